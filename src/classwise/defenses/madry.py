"""PGD adversarial training (Madry et al., 2018): cross entropy on the adversarial batch alone."""

from __future__ import annotations

import torch

from classwise.attacks.pgd import Inner, pgd
from classwise.defenses.defense import Defense, Run, Step, evaluating


class Madry(Defense):
    """The attack runs with batch norm in evaluation mode; sources differ here and Tian et al. do not say."""

    def __init__(self, run: Run, *, attack: Inner):
        super().__init__(run)
        self.attack = {**attack.plain(), "start": attack.start or "R3"}

    def loss(self, model, x, y) -> Step:
        with evaluating(model) as bare:
            adversarial = pgd(bare, x, y, **self.attack, generator=self.run.generator)
            with torch.no_grad():
                natural = bare(x)
        logits = model(adversarial)
        losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
        return Step(losses.mean(), losses.detach(), natural=natural, adversarial=logits.detach())
