"""The one training loop. What differs between methods is the defense's loss and its explicit state."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from classwise.books import Books, per_class
from classwise.checkpoints import load_checkpoint, save_checkpoint
from classwise.data.dataset import Dataset
from classwise.defenses import DEFENSES
from classwise.defenses.defense import Defense, Run
from classwise.devices import peak_memory_mb
from classwise.engine import fitting_batch
from classwise.errors import Interrupted, UserError
from classwise.evaluation import Split, evaluate
from classwise.models.classifier import Classifier, build
from classwise.parameters import parameters_of
from classwise.processes import Team
from classwise.randomness import seed_of
from classwise.specs import AtEpoch, Best, Optimizer, Training, Validation
from classwise.store import HISTORY

CHECK_EVERY = 50  # updates between two looks at the losses: looking makes a GPU wait


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
    """Where a run's news go, and who may ask it to stop; the default is nowhere and nobody."""

    epoch: Callable[[Progress], None] = field(default=lambda progress: None)
    step: Callable[[int, int], None] = field(default=lambda done, steps: None)  # updates done, of the whole run
    note: Callable[[str], None] = field(default=lambda sentence: None)
    stop: Callable[[], bool] = field(default=lambda: False)


@dataclass(frozen=True)
class Saving:
    """When a checkpoint is written: after so many epochs or minutes, whichever comes first."""

    epochs: int = 1
    minutes: float = 10.0


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
    saving: Saving | None = None,
    team: Team | None = None,
) -> Trained:
    """Train one model and keep per-class books of every epoch.

    `defense` and `evaluation` (the attack behind the history's robust accuracies) are `{kind, **keys}`. `removed`
    is the class left out, in training and in testing. `key` identifies the run: only a checkpoint with the same key is
    resumed, and then the result is bit for bit that of an uninterrupted run (on a CPU), wherever in an epoch it was
    saved. Asked to stop, it saves and raises `Interrupted`. In a team every process calls this and gets the result.
    """
    listener, saving, team = listener or Listener(), saving or Saving(), team or Team()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # Dropout is the one draw of the loop that torch takes from its global generator.
        torch.manual_seed(seed_of(seed, "global", *team.mark()))
        run = _Loop(dataset, architecture, defense, training, evaluation, removed, seed, device, team, listener.note)
        state, sentence = load_checkpoint(checkpoint, key, keep=not team.leads)
        listener.note(sentence)
        if state is not None:
            run.load_state_dict(state)
        saved = _Saved(checkpoint, key, saving, run, team)
        while not run.over():
            for _ in run.updates():
                listener.step(run.updates_done(), run.updates_in_all())
                if team.any(listener.stop()):
                    saved.write()
                    raise Interrupted(f"stopped in epoch {run.epoch + 1} as asked; the checkpoint has all of it")
                saved.write_if_due()
            listener.epoch(run.finish_epoch())
            saved.write_if_due()
    return run.result()


class _Saved:
    """The checkpoint of a run, and when it was last written."""

    def __init__(self, path: Path, key: str, saving: Saving, run: _Loop, team: Team):
        self.path, self.key, self.saving, self.run, self.team = path, key, saving, run, team
        self.epoch, self.time = run.epoch, time.monotonic()

    def write_if_due(self) -> None:
        by_time = time.monotonic() - self.time >= 60 * self.saving.minutes
        if self.run.epoch - self.epoch >= self.saving.epochs or self.team.any(by_time):
            self.write()

    def write(self) -> None:
        self.run.check_losses()  # a diverged state is never worth keeping
        state = self.run.state_dict()
        if self.team.leads:
            save_checkpoint(self.path, self.key, state)
        self.epoch, self.time = self.run.epoch, time.monotonic()


class _Loop:
    """Everything that changes while a model trains, so that all of it can be saved and restored."""

    def __init__(
        self, dataset, architecture, defense, training: Training, evaluation, removed, seed, device, team: Team, note
    ):
        self.training, self.evaluation, self.seed = training, evaluation, seed
        self.device, self.team = device, team
        count = len(dataset.card["classes"])
        if removed is not None and not 0 <= removed < count:
            raise UserError(f"removed class {removed}: the data set has classes 0 to {count - 1}")
        classes = tuple(c for c in range(count) if c != removed)
        self.splits = _splits(dataset, classes, training.validation, seed, device)
        self.model = build(architecture, dataset.shape, classes, seed_of(seed, "weights")).to(device)
        if training.precision == "bf16":
            self.model = self.model.to(memory_format=torch.channels_last)  # several times faster where bf16 is
        self.average = copy.deepcopy(self.model).requires_grad_(False) if training.ema is not None else None
        network = Mixed(self.model, training.precision)
        self.network = team.together(torch.compile(network) if training.compile else network, device)
        self.optimizer = _optimizer(training.optimizer, self.model)
        self.order = torch.Generator().manual_seed(seed_of(seed, "order"))
        self.draws = torch.Generator(device).manual_seed(seed_of(seed, "draws", *team.mark()))
        self.defense = _defense(defense, Run(classes, self.draws, count, training.epochs, note, team.mean))
        self.epoch, self.batch = 0, 0  # finished epochs; finished updates of the epoch under way
        self.order_before = self.order.get_state()  # as the epoch under way began
        self.books, self.losses, self.finite = Books(classes, device), [], math.nan
        self.seconds, self.epoch_seconds = 0.0, 0.0
        self.selected, self.selected_epoch, self.best = None, 0, -math.inf
        self.history: list[dict[str, list]] = []  # columns of one split in one epoch, as a checkpoint holds them

    # Where the run is

    def over(self) -> bool:
        return self.epoch >= self.training.epochs or self.defense.stopped

    def updates_done(self) -> int:
        return self.epoch * self._batches() + self.batch

    def updates_in_all(self) -> int:
        return self.training.epochs * self._batches()

    def _batches(self) -> int:
        return math.ceil(len(self.splits["train"]) / self.training.batch_size)

    # One epoch

    def updates(self) -> Iterator[None]:
        """The updates of the epoch under way that are still to do, one at a time."""
        started = time.perf_counter()
        if self.batch == 0:
            self.order_before = self.order.get_state()
            self.books, self.epoch_seconds = Books(self.model.classes, self.device), 0.0
            self.defense.epoch_start(self.epoch + 1, self.network, self._sample)
        self.order.set_state(self.order_before)
        batches = torch.randperm(len(self.splits["train"]), generator=self.order).split(self.training.batch_size)
        self.network.train()
        for rows in batches[self.batch :]:
            self._update(rows, self.epoch + self.batch / len(batches))
            self.batch += 1
            if self.batch % CHECK_EVERY == 0:
                self.check_losses()
            self.epoch_seconds += time.perf_counter() - started
            yield  # a checkpoint written here is no time of the training
            started = time.perf_counter()

    def _update(self, rows: torch.Tensor, done: float) -> None:
        settings, split, own = self.training, self.splits["train"], self.team.share(rows)
        rate = settings.optimizer.lr * settings.schedule.scale(done, settings.epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        x, y = split.batch(own.to(self.device))
        if settings.augment == "crop-flip":
            x = crop_flip(x, self.draws)
        step = self.defense.loss(self.network, x, y)
        self.optimizer.zero_grad(set_to_none=True)
        (step.loss * self.team.weight(rows, own)).backward()
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        if self.average is not None:
            _move_average(self.average, self.model, settings.ema)
        self.losses.append(step.loss.detach())
        if self.team.leads or len(own) < len(rows):
            self.books.add(y, step)

    def check_losses(self) -> None:
        """Stop where a loss since the last look is not finite; tell which one, and the last one that was."""
        losses = torch.stack(self.losses).double().cpu() if self.losses else torch.zeros(0)
        first = self.batch - len(losses) + 1
        self.losses = []
        bad = (~losses.isfinite()).nonzero()
        last = float(losses[int(bad[0]) - 1]) if len(bad) and int(bad[0]) else self.finite
        if self.team.any(len(bad) > 0):
            where = f"update {first + int(bad[0])}" if len(bad) else "an update of another process"
            raise UserError(
                f"training diverged in epoch {self.epoch + 1}, {where} of {self._batches()}: the loss is not finite "
                f"(the last finite one was {last:.4g}); try a smaller optimizer.lr, `clip`, or a smaller beta where "
                "the defense has one"
            )
        if len(losses):
            self.finite = float(losses[-1])

    def finish_epoch(self) -> Progress:
        """Evaluate, let the defense draw its conclusions, and write the books of the epoch."""
        started, settings = time.perf_counter(), self.training
        self.check_losses()
        weights = self.defense.class_weights()
        tables = {"train": self.books.table(self.team)}
        speed = int(tables["train"]["n"].sum()) / max(self.epoch_seconds, 1e-9)
        self.epoch, self.batch = self.epoch + 1, 0
        if self.epoch % settings.evaluate_every == 0 or self.epoch == settings.epochs:
            tables |= self._evaluate()
        self.defense.epoch_end(tables, self.network)
        if self.defense.stopped and self.average is not None:
            _move_average(self.average, self.model, decay=0)
        self._select(tables)
        self.seconds += self.epoch_seconds + time.perf_counter() - started
        facts = {
            "epoch": self.epoch,
            "learning_rate": self.optimizer.param_groups[0]["lr"],  # of the epoch's last update
            "seconds": self.seconds,
            "images_per_second": speed,
            "peak_memory_mb": peak_memory_mb(self.device),
        }
        for split, table in tables.items():
            rows = table.assign(**facts, split=split, class_weight=weights.cpu().numpy())
            self.history.append(rows[HISTORY.names].to_dict("list"))
        return self._progress(float(tables["train"]["loss"].mean()))

    def _progress(self, loss: float) -> Progress:
        tested = [rows for rows in self.history if rows["split"][0] == "test"]
        natural, robust = (
            float(np.mean(tested[-1][name])) if tested else math.nan for name in ("natural_accuracy", "robust_accuracy")
        )
        return Progress(self.epoch, self.training.epochs, loss, natural, robust)

    def _evaluate(self) -> dict[str, pd.DataFrame]:
        attack, tables, model = self.evaluation or {"kind": "none"}, {}, self._published()
        model.eval()
        for name in ("validation", "test"):
            split = self.splits[name].part(self.team.rank, self.team.size)
            if not len(self.splits[name]):
                continue
            outcomes = evaluate(
                model,
                split,
                attack,
                seed=seed_of(self.seed, name, self.epoch, *self.team.mark()),
                batch_size=fitting_batch(model, split.batch(slice(0, 1))[0], self.training.precision),
                precision=self.training.precision,
            )
            whole = pd.concat(self.team.all_of(outcomes), ignore_index=True)
            tables[name] = per_class(whole, self.model.classes, attacked=self.evaluation is not None)
        return tables

    def _published(self) -> Classifier:
        """The model that is tested and kept: the running mean of the weights where there is one."""
        return self.model if self.average is None else self.average

    def _select(self, tables: Mapping[str, pd.DataFrame]) -> None:
        """Keep the weights if this is the epoch that the study wants, so far."""
        select = self.training.select
        if isinstance(select, Best):
            value = _measure(select.best, tables["validation"]) if "validation" in tables else -math.inf
            wanted, self.best = value > self.best, max(value, self.best)
        elif isinstance(select, AtEpoch):
            wanted = self.epoch == select.epoch
        else:
            wanted = self.epoch == self.training.epochs
        if wanted or (self.defense.stopped and self.selected is None):
            self.selected = {
                name: tensor.detach().cpu().clone() for name, tensor in self._published().state_dict().items()
            }
            self.selected_epoch = self.epoch - 1 if self.defense.stopped else self.epoch

    def _sample(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        split = self.splits["train"]
        fixed = torch.Generator().manual_seed(seed_of(self.seed, "sample"))
        return split.batch(torch.randperm(len(split), generator=fixed)[:count].to(self.device))

    # What a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        shared = {name: getattr(self, name) for name in PLAIN_STATE}
        randomness = {
            "draws": self.draws.get_state(),
            "global": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "books": self.books.sums.cpu(),
        }
        return {
            **shared,
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "defense": self.defense.state_dict(),
            "order": self.order.get_state(),
            "processes": self.team.all_of(randomness),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in PLAIN_STATE:
            setattr(self, name, state[name])
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.defense.load_state_dict(state["defense"])
        self.order.set_state(state["order"])
        own = state["processes"][self.team.rank]
        self.draws.set_state(own["draws"])
        self.books.sums.copy_(own["books"])
        torch.set_rng_state(own["global"])
        if own["cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], self.device)

    def result(self) -> Trained:
        wrong = [name for name, tensor in self.selected.items() if not bool(tensor.isfinite().all())]
        if wrong:
            raise UserError(f"training diverged: {wrong[0]} is not finite after epoch {self.selected_epoch}")
        self.model.load_state_dict(self.selected)
        history = pd.concat([pd.DataFrame(rows) for rows in self.history], ignore_index=True)
        return Trained(self.model.eval(), history, self.selected_epoch)


# Numbers, lists and tensors of the loop that are saved as they are.
PLAIN_STATE = (
    "epoch", "batch", "order_before", "finite", "seconds", "epoch_seconds",
    "selected", "selected_epoch", "best", "history",
)  # fmt: skip


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


def _optimizer(settings: Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    norms = [
        parameter
        for module in model.modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        for parameter in module.parameters()
    ]
    spared = [] if settings.decay_batch_norm else norms
    others = [parameter for parameter in model.parameters() if not any(parameter is norm for norm in spared)]
    groups = [{"params": others, "weight_decay": settings.weight_decay}]
    groups += [{"params": spared, "weight_decay": 0.0}] if spared else []
    if settings.kind == "adam":
        return torch.optim.Adam(groups, lr=settings.lr)
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov)


@torch.no_grad()
def _move_average(average: torch.nn.Module, model: torch.nn.Module, decay: float) -> None:
    """Weights and batch statistics of `average` go 1 - decay of the way to the model's; counters are copied."""
    current = model.state_dict()
    for name, tensor in average.state_dict().items():
        if tensor.is_floating_point():
            tensor.lerp_(current[name], 1 - decay)
        else:
            tensor.copy_(current[name])


def _measure(name: str, table: pd.DataFrame) -> float:
    """Of the validation images: what `select: {best: ...}` compares."""
    column = table["natural_accuracy" if name == "natural" else "robust_accuracy"]
    return float(column.min() if name == "worst" else column.mean())


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
