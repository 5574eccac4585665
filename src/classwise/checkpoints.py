"""The state of a training run between two updates, on disk, outside of everything that a workflow manages."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from classwise.store import appearing


def key_of(**identity: Any) -> str:
    """What makes two trainings the same: their parameters, data and code."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def save_checkpoint(path: Path, key: str, state: dict[str, Any]) -> None:
    with appearing(path) as temporary:
        torch.save({"key": key, **state}, temporary)


def load_checkpoint(path: Path, key: str, keep: bool = False) -> tuple[dict[str, Any] | None, str]:
    """The state to go on from, or None, and a sentence that says why.

    A checkpoint of other parameters, data or code, or one that cannot be read, is set aside under another name; with
    `keep` it stays where it is (of several processes, one moves it).
    """
    if not path.exists():
        return None, "no checkpoint: training starts at epoch 1"
    try:
        # weights_only: tensors and plain values; a pickle that wants to run code is refused.
        state = torch.load(path, map_location="cpu", weights_only=True)
        reason = "" if state.pop("key") == key else "it belongs to other parameters, data or code"
    except Exception as error:  # torch.load raises whatever the damage provokes
        reason = f"it cannot be read ({type(error).__name__})"
    if reason:
        place = path if keep else _set_aside(path)
        return None, f"checkpoint set aside as {place}, because {reason}: training starts at epoch 1"
    within = f" and {state['batch']} updates" if state["batch"] else ""
    return state, f"checkpoint of epoch {state['epoch']}{within} found: training goes on from there"


def _set_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}.set-aside-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)
