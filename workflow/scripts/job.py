"""What every rule script does around its work: a log, torch's threads, and errors as sentences."""

import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

from classwise.errors import Interrupted, UserError

STOPPED = 75  # the exit code of a job that was asked to stop and can go on: sysexits' "try again"


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
        except Interrupted as error:
            log.write(f"Stopped: {error}\n")
            raise SystemExit(STOPPED) from None
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None
        finally:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
