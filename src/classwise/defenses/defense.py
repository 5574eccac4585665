"""What the training loop asks of a defense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch

from classwise.errors import UserError

# Images and labels of so many training examples, the same ones in every epoch, not augmented.
Sample = Callable[[int], tuple["torch.Tensor", "torch.Tensor"]]


@dataclass(frozen=True)
class Run:
    """What a defense may know of the training it serves."""

    classes: tuple[int, ...]  # original ids of the classes kept; output k of the model is class classes[k]
    generator: torch.Generator  # for every random draw; its state is part of the checkpoint
    class_count: int  # of the data set, a removed class included
    epochs: int
    note: Callable[[str], None] = field(default=lambda sentence: None)  # a sentence for the log
    mean: Callable[[float], float] = field(default=lambda value: value)  # of a number that each process has its own of

    def per_class(self, key: str, value: float | list[float]) -> torch.Tensor:
        """value[class kept] of a key that is one number, or a list with one for each class of the data set."""
        if isinstance(value, list) and len(value) != self.class_count:
            raise UserError(
                f"{key} = {value}: must be one number, or one for each of the {self.class_count} classes; "
                f"these are {len(value)}"
            )
        numbers = [value[c] if isinstance(value, list) else value for c in self.classes]
        return torch.tensor(numbers, dtype=torch.float32, device=self.generator.device)


@dataclass(frozen=True)
class Step:
    """One batch: what to minimise, and what the books want."""

    loss: torch.Tensor  # scalar
    per_example: torch.Tensor  # loss[example], detached
    natural: torch.Tensor | None = None  # logits[example, class] of the clean images, detached; None: not computed
    adversarial: torch.Tensor | None = None  # likewise under the training attack


class Defense:
    """A loss with explicit state. `y` are positions in `run.classes`, not original ids.

    Set `stopped` in `epoch_end` to end the run; the model must have the weights of the epoch before by then.
    """

    head = "linear"  # of `models.classifier.HEADS`: what the loss expects of the network's last layer
    stopped = False

    def __init__(self, run: Run):
        self.run = run

    def loss(self, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
        """The loss of one batch; it makes its own adversarial examples. The model comes in training mode."""
        raise NotImplementedError

    def class_weights(self) -> torch.Tensor:
        """weight[class] of this epoch, for the history."""
        return torch.ones(len(self.run.classes))

    def epoch_start(self, epoch: int, model: torch.nn.Module, sample: Sample) -> None:
        """Called once before each 1-based epoch; not again when a run goes on in the middle of one."""

    def epoch_end(self, per_class: dict[str, pd.DataFrame], model: torch.nn.Module) -> None:
        """Called after each epoch with per-class accuracies and losses of each split that was evaluated."""

    def state_dict(self) -> dict[str, Any]:
        """All that changed and a later update needs: tensors, numbers, strings, lists and dicts. A run may be saved and
        go on after any update."""
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
        # Of several processes each attacks its own images: nothing to tell the others, as the wrapper would.
        yield getattr(model, "module", model)
    finally:
        model.train(training)
