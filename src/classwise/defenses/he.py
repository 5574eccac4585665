"""Hypersphere embedding (Pang et al., 2020): unit features, unit class vectors, and an angular margin."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from classwise.attacks.pgd import Inner
from classwise.defenses.defense import Run, Step, evaluating
from classwise.defenses.hypersphere import Hypersphere, margin_loss
from classwise.defenses.trades import kl
from classwise.parameters import NonNegative, Positive


class He(Hypersphere):
    def __init__(
        self,
        run: Run,
        *,
        attack: Inner,
        variant: Annotated[
            Literal["pgd", "trades"], Field(description="which adversarial training the embedding is put into")
        ] = "pgd",
        beta: NonNegative | None = None,
        scale: Positive = 15.0,
        margin: NonNegative = 0.2,
    ):
        super().__init__(run, attack, scale, margin)
        self.variant, self.beta = variant, beta

    @staticmethod
    def contradiction(keys) -> str | None:
        if keys.variant == "trades" and keys.beta is None:
            return "variant trades needs the key `beta`, such as 6"
        if keys.variant == "pgd" and keys.beta is not None:
            return "`beta` is a key of variant trades; variant pgd has no divergence to weigh"
        return None

    def loss(self, model, x, y) -> Step:
        return self._trades(model, x, y) if self.variant == "trades" else super().loss(model, x, y)

    def _trades(self, model, x, y) -> Step:
        """One natural pass serves both terms here, unlike in TRADES itself."""
        with evaluating(model) as bare:
            with torch.no_grad():
                clean = self._log_softmax(bare(x))
            adversarial = self.climb(bare, x, lambda z, rows: kl(clean, self._log_softmax(z)).sum())
        natural, cosines = model(x), model(adversarial)
        divergence = kl(self._log_softmax(natural), self._log_softmax(cosines))
        losses = margin_loss(natural, y, self.scale, self.margin) + self.beta * divergence
        return Step(losses.mean(), losses.detach(), natural=natural.detach(), adversarial=cosines.detach())

    def _log_softmax(self, cosines: torch.Tensor) -> torch.Tensor:
        return (self.scale * cosines).log_softmax(dim=1)
