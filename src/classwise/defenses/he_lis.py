"""HE-LIS (tian20 App. G): hypersphere embedding without a margin, its scale rising in a straight line."""

from __future__ import annotations

from classwise.attacks.pgd import Inner
from classwise.defenses.defense import Run
from classwise.defenses.hypersphere import CountFrom, Hypersphere, ramp
from classwise.parameters import Count, Positive


class HeLis(Hypersphere):
    """`over` is the paper's n_FI; its default is all epochs."""

    def __init__(
        self,
        run: Run,
        *,
        attack: Inner,
        first: Positive = 1.0,
        final: Positive = 75.0,
        over: Count | None = None,
        count_from: CountFrom = 0,
    ):
        super().__init__(run, attack, scale=first)
        self.first, self.final, self.over, self.count_from = first, final, over or run.epochs, count_from

    def epoch_start(self, epoch, model, sample) -> None:
        self.scale = ramp(self.first, self.final, epoch - 1 + self.count_from, self.over)
