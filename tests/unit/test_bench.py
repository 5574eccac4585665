"""The race between attack libraries, on a network so small that only the bookkeeping is of interest."""

import numpy as np
import pandas as pd
import pytest
import torch

from classwise import bench
from classwise.artefacts import BENCHED
from classwise.errors import UserError
from conftest import small_model

BALL = {"epsilon": 0.1, "steps": 3, "step_size": 0.05}


@pytest.fixture(scope="module")
def images():
    x = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return [(part, small_model()(part).argmax(dim=1)) for part in x.split(8)]


def test_every_kind_that_a_study_may_race_has_a_field():
    assert tuple(bench.RACES) == BENCHED


def test_everybody_stays_in_the_ball_and_spends_what_the_attack_says(images):
    model = small_model()
    for contender in bench.pgd_field(**BALL):
        spent = []
        attack = contender.start(model.requires_grad_(not contender.frozen), spent.append)
        for x, y in images:
            found = attack(x, y).detach()
            assert found.shape == x.shape
            assert float((found - x).abs().max()) <= 0.1 + 1e-6
            assert float(found.min()) >= 0
            assert float(found.max()) <= 1
        assert sum(spent) <= 12 * 3 if "any" in contender.name else sum(spent) == 12 * 3


@pytest.mark.parametrize(
    ("field", "keys"),
    [
        (bench.cw_linf_field, {"rounds": 1, "c": 0.01, "iterations": 3, "lr": 0.005}),
        (bench.nattack_field, {"iterations": 2, "population": 10}),
    ],
)
def test_the_dear_attacks_race_too(images, field, keys):
    runs = bench.run_race(field(epsilon=0.1, **keys), small_model(), images[:1], repeats=1, report=lambda line: None)
    assert (runs["spent"] > 0).all()
    assert (runs["seconds"] > 0).all()


def test_the_weights_are_frozen_again_after_a_race(images):
    model = small_model()
    bench.run_race(bench.pgd_field(**BALL)[:1], model, images, repeats=1, report=lambda line: None)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def runs(**seconds) -> pd.DataFrame:
    rows = [
        {"contender": name, "repeat": number, "seconds": value, "spent": 20.0, "memory_mb": 1.0, "accuracy": 50.0}
        for name, values in seconds.items()
        for number, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_ratios_are_taken_within_a_repeat():
    """A machine that is ten times slower in the second repeat changes no ratio."""
    table = bench.standings(
        runs(**{"classwise bf16": [1, 10, 1], "torchattacks": [3, 30, 3], "limit bf16": [0.9, 9, 0.9]}), images=10
    ).set_index("contender")
    assert table.loc["classwise bf16", "faster_than_torchattacks"] == pytest.approx(3)
    assert table.loc["torchattacks", "faster_than_torchattacks"] == 1
    assert table.loc["classwise bf16", "share_of_limit"] == pytest.approx(0.9)
    assert table.loc["classwise bf16", "seconds_per_1000"] == pytest.approx(100)
    assert table["share_of_limit"].drop("classwise bf16").isna().all()
    assert table["faster_than_foolbox"].isna().all()


def test_an_attack_that_takes_fewer_gradients_is_not_called_faster_for_it():
    table = runs(**{"classwise fp32": [1.0], "ART": [1.0]})
    table.loc[table["contender"] == "ART", "spent"] = 5.0
    ours = bench.standings(table, images=1, per_spent=True).set_index("contender").loc["classwise fp32"]
    assert ours["faster_than_ART"] == pytest.approx(4)


def test_a_model_that_is_not_robust_stops_the_bench(images):
    wrong = [(x, (y + 1) % 10) for x, y in images]
    with pytest.raises(UserError, match="cannot be compared below 20 %"):
        bench.raced(small_model(), wrong, {"kind": "pgd", **BALL}, 1, "conv2", report=lambda line: None)


def test_the_markdown_has_a_line_for_each_contender(images):
    table = bench.raced(
        small_model(),
        images,
        {"kind": "pgd", "epsilon": 1e-4, "steps": 2, "step_size": 1e-4},
        1,
        "conv2",
        report=lambda line: None,
    )
    table = table.assign(dataset="digits", arch="conv2", defense="madry", attack="pgd20", images=12)
    text = bench.markdown(table, "On a machine.")
    assert [line.split(" | ")[2] for line in text.splitlines()[2 : 2 + len(table)]] == list(table["contender"])
    assert "nan" not in text
    assert np.isfinite(table["memory_mb"]).all()
