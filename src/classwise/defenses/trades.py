"""TRADES (Zhang et al., 2019): natural cross entropy plus beta times the KL divergence to the adversarial output.

With one beta for each class it is tian21 eq. 5.
"""

from __future__ import annotations

import torch

from classwise.attacks.pgd import Inner, ascend
from classwise.defenses.defense import Defense, Run, Step, evaluating
from classwise.parameters import PerClass


class Trades(Defense):
    """The attack maximises KL(p(x) || p(x')); the gradient of the update flows through both arguments of the KL.

    Natural images go through the network twice in training mode, as in the authors' code: batch norm statistics see
    natural, adversarial, natural.
    """

    def __init__(self, run: Run, *, beta: PerClass, attack: Inner):
        super().__init__(run)
        self.beta = run.per_class("beta", beta)
        self.attack = {**attack.plain(), "start": attack.start or "R1"}

    def loss(self, model, x, y) -> Step:
        with evaluating(model) as bare:
            with torch.no_grad():
                clean = bare(x).log_softmax(dim=1)
            adversarial = ascend(
                bare,
                x,
                lambda z, rows: kl(clean, z.log_softmax(dim=1)).sum(),
                **self.attack,
                generator=self.run.generator,
            )
        natural = model(x)
        cross_entropy = torch.nn.functional.cross_entropy(natural, y, reduction="none")
        logits = model(adversarial)
        divergence = kl(model(x).log_softmax(dim=1), logits.log_softmax(dim=1))
        losses = cross_entropy + self.beta[y] * divergence
        return Step(losses.mean(), losses.detach(), natural=natural.detach(), adversarial=logits.detach())


def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q)[example] from log-probabilities[example, class]."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)
