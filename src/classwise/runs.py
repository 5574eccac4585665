"""A training from files to files, as one process or as one of several that share it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from classwise.checkpoints import key_of
from classwise.data.dataset import read_dataset
from classwise.devices import choose_device, keep_memory, peak_memory_mb, platform_facts, use_threads
from classwise.models.classifier import save_weights, weights_fingerprint
from classwise.processes import Team, joined
from classwise.randomness import seed_of
from classwise.specs import Training
from classwise.store import HISTORY, write_json, write_table
from classwise.training import Listener, Saving, Trained, train


def train_files(request: Mapping[str, Any]) -> None:
    """Train what `request` describes (plain values: see the rule's script) and write weights, card and history."""
    training = Training.model_validate(request["job"]["training"])
    use_threads(max(1, request["threads"] // training.processes))
    keep_memory()
    with joined(choose_device(request["device"])) as (team, device), _log(request["log"], team) as log:
        dataset = read_dataset(request["arrays"], request["data_card"])
        names, job = request["names"], request["job"]
        identity = {
            "study": request["study"],
            **names,
            "defense_id": names["defense"],
            **job,
            "data": dataset.card["fingerprint"],
        }
        with tqdm(unit="update", file=log, ncols=110, mininterval=5, disable=not team.leads) as bar:
            trained = train(
                dataset,
                architecture=job["architecture"],
                defense=job["defense"],
                training=training,
                evaluation=job["evaluation"],
                removed=None if names["removed"] == "all" else int(names["removed"].removeprefix("no-")),
                seed=seed_of("train", request["study"], *names.values()),
                checkpoint=Path(request["checkpoint"]),
                key=key_of(**identity, source=request["source"]),
                device=device,
                listener=_shown(bar, log, stop_asked()),
                saving=Saving(**request["saving"]),
                team=team,
            )
        if team.leads:
            facts = {
                **platform_facts(device),
                "precision": training.precision,
                "source": request["source"],
                "seconds": round(float(trained.history["seconds"].max()), 3),
                "peak_memory_mb": round(peak_memory_mb(device), 1),
            }
            _write(request, trained, identity, facts, dataset.shape)


def _write(request: Mapping[str, Any], trained: Trained, identity: Mapping, facts: Mapping, shape) -> None:
    state = trained.model.state_dict()
    save_weights(request["weights"], state)
    write_table(request["history"], trained.history, {**identity, **facts}, HISTORY)
    write_json(
        request["card"],
        {
            **identity,
            "classes": trained.model.classes,
            "shape": shape,
            "epoch": trained.epoch,
            "fingerprint": weights_fingerprint(state),
            **facts,
        },
    )
    # Last: until here a killed job goes on from its checkpoint.
    Path(request["checkpoint"]).unlink(missing_ok=True)


def _shown(bar: tqdm, log, stop: Callable[[], bool]) -> Listener:
    """The news of a run as a progress bar of updates, with the accuracies of the last epoch beside it."""

    def step(done: int, steps: int) -> None:
        bar.total = steps
        bar.update(done - bar.n)

    def epoch(progress) -> None:
        bar.set_postfix(
            epoch=f"{progress.epoch}/{progress.epochs}",
            loss=f"{progress.loss:.3f}",
            natural=f"{progress.natural:.1f}%",
            robust=f"{progress.robust:.1f}%",
        )

    return Listener(epoch=epoch, step=step, note=lambda sentence: bar.write(sentence, file=log), stop=stop)


def stop_asked() -> Callable[[], bool]:
    """Whether SIGTERM or SIGUSR1, a cluster's notice that time is up, has come since; it kills nobody any more."""
    came: list[int] = []
    for name in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, lambda number, frame: came.append(number))
    return lambda: bool(came)


@contextmanager
def _log(path: str, team: Team):
    """Where this process writes: as one of several, the rule's log if it leads and nowhere if not."""
    if team.size == 1:
        yield sys.stderr
        return
    with Path(path).open("a", encoding="utf-8", buffering=1) if team.leads else nullcontext() as log:
        yield log
