"""Two processes that share a training, against one that does it alone."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from classwise.data import DATASETS
from classwise.data.dataset import prepare, read_dataset
from classwise.errors import Interrupted, UserError
from classwise.processes import Team, joined, launch
from classwise.specs import Training
from classwise.store import read_table, write_table
from classwise.training import Listener, Saving, train

# No random start: what a process draws depends on its place, and the curves shall be comparable.
DEFENSES = {
    "standard": {"kind": "standard"},
    "madry": {"kind": "madry", "attack": {"epsilon": 0.2, "steps": 2, "step_size": 0.1, "start": "none"}},
    "trades": {"kind": "trades", "beta": 3, "attack": {"epsilon": 0.2, "steps": 2, "step_size": 0.1, "start": "R1"}},
}


def few(folder):
    arrays, card = folder / "data.safetensors", folder / "data.json"
    if not card.exists():
        prepare("digits", DATASETS["digits"], {"train": 1000, "split_seed": 0}, folder, arrays, card)
    data = read_dataset(arrays, card)
    return dataclasses.replace(data, train_images=data.train_images[:203], train_labels=data.train_labels[:203])


def shared_training(folder, defense, stop_at=None):
    """What each process runs; the one that leads writes the history."""
    torch.set_num_threads(1)
    updates = []
    with joined(torch.device("cpu")) as (team, device):
        trained = train(
            few(folder),
            architecture={"kind": "conv2", "width": 4},
            defense=DEFENSES[defense],
            training=Training(epochs=3, batch_size=50, optimizer={"lr": 0.05}, processes=team.size),
            evaluation={"kind": "fgsm", "epsilon": 0.1, "start": "none"},
            removed=4,
            seed=0,
            checkpoint=folder / f"checkpoint-{team.size}.pt",
            key="k",
            device=device,
            # one process of the two is told
            listener=Listener(
                step=lambda done, steps: updates.append(done),
                stop=lambda: team.rank == team.size - 1 and stop_at in updates,
            ),
            saving=Saving(epochs=1, minutes=100),
            team=team,
        )
        weights = torch.cat([parameter.detach().flatten() for parameter in trained.model.parameters()])
        everybodys = team.all_of(weights)
        assert all(torch.equal(weights, other) for other in everybodys), "processes went apart"
        if team.leads:
            write_table(folder / f"history-{team.size}.parquet", trained.history)


@pytest.mark.parametrize("defense", list(DEFENSES))
def test_two_processes_have_the_loss_curve_of_one(tmp_path, defense):
    few(tmp_path)
    for processes in (1, 2):
        launch(shared_training, (tmp_path, defense), processes)
    alone, shared = (read_table(tmp_path / f"history-{n}.parquet") for n in (1, 2))
    same = ["epoch", "split", "class", "n", "learning_rate"]
    assert alone[same].equals(shared[same]), "the same examples were counted"
    # TRADES starts from noise of 0.001 that each process draws for itself
    tolerance = 0.02 if defense == "trades" else 1e-4
    np.testing.assert_allclose(alone["loss"], shared["loss"], rtol=tolerance)
    gap = (alone["natural_accuracy"] - shared["natural_accuracy"]).abs().max()
    assert gap <= (100 / alone["n"].min() if defense == "trades" else 1e-9)


def test_all_stop_when_one_is_told_and_go_on_together(tmp_path):
    few(tmp_path)
    launch(shared_training, (tmp_path, "madry"), 2)
    whole = read_table(tmp_path / "history-2.parquet")
    (tmp_path / "checkpoint-2.pt").unlink()
    (tmp_path / "history-2.parquet").unlink()
    with pytest.raises(Interrupted, match="stopped in epoch 2"):
        launch(shared_training, (tmp_path, "madry", 7), 2)
    assert not (tmp_path / "history-2.parquet").exists()
    launch(shared_training, (tmp_path, "madry"), 2)
    resumed = read_table(tmp_path / "history-2.parquet")
    measured = ["seconds", "images_per_second", "peak_memory_mb"]
    pd.testing.assert_frame_equal(whole.drop(columns=measured), resumed.drop(columns=measured), check_exact=True)


@given(rows=st.integers(1, 40), size=st.integers(1, 5))
def test_shares_cover_a_batch_and_their_weights_make_its_mean(rows, size):
    batch, values = torch.arange(rows), torch.rand(rows, dtype=torch.float64)
    teams = [Team(rank, size) for rank in range(size)]
    shares = [team.share(batch) for team in teams]
    if rows >= size:
        assert sorted(torch.cat(shares).tolist()) == list(range(rows))
    mean = sum(values[own].mean() * team.weight(batch, own) for team, own in zip(teams, shares, strict=True)) / size
    assert float(mean) == pytest.approx(float(values.mean()))


def test_what_one_process_says_is_said_by_all():
    for processes in (1, 2):
        with pytest.raises(UserError, match=r"^the file x\.bin is damaged$"):
            launch(_damaged, (), processes)


def _damaged():
    with joined(torch.device("cpu")) as (team, _):
        if team.rank == team.size - 1:
            raise UserError("the file x.bin is damaged")
        team.any(False)  # would wait for ever
