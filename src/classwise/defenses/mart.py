"""MART (Wang et al., 2020): boosted cross entropy, a divergence that counts more where the clean image is missed."""

from __future__ import annotations

import torch

from classwise.attacks.pgd import Inner, pgd
from classwise.defenses.defense import Defense, Run, Step, evaluating
from classwise.parameters import NonNegative


class Mart(Defense):
    """`beta` is the paper's lambda, under its name in the authors' code. One natural pass, then one adversarial."""

    def __init__(self, run: Run, *, beta: NonNegative, attack: Inner):
        super().__init__(run)
        self.beta = beta
        self.attack = {**attack.plain(), "start": attack.start or "R1"}

    def loss(self, model, x, y) -> Step:
        with evaluating(model) as bare:
            adversarial = pgd(bare, x, y, **self.attack, generator=self.run.generator)
        natural, logits = model(x), model(adversarial)
        losses = boosted_cross_entropy(logits, y) + self.beta * weighted_divergence(natural, logits, y)
        return Step(losses.mean(), losses.detach(), natural=natural.detach(), adversarial=logits.detach())


def boosted_cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """-log p_y - log(1 - max_wrong p), with the constants of the authors' code: the second term is at most 9.2."""
    strongest = logits.softmax(dim=1).scatter(1, y[:, None], 0.0).amax(dim=1)
    return torch.nn.functional.cross_entropy(logits, y, reduction="none") - (1.0001 - strongest + 1e-12).log()


def weighted_divergence(natural: torch.Tensor, adversarial: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """KL(p || p') (1 - p_y), differentiated through the weight as well."""
    clean = natural.log_softmax(dim=1)
    divergence = (clean.exp() * (clean - (adversarial.softmax(dim=1) + 1e-12).log())).sum(dim=1)
    return divergence * (1.0000001 - clean.exp().gather(1, y[:, None])[:, 0])
