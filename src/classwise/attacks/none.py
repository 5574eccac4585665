"""No attack: stores the natural outcomes."""

from __future__ import annotations

import torch


def none(model, x: torch.Tensor, y: torch.Tensor, *, generator) -> torch.Tensor:
    """The clean images."""
    return x
