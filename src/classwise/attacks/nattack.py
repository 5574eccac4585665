"""NATTACK (Li et al., 2019): a black box attack that moves a Gaussian in tanh space by natural evolution strategies."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from classwise.attacks.target import narrowed, predict, readable
from classwise.parameters import Count, Epsilon, Positive


def nattack(
    model,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    epsilon: Epsilon,
    iterations: Count = 500,
    population: Count = 300,
    sigma: Positive = 0.1,
    lr: Positive = 0.02,
    runner_up: Annotated[
        Literal["own", "first"],
        Field(description="own: each member's strongest wrong class; first: the reference code's, of member 0 for all"),
    ] = "own",
    generator,
) -> torch.Tensor:
    """The mean image of the first success, tested every tenth iteration; the clean image where there is none.

    Only probabilities are asked for, `population` queries an iteration for each image that still resists. An image that
    is misclassified without any attack costs nothing.
    """
    origin = torch.atanh((2 * x - 1) * (1 - 1e-6))
    base = (torch.tanh(origin) + 1) / 2
    mu = 0.001 * _normal(x.shape, x, generator)
    result, rows = x.clone(), (predict(model, x) == y).nonzero()[:, 0]

    def image(shift: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Images of shifts[example, ..., channel, row, column], inside the ball of the clean image."""
        lead = shift.dim() - x.dim()
        pick = (slice(None), *([None] * lead))
        moved = (torch.tanh(origin[rows][pick] + shift) + 1) / 2
        return (x[rows][pick] + (moved - base[rows][pick]).clamp(-epsilon, epsilon)).clamp(0, 1)

    for iteration in range(iterations):
        if iteration % 10 == 0 and len(rows):
            means = image(mu[rows], rows)
            fooled = predict(narrowed(model, rows), means) != y[rows]
            result[rows[fooled]] = means[fooled]
            rows = rows[~fooled]
        if not len(rows):
            break
        noise = _normal((len(rows), population, *x.shape[1:]), x, generator)
        with torch.no_grad():
            queries = image(mu[rows][:, None] + sigma * noise, rows).flatten(0, 1)
            logits = narrowed(model, rows)(queries).unflatten(0, (len(rows), population))
        mu[rows] += lr / (population * sigma) * gain(rewards(logits, y[rows], runner_up), noise)
    if len(rows):
        means = image(mu[rows], rows)
        fooled = predict(narrowed(model, rows), means) != y[rows]
        result[rows[fooled]] = means[fooled]
    return result


def rewards(logits: torch.Tensor, y: torch.Tensor, runner_up: str) -> torch.Tensor:
    """reward[example, member] = - max(log p_y - log p_runner_up, 0) / 2, from logits[example, member, class]."""
    p = readable(logits).softmax(dim=-1)
    index = y[:, None, None].expand(*p.shape[:2], 1)
    own = p.gather(-1, index)[..., 0]
    wrong = p.scatter(-1, index, 0.0).amax(dim=-1)
    if runner_up == "first":
        wrong = wrong[:, :1]
    return -0.5 * ((own + 1e-30).log() - (wrong + 1e-30).log()).clamp(min=0)


def gain(reward: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The sum over members of standardised reward times noise; nothing where all rewards are equal."""
    reward = reward.double()  # in float32 the mean of equal rewards is off by more than the 1e-7 below forgives
    spread = reward.std(dim=1, correction=0, keepdim=True)
    advantage = (reward - reward.mean(dim=1, keepdim=True)) / (spread + 1e-7)
    return torch.einsum("bp,bp...->b...", advantage.to(noise), noise)


def _normal(shape, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(like)
