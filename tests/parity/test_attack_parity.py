"""Our attacks against other people's, on a model that is really robust.

The model: conv2, trained here by Madry's method on 1,000 digits; more than half of the 797 test images survive PGD-20.
Where no library has the attack, a slow implementation of one image at a time, written from the formulas, is the oracle.
"""

import eagerpy
import foolbox
import numpy as np
import pytest
import torch
import torchattacks

from classwise.attacks.autoattack import autoattack
from classwise.attacks.cw_linf import cw_linf, minimal_distance
from classwise.attacks.nattack import gain, nattack, rewards
from classwise.attacks.pgd import cw_pgd, fgsm, pgd, targeted_pgd, targets, temperature_pgd
from classwise.attacks.target import Target
from classwise.attacks.transfer import transfer
from classwise.engine import folded, prepared
from classwise.errors import UserError
from classwise.evaluation import Parts, Split, evaluate
from classwise.models.classifier import build
from classwise.specs import Training
from classwise.training import train

EPSILON = 0.2
BALL = {"epsilon": EPSILON, "steps": 20, "step_size": 0.02}


@pytest.fixture(scope="module")
def robust(digits, tmp_path_factory):
    trained = train(
        digits,
        architecture={"kind": "conv2", "width": 16},
        defense={"kind": "madry", "attack": {"epsilon": EPSILON, "steps": 7, "step_size": 0.05}},
        training=Training(
            epochs=15, batch_size=50, optimizer={"lr": 0.05}, schedule={"milestones": [11]}, evaluate_every=15
        ),
        evaluation=None,
        removed=None,
        seed=0,
        checkpoint=tmp_path_factory.mktemp("robust") / "checkpoint.pt",
        key="k",
        device=torch.device("cpu"),
    )
    return trained.model.requires_grad_(False)


@pytest.fixture(scope="module")
def images(digits):
    split = Split.of(digits.test_images, digits.test_labels, range(10), digits.levels, "cpu")
    return split.batch(slice(None))


@pytest.fixture(scope="module")
def survivors(robust, images) -> float:
    """Share of images that survive our PGD-20, in percent."""
    x, y = images
    return accuracy(robust, pgd(robust, x, y, **BALL, generator=generator()), y)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def accuracy(model, x, y) -> float:
    return 100 * (model(x).argmax(1) == y).float().mean().item()


def test_the_model_is_really_robust(robust, images, survivors):
    assert accuracy(robust, *images) > 90
    assert survivors > 40


def test_pgd_is_torchattacks_pgd_bit_for_bit_from_the_same_start(robust, images):
    x, y = images
    for count in (64, len(x)):
        theirs = torchattacks.PGD(robust, eps=EPSILON, alpha=0.02, steps=20, random_start=False)(x[:count], y[:count])
        ours = pgd(robust, x[:count], y[:count], **BALL, start="none", generator=generator())
        assert torch.equal(ours, theirs)


def test_fgsm_is_torchattacks_fgsm_bit_for_bit(robust, images):
    x, y = images
    theirs = torchattacks.FGSM(robust, eps=EPSILON)(x, y)
    assert torch.equal(fgsm(robust, x, y, epsilon=EPSILON, start="none", generator=generator()), theirs)


def test_pgd_with_a_random_start_agrees_with_torchattacks_and_foolbox(robust, images, survivors):
    x, y = images
    torch.manual_seed(1)
    theirs = torchattacks.PGD(robust, eps=EPSILON, alpha=0.02, steps=20, random_start=True)(x, y)
    wrapped = foolbox.PyTorchModel(robust, bounds=(0, 1))
    attack = foolbox.attacks.LinfPGD(abs_stepsize=0.02, steps=20, random_start=True)
    (_, clipped, _) = attack(wrapped, *map(eagerpy.astensor, (x, y)), epsilons=EPSILON)
    # Random starts alone move these 797 images by a few; the attacks may differ by no more than that.
    others = [accuracy(robust, pgd(robust, x, y, **BALL, generator=generator(s)), y) for s in range(1, 6)]
    spread = max(others) - min(others)
    for found in (accuracy(robust, theirs, y), accuracy(robust, clipped.raw, y)):
        assert abs(found - np.mean(others)) <= max(0.3, spread)


def test_cw_pgd_is_pgd_on_the_margin(robust, images):
    """torchattacks' PGD with its loss replaced by the margin."""
    x, y = images
    point = x.clone()
    for _ in range(20):
        point.requires_grad_()
        z = robust(point)
        own = z[torch.arange(len(y)), y]
        other = (z - 1e9 * torch.nn.functional.one_hot(y, 10)).max(1).values
        (gradient,) = torch.autograd.grad((other - own).sum(), point)
        point = (x + (point.detach() + 0.02 * gradient.sign() - x).clamp(-EPSILON, EPSILON)).clamp(0, 1)
    ours = cw_pgd(robust, x, y, **BALL, start="none", generator=generator())
    assert abs(accuracy(robust, ours, y) - accuracy(robust, point, y)) < 0.3


def test_targeted_pgd_agrees_with_torchattacks(robust, images):
    x, y = images
    attack = torchattacks.PGD(robust, eps=EPSILON, alpha=0.02, steps=20, random_start=False)
    attack.set_mode_targeted_by_label()
    theirs = attack(x, (y + 1) % 10)
    ours = targeted_pgd(with_classes(robust), x, y, **BALL, target="next", start="none", generator=generator())
    assert torch.equal(ours, theirs)


def with_classes(model, count: int | None = None):
    return Target(model, model, count or 797, torch.device("cpu"))


def test_a_larger_temperature_stalls_in_float32_and_not_in_the_accurate_form(robust, images):
    """The accurate form has the gradient directions of float64 cross entropy."""
    x, y = images
    x, y, double = x[:200], y[:200], build_double(robust)
    for scale in (1.0, 10.0, 300.0):
        keys = {"epsilon": EPSILON, "steps": 1, "step_size": 0.05, "start": "none", "inverse_temperature": scale}
        accurate = temperature_pgd(robust, x, y, **keys, accurate=True, generator=generator())
        point = x.double().requires_grad_()
        loss = torch.nn.functional.cross_entropy(double(point) * scale, y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, point)
        exact = (x + 0.05 * gradient.sign().float()).clamp(0, 1)
        p = (double(x.double()) * scale).softmax(1).gather(1, y[:, None])[:, 0]
        sharp = 1 - p > 1e-9  # beyond that float64 rounds as well
        assert sharp.sum() >= 5
        assert ((accurate - exact).abs()[sharp] < 1e-6).float().mean() > 0.999
    plain = temperature_pgd(robust, x, y, **keys, generator=generator())
    assert (plain == x).flatten(1).all(1).float().mean() > 0.5  # stalled: not moved at all
    assert not (accurate == x).flatten(1).all(1).any()


def build_double(model):
    import copy

    return copy.deepcopy(model).double()


def test_the_any_protocol_is_never_weaker_and_more_steps_never_weaken_it(robust, images, survivors):
    x, y = images
    previous = 100.0
    for steps in (1, 5, 20, 40):
        target = with_classes(robust)
        keys = {**BALL, "steps": steps}
        found = accuracy(robust, pgd(target, x, y, **keys, protocol="any", generator=generator()), y)
        assert found <= previous
        assert target.steps.max() == steps
        previous = found
    assert previous <= survivors
    assert target.steps.float().mean() < 40  # the fooled ones stopped earlier


def test_restarts_never_weaken_an_attack(robust, images):
    x, y = images
    found = [accuracy(robust, pgd(robust, x, y, **BALL, restarts=r, generator=generator()), y) for r in (1, 3)]
    assert found[1] <= found[0]


def test_the_meter_counts_the_steps_of_each_example(robust, images):
    x, y = images
    target = with_classes(robust)
    pgd(target, x, y, **BALL, restarts=2, generator=generator())
    fooled = robust(pgd(robust, x, y, **BALL, generator=generator())).argmax(1) != y
    assert (target.steps[fooled] == 20).all()
    assert (target.steps[~fooled] == 40).all()


def test_a_removed_class_is_never_targeted_and_never_the_true_one():
    classes = (0, 1, 3, 7)
    y = torch.tensor([0, 1, 2, 3] * 50)
    for target in ("random", "next", 3):
        wanted = targets(y, classes, target, generator())
        assert ((wanted >= 0) & (wanted < 4)).all()
        assert (wanted != y).all()
    assert (targets(y, classes, 3, generator())[y != 2] == 2).all()
    with pytest.raises(UserError, match="no such class"):
        targets(y, classes, 5, generator())


# bf16 and folding


def test_folding_batch_norms_changes_nothing_but_rounding():
    model = build({"kind": "resnet18", "width": 8}, (3, 32, 32), range(10)).train()
    with torch.no_grad():
        for _ in range(5):
            model(torch.rand(32, 3, 32, 32) * 2)
    model.eval()
    x = torch.rand(8, 3, 32, 32)
    torch.testing.assert_close(prepared(model)(x), model(x), rtol=1e-4, atol=1e-5)
    left = [m for m in folded(model).modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert left == []


def test_a_batch_norm_that_cannot_be_folded_stays():
    class PreActivation(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = torch.nn.BatchNorm2d(3)
            self.conv = torch.nn.Conv2d(3, 4, 3)
            self.after = torch.nn.BatchNorm2d(4)

        def forward(self, x):
            z = self.conv(self.bn(x))
            return self.after(z) + z  # the convolution has two users

    model = PreActivation().eval()
    x = torch.rand(2, 3, 8, 8)
    before = model(x)
    torch.testing.assert_close(folded(model)(x), before)


def test_bf16_finds_the_robust_accuracy_of_fp32(robust, digits):
    """Over three seeds of all 797 images (2,391 attacks); judged in fp32."""
    split = Split.of(digits.test_images, digits.test_labels, range(10), digits.levels, "cpu")
    found = {}
    for precision in ("fp32", "bf16"):
        tables = [
            evaluate(robust, split, {"kind": "pgd", **BALL}, seed=s, batch_size=400, precision=precision)
            for s in range(3)
        ]
        found[precision] = 100 * np.mean([(t["predicted"] == t["label"]).mean() for t in tables])
    assert abs(found["fp32"] - found["bf16"]) <= 0.3


# transfer


def test_transfer_shows_the_surrogates_images_to_the_target(robust, images):
    x, y = images
    other = build({"kind": "conv2", "width": 8}, (1, 8, 8), range(10), seed=5).eval().requires_grad_(False)
    found = transfer(robust, x, y, surrogate="standard", **BALL, source=other, generator=generator())
    assert torch.equal(found, pgd(other, x, y, **BALL, generator=generator()))


# cw-linf


def test_cw_linf_finds_the_distance_of_a_linear_model_within_its_shrinking_factor():
    weights = torch.randn(2, 64, generator=generator())

    def linear(x):
        return 5 * x.flatten(1) @ weights.T

    x = 0.3 + 0.4 * torch.rand(20, 1, 8, 8, generator=generator(1))
    y = linear(x).argmax(1)
    _, found = minimal_distance(linear, x, y, rounds=5, c=0.01, iterations=1000, lr=0.005, shrink=0.9, enough=0.0)
    z = x.flatten(1) @ weights.T
    exact = (z[:, 0] - z[:, 1]).abs() / (weights[0] - weights[1]).abs().sum()
    # one Adam step is up to 0.0025 in pixels, and tau stops at 1/256: much smaller distances are not resolved
    resolved = exact > 0.02
    assert resolved.sum() > 8
    assert (found >= exact * 0.999).all()
    assert (found[resolved] <= exact[resolved] / 0.9).all(), found / exact


def naive_cw(model, image, label, iterations):
    """One image at a time, straight from the description of Carmon et al.'s procedure."""

    def to(x):
        return torch.atanh(0.999999 * (2 * x - 1))

    def back(w):
        return (torch.tanh(w) + 1) / 2

    if model(image[None]).argmax(1).item() != label:
        return 0.0
    origin, best = to(image), float("inf")
    reference = back(origin)
    low, high, c, start_tau = 0.0, float("inf"), 0.01, 1.0
    for _ in range(5):
        warm, tau = origin, start_tau
        found = False
        while tau > 1 / 256:
            delta = torch.zeros_like(image, requires_grad=True)
            optimizer = torch.optim.Adam([delta], lr=0.005, eps=1e-7)
            previous, found = float("inf"), False
            for iteration in range(iterations):
                adversarial = back(warm + delta)
                z = model(adversarial[None])[0]
                if z.argmax().item() != label:
                    found = True
                    best = min(best, (adversarial - image).abs().max().item())
                other = torch.cat([z[:label], z[label + 1 :]]).max()
                loss = ((adversarial - reference).abs() - tau).clamp(min=0).sum() + c * (z[label] - other).clamp(min=0)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if iteration % 100 == 0:
                    if not previous - loss.item() > 1e-4:
                        break
                    previous = loss.item()
            if not found:
                if tau < start_tau:
                    found = True
                start_tau = tau
                break
            adversarial = back(warm + delta).detach()
            tau = min(tau, (adversarial - reference).abs().max().item()) * 0.9
            warm = to(adversarial)
        if found:
            high = c
        else:
            low = c
        c = 10 * c if high == float("inf") else (low + high) / 2
    return best


def test_cw_linf_side_by_side_is_the_procedure_one_by_one(robust, images):
    x, y = images[0][:8], images[1][:8]
    keys = {"rounds": 5, "c": 0.01, "iterations": 150, "lr": 0.005, "shrink": 0.9}
    _, ours = minimal_distance(robust, x, y, **keys, enough=0.0)
    theirs = torch.tensor([naive_cw(robust, image, label.item(), 150) for image, label in zip(x, y, strict=True)])
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=2e-3)


def test_cw_linf_verdicts_do_not_depend_on_the_protocol_and_any_is_cheaper(robust, images):
    x, y = images[0][:40], images[1][:40]
    found, cost = {}, {}
    for protocol in ("last", "any"):
        target = with_classes(robust, 40)
        adversarial = cw_linf(target, x, y, epsilon=EPSILON, iterations=120, protocol=protocol, generator=generator())
        assert (adversarial - x).abs().max() <= EPSILON + 1e-6
        found[protocol] = robust(adversarial).argmax(1) == y
        cost[protocol] = target.steps.sum()
    assert torch.equal(found["last"], found["any"])
    assert cost["any"] < cost["last"]


# nattack


def naive_nattack(model, image, label, noise, mu, iterations, epsilon):
    """One image, one member at a time; `noise[iteration, member]` and the first `mu` are given."""
    origin = torch.atanh((2 * image - 1) * (1 - 1e-6))
    base = (torch.tanh(origin) + 1) / 2

    def view(m):
        return image + ((torch.tanh(origin + m) + 1) / 2 - base).clamp(-epsilon, epsilon)

    for iteration in range(iterations):
        if iteration % 10 == 0 and model(view(mu)[None]).argmax(1).item() != label:
            return True
        values = []
        for member in noise[iteration]:
            p = model(view(mu + 0.1 * member)[None]).softmax(1)[0]
            other = max(p[k].item() for k in range(len(p)) if k != label)
            values.append(-0.5 * max(np.log(p[label].item() + 1e-30) - np.log(other + 1e-30), 0))
        values = np.array(values)
        advantage = (values - values.mean()) / (values.std() + 1e-7)
        step = sum(a * n for a, n in zip(advantage, noise[iteration], strict=True))
        mu = mu + 0.02 / (len(values) * 0.1) * step.float()
    return model(view(mu)[None]).argmax(1).item() != label


def test_nattack_in_a_batch_is_the_procedure_one_by_one(robust, images):
    right = (robust(images[0]).argmax(1) == images[1]).nonzero()[:6, 0]
    x, y, iterations, population = images[0][right], images[1][right], 21, 20
    for row in range(len(x)):
        one, label = x[row : row + 1], y[row : row + 1]
        draw = generator(row)
        mu = 0.001 * torch.randn(one.shape, generator=draw)[0]
        noise = [torch.randn((1, population, *one.shape[1:]), generator=draw)[0] for _ in range(iterations)]
        naive = naive_nattack(robust, one[0], label.item(), noise, mu, iterations, EPSILON)
        ours = nattack(
            robust, one, label, epsilon=EPSILON, iterations=iterations, population=population, generator=generator(row)
        )
        assert (robust(ours).argmax(1) != label).item() == naive


def test_nattack_breaks_images_within_the_ball_and_counts_its_queries(robust, images):
    x, y = images[0][:30], images[1][:30]
    target = with_classes(robust, 30)
    found = nattack(target, x, y, epsilon=EPSILON, iterations=60, population=50, generator=generator())
    assert (found - x).abs().max() <= EPSILON + 1e-6
    natural, under = robust(x).argmax(1) == y, robust(found).argmax(1) == y
    assert under.sum() < natural.sum()
    assert (target.steps[~natural] == 0).all()
    assert (target.steps[under] == 60 * 50).all()
    assert ((target.steps % 500)[natural & ~under] == 0).all()  # success is seen every tenth iteration


def test_nattack_stands_still_when_all_rewards_are_equal():
    reward, noise = torch.full((2, 9), -0.3), torch.randn(2, 9, 1, 4, 4, generator=generator())
    assert gain(reward, noise).abs().max() < 1e-6


def test_the_defective_runner_up_is_that_of_the_first_member():
    logits = torch.randn(3, 7, 5, generator=generator())
    y = torch.tensor([0, 1, 2])
    own, first = rewards(logits, y, "own"), rewards(logits, y, "first")
    assert torch.equal(own[:, 0], first[:, 0])
    assert not torch.allclose(own, first)


# resuming


def test_a_killed_attack_keeps_its_finished_batches(robust, digits, tmp_path):
    split = Split.of(digits.test_images, digits.test_labels, range(10), digits.levels, "cpu")
    keys = {"seed": 3, "batch_size": 200}
    whole = evaluate(robust, split, {"kind": "pgd", **BALL}, **keys)

    class Killed(Exception):
        pass

    def kill(done):
        if done > 400:
            raise Killed

    with pytest.raises(Killed):
        evaluate(robust, split, {"kind": "pgd", **BALL}, **keys, parts=Parts(tmp_path, "k"), report=kill)
    assert len(list(tmp_path.iterdir())) == 3
    first = tmp_path / "00000000.parquet"
    stamp = first.stat().st_mtime_ns
    second = tmp_path / "00000200.parquet"
    second.write_bytes(second.read_bytes()[:100])  # damaged: attacked again
    resumed = evaluate(robust, split, {"kind": "pgd", **BALL}, **keys, parts=Parts(tmp_path, "k"))
    assert resumed.equals(whole)
    assert first.stat().st_mtime_ns == stamp
    other = evaluate(robust, split, {"kind": "fgsm", "epsilon": 0.1}, **keys, parts=Parts(tmp_path, "other"))
    assert not other["p_label"].equals(whole["p_label"])


def test_a_view_has_the_same_number_of_each_class_and_is_fixed_by_its_seed(digits):
    split = Split.of(digits.test_images, digits.test_labels, range(10), digits.levels, "cpu")
    view = split.subset(per_class=20, seed=0)
    assert np.bincount(view.labels).tolist() == [20] * 10
    assert np.array_equal(view.index, split.subset(per_class=20, seed=0).index)
    assert not np.array_equal(view.index, split.subset(per_class=20, seed=1).index)
    assert (digits.test_labels[view.index] == view.labels.numpy()).all()
    with pytest.raises(UserError, match="per_class = 500"):
        split.subset(per_class=500, seed=0)


# autoattack


def test_autoattack_is_at_least_as_strong_as_pgd_and_agrees_with_torchattacks(robust, images, survivors):
    x, y = images[0][:80], images[1][:80]
    target = with_classes(robust, 80)
    before = torch.get_rng_state()
    ours = autoattack(target, x, y, epsilon=EPSILON, generator=generator())
    assert torch.equal(before, torch.get_rng_state())
    assert (ours - x).abs().max() <= EPSILON + 1e-6
    standing = robust(ours).argmax(1) == y
    climbed = robust(pgd(robust, x, y, **BALL, protocol="any", restarts=3, generator=generator())).argmax(1) == y
    assert standing.sum() <= climbed.sum() + 1
    theirs = torchattacks.AutoAttack(robust, eps=EPSILON, version="standard", n_classes=10, seed=0)(x, y)
    assert abs(int(standing.sum()) - int((robust(theirs).argmax(1) == y).sum())) <= 1
    assert target.steps.min() > 0


def test_autoattack_takes_models_with_fewer_classes_but_not_with_three(images):
    x = images[0][:10]
    for count in (4, 9):
        model = build({"kind": "conv2", "width": 4}, (1, 8, 8), range(count)).eval().requires_grad_(False)
        y = model(x).argmax(1)
        found = autoattack(with_classes(model, 10), x, y, epsilon=0.1, generator=generator())
        assert (found - x).abs().max() <= 0.1 + 1e-6
    three = build({"kind": "conv2", "width": 4}, (1, 8, 8), range(3)).eval()
    with pytest.raises(UserError, match="needs at least 4"):
        autoattack(with_classes(three, 10), x, three(x).argmax(1), epsilon=0.1, generator=generator())
