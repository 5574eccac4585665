"""Where torch computes, and what that cost."""

from __future__ import annotations

import platform
import resource
import sys
from importlib.metadata import version
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
