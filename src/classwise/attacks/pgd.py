"""Projected gradient ascent in the L-inf ball. FGSM, PGD and Temperature-PGD are parameters of one core."""

from __future__ import annotations

from collections.abc import Callable

import torch

from classwise.parameters import Count, Epsilon, Parameters, Positive, Start


class Inner(Parameters):
    """The attack inside a training step; the defense brings the objective and, unless told, the start."""

    epsilon: Epsilon
    steps: Count
    step_size: Positive
    start: Start | None = None


def ascend(
    model: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    objective: Callable[[torch.Tensor], torch.Tensor],
    *,
    epsilon: float,
    steps: int,
    step_size: float,
    start: str,
    generator: torch.Generator,
) -> torch.Tensor:
    """Maximise `objective(model(x'))`, a sum over the batch, by sign steps within `epsilon` of x and within [0, 1].

    The last iterate is returned. Only the gradient of the images is computed, so weights collect none.
    """
    low, high = (x - epsilon).clamp(min=0), (x + epsilon).clamp(max=1)
    adversarial = _start(x, epsilon, start, generator)
    for _ in range(steps):
        adversarial.requires_grad_()
        (gradient,) = torch.autograd.grad(objective(model(adversarial)), adversarial)
        adversarial = (adversarial.detach() + step_size * gradient.sign()).clamp(low, high)
    return adversarial


def pgd(
    model,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    epsilon: Epsilon,
    steps: Count,
    step_size: Positive,
    start: Start = "R3",
    generator,
) -> torch.Tensor:
    """PGD on the cross entropy."""
    return temperature_pgd(
        model,
        x,
        y,
        epsilon=epsilon,
        steps=steps,
        step_size=step_size,
        start=start,
        inverse_temperature=1.0,
        generator=generator,
    )


def fgsm(model, x: torch.Tensor, y: torch.Tensor, *, epsilon: Epsilon, start: Start = "R3", generator) -> torch.Tensor:
    """One step of the size of the ball, from a random start."""
    return pgd(model, x, y, epsilon=epsilon, steps=1, step_size=epsilon, start=start, generator=generator)


def temperature_pgd(
    model,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    epsilon: Epsilon,
    steps: Count,
    step_size: Positive,
    inverse_temperature: Positive,
    start: Start = "R3",
    generator,
) -> torch.Tensor:
    """PGD on CE(softmax(z / T), y) (tian21 Sec. 5.2): large 1/T weighs the strongest wrong class most."""

    def objective(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits * inverse_temperature, y, reduction="sum")

    return ascend(
        model,
        x,
        objective,
        epsilon=epsilon,
        steps=steps,
        step_size=step_size,
        start=start,
        generator=generator,
    )


def _start(x: torch.Tensor, epsilon: float, start: str, generator: torch.Generator) -> torch.Tensor:
    if start == "none":
        return x.clone()
    if start == "R1":
        noise = torch.randn(x.shape, generator=generator, device=generator.device)
        return x + 0.001 * noise.to(x)
    noise = 2 * torch.rand(x.shape, generator=generator, device=generator.device) - 1
    point = x + epsilon * noise.to(x)
    return point if start == "R2" else point.clamp(0, 1)
