"""Where torch computes, and what that cost."""

from __future__ import annotations

import ctypes
import platform
import resource
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from classwise.errors import UserError


def choose_device(name: str = "auto") -> torch.device:
    """`auto` is the GPU where there is one; `cpu` and `cuda` insist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("config/config.yaml: device = cuda: torch sees no GPU here; allowed: auto, cpu")
    return torch.device(name)


def peak_memory_mb(device: torch.device) -> float:
    """The most memory this process held so far: on the GPU if it computes there, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**10 if sys.platform == "linux" else 2**20)


def memory_mb(device: torch.device) -> float:
    """What this process holds now, on the GPU if it computes there, else resident."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    return _status("VmRSS")


def most_memory_mb(device: torch.device) -> Callable[[], float]:
    """Begin to watch; what is returned tells the most memory held since. Not a number where the system cannot tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_allocated(device) / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the process's highest resident size
    except OSError:
        return lambda: float("nan")
    return lambda: _status("VmHWM")


def _status(key: str) -> float:
    """A line of Linux's account of this process, in MB; not a number elsewhere."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    except OSError:
        return float("nan")
    return int(lines[key].split()[0]) / 2**10


def platform_facts(device: torch.device) -> dict[str, Any]:
    """Hardware and library versions, for an artefact's provenance."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} ({name}, {torch.get_num_threads()} threads)",
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("classwise", "torch", "numpy")},
        },
    }


def use_threads(threads: int) -> None:
    """Torch computes with exactly so many threads: those that the rule was given."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def keep_memory() -> None:
    """Let glibc keep freed memory instead of handing large pieces back to the system at once.

    Otherwise each activation above 32 MB is mapped, zeroed and unmapped again in every pass: a fifth of the time of a
    float32 ResNet-18 on a CPU. Elsewhere than on glibc nothing happens.
    """
    trim_threshold, mmap_threshold = -1, -3  # names of glibc's malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**31 - 1)
