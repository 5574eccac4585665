"""Class-by-class matrices over seeds, as tidy tables: confusion of robustness, misclassified, homing."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from classwise.estimates import estimate
from classwise.metrics import confusion, homing, misclassified

CELLS = ["true", "other", "mean", "low", "high", "half_width", "seeds"]


def confusion_percent(outcomes: pd.DataFrame, classes: Sequence[int]) -> pd.DataFrame:
    """Confusion of robustness in percent of the true class (tian21 Fig. 2); `other` is the predicted class."""
    matrices = []
    for _, group in outcomes.groupby("seed"):
        counts = confusion(group["label"], group["predicted"], classes)
        matrices.append(counts.div(counts.sum(axis=1).replace(0, np.nan), axis=0) * 100)
    return over_seeds(matrices, bounds=(0, 100))


def misclassified_and_homing(outcomes: pd.DataFrame, classes: Sequence[int]) -> dict[str, pd.DataFrame]:
    """Counts of tian21 Fig. 4, seed by seed; `other` is the confound class, which the reduced model has not seen.

    `outcomes` holds the rows of the full model (`removed` is `all`) and of the reduced ones (`no-j`). A class whose
    reduced model is not there has no column in homing.
    """
    lost, home = [], []
    for _, group in outcomes.groupby("seed"):
        full = group[group["removed"] == "all"]
        reduced = {int(name.removeprefix("no-")): rows for name, rows in group.groupby("removed") if name != "all"}
        lost.append(misclassified(full["label"], full["predicted"], classes))
        home.append(homing(full, reduced, classes))
    return {
        "misclassified": over_seeds(lost, bounds=(0, np.inf)),
        "homing": over_seeds(home, bounds=(0, np.inf)),
    }


def over_seeds(matrices: Sequence[pd.DataFrame], bounds: tuple[float, float]) -> pd.DataFrame:
    """matrix[true, other] of each seed -> one row a cell with its mean and interval."""
    stack = np.stack([matrix.to_numpy(dtype=float) for matrix in matrices])
    rows = []
    for i, true in enumerate(matrices[0].index):
        for j, other in enumerate(matrices[0].columns):
            found = estimate(stack[:, i, j], bounds)
            rows.append((true, other, found.mean, found.low, found.high, found.half_width, found.n))
    return pd.DataFrame(rows, columns=CELLS)


def square(cells: pd.DataFrame, column: str = "mean") -> pd.DataFrame:
    """The tidy cells as a matrix[true, other]."""
    return cells.pivot(index="true", columns="other", values=column)
