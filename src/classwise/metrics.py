"""The papers' measures of class-wise robustness: numpy or pandas in, numpy or pandas out.

Accuracies are in percent. `classes` lists the original class ids, in the order of the result's axes; a class without
examples is NaN, not 0. Definitions: tian21 Sec. 3 to 5 (CV, MCD, CVC, homing), wat23 eq. 7 (rho).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd


def class_accuracy(label, predicted, classes: Sequence[int]) -> np.ndarray:
    """accuracy[class] in percent of the examples that each class really has."""
    label, predicted = _paired(label, predicted)
    counts = np.array([(label == c).sum() for c in classes], dtype=float)
    hits = np.array([((label == c) & (predicted == c)).sum() for c in classes], dtype=float)
    return np.divide(100 * hits, counts, out=np.full(len(counts), np.nan), where=counts > 0)


def cv(accuracy) -> float:
    """Class-wise variance: the population variance (divided by the number of classes) in squared percent."""
    return float(np.var(_accuracies(accuracy)))


def mcd(accuracy) -> float:
    """Maximum class-wise discrepancy: best minus worst class, in percentage points."""
    return float(np.ptp(_accuracies(accuracy)))


def cvc(label, variance, classes: Sequence[int]) -> np.ndarray:
    """cvc[class]: class-wise variance of confidence, the class mean of the variance of the softmax vector.

    `variance` is `p_var[example]` of an outcomes table, or the probabilities themselves, `p[example, class]`.
    """
    variance = np.asarray(variance, dtype=float)
    if variance.ndim == 2:
        variance = variance.var(axis=1)
    label, variance = _paired(label, variance)
    return np.array([variance[label == c].mean() if (label == c).any() else np.nan for c in classes])


def rho(worst: float, average: float, base_worst: float, base_average: float) -> float:
    """wat23 eq. 7: relative gain of the worst class minus relative loss of the average, against a base method.

    NaN when the base's worst class (or average) is 0: there the measure is undefined.
    """
    if base_worst == 0 or base_average == 0:
        return float("nan")
    return float((worst - base_worst) / base_worst - (base_average - average) / base_average)


def confusion(label, predicted, classes: Sequence[int]) -> pd.DataFrame:
    """confusion[true, predicted]: counts, with class ids on both axes."""
    label, predicted = _paired(label, predicted)
    table = pd.crosstab(label, predicted).reindex(index=list(classes), columns=list(classes), fill_value=0)
    return table.rename_axis(index="true", columns="predicted").astype(int)


def misclassified(label, predicted, classes: Sequence[int]) -> pd.DataFrame:
    """misclassified[true, confound]: the confusion counts with an empty diagonal (tian21 Fig. 4a)."""
    counts = confusion(label, predicted, classes)
    return counts - np.diag(np.diag(counts))


def homing(full: pd.DataFrame, reduced: Mapping[int, pd.DataFrame], classes: Sequence[int]) -> pd.DataFrame:
    """homing[true, removed]: how many examples come home when their confound class is taken away (tian21 Fig. 4b).

    `full` are the outcomes of the model trained on all classes, `reduced[j]` those of the model trained without
    class j under the same attack. An example of class i that the full model takes for j counts in [i, j] if the
    model without j is robust on it. A column whose model is not there is NaN; the diagonal is 0.
    """
    table = pd.DataFrame(np.nan, index=list(classes), columns=list(classes))
    for j, outcomes in reduced.items():
        lost = full.loc[(full["predicted"] == j) & (full["label"] != j), ["index", "label"]]
        found = lost.merge(outcomes[["index", "label", "predicted"]], on="index", suffixes=("", "_reduced"))
        if len(found) != len(lost) or (found["label"] != found["label_reduced"]).any():
            raise ValueError(f"the outcomes without class {j} do not belong to the same test examples")
        home = found.loc[found["predicted"] == found["label"], "label"].value_counts()
        table[j] = home.reindex(list(classes), fill_value=0).astype(float)
    return table.rename_axis(index="true", columns="removed")


def _accuracies(accuracy) -> np.ndarray:
    """The class accuracies that exist: an absent class takes no part in CV and MCD."""
    accuracy = np.asarray(accuracy, dtype=float)
    present = accuracy[~np.isnan(accuracy)]
    return present if len(present) else np.array([np.nan])


def _paired(first, second) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.asarray(first), np.asarray(second)
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(f"expected two columns of one length, got shapes {first.shape} and {second.shape}")
    return first, second
