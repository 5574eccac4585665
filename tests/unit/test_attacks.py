"""The PGD core: inside the ball, seeded, and the relations between the attacks that are its parameters."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from classwise.attacks import ATTACKS
from classwise.attacks.pgd import ascend, fgsm, pgd, temperature_pgd
from classwise.parameters import parameters_of
from conftest import small_model


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(count: int = 12, seed: int = 1, shape=(1, 8, 8)) -> tuple[torch.Tensor, torch.Tensor]:
    draw = generator(seed)
    return torch.rand(count, *shape, generator=draw), torch.randint(0, 10, (count,), generator=draw)


@given(
    epsilon=st.floats(1e-3, 1.0),
    step=st.floats(1e-4, 2.0),
    steps=st.integers(1, 4),
    start=st.sampled_from(["R1", "R2", "R3", "none"]),
    inverse_temperature=st.sampled_from([0.1, 1.0, 50.0, 300.0]),
    seed=st.integers(0, 1000),
)
def test_no_attack_leaves_the_ball_or_the_unit_cube(epsilon, step, steps, start, inverse_temperature, seed):
    x, y = batch(seed=seed)
    found = temperature_pgd(
        small_model(seed),
        x,
        y,
        epsilon=epsilon,
        steps=steps,
        step_size=step,
        start=start,
        inverse_temperature=inverse_temperature,
        generator=generator(seed),
    )
    assert (found - x).abs().max() <= epsilon + 1e-6
    assert found.min() >= 0
    assert found.max() <= 1


def test_temperature_pgd_at_one_is_pgd_bit_for_bit():
    x, y = batch()
    keys = {"epsilon": 0.2, "steps": 7, "step_size": 0.05, "start": "R3"}
    plain = pgd(small_model(), x, y, **keys, generator=generator())
    assert torch.equal(
        plain, temperature_pgd(small_model(), x, y, **keys, inverse_temperature=1.0, generator=generator())
    )


def test_fgsm_is_one_step_of_the_size_of_the_ball():
    x, y = batch()
    one = pgd(small_model(), x, y, epsilon=0.1, steps=1, step_size=0.1, generator=generator())
    assert torch.equal(fgsm(small_model(), x, y, epsilon=0.1, generator=generator()), one)


def test_fgsm_without_a_start_is_the_textbook_formula():
    x, y = batch()
    model = small_model()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), x)
    expected = (x + 0.1 * gradient.sign()).clamp(0, 1).detach()
    found = fgsm(model, x.detach(), y, epsilon=0.1, start="none", generator=generator())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


def test_pgd_is_the_loop_of_the_papers():
    x, y = batch()
    model, epsilon, step = small_model(), 0.1, 0.03
    expected = x.clone()
    for _ in range(5):
        expected.requires_grad_()
        (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(expected), y), expected)
        delta = (expected.detach() + step * gradient.sign() - x).clamp(-epsilon, epsilon)
        expected = (x + delta).clamp(0, 1)
    found = pgd(model, x, y, epsilon=epsilon, steps=5, step_size=step, start="none", generator=generator())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-7)


def test_temperature_scales_the_logits_and_nothing_else():
    x, y = batch()
    model, keys = small_model(), {"epsilon": 0.2, "steps": 5, "step_size": 0.05}
    scaled = pgd(lambda images: 5.0 * model(images), x, y, **keys, generator=generator())
    assert torch.equal(scaled, temperature_pgd(model, x, y, **keys, inverse_temperature=5.0, generator=generator()))


def test_the_start_conventions():
    x, _ = batch(count=400)

    def first(start):
        seen = []

        def model(images):
            seen.append(images.detach().clone())
            return images.flatten(1)

        ascend(
            model, x, lambda z, rows: z.sum(), epsilon=0.3, steps=1, step_size=0.1, start=start, generator=generator()
        )
        return seen[0]

    assert torch.equal(first("none"), x)
    assert 0.0009 < (first("R1") - x).std() < 0.0011
    unclipped, clipped = first("R2"), first("R3")
    assert unclipped.min() < 0
    assert unclipped.max() > 1
    assert torch.equal(clipped, unclipped.clamp(0, 1))
    noise = unclipped - x
    assert 0.29 < noise.abs().max() <= 0.3 + 1e-6
    assert abs(noise.mean()) < 0.005


def test_the_generator_decides_the_result():
    x, y = batch()
    keys = {"epsilon": 0.2, "steps": 3, "step_size": 0.05}
    first = pgd(small_model(), x, y, **keys, generator=generator(5))
    assert torch.equal(first, pgd(small_model(), x, y, **keys, generator=generator(5)))
    assert not torch.equal(first, pgd(small_model(), x, y, **keys, generator=generator(6)))


def test_attacking_touches_neither_global_randomness_nor_the_weights():
    x, y = batch()
    model = small_model().requires_grad_(True)
    before = torch.get_rng_state()
    pgd(model, x, y, epsilon=0.2, steps=3, step_size=0.05, generator=generator())
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_pgd_raises_the_loss_it_climbs():
    x, y = batch(count=60)
    model = small_model()
    found = pgd(model, x, y, epsilon=0.2, steps=10, step_size=0.05, generator=generator())
    loss = torch.nn.functional.cross_entropy
    assert loss(model(found), y) > loss(model(x), y)


@pytest.mark.parametrize("kind", list(ATTACKS))
def test_every_attack_has_the_shape_of_an_attack(kind):
    function = ATTACKS[kind]
    arguments = inspect.signature(function).parameters
    assert list(arguments)[:3] == ["model", "x", "y"]
    assert arguments["generator"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "generator" not in parameters_of(function).model_fields


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 10), (2, 28, 28)])
def test_attacks_work_for_any_image_size(shape):
    x, y = batch(shape=shape)
    y = y % 4
    found = pgd(
        small_model(shape=shape, classes=range(4)), x, y, epsilon=0.1, steps=2, step_size=0.1, generator=generator()
    )
    assert found.shape == x.shape
