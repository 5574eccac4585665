"""What the defenses on the hypersphere share: PGD adversarial training of scaled cosines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from classwise.attacks.pgd import Inner, ascend, cross_entropy
from classwise.defenses.defense import Defense, Run, Step, evaluating

# tian20 counts 0 <= n < n_tot where it writes the range out, for HE-CMP; for HE-LIS it does not say.
CountFrom = Annotated[Literal[0, 1], Field(description="the number n of the first epoch in the schedule")]


class Hypersphere(Defense):
    """The scale s is the loss's, not the network's: whoever attacks the trained model sees raw cosines (1/T = 1)."""

    head = "cosine"

    def __init__(self, run: Run, attack: Inner, scale: float, margin: float = 0.0):
        super().__init__(run)
        self.scale, self.margin = scale, margin
        self.attack = {**attack.plain(), "start": attack.start or "R1"}

    def loss(self, model, x, y) -> Step:
        with evaluating(model) as bare:
            with torch.no_grad():
                natural = bare(x)
            scales = self.scales(natural)
            adversarial = self.climb(bare, x, cross_entropy(y, scales))  # the attack knows no margin
        cosines = model(adversarial)
        losses = margin_loss(cosines, y, scales, self.margin)
        return Step(losses.mean(), losses.detach(), natural=natural, adversarial=cosines.detach())

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]

    def scales(self, cosines: torch.Tensor) -> torch.Tensor | float:
        """What a batch's cosines are multiplied by, given those of the clean images: a number, or s[example, 1]."""
        return self.scale

    def climb(self, model, x, objective) -> torch.Tensor:
        return ascend(model, x, objective, **self.attack, generator=self.run.generator)


def margin_loss(cosines: torch.Tensor, y: torch.Tensor, scale: torch.Tensor | float, margin: float) -> torch.Tensor:
    """The cross entropy of s (c - m) for the true class and s c for the others (CosFace)."""
    handicap = margin * torch.nn.functional.one_hot(y, cosines.shape[1])
    return torch.nn.functional.cross_entropy(scale * (cosines - handicap), y, reduction="none")


def ramp(first: float, final: float, n: int, over: int) -> float:
    """From `first` at n = 0 in a straight line to `final` at n = over, and level from there (tian20 App. G)."""
    return first + min(n / over, 1.0) * (final - first)
