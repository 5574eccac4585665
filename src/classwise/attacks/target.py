"""What an attack sees of the model it attacks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch


class Target:
    """A model under attack: fast logits, exact predictions, and a meter of what each example of the batch cost.

    An attack that goes on with some of the examples asks for `narrow(rows)`, so that the meter stays right. `steps` and
    `zero_gradient` are shared by all views of one batch. The PGD core alone sets `zero_gradient`: cw-linf climbs a
    margin, which does not saturate, and autoattack brings its own checks.
    """

    def __init__(self, model, fast: Callable[[torch.Tensor], torch.Tensor], count: int, device):
        self.model, self.fast, self.classes = model, fast, tuple(model.classes)
        self.steps = torch.zeros(count, dtype=torch.int64, device=device)
        self.zero_gradient = torch.zeros(count, dtype=torch.bool, device=device)
        self.rows = torch.arange(count, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits. It counts as one step of each example, or as many as `x` has images for each (a population)."""
        self.steps[self.rows] += len(x) // max(len(self.rows), 1)
        return self.fast(x)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """The float32 prediction, which alone decides who is fooled. Not counted: the final judgement repeats it."""
        with torch.no_grad():
            return readable(self.model(x)).argmax(dim=1)

    def note_gradient(self, gradient: torch.Tensor) -> None:
        """Remember who had nothing to climb at its first step. Not a number is nothing to climb, either."""
        first = self.steps[self.rows] == 1  # of a restart it is not
        self.zero_gradient[self.rows] |= first & ~gradient.sign().bool().flatten(1).any(dim=1)

    def narrow(self, rows: torch.Tensor) -> Target:
        """The same model, for some of the examples of this view."""
        view = copy.copy(self)
        view.rows = self.rows[rows]
        return view


def narrowed(model, rows: torch.Tensor):
    """`model` for some rows of the batch; a plain function of images is the same for all rows."""
    return model.narrow(rows) if isinstance(model, Target) else model


def note_gradient(model, gradient: torch.Tensor) -> None:
    """Tell the meter of a target of a gradient; a plain function of images has no meter."""
    if isinstance(model, Target):
        model.note_gradient(gradient)


def readable(logits: torch.Tensor) -> torch.Tensor:
    """Logits to judge by: those that are not finite count as minus infinity, and where none is finite all are equal."""
    finite = logits.isfinite()
    return torch.where(finite.any(dim=-1, keepdim=True), logits.masked_fill(~finite, float("-inf")), 0.0)


def predict(model, x: torch.Tensor) -> torch.Tensor:
    """Exact predictions of a target or of a plain model."""
    if isinstance(model, Target):
        return model.predict(x)
    with torch.no_grad():
        return model(x).argmax(dim=1)
