"""Hypersphere embedding: the cosine head, its losses and its schedules."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from classwise.attacks.pgd import Inner
from classwise.defenses.defense import Run
from classwise.defenses.he import He
from classwise.defenses.he_cmp import HeCmp, scale_for
from classwise.defenses.he_lis import HeLis
from classwise.defenses.hypersphere import margin_loss
from classwise.engine import prepared
from classwise.errors import UserError
from classwise.models.classifier import build, load_model, save_weights, weights_fingerprint
from classwise.store import write_json

INNER = Inner(epsilon=0.2, steps=3, step_size=0.1)
CONV2 = {"kind": "conv2", "width": 4, "head": "cosine"}
RESNET = {"kind": "resnet18", "width": 4, "head": "cosine"}


def run(classes=tuple(range(10)), epochs=100, note=lambda sentence: None) -> Run:
    return Run(classes, torch.Generator().manual_seed(0), class_count=10, epochs=epochs, note=note)


def batch(shape=(1, 8, 8)):
    draw = torch.Generator().manual_seed(3)
    return torch.rand(16, *shape, generator=draw), torch.randint(0, 10, (16,), generator=draw)


def cosines_of(model, x):
    """By numpy, from the network's own features."""
    h = model.features((x - model.mean) / model.std).detach().double().numpy()
    w = model.head.weight.detach().double().numpy()
    return (h / np.linalg.norm(h, axis=1, keepdims=True)) @ (w / np.linalg.norm(w, axis=1, keepdims=True)).T


# The head


@pytest.mark.parametrize("training", [True, False])
def test_the_outputs_are_cosines(training):
    x, _ = batch()
    model = build(CONV2, (1, 8, 8), range(10)).train(training)
    found = model(x).detach()
    np.testing.assert_allclose(found.numpy(), cosines_of(model, x), atol=1e-6)
    assert found.abs().max() <= 1 + 1e-6
    assert model.head.bias is None


def test_each_training_pass_puts_the_rows_back_onto_the_sphere():
    x, y = batch()
    model = build(CONV2, (1, 8, 8), range(10)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        He(run(), attack=INNER).loss(model, x, y).loss.backward()
        torch.testing.assert_close(model.head.weight.norm(dim=1), torch.ones(10))
        optimizer.step()
        assert (model.head.weight.norm(dim=1) - 1).abs().max() > 1e-3, "the step leaves the sphere"
    before = model.head.weight.clone()
    model.eval()(x)
    assert torch.equal(model.head.weight, before), "evaluation changes nothing"


def test_the_gradient_is_that_of_a_free_row_and_not_of_a_normalised_one():
    x, _ = batch()
    model = build(CONV2, (1, 8, 8), range(10)).train()
    model(x)[:, 0].sum().backward()
    features = torch.nn.functional.normalize(model.features(x), dim=1)
    torch.testing.assert_close(model.head.weight.grad[0], features.sum(dim=0).detach())
    assert (model.head.weight.grad[0] * model.head.weight[0]).sum().abs() > 0.1, "not tangential"


@pytest.mark.parametrize("architecture", [CONV2, RESNET])
def test_a_prepared_model_has_the_same_cosines(architecture):
    x, _ = batch()
    model = build(architecture, (1, 8, 8), range(10))
    model.train()(x)  # batch statistics
    with torch.no_grad():
        model.head.weight *= 1.7  # as after an optimiser's step
    model.eval()
    exact = model(x).detach()
    torch.testing.assert_close(prepared(model)(x), exact, atol=1e-5, rtol=0)
    torch.testing.assert_close(prepared(model, "bf16")(x), exact, atol=0.03, rtol=0)
    points = x.clone().requires_grad_()
    assert torch.autograd.grad(prepared(model)(points).amax(dim=1).sum(), points)[0].abs().max() > 0


def test_a_cosine_head_never_starts_at_zero():
    model = build({"kind": "small-cnn", "head": "cosine"}, (1, 28, 28), range(10)).eval()
    assert (model.head.weight.norm(dim=1) > 0).all()
    assert model(torch.rand(2, 1, 28, 28)).std(dim=1).min() > 0


def test_a_stored_model_remembers_its_head(tmp_path):
    x, _ = batch()
    model = build(CONV2, (1, 8, 8), range(10)).eval()
    card = {"architecture": CONV2, "shape": [1, 8, 8], "classes": list(range(10))}
    save_weights(tmp_path / "w", model.state_dict())
    write_json(tmp_path / "c", {**card, "fingerprint": weights_fingerprint(model.state_dict())})
    assert torch.equal(load_model(tmp_path / "w", tmp_path / "c")[0](x), model(x))


# The loss


def test_the_margin_loss_is_its_formula():
    draw = torch.Generator().manual_seed(1)
    c, y = 2 * torch.rand(8, 10, generator=draw) - 1, torch.randint(0, 10, (8,), generator=draw)
    for s, m in ((15.0, 0.2), (1.0, 0.0)):
        a = c.double().numpy()
        expected = []
        for i, label in enumerate(y.tolist()):
            own, others = np.exp(s * (a[i, label] - m)), np.exp(s * np.delete(a[i], label)).sum()
            expected.append(-np.log(own / (own + others)))
        np.testing.assert_allclose(margin_loss(c, y, s, m).numpy(), expected, rtol=1e-4)
    plain = torch.nn.functional.cross_entropy(15 * c, y, reduction="none")
    torch.testing.assert_close(margin_loss(c, y, 15.0, 0.0), plain)
    assert (margin_loss(c, y, 15.0, 0.2) > plain).all()


def test_he_in_trades_weighs_the_divergence_of_scaled_cosines():
    x, y = batch()
    model = build(CONV2, (1, 8, 8), range(10)).train()
    step = He(run(), attack=INNER, variant="trades", beta=6.0, scale=10.0, margin=0.3).loss(model, x, y)
    p, q = (10 * step.natural).softmax(1), (10 * step.adversarial).softmax(1)
    divergence = (p * (p / q).log()).sum(1)
    assert divergence.mean() > 1e-3
    torch.testing.assert_close(step.per_example, margin_loss(step.natural, y, 10.0, 0.3) + 6 * divergence)
    step.loss.backward()  # two training passes renormalise the rows in between, and autograd does not mind


def test_the_attack_of_he_climbs_scaled_cosines_without_margin():
    x, y = batch()
    model = build(CONV2, (1, 8, 8), range(10)).eval().requires_grad_(False)
    step = He(run(), attack=INNER, scale=20.0).loss(model, x, y)
    point = x + 0.001 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        point = point.detach().requires_grad_()
        torch.nn.functional.cross_entropy(20 * model(point), y).backward()
        point = (x + (point + 0.1 * point.grad.sign() - x).clamp(-0.2, 0.2)).clamp(0, 1)
    torch.testing.assert_close(step.adversarial, model(point.detach()))


# The schedules


def scales(defense, *epochs):
    found = []
    for epoch in epochs:
        defense.epoch_start(epoch, None, None)
        found.append(defense.scale)
    return found


def test_the_scale_of_he_lis_rises_in_a_straight_line():
    assert scales(HeLis(run(), attack=INNER), 1, 51, 76) == [1, 38, 56.5]
    assert scales(HeLis(run(), attack=INNER, count_from=1), 50, 100) == [38, 75]
    assert scales(HeLis(run(), attack=INNER, over=10), 11, 50) == [75, 75]


def test_he_lis_has_no_margin_and_scales_attack_and_update():
    x, y = batch()
    model = build(CONV2, (1, 8, 8), range(10)).eval().requires_grad_(False)
    lis = HeLis(run(), attack=INNER)
    lis.epoch_start(51, model, None)
    he = He(run(), attack=INNER, scale=38.0, margin=0.0)
    assert torch.equal(lis.loss(model, x, y).loss, he.loss(model, x, y).loss)


def test_the_wanted_probability_of_he_cmp_rises_to_one():
    defense, found = HeCmp(run(), attack=INNER, reading="bound"), []
    for n in (0, 45, 89, 90, 99):
        defense.epoch_start(n + 1, None, None)
        found.append(defense.probability)
    assert found == pytest.approx([0.2, 0.6, 0.9911, 1, 1], abs=1e-4)


@pytest.mark.parametrize(("probability", "scale"), [(0.2, 0.405465), (0.5, 1.098612), (0.9, 2.197225)])
def test_the_bound_of_he_cmp_is_the_closed_form(probability, scale):
    defense = HeCmp(run(), attack=INNER, reading="bound", first_probability=probability)
    assert scales(defense, 1) == [pytest.approx(scale, abs=1e-6)]


def test_the_solver_finds_the_root_from_tiny_gaps_to_the_largest():
    draw = np.random.default_rng(0)
    for size in (1e-3, 0.03, 0.3, 2.0):
        for probability in (0.11, 0.2, 0.9, 0.999):
            gaps = size * draw.random(9)
            expected = brentq(lambda s, g=gaps, p=probability: p - 1 / (1 + np.exp(-s * g).sum()), 0, 1e7)
            assert scale_for(gaps, probability, 1e9) == pytest.approx(expected, rel=1e-5)
    assert scale_for(np.full(9, 0.3), 1.0, 80.0) == 80.0, "probability 1 has no finite root"
    assert scale_for(np.zeros(9), 0.5, 150.0) <= 150.0, "nor have equal cosines"


@pytest.mark.parametrize("summary", ["mean", "largest"])
def test_he_cmp_solves_for_the_cosines_of_its_sample(summary):
    x, y = batch()
    model = build(CONV2, (1, 8, 8), range(10)).train()
    asked, notes = [], []

    def sample(count):
        asked.append(count)
        return x, y

    keys = {"summary": summary, "examples": 16, "first_probability": 0.4, "s_max": 1e6}
    defense = HeCmp(run(note=notes.append), attack=INNER, **keys)
    defense.epoch_start(1, model, sample)
    sorted_cosines = -np.sort(-cosines_of(model, x), axis=1)
    one = sorted_cosines.mean(axis=0) if summary == "mean" else max(sorted_cosines, key=lambda row: row[0])
    softmax = np.exp(defense.scale * one) / np.exp(defense.scale * one).sum()
    assert softmax.max() == pytest.approx(0.4, abs=1e-6)
    assert asked == [16]
    assert model.training
    assert notes == [f"epoch 1: maximum probability 0.4 by scale {defense.scale:.4g}"]


def test_he_cmp_can_give_each_image_the_wanted_probability():
    x, _ = batch()
    model = build(CONV2, (1, 8, 8), range(10)).eval().requires_grad_(False)
    defense = HeCmp(run(), attack=INNER, reading="example", first_probability=0.4, s_max=1e6)
    defense.epoch_start(1, model, None)
    found = (defense.scales(model(x)) * model(x)).softmax(1).amax(1)
    torch.testing.assert_close(found, torch.full((16,), 0.4), atol=1e-3, rtol=0)


def test_a_probability_that_every_output_exceeds_is_refused():
    with pytest.raises(UserError, match=r"^first_probability = 0.1: must be above 1/9"):
        HeCmp(run(classes=tuple(range(9))), attack=INNER, first_probability=0.1)
