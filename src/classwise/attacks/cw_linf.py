"""The minimal-distance Carlini-Wagner L-inf attack, as Carmon et al. ran it and Tian et al. after them.

For each image alone: five values of c by binary search; for each, a threshold tau that shrinks as long as Adam finds an
adversarial image; in tanh space. Here all images advance side by side, each at its own c, tau and iteration, so a batch
costs as many gradient steps as its slowest image and wastes none on those that are through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from classwise.attacks.pgd import Protocol
from classwise.attacks.target import narrowed, predict
from classwise.parameters import Count, Epsilon, Positive

TAU_MIN = 1 / 256
CHECK_EVERY, LEAST_GAIN = 100, 1e-4  # Adam stops early when 100 iterations gain less
BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-7


@dataclass
class _State:
    """Where each image is; every field is a tensor over the images that are still running."""

    rows: torch.Tensor  # place in the batch
    low: torch.Tensor  # the binary search on c
    high: torch.Tensor
    c: torch.Tensor
    round: torch.Tensor
    start_tau: torch.Tensor  # where the next c begins; it persists, so later c try smaller tau only
    tau: torch.Tensor
    warm: torch.Tensor  # in tanh space: the image that this tau starts from
    delta: torch.Tensor
    first_moment: torch.Tensor
    second_moment: torch.Tensor
    iteration: torch.Tensor
    previous: torch.Tensor  # loss at the last check
    found: torch.Tensor  # whether this tau has seen an adversarial image

    def __getitem__(self, keep: torch.Tensor) -> _State:
        return _State(**{name: value[keep] for name, value in vars(self).items()})


def cw_linf(
    model,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    epsilon: Epsilon,
    rounds: Count = 5,
    c: Positive = 0.01,
    iterations: Count = 1000,
    lr: Positive = 0.005,
    shrink: Annotated[Positive, Field(lt=1)] = 0.9,
    protocol: Protocol = "last",
    generator,
) -> torch.Tensor:
    """The closest adversarial image if it is within epsilon, else the clean image: robust means farther than epsilon.

    Protocol `last` runs to the end; `any` leaves an image as soon as something within epsilon is found, which gives the
    same verdict for less. Nothing is random.
    """
    closest, distance = minimal_distance(
        model,
        x,
        y,
        rounds=rounds,
        c=c,
        iterations=iterations,
        lr=lr,
        shrink=shrink,
        enough=epsilon if protocol == "any" else 0.0,
    )
    inside = (distance <= epsilon).view(-1, *[1] * (x.dim() - 1))
    return torch.where(inside, closest, x)


def minimal_distance(
    model,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    rounds: int,
    c: float,
    iterations: int,
    lr: float,
    shrink: float,
    enough: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The closest adversarial image found, and its L-inf distance (infinite if none, 0 if x is misclassified)."""
    origin = _to_tanh(x)
    closest, distance = x.clone(), torch.full((len(x),), float("inf"), device=x.device)
    wrong = predict(model, x) != y
    distance[wrong] = 0.0
    state = _begin(origin, (~wrong).nonzero()[:, 0], c)
    while len(state.rows):
        rows = state.rows
        images, logits, loss, gradient = _loss(narrowed(model, rows), origin[rows], y[rows], state)
        _record(model, rows, images, logits, x, y, closest, distance, state)
        _adam(state, gradient, lr)
        check = state.iteration % CHECK_EVERY == 0
        stalled = check & ~(state.previous - loss > LEAST_GAIN)
        state.previous = torch.where(check, loss, state.previous)
        ended = stalled | (state.iteration == iterations - 1)
        state.iteration += 1
        if ended.any():
            _next_tau(state, ended, origin[rows], shrink)
        running = (state.round < rounds) & (distance[rows] > enough)
        if not running.all():
            state = state[running]
    return closest, distance


def _begin(origin: torch.Tensor, rows: torch.Tensor, c: float) -> _State:
    count, device = len(rows), origin.device

    def full(value, dtype=torch.float32):
        return torch.full((count,), value, dtype=dtype, device=device)

    zeros = torch.zeros_like(origin[rows])
    return _State(
        rows=rows,
        low=full(0.0),
        high=full(float("inf")),
        c=full(c),
        round=full(0, torch.int64),
        start_tau=full(1.0),
        tau=full(1.0),
        warm=origin[rows].clone(),
        delta=zeros,
        first_moment=zeros.clone(),
        second_moment=zeros.clone(),
        iteration=full(0, torch.int64),
        previous=full(float("inf")),
        found=full(False, torch.bool),
    )


def _loss(model, origin: torch.Tensor, y: torch.Tensor, state: _State):
    """Images, logits, loss[example] and its gradient with respect to delta."""
    delta = state.delta.detach().requires_grad_()
    images = _from_tanh(state.warm + delta)
    logits = model(images)
    own = logits.gather(1, y[:, None])[:, 0]
    other = logits.scatter(1, y[:, None], float("-inf")).amax(dim=1)
    beyond = ((images - _from_tanh(origin)).abs() - _wide(state.tau, images)).clamp(min=0)
    loss = beyond.flatten(1).sum(dim=1) + state.c * (own - other).clamp(min=0)
    (gradient,) = torch.autograd.grad(loss.sum(), delta)
    # An image that is once not a number stays so, and its tau would shrink for ever.
    return images.detach(), logits.detach(), loss.detach(), gradient.nan_to_num()


def _record(model, rows, images, logits, x, y, closest, distance, state: _State) -> None:
    """Note who is adversarial, and keep the closest image of each; close calls are decided by the exact prediction."""
    adversarial = logits.argmax(dim=1) != y[rows]
    state.found |= adversarial
    away = (images - x[rows]).abs().flatten(1).amax(dim=1)
    better = (adversarial & (away < distance[rows])).nonzero()[:, 0]
    if len(better):
        better = better[predict(model, images[better]) != y[rows[better]]]
        closest[rows[better]], distance[rows[better]] = images[better], away[better]


def _adam(state: _State, gradient: torch.Tensor, lr: float) -> None:
    first, second = BETAS
    state.first_moment = first * state.first_moment + (1 - first) * gradient
    state.second_moment = second * state.second_moment + (1 - second) * gradient**2
    time = (state.iteration + 1).to(gradient)
    mean = state.first_moment / _wide(1 - first**time, gradient)
    spread = state.second_moment / _wide(1 - second**time, gradient)
    state.delta = state.delta - lr * mean / (spread.sqrt() + ADAM_EPSILON)


def _next_tau(state: _State, ended: torch.Tensor, origin: torch.Tensor, shrink: float) -> None:
    """Where the images go whose Adam run has ended: a smaller tau, or the next c."""
    success = ended & state.found
    images = _from_tanh(state.warm + state.delta)
    reached = (images - _from_tanh(origin)).abs().flatten(1).amax(dim=1)
    state.tau = torch.where(success, torch.minimum(state.tau, reached) * shrink, state.tau)
    state.warm = torch.where(_wide(success, images), _to_tanh(images), state.warm)

    failed, through = ended & ~state.found, success & (state.tau <= TAU_MIN)
    good = through | (failed & (state.tau < state.start_tau))  # a failed smaller tau does not speak against this c
    state.start_tau = torch.where(failed, state.tau, state.start_tau)
    turned = failed | through
    state.high = torch.where(turned & good, state.c, state.high)
    state.low = torch.where(turned & ~good, state.c, state.low)
    following = torch.where(state.high.isinf(), 10 * state.c, (state.low + state.high) / 2)
    state.c = torch.where(turned, following, state.c)
    state.round += turned.long()
    state.warm = torch.where(_wide(turned, images), origin, state.warm)
    state.tau = torch.where(turned, state.start_tau, state.tau)

    state.iteration[ended] = 0
    state.previous[ended] = float("inf")
    state.found[ended] = False
    for field in (state.delta, state.first_moment, state.second_moment):
        field[ended] = 0


def _to_tanh(images: torch.Tensor) -> torch.Tensor:
    return torch.atanh(0.999999 * (2 * images - 1))


def _from_tanh(w: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(w) + 1) / 2


def _wide(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))
