"""The evaluation loop judges every example once, reproducibly, whatever the attack."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import classwise.evaluation as evaluation
from classwise.evaluation import Parts, Split, evaluate, sanity_facts
from classwise.store import OUTCOMES, outcomes_problem
from conftest import small_model

PGD = {"kind": "pgd", "epsilon": 0.2, "steps": 3, "step_size": 0.1}


def split(data, classes=range(10)) -> Split:
    return Split.of(data.test_images, data.test_labels, tuple(classes), data.levels, "cpu")


@given(
    classes=st.sets(st.integers(0, 9), min_size=2).map(sorted),
    epsilon=st.floats(0.01, 1.0),
    kind=st.sampled_from(["none", "fgsm", "pgd"]),
    batch_size=st.integers(50, 900),
    seed=st.integers(0, 99),
)
def test_outcomes_keep_their_contract_for_any_classes_and_attack(digits, classes, epsilon, kind, batch_size, seed):
    attack = {"none": {}, "fgsm": {"epsilon": epsilon}, "pgd": {"epsilon": epsilon, "steps": 2, "step_size": 0.3}}[kind]
    model, images = small_model(seed, classes), split(digits, classes)
    outcomes = evaluate(model, images, {"kind": kind, **attack}, seed=seed, batch_size=batch_size)
    expected = np.flatnonzero(np.isin(digits.test_labels, classes))
    found = outcomes_problem(
        outcomes[OUTCOMES.names], expected=expected, classes=classes, epsilon=attack.get("epsilon", 0)
    )
    assert found is None
    assert (digits.test_labels[outcomes["index"]] == outcomes["label"]).all()


def test_the_seed_decides_and_batches_do_not_lean_on_each_other(digits):
    model, images = small_model(), split(digits)
    first = evaluate(model, images, PGD, seed=1, batch_size=100)
    assert first.equals(evaluate(model, images, PGD, seed=1, batch_size=100))
    assert not first["p_label"].equals(evaluate(model, images, PGD, seed=2, batch_size=100)["p_label"])
    # the first batch alone gives the rows it gives among others
    head = Split(images.images[:100], images.labels[:100], images.index[:100], images.levels)
    assert first.iloc[:100].equals(evaluate(model, head, PGD, seed=1, batch_size=100))


def test_no_attack_gives_natural_outcomes(digits):
    outcomes = evaluate(small_model(), split(digits), {"kind": "none"}, seed=0, batch_size=100)
    assert (outcomes["natural"] == outcomes["predicted"]).all()
    assert (outcomes["linf"] == 0).all()
    assert (outcomes["steps"] == 0).all()


def test_steps_are_the_gradients_that_were_taken(digits):
    outcomes = evaluate(small_model(), split(digits), PGD, seed=0, batch_size=300)
    assert (outcomes["steps"] == 3).all()


def test_probabilities_are_those_of_the_attacked_image(digits):
    model, images = small_model(), split(digits)
    outcomes = evaluate(model, images, {"kind": "none"}, seed=0, batch_size=200)
    p = model(images.batch(slice(None))[0]).softmax(1).numpy()
    np.testing.assert_allclose(outcomes["p_max"], p.max(1), rtol=1e-5)
    np.testing.assert_allclose(outcomes["p_var"], p.var(1), rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(outcomes["p_label"], p[np.arange(len(p)), images.labels], rtol=1e-5)


@pytest.mark.parametrize("offence", [lambda x: x + 0.3, lambda x: x - 0.15, lambda x: x * float("nan")])
def test_an_attack_that_cheats_is_caught(digits, monkeypatch, offence):
    cheat = {"cheat": lambda model, x, y, epsilon, generator: offence(x)}
    monkeypatch.setattr(evaluation, "ATTACKS", cheat)
    with pytest.raises(ValueError, match="left"):
        evaluate(small_model(), split(digits), {"kind": "cheat", "epsilon": 0.1}, seed=0, batch_size=100)


def test_a_model_in_training_mode_is_refused(digits):
    with pytest.raises(ValueError, match="evaluation mode"):
        evaluate(small_model().train(), split(digits), PGD, seed=0, batch_size=100)


def test_images_are_in_the_unit_interval(digits):
    x, _ = split(digits).batch(torch.arange(100))
    assert x.dtype == torch.float32
    assert x.min() == 0
    assert x.max() == 1


# what the sanity report is made of


class Odd(torch.nn.Module):
    """A small model whose logits go through `change(logits, images)`."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.change = small_model(), change
        self.classes = self.inner.classes
        self.eval()

    def forward(self, x):
        return self.change(self.inner(x), x)


NAN = {
    "every logit": lambda z, x: z * float("nan"),
    "one logit of bright images": lambda z, x: z.masked_fill(bright(x) & (torch.arange(10) == 3), float("nan")),
    "every logit of bright images": lambda z, x: z.masked_fill(bright(x), float("nan")),
    "an infinite logit": lambda z, x: z.masked_fill(bright(x) & (torch.arange(10) == 3), float("inf")),
}
EVERY_CORE = [
    {"kind": "none"},
    PGD,
    {**PGD, "restarts": 2, "protocol": "any"},
    {"kind": "cw-linf", "epsilon": 0.2, "iterations": 5, "rounds": 2},
    {"kind": "nattack", "epsilon": 0.2, "iterations": 12, "population": 4},
]


def bright(x: torch.Tensor) -> torch.Tensor:
    return (x.flatten(1).mean(dim=1) > 0.31)[:, None]


@pytest.mark.parametrize("attack", EVERY_CORE, ids=lambda attack: attack["kind"])
@pytest.mark.parametrize("change", NAN.values(), ids=list(NAN))
def test_logits_that_are_not_finite_are_counted_and_break_no_contract(digits, change, attack):
    images = split(digits).subset(per_class=6, seed=0, classes=range(10))
    model, x = Odd(change), images.batch(slice(None))[0]
    outcomes = evaluate(model, images, attack, seed=0, batch_size=40)
    broken = ~model(x).isfinite().all(dim=1).numpy()
    assert broken.any()
    assert not outcomes["finite"][broken].any()
    assert sanity_facts(outcomes)["not_finite"] >= broken.sum()
    keys = {"expected": images.index, "classes": range(10), "epsilon": attack.get("epsilon", 0)}
    assert outcomes_problem(outcomes[OUTCOMES.names], **keys) is None


def test_without_a_finite_logit_nobody_is_right_and_all_classes_are_equally_probable(digits):
    outcomes = evaluate(Odd(NAN["every logit"]), split(digits), PGD, seed=0, batch_size=300)
    for column in ("natural", "predicted"):
        assert (outcomes[column] == np.where(outcomes["label"] == 0, 1, 0)).all()
    np.testing.assert_allclose(outcomes[["p_label", "p_max"]], 0.1, rtol=1e-6)
    assert outcomes["loss"].isna().all()


def test_an_example_is_judged_on_its_finite_logits(digits):
    images = split(digits)
    outcomes = evaluate(
        Odd(lambda z, x: torch.cat([z[:, :1] * float("nan"), z[:, 1:]], dim=1)),
        images,
        {"kind": "none"},
        seed=0,
        batch_size=900,
    )
    z = small_model()(images.batch(slice(None))[0])[:, 1:]
    assert outcomes["predicted"].tolist() == (1 + z.argmax(dim=1)).tolist()
    np.testing.assert_allclose(outcomes["p_max"], z.softmax(dim=1).amax(dim=1), rtol=1e-5)
    assert (outcomes["p_label"][outcomes["label"] == 0] == 0).all()


def linear(z, x):
    """Logits without a dead ReLU: no gradient of them is zero, so what vanishes vanishes in the objective."""
    return x.flatten(1) @ torch.randn(64, 10, generator=torch.Generator().manual_seed(0))


HOT = {**PGD, "kind": "temperature-pgd", "inverse_temperature": 1e6}


def test_a_sound_model_gives_no_cause_for_concern(digits):
    facts = sanity_facts(evaluate(Odd(linear), split(digits), PGD, seed=0, batch_size=300))
    assert facts == {"zero_gradient": 0.0, "not_finite": 0, "not_repeatable": 0}


def test_dropout_that_never_sleeps_is_found_by_asking_twice_in_the_first_batch(digits):
    torch.manual_seed(0)
    model = Odd(lambda z, x: torch.nn.functional.dropout(z, 0.5, training=True))
    outcomes = evaluate(model, split(digits), {"kind": "none"}, seed=0, batch_size=100)
    assert (~outcomes["repeatable"][:100]).mean() > 0.9
    assert outcomes["repeatable"][100:].all()
    assert sanity_facts(outcomes)["not_repeatable"] == (~outcomes["repeatable"]).sum()


def test_a_saturated_softmax_shows_as_zero_gradients(digits):
    outcomes = evaluate(Odd(linear), split(digits), HOT, seed=0, batch_size=300)
    stalled = outcomes["zero_gradient"]
    assert 0 < sanity_facts(outcomes)["zero_gradient"] <= stalled.mean()
    # an image that is taken for another class has the gradient of that class, however sure the model is
    assert (outcomes["predicted"] == outcomes["label"])[stalled].all()
    accurate = evaluate(Odd(linear), split(digits), {**HOT, "accurate": True}, seed=0, batch_size=300)
    assert not accurate["zero_gradient"].any()


def test_who_is_fooled_already_needs_no_gradient(digits):
    outcomes = evaluate(Odd(linear), split(digits), {**PGD, "kind": "cw-pgd", "confidence": 0}, seed=0, batch_size=300)
    assert outcomes["zero_gradient"].mean() > 0.5  # an untrained model: most are misclassified, and beyond the margin
    assert sanity_facts(outcomes)["zero_gradient"] == 0


def test_only_the_first_gradient_of_the_first_start_counts(digits):
    # whether it saturates depends on the start, and one small step leaves many to start again
    warm = {**HOT, "inverse_temperature": 20, "steps": 1, "step_size": 0.01}
    once = evaluate(Odd(linear), split(digits), warm, seed=0, batch_size=900)
    again = evaluate(Odd(linear), split(digits), {**warm, "restarts": 9}, seed=0, batch_size=900)
    assert again["steps"].max() > once["steps"].max()
    assert once["zero_gradient"].any()
    assert once["zero_gradient"].equals(again["zero_gradient"])


def test_a_resumed_attack_reports_the_same(digits, tmp_path):
    torch.manual_seed(0)
    model = Odd(lambda z, x: NAN["one logit of bright images"](torch.nn.functional.dropout(z, 0.5, training=True), x))
    keys = {"seed": 0, "batch_size": 300, "parts": Parts(tmp_path, "k")}
    whole = evaluate(model, split(digits), HOT, **keys)
    assert min(sanity_facts(whole).values()) > 0
    assert evaluate(model, split(digits), HOT, **keys).equals(whole)
