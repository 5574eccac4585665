"""The measures: pinned numbers, and properties on any outcomes."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classwise.metrics import class_accuracy, confusion, cv, cvc, homing, mcd, misclassified, rho

MADRY_RESNET18 = [57.6, 74.9, 37.6, 22.1, 30.7, 41.2, 55.6, 64.0, 71.0, 62.0]  # tian20 Table 5


def test_cv_and_mcd_of_the_resnet18_row_are_those_of_tian21_table5():
    assert round(cv(MADRY_RESNET18), 2) == 284.43
    assert mcd(MADRY_RESNET18) == pytest.approx(52.8)
    assert np.mean(MADRY_RESNET18) == pytest.approx(51.67)


def test_cv_is_the_population_variance():
    assert cv([0.0, 100.0]) == 2500.0


def test_cvc_of_certain_outputs_is_009_and_of_uniform_outputs_0():
    certain, uniform = np.eye(10), np.full((10, 10), 0.1)
    assert cvc(np.arange(10), certain, range(10)) == pytest.approx(0.09)
    assert cvc(np.arange(10), uniform, range(10)) == pytest.approx(0)


def test_cvc_reads_the_variance_column_of_outcomes():
    assert cvc([0, 0, 1], [0.02, 0.04, 0.06], [0, 1, 2])[:2] == pytest.approx([0.03, 0.06])
    assert np.isnan(cvc([0, 0, 1], [0.02, 0.04, 0.06], [0, 1, 2])[2])


def test_rho_reproduces_two_printed_cells_and_is_0_for_the_base():
    assert rho(69.2, 81.75, 64.6, 82.11) == pytest.approx(0.0668, abs=5e-5)
    assert rho(36.6, 49.13, 25.2, 51.69) == pytest.approx(0.4029, abs=5e-5)
    assert rho(25.2, 51.69, 25.2, 51.69) == 0


def test_rho_is_undefined_when_the_base_loses_a_class_altogether():
    assert np.isnan(rho(5.0, 40.0, 0.0, 45.0))


def test_an_absent_class_is_nan_and_takes_no_part_in_cv_and_mcd():
    accuracy = class_accuracy([0, 0, 2], [0, 1, 2], [0, 1, 2])
    assert accuracy[[0, 2]].tolist() == [50.0, 100.0]
    assert np.isnan(accuracy[1])
    assert cv(accuracy) == 625.0
    assert mcd(accuracy) == 50.0


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one length"):
        class_accuracy([0, 1], [0], [0, 1])


predictions = st.integers(2, 6).flatmap(
    lambda k: st.tuples(
        st.just(k), st.lists(st.tuples(st.integers(0, k - 1), st.integers(0, k - 1)), min_size=1, max_size=60)
    )
)


@given(predictions)
def test_confusion_counts_every_example_once_and_its_diagonal_is_the_accuracy(case):
    k, pairs = case
    label, predicted = np.array(pairs).T
    matrix = confusion(label, predicted, range(k))
    assert matrix.to_numpy().sum() == len(pairs)
    counts = matrix.sum(axis=1).to_numpy()
    accuracy = class_accuracy(label, predicted, range(k))
    present = counts > 0
    assert accuracy[present] == pytest.approx(100 * np.diag(matrix)[present] / counts[present])
    assert np.isnan(accuracy[~present]).all()


@given(predictions)
def test_misclassified_is_the_confusion_with_an_empty_diagonal(case):
    k, pairs = case
    label, predicted = np.array(pairs).T
    lost = misclassified(label, predicted, range(k))
    assert (np.diag(lost) == 0).all()
    assert lost.to_numpy().sum() == (label != predicted).sum()


def outcomes(index, label, predicted) -> pd.DataFrame:
    return pd.DataFrame({"index": index, "label": label, "predicted": predicted})


@given(predictions, st.randoms(use_true_random=False))
def test_homing_never_exceeds_misclassified_and_has_an_empty_diagonal(case, random):
    k, pairs = case
    label, predicted = np.array(pairs).T
    index = np.arange(len(label))
    full = outcomes(index, label, predicted)
    reduced = {}
    for j in range(k):
        keep = label != j
        left = [c for c in range(k) if c != j]
        reduced[j] = outcomes(index[keep], label[keep], [random.choice(left) for _ in range(keep.sum())])
    home, lost = homing(full, reduced, range(k)), misclassified(label, predicted, range(k))
    assert (home.to_numpy() <= lost.to_numpy()).all()
    assert (np.diag(home) == 0).all()


def test_homing_counts_the_examples_that_come_home():
    full = outcomes([0, 1, 2, 3], [3, 3, 3, 5], [5, 5, 3, 3])
    without_5 = outcomes([0, 1, 2], [3, 3, 3], [3, 4, 3])
    home = homing(full, {5: without_5}, range(6))
    assert home.loc[3, 5] == 1  # of the two that went to 5; the third never left
    assert home[5].sum() == 1
    assert home[3].isna().all()  # no model without class 3 is given


def test_homing_refuses_outcomes_of_other_examples():
    full = outcomes([0, 1], [3, 3], [5, 5])
    with pytest.raises(ValueError, match="without class 5"):
        homing(full, {5: outcomes([0, 7], [3, 3], [3, 3])}, range(6))
    with pytest.raises(ValueError, match="without class 5"):
        homing(full, {5: outcomes([0, 1], [3, 2], [3, 3])}, range(6))
