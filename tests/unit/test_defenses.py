"""The losses, against their formulas written out."""

import pytest
import torch

from classwise.attacks.pgd import Inner, pgd
from classwise.defenses import DEFENSES
from classwise.defenses.defense import Run
from classwise.defenses.fast import Fast, Guard
from classwise.defenses.madry import Madry
from classwise.defenses.mart import Mart, boosted_cross_entropy, weighted_divergence
from classwise.defenses.standard import Standard
from classwise.defenses.trades import Trades, kl
from classwise.errors import UserError
from classwise.models.classifier import build
from conftest import small_model

INNER = Inner(epsilon=0.2, steps=3, step_size=0.1)
KEYS = {  # of each kind, as few as it takes
    "standard": {},
    "madry": {"attack": INNER},
    "trades": {"attack": INNER, "beta": 6.0},
    "mart": {"attack": INNER, "beta": 5.0},
    "he": {"attack": INNER},
    "he-lis": {"attack": INNER},
    "he-cmp": {"attack": INNER},
    "fast": {"epsilon": 0.2},
}


def run(seed: int = 0, classes=tuple(range(10)), **facts) -> Run:
    return Run(classes, torch.Generator().manual_seed(seed), **{"class_count": 10, "epochs": 100, **facts})


def batch(shape=(1, 8, 8)):
    draw = torch.Generator().manual_seed(3)
    return torch.rand(16, *shape, generator=draw), torch.randint(0, 10, (16,), generator=draw)


def test_kl_is_taken_from_the_clean_to_the_adversarial_output():
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    assert kl(p.log(), q.log()).item() == pytest.approx(0.368064, abs=1e-6)
    assert kl(q.log(), p.log()).item() != pytest.approx(0.368064, abs=1e-3)


def test_standard_is_the_cross_entropy_of_clean_images():
    x, y = batch()
    step = Standard(run()).loss(small_model(), x, y)
    assert step.loss.item() == pytest.approx(torch.nn.functional.cross_entropy(small_model()(x), y).item())
    assert step.adversarial is None


def test_madry_sees_the_adversarial_batch_alone():
    x, y = batch()
    model = small_model()
    step = Madry(run(), attack=INNER).loss(model, x, y)
    adversarial = pgd(
        model, x, y, epsilon=0.2, steps=3, step_size=0.1, start="R3", generator=torch.Generator().manual_seed(0)
    )
    expected = torch.nn.functional.cross_entropy(model(adversarial), y)
    assert step.loss.item() == pytest.approx(expected.item())
    assert torch.equal(step.natural, model(x))


def decided_model():
    """A network with large logits, on which clean and adversarial outputs differ by much."""
    model = build({"kind": "conv2", "width": 8}, (1, 8, 8), range(10), 0).eval().requires_grad_(False)
    model.head.weight *= 100
    return model


def test_trades_is_natural_cross_entropy_plus_beta_times_the_divergence():
    x, y = batch()
    model = decided_model()
    step = Trades(run(), beta=6.0, attack=INNER).loss(model, x, y)
    # the reference form: a summed KLDivLoss divided by the batch, the clean output as its target
    p, q = model(x).softmax(1), step.adversarial.softmax(1)
    divergence = torch.nn.functional.kl_div(q.log(), p, reduction="sum") / len(x)
    backwards = torch.nn.functional.kl_div(p.log(), q, reduction="sum") / len(x)
    assert divergence > 0.01
    assert abs(divergence - backwards) > 1e-3
    natural = torch.nn.functional.cross_entropy(model(x), y)
    assert (step.loss - natural).item() == pytest.approx(6 * divergence.item(), rel=1e-3)


def test_the_trades_attack_raises_the_divergence():
    x, y = batch()
    model = decided_model()
    step = Trades(run(), beta=1.0, attack=INNER).loss(model, x, y)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(9)) * 0.4 - 0.2
    clean, random = model(x).log_softmax(1), model((x + noise).clamp(0, 1)).log_softmax(1)
    assert kl(clean, step.adversarial.log_softmax(1)).mean() > 2 * kl(clean, random).mean()


def test_the_gradient_of_trades_flows_through_both_arguments_of_the_divergence():
    x, y = batch()
    model = build({"kind": "conv2", "width": 2}, (1, 8, 8), range(10), 0)

    def head_gradient(loss):
        model.zero_grad()
        loss.backward()
        return model.head.weight.grad.clone()

    found = head_gradient(Trades(run(), beta=6.0, attack=INNER).loss(model, x, y).loss)
    seen = []
    hook = model.register_forward_pre_hook(lambda module, images: seen.append(images[0]))
    Trades(run(), beta=6.0, attack=INNER).loss(model, x, y)
    hook.remove()
    adversarial = seen[-2]  # natural, adversarial, natural are the last three passes

    def written_out(clean):
        divergence = kl(clean.log_softmax(1), model(adversarial).log_softmax(1)).mean()
        return torch.nn.functional.cross_entropy(model(x), y) + 6 * divergence

    torch.testing.assert_close(found, head_gradient(written_out(model(x))))
    assert not torch.allclose(found, head_gradient(written_out(model(x).detach())))


def test_the_trades_attack_starts_with_a_little_gaussian_noise_and_madry_inside_the_ball():
    assert Trades(run(), beta=1.0, attack=INNER).attack["start"] == "R1"
    assert Madry(run(), attack=INNER).attack["start"] == "R3"
    chosen = INNER.model_copy(update={"start": "R2"})
    assert Madry(run(), attack=chosen).attack["start"] == "R2"


@pytest.mark.parametrize(
    ("defense", "updates"),
    [("standard", 1), ("madry", 1), ("trades", 3), ("mart", 2), ("he", 1), ("he-lis", 1), ("he-cmp", 1), ("fast", 2)],
)
def test_batch_norm_statistics_move_with_the_update_and_not_with_the_attack_except_in_fast(defense, updates):
    """TRADES passes natural, adversarial, natural in training mode; MART natural, adversarial; fast its attack too."""
    x, y = batch((3, 8, 8))
    model = build({"kind": "resnet18", "width": 4, "head": DEFENSES[defense].head}, (3, 8, 8), range(10), 0).train()
    DEFENSES[defense](run(), **KEYS[defense]).loss(model, x, y)
    assert model.training
    assert model.features.bn1.num_batches_tracked.item() == updates


@pytest.mark.parametrize("kind", list(DEFENSES))
def test_the_loss_is_the_mean_of_the_per_example_losses(kind):
    x, y = batch()
    step = DEFENSES[kind](run(), **KEYS[kind]).loss(small_model(), x, y)
    assert step.per_example.shape == y.shape
    assert not step.per_example.requires_grad
    assert step.loss.item() == pytest.approx(step.per_example.mean().item())


def test_a_stateless_defense_refuses_a_foreign_state():
    assert Standard(run()).state_dict() == {}
    with pytest.raises(ValueError, match="no state"):
        Standard(run()).load_state_dict({"weights": [1]})


# One beta for each class


def test_equal_betas_are_one_beta_bit_for_bit():
    x, y = batch()
    one, ten = (Trades(run(), beta=beta, attack=INNER).loss(small_model(), x, y) for beta in (0.1, [0.1] * 10))
    assert torch.equal(one.per_example, ten.per_example)
    assert torch.equal(one.loss, ten.loss)


def test_each_class_has_its_own_beta():
    """tian21 eq. 5: the class's beta weighs the divergence of its examples before the mean is taken."""
    x, y = batch()
    model, betas = decided_model(), [float(c) for c in range(10)]
    step = Trades(run(), beta=betas, attack=INNER).loss(model, x, y)
    p, q = model(x).softmax(1).double(), step.adversarial.softmax(1).double()
    expected = sum(-p[i, y[i]].log() + betas[y[i]] * (p[i] * (p[i] / q[i]).log()).sum() for i in range(len(y))) / len(y)
    assert step.loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_betas_are_of_original_classes_when_one_is_removed():
    kept = tuple(c for c in range(10) if c != 5)
    betas = Trades(run(classes=kept), beta=[float(c) for c in range(10)], attack=INNER).beta
    assert betas.tolist() == list(kept)


def test_a_beta_too_few_is_told_in_one_sentence():
    with pytest.raises(UserError, match=r"^beta = \[6.0, 6.0\]: must be one number, or one for each of the 10 classes"):
        Trades(run(), beta=[6.0, 6.0], attack=INNER)


# MART


def test_the_boosted_cross_entropy_of_a_uniform_output():
    found = boosted_cross_entropy(torch.zeros(1, 10), torch.tensor([3]))
    assert found.item() == pytest.approx(2.302585 + 0.105249, abs=1e-5)


def test_mart_is_its_formula():
    """Written out as the authors do: the second largest probability if the largest is the true class."""
    x, y = batch()
    model = decided_model()
    y[:8] = model(x[:8]).argmax(1)
    step = Mart(run(), beta=5.0, attack=Inner(epsilon=0.02, steps=1, step_size=0.02)).loss(model, x, y)
    p, q = model(x).softmax(1).double(), step.adversarial.softmax(1).double()
    assert {bool(q[i].argmax() == y[i]) for i in range(len(y))} == {True, False}
    for i, found in enumerate(step.per_example.tolist()):
        first, second = q[i].sort(descending=True).indices[:2]
        wrong = second if first == y[i] else first
        boosted = -q[i, y[i]].log() - (1.0001 - q[i, wrong] + 1e-12).log()
        divergence = (p[i] * (p[i].log() - (q[i] + 1e-12).log())).sum()
        assert found == pytest.approx((boosted + 5 * divergence * (1.0000001 - p[i, y[i]])).item(), rel=1e-3, abs=1e-4)


def test_the_weight_of_marts_divergence_is_not_detached():
    draw = torch.Generator().manual_seed(0)
    natural, adversarial = torch.randn(2, 4, 10, generator=draw, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3])
    natural.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: weighted_divergence(z, adversarial, y), natural)


def test_mart_passes_the_natural_batch_first():
    x, y = batch()
    model = build({"kind": "conv2", "width": 2}, (1, 8, 8), range(10), 0).train()
    seen = []
    model.register_forward_pre_hook(lambda module, images: seen.append(images[0]) if module.training else None)
    step = Mart(run(), beta=5.0, attack=INNER).loss(model, x, y)
    assert len(seen) == 2
    assert torch.equal(seen[0], x)
    assert torch.equal(model(seen[1]), step.adversarial)


# Fast


def test_fast_takes_one_step_of_one_and_a_quarter_epsilon_from_a_point_of_the_ball():
    x, y = batch()
    model = build({"kind": "resnet18", "width": 4}, (1, 8, 8), range(10), 0).train()
    twin = build({"kind": "resnet18", "width": 4}, (1, 8, 8), range(10), 0).train()
    step = Fast(run(), epsilon=0.2).loss(model, x, y)
    noise = 0.2 * (2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1)
    point = (x + noise).clamp(0, 1).requires_grad_()
    torch.nn.functional.cross_entropy(twin(point), y).backward()  # batch norm in training mode
    adversarial = (x + (point + 0.25 * point.grad.sign() - x).clamp(-0.2, 0.2)).clamp(0, 1)
    torch.testing.assert_close(step.adversarial, twin(adversarial.detach()).detach())
    assert step.natural is None, "not computed in passing"


def test_the_attack_of_fast_leaves_no_gradient_in_the_weights():
    x, y = batch()
    model = build({"kind": "conv2", "width": 2}, (1, 8, 8), range(10), 0).train()
    Fast(run(), epsilon=0.2).loss(model, x, y)
    assert all(weight.grad is None for weight in model.parameters())


def test_the_guard_stops_at_a_drop_of_more_than_allowed_and_restores_the_weights_of_before():
    x, y = batch()
    model = build({"kind": "conv2", "width": 2}, (1, 8, 8), range(10), 0)
    notes, found = [], iter([0.5, 0.3, 0.09])
    defense = Fast(run(note=notes.append), epsilon=0.2, guard=Guard())
    defense._robust = lambda model, x, y: next(found)
    for epoch in (1, 2, 3):
        assert not defense.stopped
        with torch.no_grad():
            model.head.bias.fill_(epoch)
        defense.epoch_start(epoch, model, None)
        defense.loss(model, x, y)
        defense.epoch_end({}, model)
    assert defense.stopped, "0.3 - 0.09 is more than 0.2; 0.5 - 0.3 is not"
    assert (model.head.bias == 2).all()
    assert notes == [
        "epoch 3: catastrophic overfitting, robust accuracy fell from 30.0 % to 9.0 % on a batch; "
        "training stops with the weights of epoch 2"
    ]


def test_the_guard_measures_the_first_batch_of_the_epoch_under_pgd():
    x, y = batch()
    model = decided_model()
    y = model(x).argmax(1)
    defense = Fast(run(), epsilon=0.2, guard=Guard())
    defense.epoch_start(1, model, None)
    defense.loss(model, x, y)
    defense.loss(model, x.flip(0), y)
    assert torch.equal(defense.first_batch[0], x)
    draws = defense.run.generator.get_state()
    defense.epoch_end({}, model)
    defense.run.generator.set_state(draws)
    attack = {"epsilon": 0.2, "steps": 5, "step_size": 0.05, "generator": defense.run.generator}
    assert 0 < defense.robust < 1
    assert defense.robust == (model(pgd(model, x, y, **attack)).argmax(1) == y).float().mean().item()
