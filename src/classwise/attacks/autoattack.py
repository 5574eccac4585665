"""AutoAttack (Croce and Hein, 2020), the standard version, through its packaged implementation."""

from __future__ import annotations

import torch

from classwise.errors import UserError
from classwise.parameters import Epsilon

LEAST_CLASSES = 4  # the targeted DLR loss divides by differences of the first, third and fourth logit


def autoattack(model, x: torch.Tensor, y: torch.Tensor, *, epsilon: Epsilon, generator) -> torch.Tensor:
    """APGD-CE, targeted APGD, targeted FAB and Square in turn, each on the images that are still robust.

    The package aims at nine target classes; here at all wrong ones where the model has fewer. It decides itself whom it
    asks when, so each example is charged the mean of its batch.
    """
    from pyautoattack import AutoAttack

    classes, asked = len(model.classes), 0
    if classes < LEAST_CLASSES:
        raise UserError(
            f"autoattack: the model has {classes} classes; the targeted loss needs at least {LEAST_CLASSES}"
        )

    def logits(images: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked += len(images)
        return model.fast(images)

    # The package seeds torch's global generator; the fork keeps that from everybody else.
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        attack = AutoAttack(logits, eps=epsilon, device=x.device, seed=seed, version="standard")
        attack.verbose = False
        attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = min(9, classes - 1)
        found, _ = attack.run_standard_evaluation(x, y, batch_size=len(x))
    model.steps[model.rows] += asked // len(x)
    return found
