"""The training loop: books, selection, validation, and runs that are never lost."""

import numpy as np
import pytest
import torch

from classwise.checkpoints import load_checkpoint, save_checkpoint
from classwise.defenses.standard import Standard
from classwise.errors import UserError
from classwise.evaluation import Split, evaluate
from classwise.models.classifier import build, save_weights
from classwise.specs import Training
from classwise.store import HISTORY, write_table
from classwise.training import Listener, Mixed, _held_out, crop_flip, train

ATTACK = {"epsilon": 0.2, "steps": 2, "step_size": 0.1}
DEFENSES = {
    "standard": {"kind": "standard"},
    "madry": {"kind": "madry", "attack": ATTACK},
    "trades": {"kind": "trades", "beta": 6, "attack": ATTACK},
}
PGD = {"kind": "pgd", "epsilon": 0.2, "steps": 2, "step_size": 0.1}
# batch norm and dropout are what a careless resume loses
NETWORKS = {
    "plain": {"kind": "conv2", "width": 4},
    "batch norm": {"kind": "resnet18", "width": 4},
    "dropout": {"kind": "small-cnn"},
}


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def few(digits):
    """200 training images, so that an epoch takes a blink."""
    import dataclasses

    return dataclasses.replace(digits, train_images=digits.train_images[:200], train_labels=digits.train_labels[:200])


def settings(**changes) -> Training:
    keys = {"epochs": 3, "batch_size": 64, "optimizer": {"lr": 0.05}, "schedule": {"milestones": [3]}, **changes}
    return Training.model_validate(keys)


def run(data, folder, *, defense="madry", network="plain", removed=None, key="k", killed_after=None, **changes):
    def epoch(progress):
        if progress.epoch == killed_after:
            raise Killed

    notes = []
    trained = train(
        data,
        architecture=NETWORKS[network],
        defense=DEFENSES[defense],
        training=settings(**changes),
        evaluation=PGD,
        removed=removed,
        seed=7,
        checkpoint=folder / "checkpoint.pt",
        key=key,
        device=torch.device("cpu"),
        listener=Listener(epoch=epoch, note=notes.append),
    )
    return trained, notes


def enlarged(data):
    """The digits at 28 x 28, for networks that want that size."""
    import dataclasses

    images = {
        name: np.kron(getattr(data, name)[:120], np.ones((4, 4), np.uint8))[:, :, 2:30, 2:30].copy()
        for name in ("train_images", "test_images")
    }
    labels = {name: getattr(data, name)[:120] for name in ("train_labels", "test_labels")}
    return dataclasses.replace(data, **images, **labels, card={**data.card, "shape": [1, 28, 28]})


@pytest.mark.parametrize("killed_after", [1, 2])
@pytest.mark.parametrize("defense", list(DEFENSES))
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(few, tmp_path, defense, killed_after):
    whole, _ = run(few, tmp_path / "whole", defense=defense)
    with pytest.raises(Killed):
        run(few, tmp_path, defense=defense, killed_after=killed_after)
    resumed, notes = run(few, tmp_path, defense=defense)
    # the kill came before the checkpoint of that epoch was written
    assert "epoch 1 found" in notes[0] if killed_after == 2 else "no checkpoint" in notes[0]
    assert_same(whole, resumed)


def test_a_run_in_bf16_resumes_bit_for_bit_and_keeps_float32_weights(few, tmp_path):
    keys = {"network": "batch norm", "precision": "bf16", "schedule": {"kind": "triangular"}}
    whole, _ = run(few, tmp_path / "whole", **keys)
    with pytest.raises(Killed):
        run(few, tmp_path / "killed", killed_after=1, **keys)
    resumed, _ = run(few, tmp_path / "killed", **keys)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])
        assert weight.dtype in (torch.float32, torch.int64)  # the latter counts batches


def test_bf16_changes_logits_by_rounding_only():
    model = build(NETWORKS["batch norm"], (1, 16, 16), range(10)).eval()
    x = torch.rand(8, 1, 16, 16)
    exact, rounded = Mixed(model, "fp32")(x), Mixed(model, "bf16")(x)
    assert exact.dtype == rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    assert torch.allclose(exact, rounded, atol=0.02 * float(exact.detach().abs().max()))


def test_schedules_pass_through_their_corners():
    def scales(*done, **schedule):
        return [
            Training.model_validate({"epochs": 10, "optimizer": {"lr": 1}, "schedule": schedule}).schedule.scale(d, 10)
            for d in done
        ]

    assert scales(0, 3.99, 4, 7.5, 9, milestones=[5, 9], factor=0.5) == [1, 1, 0.5, 0.5, 0.25]
    assert scales(0, 5, 10, kind="cosine") == pytest.approx([1, 0.5, 0])
    assert scales(0, 1, 2, 6, 10, kind="triangular", peak=0.2) == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert scales(0, 5, 7.5, 20, kind="piecewise", points=[[0, 0], [5, 1], [10, 0.5]]) == pytest.approx(
        [0, 1, 0.75, 0.5]
    )


def test_the_rate_moves_within_an_epoch(few, tmp_path):
    trained, _ = run(few, tmp_path, epochs=2, schedule={"kind": "piecewise", "points": [[0, 1], [2, 0]]})
    rates = trained.history.groupby("epoch")["learning_rate"].first()
    # four updates an epoch: the last ones are at 0.75 and 1.75 epochs
    assert list(rates) == pytest.approx([0.05 * (1 - 0.75 / 2), 0.05 * (1 - 1.75 / 2)])


@pytest.mark.parametrize("network", ["batch norm", "dropout"])
def test_batch_norm_and_dropout_resume_bit_for_bit(few, tmp_path, network):
    data = enlarged(few)
    whole, _ = run(data, tmp_path / "whole", network=network, augment="crop-flip")
    with pytest.raises(Killed):
        run(data, tmp_path, network=network, augment="crop-flip", killed_after=3)
    resumed, notes = run(data, tmp_path, network=network, augment="crop-flip")
    assert "epoch 2 found" in notes[0]
    assert_same(whole, resumed)


def assert_same(first, second):
    for (name, a), b in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert first.history.drop(columns="seconds").equals(second.history.drop(columns="seconds"))


def test_the_same_seed_gives_the_same_bytes(few, tmp_path):
    for name in ("a", "b"):
        trained, _ = run(few, tmp_path / name)
        save_weights(tmp_path / f"{name}.safetensors", trained.model.state_dict())
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_training_does_not_touch_global_randomness(few, tmp_path):
    before = torch.get_rng_state()
    run(few, tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def test_a_checkpoint_of_another_run_is_set_aside_and_told(few, tmp_path):
    with pytest.raises(Killed):
        run(few, tmp_path, killed_after=2)
    fresh, notes = run(few, tmp_path, key="other")
    assert "set aside" in notes[0]
    assert "other parameters, data or code" in notes[0]
    assert (tmp_path / "checkpoint.set-aside-1.pt").exists()
    assert_same(fresh, run(few, tmp_path / "whole", key="other")[0])


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_checkpoint_is_set_aside(tmp_path, damage):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, "k", {"epoch": 1})
    path.write_bytes(path.read_bytes()[:-50] if damage is None else damage)
    state, sentence = load_checkpoint(path, "k")
    assert state is None
    assert "cannot be read" in sentence
    assert not path.exists()


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    import pickle

    path = tmp_path / "checkpoint.pt"
    path.write_bytes(pickle.dumps({"key": print}, protocol=2))
    assert load_checkpoint(path, "k")[0] is None


def test_the_history_has_every_epoch_split_and_class(few, tmp_path):
    trained, _ = run(few, tmp_path, validation={"per_class": 3}, evaluate_every=2)
    history = trained.history
    write_table(tmp_path / "history.parquet", history, {}, HISTORY)
    epochs = history.groupby("split")["epoch"].unique().map(list).to_dict()
    assert epochs == {"train": [1, 2, 3], "validation": [2, 3], "test": [2, 3]}  # the last epoch is always evaluated
    assert (history.groupby(["split", "epoch"])["class"].nunique() == 10).all()
    totals = history[history["epoch"] == 3].groupby("split")["n"].sum()
    assert totals["train"] == 200 - 30
    assert totals["validation"] == 30
    assert totals["test"] == 797
    assert history.set_index("epoch")["learning_rate"].groupby(level=0).first().tolist() == pytest.approx(
        [0.05, 0.05, 0.005]
    )
    assert history[["natural_accuracy", "robust_accuracy"]].stack().between(0, 100).all()
    assert history[["natural_accuracy", "robust_accuracy", "loss"]].notna().all().all()
    assert (history["class_weight"] == 1).all()


def test_the_test_accuracies_of_the_history_are_those_of_an_evaluation(few, tmp_path):
    trained, _ = run(few, tmp_path)
    last = trained.history[(trained.history["split"] == "test") & (trained.history["epoch"] == 3)]
    split = Split.of(few.test_images, few.test_labels, range(10), 16, "cpu")
    outcomes = evaluate(trained.model, split, {"kind": "none"}, seed=0, batch_size=100)
    natural = 100 * (outcomes["natural"] == outcomes["label"]).groupby(outcomes["label"]).mean()
    assert last["natural_accuracy"].tolist() == pytest.approx(natural.tolist())


def test_standard_training_has_no_running_robust_accuracy(few, tmp_path):
    trained, _ = run(few, tmp_path, defense="standard", epochs=1)
    running = trained.history[trained.history["split"] == "train"]
    assert running["robust_accuracy"].isna().all()
    assert running["natural_accuracy"].notna().all()


def test_a_removed_class_has_no_output_and_never_appears(few, tmp_path):
    trained, _ = run(few, tmp_path, removed=5)
    kept = (0, 1, 2, 3, 4, 6, 7, 8, 9)
    assert trained.model.classes == kept
    assert trained.model.head.out_features == 9
    assert set(trained.history["class"]) == set(kept)
    split = Split.of(few.test_images, few.test_labels, trained.model.classes, few.levels, "cpu")
    outcomes = evaluate(trained.model, split, PGD, seed=0, batch_size=100)
    assert set(outcomes["label"]) == set(kept)
    assert not (outcomes[["natural", "predicted"]] == 5).any().any()
    # rows keep their place in the whole test split, and labels their original ids
    assert (few.test_labels[outcomes["index"]] == outcomes["label"]).all()


def test_a_class_that_does_not_exist_cannot_be_removed(few, tmp_path):
    with pytest.raises(UserError, match="classes 0 to 9"):
        run(few, tmp_path, removed=10)


def test_the_selected_epoch_is_kept_while_training_goes_on(few, tmp_path):
    early, _ = run(few, tmp_path / "early", select={"epoch": 2})
    short, _ = run(few, tmp_path / "short", epochs=2)
    assert early.epoch == 2
    assert early.history["epoch"].max() == 3
    for a, b in zip(early.model.state_dict().values(), short.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_selected_epoch_survives_a_kill_after_it(few, tmp_path):
    with pytest.raises(Killed):
        run(few, tmp_path, select={"epoch": 1}, killed_after=3)
    resumed, _ = run(few, tmp_path, select={"epoch": 1})
    assert_same(resumed, run(few, tmp_path / "whole", select={"epoch": 1})[0])


def test_divergence_stops_with_the_epoch_and_publishes_nothing(few, tmp_path):
    with pytest.raises(UserError, match="diverged in epoch 1"):
        run(few, tmp_path, optimizer={"lr": 1e30})
    assert not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.parametrize("pick", ["first", "last", "seeded"])
def test_validation_takes_the_same_number_of_each_class(pick):
    labels = np.array([0, 1, 0, 1, 1, 0, 0, 1])
    held = _held_out(labels, settings(validation={"per_class": 2, "pick": pick}).validation, seed=1)
    assert np.bincount(labels[held]).tolist() == [2, 2]
    if pick != "seeded":
        assert held.tolist() == ([0, 1, 2, 3] if pick == "first" else [4, 5, 6, 7])


def test_validation_must_leave_something_to_train_on():
    with pytest.raises(UserError, match="per_class = 2"):
        _held_out(np.array([0, 0, 1, 1]), settings(validation={"per_class": 2}).validation, seed=0)


def test_madry_training_makes_digits_more_robust(digits, tmp_path):
    """A dozen epochs on 1,000 digits are enough to tell the two apart by far, under the attack of the history."""
    robust = {}
    for defense in ("standard", "madry"):
        trained, _ = run(digits, tmp_path / defense, defense=defense, epochs=12, batch_size=32, schedule={})
        robust[defense] = trained.history.query("split == 'test' and epoch == 12")["robust_accuracy"].mean()
    assert robust["madry"] > robust["standard"] + 20


def test_crops_shift_by_at_most_four_pixels_and_flips_mirror():
    generator = torch.Generator().manual_seed(0)
    image = torch.zeros(500, 1, 16, 16)
    image[:, 0, 8, 6] = 1.0
    found = crop_flip(image, generator)
    assert found.shape == image.shape
    assert (found.sum(dim=(1, 2, 3)) == 1).all()  # the pixel never leaves, as it is further than 4 from each border
    rows, columns = found.flatten(1).argmax(1) // 16, found.flatten(1).argmax(1) % 16
    assert rows.min() == 4
    assert rows.max() == 12
    straight, mirrored = (columns >= 2) & (columns <= 10), (columns >= 5) & (columns <= 13)
    assert (straight | mirrored).all()
    assert (columns < 5).any()
    assert (columns > 10).any()


def test_a_defense_with_unknown_keys_is_refused(few, tmp_path):
    from pydantic import ValidationError

    from classwise.training import _defense

    with pytest.raises(ValidationError):
        _defense({"kind": "standard", "beta": 1}, None)
    assert isinstance(_defense({"kind": "standard"}, None), Standard)
