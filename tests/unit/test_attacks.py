"""The PGD core: inside the ball, seeded, and the relations between the attacks that are its parameters."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from classwise.attacks import ATTACKS
from classwise.attacks.pgd import ascend, fgsm, pgd, targets, temperature_pgd
from classwise.attacks.target import Target
from classwise.errors import UserError
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


CLIMB = {"steps": 3, "step_size": 0.1}
KEYS = {  # what each kind needs, small; epsilon is drawn
    "none": {},
    "fgsm": {},
    "pgd": CLIMB,
    "temperature-pgd": {**CLIMB, "inverse_temperature": 5.0},
    "targeted-pgd": CLIMB,
    "cw-pgd": CLIMB,
    "cw-linf": {"iterations": 10, "rounds": 2, "lr": 0.05},
    "transfer": {**CLIMB, "surrogate": "other", "source": small_model(seed=9)},
    "nattack": {"iterations": 11, "population": 5},
    "autoattack": {},
}


def attacked(kind, x, y, *, epsilon, seed, **more):
    """The images and who is fooled, by the attack `kind` on a small model with that seed."""
    model = small_model(seed)
    keys = {**KEYS[kind], **more} | ({} if kind == "none" else {"epsilon": epsilon})
    found = ATTACKS[kind](Target(model, model, len(x), x.device), x, y, **keys, generator=generator(seed))
    return found, model(found).argmax(1) != y


def edgy(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images with many pixels that are exactly 0 or 1, and labels that the small model of that seed mostly predicts."""
    x, y = batch(count, seed)
    x = (2 * x - 0.5).clamp(0, 1)
    right = small_model(seed)(x).argmax(1)
    return x, torch.where(torch.arange(count) % 3 == 0, y, right)


@pytest.mark.parametrize("kind", [kind for kind in ATTACKS if kind != "autoattack"])
@given(epsilon=st.floats(1e-3, 1.0), seed=st.integers(0, 1000), data=st.data())
def test_no_kind_of_attack_leaves_the_ball_or_the_unit_cube(kind, epsilon, seed, data):
    fields = parameters_of(ATTACKS[kind]).model_fields
    more = {}
    for name, values in {"start": ["R1", "R2", "R3", "none"], "protocol": ["last", "any"], "restarts": [1, 3]}.items():
        if name in fields:
            more[name] = data.draw(st.sampled_from(values), name)
    x, y = edgy(9, seed)
    found, _ = attacked(kind, x, y, epsilon=epsilon, seed=seed, **more)
    assert (found - x).abs().max() <= epsilon + 1e-6
    assert found.min() >= 0
    assert found.max() <= 1


@pytest.mark.parametrize("epsilon", [0.01, 0.9])
def test_autoattack_leaves_neither_the_ball_nor_the_unit_cube(epsilon):
    x, y = edgy(9, 0)
    found, _ = attacked("autoattack", x, y, epsilon=epsilon, seed=0)
    assert (found - x).abs().max() <= epsilon + 1e-6
    assert found.min() >= 0
    assert found.max() <= 1


@pytest.mark.parametrize("kind", ["pgd", "temperature-pgd", "targeted-pgd", "cw-pgd"])
@given(
    epsilon=st.floats(0.01, 0.5),
    step=st.floats(0.01, 0.5),
    few=st.integers(1, 4),
    more=st.integers(1, 4),
    start=st.sampled_from(["R1", "R2", "R3", "none"]),
    seed=st.integers(0, 1000),
)
def test_more_steps_never_make_any_weaker(kind, epsilon, step, few, more, start, seed):
    x, y = edgy(30, seed)
    keys = {"epsilon": epsilon, "step_size": step, "start": start, "seed": seed, "protocol": "any"}
    _, fooled = attacked(kind, x, y, **keys, steps=few)
    _, then = attacked(kind, x, y, **keys, steps=few + more)
    assert not (fooled & ~then).any()


def test_more_steps_never_make_any_with_restarts_weaker():
    """They did, when an image's later starts depended on which others were still standing."""
    keys = {"epsilon": 0.1, "step_size": 0.05, "protocol": "any", "restarts": 4}
    for seed in range(150):
        x, y = edgy(30, seed)
        fooled = [attacked("pgd", x, y, **keys, seed=seed, steps=steps)[1] for steps in (1, 2, 3)]
        assert not (fooled[0] & ~fooled[1]).any()
        assert not (fooled[1] & ~fooled[2]).any()


@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_removed_class_is_never_targeted_and_never_the_true_one(data, seed):
    """Targets are positions in the classes that are left, so a removed class is one that no position means."""
    classes = tuple(sorted(data.draw(st.sets(st.integers(0, 9), min_size=2, max_size=9), "classes left")))
    y = torch.randint(len(classes), (60,), generator=generator(seed))
    target = data.draw(st.sampled_from(["random", "next", *classes]), "target")
    wanted = targets(y, classes, target, generator(seed))
    meant = [classes[position] for position in wanted.tolist()]  # a position beyond them raises
    assert min(wanted) >= 0
    assert (wanted != y).all()
    if target in classes:
        assert {m for m, true in zip(meant, y.tolist(), strict=True) if classes[true] != target} <= {target}
    removed = data.draw(st.sampled_from(sorted(set(range(10)) - set(classes))), "removed")
    with pytest.raises(UserError, match="no such class"):
        targets(y, classes, removed, generator(seed))


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
