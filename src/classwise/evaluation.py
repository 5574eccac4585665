"""One loop judges a model under an attack, example by example."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from classwise.attacks import ATTACKS
from classwise.attacks.target import Target, readable
from classwise.engine import prepared
from classwise.errors import UserError
from classwise.models.classifier import Classifier
from classwise.randomness import seed_of
from classwise.store import LINF_TOLERANCE, read_metadata, read_table, write_table


@dataclass(frozen=True)
class Split:
    """Images of the classes kept, on the device as uint8, with their places in the whole split."""

    images: torch.Tensor  # uint8[example, channel, row, column]
    labels: torch.Tensor  # positions in the classes kept
    index: np.ndarray  # position[example] in the data set's split
    levels: int

    @classmethod
    def of(cls, images: np.ndarray, labels: np.ndarray, classes, levels: int, device, keep=None) -> Split:
        """The examples of `classes` (original ids), further limited to the indices `keep` if given."""
        index = np.flatnonzero(np.isin(labels, classes))
        if keep is not None:
            index = index[np.isin(index, keep)]
        position = np.full(max(int(labels.max()), *classes) + 1, -1)
        position[list(classes)] = np.arange(len(classes))
        return cls(
            torch.from_numpy(images[index]).to(device),
            torch.from_numpy(position[labels[index]]).to(device),
            index,
            levels,
        )

    def subset(self, per_class: int, seed: int, classes: Sequence[int]) -> Split:
        """`per_class` images of each class, chosen by `seed`, in their order.

        `classes` are the original ids behind the labels: a model without a class sees the same images of the others.
        """
        labels, chosen = self.labels.cpu().numpy(), []
        for c in np.unique(labels):
            members = np.flatnonzero(labels == c)
            if len(members) < per_class:
                raise UserError(f"views: per_class = {per_class}: a class has only {len(members)} test images")
            chosen.append(np.random.default_rng(seed_of("view", seed, classes[c])).permutation(members)[:per_class])
        rows = np.sort(np.concatenate(chosen))
        return Split(self.images[rows], self.labels[rows], self.index[rows], self.levels)

    def part(self, number: int, parts: int) -> Split:
        """Every `parts`-th example, beginning with the `number`-th."""
        rows = slice(number, None, parts)
        return Split(self.images[rows], self.labels[rows], self.index[rows], self.levels)

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Images in [0, 1] and labels of the given rows."""
        return self.images[rows].float() / self.levels, self.labels[rows]


class Parts:
    """Finished batches on disk, so that a killed attack loses one batch at most."""

    def __init__(self, folder: Path, key: str):
        self.folder, self.key = Path(folder), key

    def load(self, first: int) -> pd.DataFrame | None:
        """The batch that begins at row `first`, if it was finished with the same parameters, model, data and code."""
        path = self._path(first)
        try:
            if path.exists() and read_metadata(path).get("key") == self.key:
                return read_table(path)
        except UserError:
            pass  # damaged: this batch is attacked again
        return None

    def save(self, first: int, outcomes: pd.DataFrame) -> None:
        write_table(self._path(first), outcomes, {"key": self.key})

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, first: int) -> Path:
        return self.folder / f"{first:08d}.parquet"


def evaluate(
    model: Classifier,
    split: Split,
    attack: Mapping[str, Any],
    *,
    seed: int,
    batch_size: int,
    precision: str = "fp32",
    compiled: bool = False,
    surrogate: Classifier | None = None,
    parts: Parts | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> pd.DataFrame:
    """The outcomes of every example of `split` under `attack`, plus `loss` (the cross entropy) and what `sanity_facts`
    counts: `zero_gradient`, `finite` and `repeatable`.

    The model is in evaluation mode. The attack climbs on a prepared copy in `precision`; predictions are original class
    ids, from a final float32 forward pass of the model itself. Each batch has its own generator, from `seed` and its
    place, so no batch depends on the ones before it, and those that `parts` holds are not attacked again.
    """
    keys = dict(attack)
    run, epsilon = partial(ATTACKS[keys.pop("kind")], **keys), attack.get("epsilon", 0.0)
    if surrogate is not None:
        run = partial(run, source=prepared(surrogate, precision, compiled))
    fast, tables = prepared(model, precision, compiled), []
    for first in range(0, len(split), batch_size):
        table = parts.load(first) if parts else None
        if table is None:
            x, y = split.batch(slice(first, first + batch_size))
            generator = torch.Generator(x.device).manual_seed(seed_of(seed, first))
            target = Target(model, fast, len(x), x.device)
            adversarial = run(target, x, y, generator=generator).detach()
            columns = _judge(model, x, adversarial, y, epsilon, ask_twice=first == 0)
            columns |= {"steps": target.steps, "zero_gradient": target.zero_gradient}
            table = _table(columns, split.index[first : first + batch_size], model.classes)
            if parts:
                parts.save(first, table)
        tables.append(table)
        report(min(first + batch_size, len(split)))
    return pd.concat(tables, ignore_index=True)


def _table(columns: Mapping[str, torch.Tensor], index: np.ndarray, classes: tuple[int, ...]) -> pd.DataFrame:
    arrays = {name: values.cpu().numpy() for name, values in columns.items()}
    for name in ("label", "natural", "predicted"):
        arrays[name] = np.asarray(classes)[arrays[name]]
    return pd.DataFrame({"index": index, **arrays})


@torch.no_grad()
def _judge(model, x, adversarial, y, epsilon: float, *, ask_twice: bool) -> dict[str, torch.Tensor]:
    """Who is what, for the model itself in float32.

    An example is judged on its finite logits; where none is finite it counts as misclassified, so NaN is never robust.
    The cross entropy stays that of the logits as they are: a history shall show that a training broke down.
    """
    linf = (adversarial - x).abs().flatten(1).amax(dim=1)
    if not bool(((adversarial >= 0) & (adversarial <= 1)).all()) or not bool((linf <= epsilon + LINF_TOLERANCE).all()):
        raise ValueError(f"the attack left [0, 1] or the ball: largest perturbation {float(linf.max())}")
    natural, logits = model(x).float(), model(adversarial).float()
    probabilities = readable(logits).softmax(dim=1)
    return {
        "label": y,
        "natural": _predicted(natural, y),
        "predicted": _predicted(logits, y),
        "p_label": probabilities.gather(1, y[:, None])[:, 0],
        "p_max": probabilities.amax(dim=1),
        "p_var": probabilities.var(dim=1, correction=0),
        "linf": linf,
        "loss": torch.nn.functional.cross_entropy(logits, y, reduction="none"),
        "finite": (natural.isfinite() & logits.isfinite()).all(dim=1),
        "repeatable": _same(model(x).float(), natural) if ask_twice else torch.ones_like(y, dtype=torch.bool),
    }


def _predicted(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The class of the largest finite logit; without any, the first class that is not the label."""
    nothing = ~logits.isfinite().any(dim=1)
    return torch.where(nothing, (y == 0).to(y), readable(logits).argmax(dim=1))


def _same(again: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """same[example]: equal logits up to the rounding of parallel sums, with the tolerance of AutoAttack's check."""
    return torch.isclose(again, before, rtol=1e-4, atol=1e-4, equal_nan=True).all(dim=1)


def sanity_facts(outcomes: pd.DataFrame) -> dict[str, float | int]:
    """What `classwise.sanity` warns of, from the columns of `evaluate`.

    `zero_gradient` is the share of examples that the attack had nothing to climb for and that count as robust: who is
    fooled already (a margin below its confidence, say) needs no gradient. It lives here and not there, so that another
    word in a warning attacks no model again.
    """
    robust = outcomes["predicted"] == outcomes["label"]
    return {
        "zero_gradient": float((outcomes["zero_gradient"] & robust).mean()),
        "not_finite": int((~outcomes["finite"]).sum()),
        "not_repeatable": int((~outcomes["repeatable"]).sum()),
    }
