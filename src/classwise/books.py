"""Per-class books of an epoch: running sums while a model trains, and means of what was evaluated."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from classwise.defenses.defense import Step
from classwise.processes import Team

PER_CLASS = ["class", "n", "natural_accuracy", "robust_accuracy", "loss"]


class Books:
    """Running per-class sums of an epoch, kept on the device: no batch waits for a number."""

    NAMES = ("n", "natural", "n_natural", "robust", "n_robust", "loss")

    def __init__(self, classes: tuple[int, ...], device: torch.device):
        self.classes = classes
        self.sums = torch.zeros(len(self.NAMES), len(classes), dtype=torch.float64, device=device)

    def add(self, y: torch.Tensor, step: Step) -> None:
        self._count("n", y, torch.ones_like(y))
        self._count("loss", y, step.per_example)
        for name, logits in (("natural", step.natural), ("robust", step.adversarial)):
            if logits is not None:
                self._count(name, y, logits.argmax(dim=1) == y)
                self._count(f"n_{name}", y, torch.ones_like(y))

    def _count(self, name: str, y: torch.Tensor, values: torch.Tensor) -> None:
        self.sums[self.NAMES.index(name)].index_add_(0, y, values.double())

    def table(self, team: Team) -> pd.DataFrame:
        """PER_CLASS columns of all processes; an accuracy that the method does not compute in passing is NaN."""
        sums = dict(zip(self.NAMES, team.sum(self.sums).cpu().numpy(), strict=True))

        def ratio(part: str, whole: str) -> np.ndarray:
            blank = np.full(len(self.classes), np.nan)
            return np.divide(sums[part], sums[whole], out=blank, where=sums[whole] > 0)

        return pd.DataFrame(
            {
                "class": self.classes,
                "n": sums["n"].astype(int),
                "natural_accuracy": 100 * ratio("natural", "n_natural"),
                "robust_accuracy": 100 * ratio("robust", "n_robust"),
                "loss": ratio("loss", "n"),
            }
        )


def per_class(outcomes: pd.DataFrame, classes: tuple[int, ...], attacked: bool) -> pd.DataFrame:
    """PER_CLASS columns of an evaluated split; classes without examples are NaN."""
    right = outcomes.assign(
        natural_accuracy=100.0 * (outcomes["natural"] == outcomes["label"]),
        robust_accuracy=100.0 * (outcomes["predicted"] == outcomes["label"]) if attacked else np.nan,
    )
    means = right.groupby("label")[["natural_accuracy", "robust_accuracy", "loss"]].mean()
    counts = right.groupby("label").size().rename("n")
    table = means.join(counts).reindex(list(classes)).rename_axis("class").reset_index()
    return table.assign(n=table["n"].fillna(0).astype(int))[PER_CLASS]
