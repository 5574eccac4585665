"""The evaluation loop judges every example once, reproducibly, whatever the attack."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import classwise.evaluation as evaluation
from classwise.evaluation import Split, evaluate
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
