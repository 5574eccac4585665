"""Projected gradient ascent in the L-inf ball: one core; FGSM, PGD and their kin are its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field

from classwise.attacks.target import narrowed, note_gradient, predict
from classwise.errors import UserError
from classwise.parameters import Count, Epsilon, Flag, Natural, NonNegative, Parameters, Positive, Start

# To be maximised, a sum over examples: (logits[example, class], rows of the batch that they belong to) -> scalar.
Objective = Callable
Protocol = Annotated[
    Literal["last", "any"],
    Field(description="last: the final iterate decides (the papers); any: done at the first success (the worst case)"),
]
EVERY = slice(None)


class Inner(Parameters):
    """The attack inside a training step; the defense brings the objective and, unless told, the start."""

    epsilon: Epsilon
    steps: Count
    step_size: Positive
    start: Start | None = None


def ascend(
    model,
    x: torch.Tensor,
    objective: Objective,
    *,
    epsilon,
    steps: int,
    step_size,
    start: str | torch.Tensor,
    generator: torch.Generator,
    labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Maximise `objective(logits, rows)` by sign steps within `epsilon` of x and within [0, 1]; the last iterate.

    `start` names a convention, or is the points themselves.

    With `labels`, an example is done at the first iterate, the start included, that is not predicted as its label; that
    iterate is its result, and the loop goes on with the others only. Only gradients of the images are computed.
    """
    point = _start(x, epsilon, start, generator) if isinstance(start, str) else start
    rows, done = EVERY, []
    for step in range(steps):
        point.requires_grad_()
        logits = model(point)
        (gradient,) = torch.autograd.grad(objective(logits, rows), point)
        if step == 0:
            note_gradient(model, gradient)
        point = point.detach()
        if labels is not None:
            fooled = _fooled(model, point, logits.detach(), labels[rows])
            if fooled.any():
                places = torch.arange(len(x), device=x.device)[rows]
                done.append((places[fooled], point[fooled]))
                rows, keep = places[~fooled], (~fooled).nonzero()[:, 0]
                model, point, gradient = narrowed(model, keep), point[keep], gradient[keep]
                if not len(rows):
                    break
        offset = (point + step_size * gradient.sign() - x[rows]).clamp(-epsilon, epsilon)
        point = (x[rows] + offset).clamp(0, 1)
    if not done:
        return point
    result = x.clone()
    for places, points in [*done, (rows, point)]:
        result[places] = points
    return result.clamp(0, 1)


def _fooled(model, point: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Who is misclassified: suspected from the fast logits, confirmed by the exact prediction."""
    fooled = logits.argmax(dim=1) != labels
    suspects = fooled.nonzero()[:, 0]
    if len(suspects):
        fooled[suspects] = predict(model, point[suspects].clamp(0, 1)) != labels[suspects]
    return fooled


def search(
    model,
    x: torch.Tensor,
    y: torch.Tensor,
    objective: Objective,
    *,
    restarts: int,
    protocol: str,
    generator: torch.Generator,
    epsilon,
    start: str,
    **steps,
) -> torch.Tensor:
    """`ascend`, again from a new start for the examples that no run has fooled yet."""
    labels = y if protocol == "any" else None
    best = ascend(model, x, objective, epsilon=epsilon, start=start, **steps, generator=generator, labels=labels)
    for _ in range(restarts - 1):
        rows = (predict(model, best) == y).nonzero()[:, 0]
        if not len(rows):
            break
        # Drawn for all, so that an image's starts do not depend on who else is left: else more steps, leaving fewer,
        # could take away the start that fools it.
        points = _start(x, epsilon, start, generator)
        again = ascend(
            narrowed(model, rows),
            x[rows],
            lambda logits, inner, rows=rows: objective(logits, rows[inner]),
            epsilon=epsilon,
            start=points[rows],
            **steps,
            generator=generator,
            labels=None if labels is None else labels[rows],
        )
        fooled = predict(narrowed(model, rows), again) != y[rows]
        best[rows[fooled]] = again[fooled]
    return best


# Objectives


def cross_entropy(y: torch.Tensor, scale: float = 1.0) -> Objective:
    """CE(softmax(scale z), y)."""
    return lambda z, rows: torch.nn.functional.cross_entropy(z * scale, y[rows], reduction="sum")


def tempered_margin(y: torch.Tensor, scale: float) -> Objective:
    """log-sum-exp(scale z_wrong) / scale - z_y: its gradient is that of the cross entropy at `scale`, up to a positive
    factor for each example, and never rounds to zero, however large the scale."""

    def objective(z: torch.Tensor, rows) -> torch.Tensor:
        own, wrong = _own_and_wrong(z, y[rows])
        return (torch.logsumexp(wrong * scale, dim=1) / scale - own).sum()

    return objective


def margin(y: torch.Tensor, confidence: float) -> Objective:
    """- max(z_y - max_wrong z + confidence, 0), as in wat23's evaluation."""

    def objective(z: torch.Tensor, rows) -> torch.Tensor:
        own, wrong = _own_and_wrong(z, y[rows])
        return -(own - wrong.amax(dim=1) + confidence).clamp(min=0).sum()

    return objective


def _own_and_wrong(z: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The true class's logit, and all logits with that one at minus infinity."""
    own = z.gather(1, y[:, None])[:, 0]
    mask = torch.nn.functional.one_hot(y, z.shape[1]).bool()
    return own, z.masked_fill(mask, float("-inf"))


# The attacks


def pgd(
    model,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    epsilon: Epsilon,
    steps: Count,
    step_size: Positive,
    start: Start = "R3",
    restarts: Count = 1,
    protocol: Protocol = "last",
    generator,
) -> torch.Tensor:
    """PGD on the cross entropy."""
    ball = {"epsilon": epsilon, "steps": steps, "step_size": step_size, "start": start}
    objective = cross_entropy(y)
    return search(model, x, y, objective, **ball, restarts=restarts, protocol=protocol, generator=generator)


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
    accurate: Flag = False,
    start: Start = "R3",
    restarts: Count = 1,
    protocol: Protocol = "last",
    generator,
) -> torch.Tensor:
    """PGD on CE(softmax(z / T), y) (tian21 Sec. 5.2): large 1/T weighs the strongest wrong class most.

    In plain float32 the softmax saturates for large 1/T and the attack stalls, as in the papers' tables; `accurate`
    takes the same direction by a form that does not saturate.
    """
    ball = {"epsilon": epsilon, "steps": steps, "step_size": step_size, "start": start}
    objective = (tempered_margin if accurate else cross_entropy)(y, inverse_temperature)
    return search(model, x, y, objective, **ball, restarts=restarts, protocol=protocol, generator=generator)


def cw_pgd(
    model,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    epsilon: Epsilon,
    steps: Count,
    step_size: Positive,
    confidence: NonNegative = 50.0,
    start: Start = "R3",
    restarts: Count = 1,
    protocol: Protocol = "last",
    generator,
) -> torch.Tensor:
    """PGD on the margin loss, which wat23 and its followers call CW. Not the minimal-distance attack of that name."""
    ball = {"epsilon": epsilon, "steps": steps, "step_size": step_size, "start": start}
    objective = margin(y, confidence)
    return search(model, x, y, objective, **ball, restarts=restarts, protocol=protocol, generator=generator)


def targeted_pgd(
    model,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    epsilon: Epsilon,
    steps: Count,
    step_size: Positive,
    target: Annotated[
        Literal["random", "next"] | Natural,
        Field(description="random: any class but the true one; next; or a class id"),
    ] = "random",
    start: Start = "R3",
    restarts: Count = 1,
    protocol: Protocol = "last",
    generator,
) -> torch.Tensor:
    """Minimise the cross entropy of a target class. Images of a fixed target class itself go to the next class."""
    wanted = targets(y, tuple(model.classes), target, generator)
    climb = cross_entropy(wanted)
    ball = {"epsilon": epsilon, "steps": steps, "step_size": step_size, "start": start}
    return search(
        model, x, y, lambda z, rows: -climb(z, rows), **ball, restarts=restarts, protocol=protocol, generator=generator
    )


def targets(y: torch.Tensor, classes: tuple[int, ...], target: str | int, generator: torch.Generator) -> torch.Tensor:
    """A wrong class for each example, as positions in the classes that the model has."""
    count = len(classes)
    if target == "random":
        shift = torch.randint(1, count, y.shape, generator=generator, device=generator.device).to(y)
        return (y + shift) % count
    following = (y + 1) % count
    if target == "next":
        return following
    if target not in classes:
        raise UserError(f"targeted-pgd: target = {target}: the model has no such class; it has {list(classes)}")
    fixed = torch.full_like(y, classes.index(target))
    return torch.where(y == fixed, following, fixed)


def _start(x: torch.Tensor, epsilon, start: str, generator: torch.Generator) -> torch.Tensor:
    if start == "none":
        return x.clone()
    if start == "R1":
        noise = torch.randn(x.shape, generator=generator, device=generator.device)
        # In a ball of a few thousandths the normal's tail would be outside, and protocol `any` may keep the start.
        return x + (0.001 * noise.to(x)).clamp(-epsilon, epsilon)
    noise = 2 * torch.rand(x.shape, generator=generator, device=generator.device) - 1
    point = x + epsilon * noise.to(x)
    return point if start == "R2" else point.clamp(0, 1)
