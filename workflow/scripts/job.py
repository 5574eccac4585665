"""What every rule script does around its work: a log, torch's threads, and errors as sentences."""

import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

from classwise.errors import UserError


@contextmanager
def job(snakemake):
    """Standard output and error go to the rule's log. A user's error ends the job with its sentence alone."""
    path = Path(snakemake.log[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", buffering=1) as log:
        sys.stdout = sys.stderr = log
        try:
            yield log
        except UserError as error:
            log.write(f"Error: {error}\n")
            raise SystemExit(1) from None
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None
        finally:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def use_threads(threads: int) -> None:
    """Torch computes with exactly the threads that the rule was given."""
    import torch

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def keep_memory() -> None:
    """Let glibc keep freed memory instead of handing large pieces back to the system at once.

    Otherwise each activation above 32 MB is mapped, zeroed and unmapped again in every pass: a fifth of the time of a
    float32 ResNet-18 on a CPU. Elsewhere than on glibc nothing happens.
    """
    import ctypes

    trim_threshold, mmap_threshold = -1, -3  # names of glibc's malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**31 - 1)
