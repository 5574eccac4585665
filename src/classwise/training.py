"""The one training loop. What differs between methods is the defense's loss and its explicit state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from classwise.checkpoints import load_checkpoint, save_checkpoint
from classwise.data.dataset import Dataset
from classwise.defenses import DEFENSES
from classwise.defenses.defense import Defense, Run, Step
from classwise.errors import UserError
from classwise.evaluation import Split, evaluate
from classwise.models.classifier import Classifier, build
from classwise.parameters import parameters_of
from classwise.randomness import seed_of
from classwise.specs import Training, Validation
from classwise.store import HISTORY

PER_CLASS = ["class", "n", "natural_accuracy", "robust_accuracy", "loss"]


@dataclass(frozen=True)
class Progress:
    """One finished epoch: the training loss, and the accuracies (%) of the test split when it was last evaluated."""

    epoch: int
    epochs: int
    loss: float
    natural: float  # NaN before the first evaluation
    robust: float


@dataclass
class Listener:
    """Where a run's news go; the default is nowhere."""

    epoch: Callable[[Progress], None] = field(default=lambda progress: None)
    note: Callable[[str], None] = field(default=lambda sentence: None)


@dataclass(frozen=True)
class Trained:
    model: Classifier
    history: pd.DataFrame
    epoch: int  # 1-based epoch whose weights these are


def train(
    dataset: Dataset,
    *,
    architecture: Mapping[str, Any],
    defense: Mapping[str, Any],
    training: Training,
    evaluation: Mapping[str, Any] | None,
    removed: int | None,
    seed: int,
    checkpoint: Path,
    key: str,
    device: torch.device,
    listener: Listener | None = None,
) -> Trained:
    """Train one model and keep per-class books of every epoch.

    `defense` and `evaluation` (the attack behind the history's robust accuracies) are `{kind, **keys}`. `removed`
    is the class left out, in training and in testing. `key` identifies the run: only a checkpoint with the same key is
    resumed, and then the result is bit for bit that of an uninterrupted run (on a CPU).
    """
    listener = listener or Listener()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # Dropout is the one draw of the loop that torch takes from its global generator.
        torch.manual_seed(seed_of(seed, "global"))
        run = _Loop(dataset, architecture, defense, training, evaluation, removed, seed, device)
        state, sentence = load_checkpoint(checkpoint, key)
        listener.note(sentence)
        if state is not None:
            run.load_state_dict(state)
        while run.epoch < training.epochs:
            listener.epoch(run.one_epoch())
            save_checkpoint(checkpoint, key, run.state_dict())
    return run.result()


class _Loop:
    """Everything that changes while a model trains, so that all of it can be saved and restored."""

    def __init__(self, dataset, architecture, defense, training: Training, evaluation, removed, seed, device):
        self.training, self.evaluation, self.seed, self.device = training, evaluation, seed, device
        if removed is not None and not 0 <= removed < len(dataset.card["classes"]):
            raise UserError(
                f"removed class {removed}: the data set has classes 0 to {len(dataset.card['classes']) - 1}"
            )
        classes = tuple(c for c in range(len(dataset.card["classes"])) if c != removed)
        self.splits = _splits(dataset, classes, training.validation, seed, device)
        self.model = build(architecture, dataset.shape, classes, seed_of(seed, "weights")).to(device)
        if training.precision == "bf16":
            self.model = self.model.to(memory_format=torch.channels_last)  # several times faster where bf16 is
        settings = training.optimizer
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
        )
        self.order = torch.Generator().manual_seed(seed_of(seed, "order"))
        self.draws = torch.Generator(device).manual_seed(seed_of(seed, "draws"))
        self.defense = _defense(defense, Run(classes, self.draws))
        self.epoch, self.seconds, self.selected = 0, 0.0, None
        self.history: list[dict[str, list]] = []  # columns of one split in one epoch, as a checkpoint holds them

    def one_epoch(self) -> Progress:
        started, self.epoch = time.perf_counter(), self.epoch + 1
        weights = self.defense.class_weights()
        per_class = {"train": self._update()}
        if self.epoch % self.training.evaluate_every == 0 or self.epoch == self.training.epochs:
            per_class |= self._evaluate()
        self.defense.epoch_end(per_class)
        if self.epoch == self._selected_epoch():
            self.selected = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        self.seconds += time.perf_counter() - started
        for split, table in per_class.items():
            rate = self.optimizer.param_groups[0]["lr"]  # of the epoch's last update
            facts = {"epoch": self.epoch, "split": split, "learning_rate": rate, "seconds": self.seconds}
            rows = table.assign(**facts, class_weight=weights.cpu().numpy())
            self.history.append(rows[HISTORY.names].to_dict("list"))
        tested = [rows for rows in self.history if rows["split"][0] == "test"]
        natural, robust = (
            float(np.mean(tested[-1][name])) if tested else float("nan")
            for name in ("natural_accuracy", "robust_accuracy")
        )
        loss = float(per_class["train"]["loss"].mean())
        return Progress(self.epoch, self.training.epochs, loss, natural, robust)

    def _update(self) -> pd.DataFrame:
        split, books = self.splits["train"], _Books(self.model.classes, self.device)
        network, settings = Mixed(self.model, self.training.precision).train(), self.training
        batches = torch.randperm(len(split), generator=self.order).split(settings.batch_size)
        for number, rows in enumerate(batches):
            done = self.epoch - 1 + number / len(batches)
            for group in self.optimizer.param_groups:
                group["lr"] = settings.optimizer.lr * settings.schedule.scale(done, settings.epochs)
            x, y = split.batch(rows.to(self.device))
            if settings.augment == "crop-flip":
                x = crop_flip(x, self.draws)
            step = self.defense.loss(network, x, y)
            self.optimizer.zero_grad(set_to_none=True)
            step.loss.backward()
            self.optimizer.step()
            books.add(y, step)
        table = books.table()
        if not np.isfinite(table["loss"]).all():
            raise UserError(
                f"training diverged in epoch {self.epoch}: the loss is no longer finite; "
                "try a smaller optimizer.lr, or a smaller beta where the defense has one"
            )
        return table

    def _evaluate(self) -> dict[str, pd.DataFrame]:
        attack, tables = self.evaluation or {"kind": "none"}, {}
        self.model.eval()
        for name in ("validation", "test"):
            split = self.splits[name]
            if len(split):
                outcomes = evaluate(
                    self.model,
                    split,
                    attack,
                    seed=seed_of(self.seed, name, self.epoch),
                    batch_size=EVALUATION_BATCH,
                )
                tables[name] = _per_class(outcomes, self.model.classes, attacked=self.evaluation is not None)
        return tables

    def _selected_epoch(self) -> int:
        return self.training.epochs if self.training.select == "last" else self.training.select.epoch

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "defense": self.defense.state_dict(),
            "selected": self.selected,
            "history": self.history,
            "order": self.order.get_state(),
            "draws": self.draws.get_state(),
            "global": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.seconds, self.selected = state["epoch"], state["seconds"], state["selected"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.defense.load_state_dict(state["defense"])
        self.history = list(state["history"])
        self.order.set_state(state["order"])
        self.draws.set_state(state["draws"])
        torch.set_rng_state(state["global"])
        if state["cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def result(self) -> Trained:
        self.model.load_state_dict(self.selected)
        history = pd.concat([pd.DataFrame(rows) for rows in self.history], ignore_index=True)
        return Trained(self.model.eval(), history, self._selected_epoch())


EVALUATION_BATCH = 500


class Mixed(torch.nn.Module):
    """The network in the precision of its training; logits, losses and weights are float32 all the same."""

    def __init__(self, model: Classifier, precision: str):
        super().__init__()
        self.model, self.bf16 = model, precision == "bf16"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.bf16:
            return self.model(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.model(x.contiguous(memory_format=torch.channels_last)).float()


class _Books:
    """Running per-class sums of an epoch, kept on the device: no batch waits for a number."""

    def __init__(self, classes: tuple[int, ...], device: torch.device):
        self.classes = classes
        self.sums = {
            name: torch.zeros(len(classes), dtype=torch.float64, device=device)
            for name in ("n", "natural", "n_natural", "robust", "n_robust", "loss")
        }

    def add(self, y: torch.Tensor, step: Step) -> None:
        self._count("n", y, torch.ones_like(y))
        self._count("loss", y, step.per_example)
        for name, logits in (("natural", step.natural), ("robust", step.adversarial)):
            if logits is not None:
                self._count(name, y, logits.argmax(dim=1) == y)
                self._count(f"n_{name}", y, torch.ones_like(y))

    def _count(self, name: str, y: torch.Tensor, values: torch.Tensor) -> None:
        self.sums[name].index_add_(0, y, values.double())

    def table(self) -> pd.DataFrame:
        """PER_CLASS columns; an accuracy that the method does not compute in passing is NaN."""
        sums = {name: values.cpu().numpy() for name, values in self.sums.items()}

        def ratio(part: str, whole: str) -> np.ndarray:
            blank = np.full(len(self.classes), np.nan)
            return np.divide(sums[part], sums[whole], out=blank, where=sums[whole] > 0)

        return pd.DataFrame(
            {
                "class": self.classes,
                "n": sums["n"].astype(int),
                "natural_accuracy": 100 * ratio("natural", "n_natural"),
                "robust_accuracy": 100 * ratio("robust", "n_robust"),
                "loss": ratio("loss", "n"),
            }
        )


def _per_class(outcomes: pd.DataFrame, classes: tuple[int, ...], attacked: bool) -> pd.DataFrame:
    """PER_CLASS columns of an evaluated split; classes without examples are NaN."""
    right = outcomes.assign(
        natural_accuracy=100.0 * (outcomes["natural"] == outcomes["label"]),
        robust_accuracy=100.0 * (outcomes["predicted"] == outcomes["label"]) if attacked else np.nan,
    )
    means = right.groupby("label")[["natural_accuracy", "robust_accuracy", "loss"]].mean()
    counts = right.groupby("label").size().rename("n")
    table = means.join(counts).reindex(list(classes)).rename_axis("class").reset_index()
    return table.assign(n=table["n"].fillna(0).astype(int))[PER_CLASS]


def _defense(settings: Mapping[str, Any], run: Run) -> Defense:
    keys = dict(settings)
    kind = DEFENSES[keys.pop("kind")]
    checked = parameters_of(kind).model_validate(keys)
    return kind(run, **{name: getattr(checked, name) for name in type(checked).model_fields})


def _splits(dataset: Dataset, classes, validation: Validation | None, seed: int, device) -> dict[str, Split]:
    held = _held_out(dataset.train_labels, validation, seed)
    rest = np.setdiff1d(np.arange(len(dataset.train_labels)), held)

    def split(part: str, keep=None) -> Split:
        images, labels = getattr(dataset, f"{part}_images"), getattr(dataset, f"{part}_labels")
        return Split.of(images, labels, classes, dataset.levels, device, keep)

    return {"train": split("train", rest), "validation": split("train", held), "test": split("test")}


def _held_out(labels: np.ndarray, validation: Validation | None, seed: int) -> np.ndarray:
    """Indices of the validation images: the same number of each class, the first, the last or a seeded choice."""
    if validation is None:
        return np.array([], dtype=int)
    chosen = []
    for c in np.unique(labels):
        members = np.flatnonzero(labels == c)
        if len(members) <= validation.per_class:
            raise UserError(
                f"training.validation.per_class = {validation.per_class}: must leave at least one training image of "
                f"class {c}, which has {len(members)}"
            )
        if validation.pick == "seeded":
            members = np.random.default_rng(seed_of(seed, "validation", c)).permutation(members)
        chosen.append(
            members[-validation.per_class :] if validation.pick == "last" else members[: validation.per_class]
        )
    return np.sort(np.concatenate(chosen))


def crop_flip(x: torch.Tensor, generator: torch.Generator, padding: int = 4) -> torch.Tensor:
    """A random shift by up to `padding` pixels (zeros come in) and a coin-flip mirror, for each image of the batch."""
    count, _, height, width = x.shape
    shifts = torch.randint(0, 2 * padding + 1, (2, count), generator=generator, device=x.device)
    mirrored = torch.rand(count, generator=generator, device=x.device) < 0.5
    rows = shifts[0][:, None] + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device).expand(count, width)
    columns = shifts[1][:, None] + torch.where(mirrored[:, None], columns.flip(1), columns)
    padded = torch.nn.functional.pad(x, [padding] * 4)
    examples = torch.arange(count, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[examples, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
