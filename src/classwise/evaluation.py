"""One loop judges a model under an attack, example by example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from classwise.attacks import ATTACKS
from classwise.models.classifier import Classifier
from classwise.randomness import seed_of
from classwise.store import LINF_TOLERANCE


@dataclass(frozen=True)
class Split:
    """Images of the classes kept, on the device as uint8, with their places in the whole split."""

    images: torch.Tensor  # uint8[example, channel, row, column]
    labels: torch.Tensor  # positions in the classes kept
    index: np.ndarray  # position[example] in the data set's split
    levels: int

    @classmethod
    def of(cls, images: np.ndarray, labels: np.ndarray, classes, levels: int, device, keep=None) -> Split:
        """The examples of `classes` (original ids), further limited to the indices `keep` if given."""
        index = np.flatnonzero(np.isin(labels, classes))
        if keep is not None:
            index = index[np.isin(index, keep)]
        position = np.full(max(int(labels.max()), *classes) + 1, -1)
        position[list(classes)] = np.arange(len(classes))
        return cls(
            torch.from_numpy(images[index]).to(device),
            torch.from_numpy(position[labels[index]]).to(device),
            index,
            levels,
        )

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Images in [0, 1] and labels of the given rows."""
        return self.images[rows].float() / self.levels, self.labels[rows]


def bind(attack: Mapping[str, Any]) -> Callable:
    """The function of an attack with its keys filled in: `(model, x, y, generator=...) -> x_adv`."""
    keys = dict(attack)
    return partial(ATTACKS[keys.pop("kind")], **keys)


def evaluate(
    model: Classifier,
    split: Split,
    attack: Mapping[str, Any],
    *,
    seed: int,
    batch_size: int,
    report: Callable[[int], None] = lambda done: None,
) -> pd.DataFrame:
    """The outcomes of every example of `split` under `attack`, plus the cross entropy as `loss`.

    The model is in evaluation mode. Each batch has its own generator, derived from `seed` and its place, so no batch
    depends on the ones before it. Predictions are original class ids, from a final float32 forward pass.
    """
    if model.training:
        raise ValueError("evaluate wants the model in evaluation mode")
    run, epsilon, parts = bind(attack), attack.get("epsilon", 0.0), []
    for first in range(0, len(split), batch_size):
        x, y = split.batch(slice(first, first + batch_size))
        generator = torch.Generator(x.device).manual_seed(seed_of(seed, first))
        counted = _Counted(model)
        adversarial = run(counted, x, y, generator=generator).detach()
        parts.append(_judge(model, x, adversarial, y, counted.calls, epsilon))
        report(min(first + batch_size, len(split)))
    columns = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
    for name in ("label", "natural", "predicted"):
        columns[name] = np.asarray(model.classes)[columns[name]]
    return pd.DataFrame({"index": split.index, **columns})


class _Counted:
    """A model that counts how often an attack asks it."""

    def __init__(self, model: Classifier):
        self.model, self.calls = model, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.model(x)


@torch.no_grad()
def _judge(model, x, adversarial, y, steps: int, epsilon: float) -> dict[str, torch.Tensor]:
    linf = (adversarial - x).abs().flatten(1).amax(dim=1)
    if not bool(((adversarial >= 0) & (adversarial <= 1)).all()) or not bool((linf <= epsilon + LINF_TOLERANCE).all()):
        raise ValueError(f"the attack left [0, 1] or the ball: largest perturbation {float(linf.max())}")
    logits = model(adversarial).float()
    probabilities = logits.softmax(dim=1)
    return {
        "label": y,
        "natural": model(x).argmax(dim=1),
        "predicted": logits.argmax(dim=1),
        "p_label": probabilities.gather(1, y[:, None])[:, 0],
        "p_max": probabilities.amax(dim=1),
        "p_var": probabilities.var(dim=1, correction=0),
        "linf": linf,
        "steps": torch.full_like(y, steps),
        "loss": torch.nn.functional.cross_entropy(logits, y, reduction="none"),
    }
