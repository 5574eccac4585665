"""The training loop: books, selection, validation, and runs that are never lost."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_for_hypothesis
from hypothesis import strategies as st

from classwise import training
from classwise.checkpoints import load_checkpoint, save_checkpoint
from classwise.defenses import DEFENSES as KINDS
from classwise.defenses.standard import Standard
from classwise.errors import Interrupted, UserError
from classwise.evaluation import Split, evaluate
from classwise.models.classifier import build, save_weights
from classwise.randomness import seed_of
from classwise.specs import Optimizer, Training
from classwise.store import HISTORY, write_table
from classwise.training import Listener, Mixed, Saving, _held_out, crop_flip, train

ATTACK = {"epsilon": 0.2, "steps": 2, "step_size": 0.1}
DEFENSES = {
    "standard": {"kind": "standard"},
    "madry": {"kind": "madry", "attack": ATTACK},
    "trades": {"kind": "trades", "beta": 6, "attack": ATTACK},
    "trades by class": {"kind": "trades", "beta": [6, 6, 6, 6, 6, 0.5, 6, 6, 6, 6], "attack": ATTACK},
    "mart": {"kind": "mart", "beta": 5, "attack": ATTACK},
    "he": {"kind": "he", "scale": 5, "attack": ATTACK},
    "he in trades": {"kind": "he", "variant": "trades", "beta": 6, "scale": 5, "attack": ATTACK},
    "he-lis": {"kind": "he-lis", "final": 10, "attack": ATTACK},
    "he-cmp": {"kind": "he-cmp", "s_max": 10, "examples": 50, "attack": ATTACK},
    "he-cmp of each example": {"kind": "he-cmp", "reading": "example", "s_max": 10, "attack": ATTACK},
    "fast": {"kind": "fast", "epsilon": 0.2},
    "guarded fast": {"kind": "fast", "epsilon": 0.2, "guard": {"drop": 0.3}},
}
PGD = {"kind": "pgd", "epsilon": 0.2, "steps": 2, "step_size": 0.1}
# batch norm and dropout are what a careless resume loses
NETWORKS = {
    "plain": {"kind": "conv2", "width": 4},
    "batch norm": {"kind": "resnet18", "width": 4},
    "dropout": {"kind": "small-cnn"},
    "wide": {"kind": "conv2", "width": 16},
}


MEASURED = ["seconds", "images_per_second", "peak_memory_mb"]  # different each time


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


def run(
    data, folder, *, defense="madry", network="plain", removed=None, key="k", killed_after=None, killed_at=None,
    stopped_at=None, saving=None, **changes,
):  # fmt: skip
    """Train; `killed_after` an epoch, `killed_at` or asked to stop at (`stopped_at`) an update of the whole run."""
    updates = 0

    def epoch(progress):
        if progress.epoch == killed_after:
            raise Killed

    def step(done, steps):
        nonlocal updates
        updates = done
        if done == killed_at:
            raise Killed

    notes = []
    trained = train(
        data,
        architecture={**NETWORKS[network], "head": KINDS[DEFENSES[defense]["kind"]].head},
        defense=DEFENSES[defense],
        training=settings(**changes),
        evaluation=PGD,
        removed=removed,
        seed=7,
        checkpoint=folder / "checkpoint.pt",
        key=key,
        device=torch.device("cpu"),
        listener=Listener(epoch=epoch, step=step, note=notes.append, stop=lambda: updates == stopped_at),
        saving=saving,
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


@settings_for_hypothesis(max_examples=3)
@given(killed_at=st.integers(2, 12))
@pytest.mark.parametrize("defense", list(DEFENSES))
def test_a_run_killed_anywhere_in_an_epoch_resumes_bit_for_bit(few, tmp_path_factory, defense, killed_at):
    """Four updates an epoch, three epochs; the checkpoint is that of the update before."""
    folder, always = tmp_path_factory.mktemp("killed"), Saving(epochs=1, minutes=0)
    whole, _ = run(few, folder / "whole", defense=defense, saving=Saving(epochs=100, minutes=100))
    with pytest.raises(Killed):
        run(few, folder, defense=defense, killed_at=killed_at, saving=always)
    resumed, notes = run(few, folder, defense=defense)
    epoch, batch = divmod(killed_at - 1, 4)
    assert notes[0].startswith(f"checkpoint of epoch {epoch}" + (f" and {batch} updates" if batch else ""))
    assert_same(whole, resumed)


def test_a_run_that_is_asked_to_stop_saves_first(few, tmp_path):
    seldom = Saving(epochs=100, minutes=100)
    whole, _ = run(few, tmp_path / "whole")
    with pytest.raises(Interrupted, match="stopped in epoch 2"):
        run(few, tmp_path, stopped_at=6, saving=seldom)
    resumed, notes = run(few, tmp_path)
    assert "epoch 1 and 2 updates found" in notes[0]
    assert_same(whole, resumed)


def test_checkpoints_are_written_by_epochs_or_by_minutes_whichever_is_sooner(few, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        training, "save_checkpoint", lambda path, key, state: written.append((state["epoch"], state["batch"]))
    )
    run(few, tmp_path, epochs=4, saving=Saving(epochs=2, minutes=100))
    assert written == [(2, 0), (4, 0)]
    written.clear()
    run(few, tmp_path, epochs=2, saving=Saving(epochs=100, minutes=0))
    assert written == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 0)]


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
    # Wong et al. on ImageNet, learning rate 1 (the sizes of its three phases' images are not part of a schedule)
    three_phases = [[0, 0], [1, 0.4], [6, 0.04], [12, 0.004], [15, 0.0004]]
    assert scales(0.5, 1, 6, 9, 15, kind="piecewise", points=three_phases) == pytest.approx(
        [0.2, 0.4, 0.04, 0.022, 0.0004]
    )
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
    assert first.history.drop(columns=MEASURED).equals(second.history.drop(columns=MEASURED))


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


# After eight epochs the rate is so large that what was learnt is lost.
COLLAPSE = {
    "defense": "guarded fast",
    "network": "wide",
    "evaluate_every": 20,
    "schedule": {"kind": "piecewise", "points": [[0, 1], [8, 1], [8.01, 20]]},
}


def test_a_run_that_its_defense_stops_keeps_the_weights_of_the_epoch_before(digits, tmp_path):
    stopped, notes = run(digits, tmp_path / "stopped", epochs=20, **COLLAPSE)
    short, _ = run(digits, tmp_path / "short", epochs=stopped.epoch, **COLLAPSE)
    assert 8 <= stopped.epoch < 19
    assert "catastrophic overfitting" in notes[-1]
    assert notes[-1].endswith(f"with the weights of epoch {stopped.epoch}")
    assert stopped.history["epoch"].max() == stopped.epoch + 1, "the books show the collapse"
    for a, b in zip(stopped.model.state_dict().values(), short.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    selected, _ = run(digits, tmp_path / "selected", epochs=20, select={"epoch": 2}, **COLLAPSE)
    assert selected.epoch == 2, "an epoch that was selected before the stop stays"


def test_a_stop_survives_a_kill_before_and_after_its_checkpoint(digits, tmp_path):
    whole, _ = run(digits, tmp_path / "whole", epochs=20, **COLLAPSE)
    with pytest.raises(Killed):
        run(digits, tmp_path, epochs=20, killed_after=whole.epoch + 1, **COLLAPSE)
    resumed, _ = run(digits, tmp_path, epochs=20, **COLLAPSE)
    assert_same(whole, resumed)
    again, notes = run(digits, tmp_path, epochs=20, **COLLAPSE)
    assert len(notes) == 1, "nothing is trained any more"
    assert_same(whole, again)
    assert again.epoch == whole.epoch


@pytest.mark.parametrize("defense", [name for name in DEFENSES if name not in ("standard", "madry")])
def test_every_defense_makes_digits_far_more_robust_than_chance(digits, tmp_path, defense):
    """Fifteen epochs. Standard training ends below 10 % here."""
    keys = {"network": "wide", "epochs": 15, "schedule": {}, "evaluate_every": 15}
    trained, _ = run(digits, tmp_path, defense=defense, **keys)
    split = Split.of(digits.test_images, digits.test_labels, range(10), digits.levels, "cpu")
    outcomes = evaluate(trained.model, split, {**PGD, "steps": 10, "step_size": 0.05}, seed=0, batch_size=500)
    assert 100 * (outcomes["predicted"] == outcomes["label"]).mean() > 30


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


def test_the_running_mean_of_the_weights_is_the_model(few, tmp_path):
    """Decay 0 is the model itself; decay 1 never leaves the start; between them it lags behind."""
    plain, _ = run(few, tmp_path / "plain", network="batch norm", epochs=2)
    same, _ = run(few, tmp_path / "same", network="batch norm", epochs=2, ema=0.0)
    frozen, _ = run(few, tmp_path / "frozen", network="batch norm", epochs=2, ema=1.0)
    longer, _ = run(few, tmp_path / "longer", network="batch norm", epochs=3, ema=1.0)
    assert_same(plain, same)
    for name, weight in frozen.model.named_parameters():
        assert torch.equal(weight, longer.model.get_parameter(name))
        assert not torch.equal(weight, plain.model.get_parameter(name))
    lagging, _ = run(few, tmp_path / "lagging", network="batch norm", epochs=2, ema=0.9)
    assert lagging.history["loss"].iloc[0] == plain.history["loss"].iloc[0], "the training itself does not change"
    with pytest.raises(Killed):
        run(few, tmp_path / "killed", network="batch norm", epochs=2, ema=0.9, killed_after=2)
    resumed, _ = run(few, tmp_path / "killed", network="batch norm", epochs=2, ema=0.9)
    assert_same(lagging, resumed)


def test_a_clipped_gradient_moves_the_weights_by_at_most_its_norm(few, tmp_path):
    keys = {"epochs": 1, "batch_size": 200, "optimizer": {"lr": 1.0, "momentum": 0.0}, "schedule": {}}
    start = build(NETWORKS["plain"], (1, 8, 8), range(10), seed_of(7, "weights"))
    distance = {}
    for clip in (None, 0.01):
        trained, _ = run(few, tmp_path / str(clip), clip=clip, **keys)
        gaps = [(a - b).flatten() for a, b in zip(start.parameters(), trained.model.parameters(), strict=True)]
        distance[clip] = float(torch.cat(gaps).norm().detach())
    assert distance[0.01] == pytest.approx(0.01, rel=1e-3)
    assert distance[None] > 0.02


def test_batch_norm_can_be_spared_weight_decay(few):
    model = build(NETWORKS["batch norm"], (1, 8, 8), range(10))
    decayed = training._optimizer(Optimizer(lr=1, weight_decay=0.1), model)
    spared = training._optimizer(Optimizer(lr=1, weight_decay=0.1, decay_batch_norm=False), model)
    norms = sum(p.numel() for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d) for p in m.parameters())
    sizes = [(sum(p.numel() for p in g["params"]), g["weight_decay"]) for g in spared.param_groups]
    whole = sum(p.numel() for p in model.parameters())
    assert sizes == [(whole - norms, 0.1), (norms, 0.0)]
    assert [g["weight_decay"] for g in decayed.param_groups] == [0.1]


def test_adam_trains_and_resumes(few, tmp_path):
    keys = {"optimizer": {"kind": "adam", "lr": 0.01}, "epochs": 3}
    whole, _ = run(few, tmp_path / "whole", **keys)
    with pytest.raises(Killed):
        run(few, tmp_path, killed_after=2, **keys)
    assert_same(whole, run(few, tmp_path, **keys)[0])


@pytest.mark.parametrize(("measure", "column", "how"), [
    ("robust", "robust_accuracy", "mean"), ("worst", "robust_accuracy", "min"), ("natural", "natural_accuracy", "mean"),
])  # fmt: skip
def test_the_best_epoch_is_chosen_on_validation_images(few, tmp_path, measure, column, how):
    keys = {"epochs": 5, "validation": {"per_class": 5}, "select": {"best": measure}, "optimizer": {"lr": 0.3}}
    trained, _ = run(few, tmp_path, **keys)
    seen = trained.history[trained.history["split"] == "validation"].groupby("epoch")[column].agg(how)
    assert trained.epoch == seen.idxmax()
    last, _ = run(few, tmp_path / "at", **{**keys, "select": {"epoch": trained.epoch}})
    assert_same(trained, last)


def test_divergence_names_epoch_update_and_the_last_finite_loss(few, tmp_path, monkeypatch):
    calls = []

    def loss(self, model, x, y):
        step = original(self, model, x, y)
        calls.append(float(step.loss.detach()))
        return dataclasses.replace(step, loss=step.loss * math.nan) if len(calls) == 7 else step

    original = Standard.loss
    monkeypatch.setattr(Standard, "loss", loss)
    with pytest.raises(UserError, match=r"epoch 2, update 3 of 4: .*the last finite one was") as told:
        run(few, tmp_path, defense="standard")
    assert f"{calls[5]:.4g}" in str(told.value)
    _, sentence = load_checkpoint(tmp_path / "checkpoint.pt", "k")
    assert "epoch 1 found" in sentence, "what was saved is from before"
