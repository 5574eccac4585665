"""What the training loop asks of a defense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch


@dataclass(frozen=True)
class Run:
    """What a defense may know of the training it serves."""

    classes: tuple[int, ...]  # original ids of the classes kept; output k of the model is class classes[k]
    generator: torch.Generator  # for every random draw; its state is part of the checkpoint


@dataclass(frozen=True)
class Step:
    """One batch: what to minimise, and what the books want."""

    loss: torch.Tensor  # scalar
    per_example: torch.Tensor  # loss[example], detached
    natural: torch.Tensor | None = None  # logits[example, class] of the clean images, detached; None: not computed
    adversarial: torch.Tensor | None = None  # likewise under the training attack


class Defense:
    """A loss with explicit state. `y` are positions in `run.classes`, not original ids."""

    def __init__(self, run: Run):
        self.run = run

    def loss(self, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
        """The loss of one batch; it makes its own adversarial examples. The model comes in training mode."""
        raise NotImplementedError

    def class_weights(self) -> torch.Tensor:
        """weight[class] of this epoch, for the history."""
        return torch.ones(len(self.run.classes))

    def epoch_end(self, per_class: dict[str, pd.DataFrame]) -> None:
        """Called after each epoch with per-class accuracies and losses of each split that was evaluated."""

    def state_dict(self) -> dict[str, Any]:
        """Whatever `epoch_end` changed: tensors, numbers, strings, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} has no state but the checkpoint holds {sorted(state)}")


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model in evaluation mode, where an attack neither sees nor moves the batch statistics."""
    training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(training)
