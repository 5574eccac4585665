"""What an attack sees of the model it attacks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch


class Target:
    """A model under attack: fast logits, exact predictions, and a meter of what each example of the batch cost.

    An attack that goes on with some of the examples asks for `narrow(rows)`, so that the meter stays right. `steps` is
    shared by all views of one batch.
    """

    def __init__(self, model, fast: Callable[[torch.Tensor], torch.Tensor], count: int, device):
        self.model, self.fast, self.classes = model, fast, tuple(model.classes)
        self.steps = torch.zeros(count, dtype=torch.int64, device=device)
        self.rows = torch.arange(count, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits. It counts as one step of each example, or as many as `x` has images for each (a population)."""
        self.steps[self.rows] += len(x) // max(len(self.rows), 1)
        return self.fast(x)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """The float32 prediction, which alone decides who is fooled. Not counted: the final judgement repeats it."""
        with torch.no_grad():
            return self.model(x).argmax(dim=1)

    def narrow(self, rows: torch.Tensor) -> Target:
        """The same model, for some of the examples of this view."""
        view = copy.copy(self)
        view.rows = self.rows[rows]
        return view


def narrowed(model, rows: torch.Tensor):
    """`model` for some rows of the batch; a plain function of images is the same for all rows."""
    return model.narrow(rows) if isinstance(model, Target) else model


def predict(model, x: torch.Tensor) -> torch.Tensor:
    """Exact predictions of a target or of a plain model."""
    if isinstance(model, Target):
        return model.predict(x)
    with torch.no_grad():
        return model(x).argmax(dim=1)
