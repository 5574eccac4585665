"""Transfer: adversarial images of a surrogate model, shown to the target."""

from __future__ import annotations

import torch

from classwise.attacks.pgd import pgd
from classwise.parameters import Count, Epsilon, Id, Positive, Start


def transfer(
    model,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    surrogate: Id,
    epsilon: Epsilon,
    steps: Count,
    step_size: Positive,
    start: Start = "R3",
    generator,
    source,
) -> torch.Tensor:
    """PGD on `source`, the model of the study's defense `surrogate` (same data, network, classes and seed)."""
    return pgd(source, x, y, epsilon=epsilon, steps=steps, step_size=step_size, start=start, generator=generator)
