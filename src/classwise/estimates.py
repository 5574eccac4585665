"""A number over several seeds: its mean and a 95 % interval."""

from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """Mean over n seeds with Student's 95 % interval; for one seed there is none and its numbers are NaN."""

    mean: float
    low: float
    high: float
    half_width: float  # of the interval before it is cut to the possible range
    n: int


def estimate(values, bounds: tuple[float, float] = (-np.inf, np.inf), confidence: float = 0.95) -> Estimate:
    """Student's t interval over seeds, cut to the range the quantity can take at all.

    It says how far another set of seeds would move the number on the same test images; it does not cover the
    choice of the test images.
    """
    values = np.asarray(values, dtype=float)
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return Estimate(mean, float("nan"), float("nan"), float("nan"), n)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return Estimate(mean, max(mean - half, bounds[0]), min(mean + half, bounds[1]), half, n)
