"""The losses, against their formulas written out."""

import pytest
import torch

from classwise.attacks.pgd import Inner
from classwise.defenses import DEFENSES
from classwise.defenses.defense import Run
from classwise.defenses.madry import Madry
from classwise.defenses.standard import Standard
from classwise.defenses.trades import Trades, kl
from classwise.models.classifier import build
from conftest import small_model

INNER = Inner(epsilon=0.2, steps=3, step_size=0.1)


def run(seed: int = 0, classes=tuple(range(10))) -> Run:
    return Run(classes, torch.Generator().manual_seed(seed))


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
    from classwise.attacks.pgd import pgd

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


@pytest.mark.parametrize(("defense", "updates"), [("madry", 1), ("trades", 3), ("standard", 1)])
def test_batch_norm_statistics_move_with_the_update_and_never_with_the_attack(defense, updates):
    """TRADES passes natural, adversarial, natural in training mode; Madry the adversarial batch alone."""
    x, y = batch((3, 8, 8))
    model = build({"kind": "resnet18", "width": 4}, (3, 8, 8), range(10), 0).train()
    keys = {"madry": {"attack": INNER}, "trades": {"attack": INNER, "beta": 6.0}, "standard": {}}[defense]
    DEFENSES[defense](run(), **keys).loss(model, x, y)
    assert model.training
    assert model.features.bn1.num_batches_tracked.item() == updates


@pytest.mark.parametrize("kind", list(DEFENSES))
def test_the_loss_is_the_mean_of_the_per_example_losses(kind):
    x, y = batch()
    keys = {"madry": {"attack": INNER}, "trades": {"attack": INNER, "beta": 6.0}, "standard": {}}[kind]
    step = DEFENSES[kind](run(), **keys).loss(small_model(), x, y)
    assert step.per_example.shape == y.shape
    assert not step.per_example.requires_grad
    assert step.loss.item() == pytest.approx(step.per_example.mean().item())


def test_a_stateless_defense_refuses_a_foreign_state():
    assert Standard(run()).state_dict() == {}
    with pytest.raises(ValueError, match="no state"):
        Standard(run()).load_state_dict({"weights": [1]})
