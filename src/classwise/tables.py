"""The papers' tables: outcomes in, a tidy table and its Markdown out. Functions are named like their targets.

A tidy table has one row for each number: what it is about, the mean over seeds with its 95 % interval, the number of
seeds and of test images. `quantity` is `total` (the mean of the class accuracies), a class id, `cv` or `mcd`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from classwise.estimates import Estimate, estimate
from classwise.metrics import class_accuracy, cv, mcd

Card = Mapping[str, Any]  # a data set's data.json
MODEL = ["dataset", "arch", "defense"]


def tian21_table1(outcomes: pd.DataFrame, cards: Mapping[str, Card], keys: Mapping[str, Any]) -> pd.DataFrame:
    """Defenses x attacks: total, each class, CV, MCD."""
    per_seed = measures(outcomes, cards)
    return _ordered(_estimates(per_seed, [*MODEL, "attack"]), keys["defenses"], keys["attacks"])


def tian21_table3(outcomes: pd.DataFrame, cards: Mapping[str, Card], keys: Mapping[str, Any]) -> pd.DataFrame:
    """Temperature-PGD for each 1/T, with the differences to the baseline attack on the same seed."""
    per_seed = measures(outcomes, cards)
    same = [*MODEL, "seed", "quantity"]
    base = per_seed[per_seed["attack"] == keys["baseline"]].set_index(same)["value"].rename("base")
    joined = per_seed.join(base, on=same)
    joined = joined.assign(difference=joined["value"] - joined["base"])
    values = _estimates(joined, [*MODEL, "attack"])
    differences = _estimates(joined, [*MODEL, "attack"], column="difference")
    table = values.merge(
        differences, on=[*MODEL, "attack", "quantity", "seeds", "images"], suffixes=("", "_difference")
    )
    inverse = outcomes.drop_duplicates("attack").set_index("attack")["inverse_temperature"]
    table.insert(4, "inverse_temperature", table["attack"].map(inverse))
    return _ordered(table, keys["defenses"], [keys["baseline"], *keys["attacks"]])


def tian21_table5(outcomes: pd.DataFrame, cards: Mapping[str, Card], keys: Mapping[str, Any]) -> pd.DataFrame:
    """CV and MCD of each data set: standard training on natural images, adversarial training under attack."""
    per_seed = measures(outcomes, cards)
    parts = []
    for number, row in enumerate(keys["rows"]):
        for training, attack in (("standard", row["natural"]), ("adversarial", row["attack"])):
            here = per_seed[
                (per_seed["dataset"] == row["dataset"])
                & (per_seed["arch"] == row["arch"])
                & (per_seed["defense"] == row[training])
                & (per_seed["attack"] == attack)
                & per_seed["quantity"].isin(["total", "cv", "mcd"])
            ]
            here = here.assign(row=number, training=training)
            parts.append(_estimates(here, ["row", *MODEL, "attack", "training"]))
    return pd.concat(parts, ignore_index=True)


def measures(outcomes: pd.DataFrame, cards: Mapping[str, Card]) -> pd.DataFrame:
    """value[model, attack, seed, quantity], with the number of test images behind it."""
    rows = []
    for names, group in outcomes.groupby([*MODEL, "attack", "seed"], sort=False):
        accuracy = class_accuracy(group["label"], group["predicted"], range(len(cards[names[0]]["classes"])))
        values = {"total": accuracy.mean(), **{str(c): a for c, a in enumerate(accuracy)}}
        values |= {"cv": cv(accuracy), "mcd": mcd(accuracy)}
        rows += [(*names, quantity, value, len(group)) for quantity, value in values.items()]
    return pd.DataFrame(rows, columns=[*MODEL, "attack", "seed", "quantity", "value", "images"])


def _estimates(per_seed: pd.DataFrame, by: list[str], column: str = "value") -> pd.DataFrame:
    rows = []
    for names, group in per_seed.groupby([*by, "quantity"], sort=False):
        found = estimate(group[column], _bounds(names[-1]) if column == "value" else (-float("inf"), float("inf")))
        rows.append((*names, found.mean, found.low, found.high, found.half_width, found.n, int(group["images"].max())))
    return pd.DataFrame(rows, columns=[*by, "quantity", "mean", "low", "high", "half_width", "seeds", "images"])


def _bounds(quantity: str) -> tuple[float, float]:
    return (0.0, 2500.0) if quantity == "cv" else (0.0, 100.0)  # the variance of numbers in [0, 100] is at most 50^2


def _ordered(table: pd.DataFrame, defenses: Sequence[str], attacks: Sequence[str]) -> pd.DataFrame:
    """Rows in the order in which the study names defenses and attacks."""
    ranks = {
        "defense": {d: i for i, d in enumerate(defenses)},
        "attack": {a: i for i, a in enumerate(attacks)},
    }
    order = table.apply({name: lambda column, rank=rank: column.map(rank) for name, rank in ranks.items()})
    return table.loc[order.sort_values(["defense", "attack"], kind="stable").index].reset_index(drop=True)


# Markdown

ROBUST, VULNERABLE = "▲", "▼"


def tian21_table1_markdown(table: pd.DataFrame, cards: Mapping[str, Card]) -> str:
    classes = _class_names(table, cards)
    lines = [
        [defense, attack, f"{group['images'].iloc[0]:,}", *_numbers(group.set_index("quantity"), classes)]
        for (defense, attack), group in table.groupby(["defense", "attack"], sort=False)
    ]
    return _page(
        ["defense", "attack", "images", "Tot.", *classes.values(), "CV", "MCD"],
        lines,
        f"Accuracy in %; CV in %², MCD in points. {_note(table)} "
        f"{ROBUST} most robust class, {VULNERABLE} most vulnerable class of the row.",
    )


def tian21_table3_markdown(table: pd.DataFrame, cards: Mapping[str, Card]) -> str:
    classes, lines = _class_names(table, cards), []
    for (defense, attack), group in table.groupby(["defense", "attack"], sort=False):
        inverse, group = group["inverse_temperature"].iloc[0], group.set_index("quantity")
        lines.append([defense, attack, f"{inverse:g}", *_numbers(group, classes)])
        if group["mean_difference"].any() or group["half_width_difference"].any():
            lines.append(["", "difference", "", *_differences(group, classes)])
    return _page(
        ["defense", "attack", "1/T", "Tot.", *classes.values(), "CV", "MCD"],
        lines,
        f"Accuracy in % under Temperature-PGD; 1/T = 1 is PGD, and differences are to it, seed by seed. {_note(table)} "
        f"{ROBUST} most robust class, {VULNERABLE} most vulnerable class of the row.",
    )


def tian21_table5_markdown(table: pd.DataFrame, cards: Mapping[str, Card]) -> str:
    lines = []
    for _, group in table.groupby(["row", "training"], sort=False):
        names = group.iloc[0][["dataset", "arch", "training", "defense", "attack"]]
        group = group.set_index("quantity")
        lines.append([*names, *(_cell(_estimate(group.loc[quantity])) for quantity in ("total", "cv", "mcd"))])
    return _page(
        ["data set", "network", "training", "defense", "attack", "Tot.", "CV", "MCD"],
        lines,
        f"Tot. in %, CV in %², MCD in points. {_note(table)}",
    )


def _class_names(table: pd.DataFrame, cards: Mapping[str, Card]) -> dict[str, str]:
    (dataset,) = table["dataset"].unique()
    names = cards[dataset]["classes"]
    return {str(c): name if name == str(c) else f"{c} {name}" for c, name in enumerate(names)}


def _numbers(group: pd.DataFrame, classes: Mapping[str, str]) -> list[str]:
    means = group.loc[list(classes), "mean"]
    marks = {means.min(): f"{VULNERABLE} ", means.max(): f"{ROBUST} "} if means.nunique() > 1 else {}
    cells = {quantity: _cell(_estimate(group.loc[quantity])) for quantity in ("total", *classes, "cv", "mcd")}
    return [marks.get(means.get(quantity), "") + cell for quantity, cell in cells.items()]


def _differences(group: pd.DataFrame, classes: Mapping[str, str]) -> list[str]:
    return [
        _cell(_estimate(group.loc[quantity], "_difference"), signed=True)
        for quantity in ("total", *classes, "cv", "mcd")
    ]


def _estimate(row: pd.Series, suffix: str = "") -> Estimate:
    return Estimate(**{name: row[name + suffix] for name in ("mean", "low", "high", "half_width")}, n=row["seeds"])


def _cell(found: Estimate, signed: bool = False) -> str:
    mean = f"{found.mean:+.1f}" if signed else f"{found.mean:.1f}"
    return mean if found.n < 2 else f"{mean} ± {found.half_width:.1f}"


def _note(table: pd.DataFrame) -> str:
    seeds, images = table["seeds"].max(), sorted(table["images"].unique())
    counts = f"{images[0]:,}" if len(images) == 1 else f"{images[0]:,} to {images[-1]:,}"
    interval = "mean ± half of Student's 95 % interval over seeds" if seeds > 1 else "one seed, so no interval"
    return f"n = {seeds} seed{'s' if seeds > 1 else ''}, {counts} test images each; {interval}."


def _page(header: Iterable[str], lines: Iterable[Iterable[str]], note: str) -> str:
    header, rows = list(header), [list(line) for line in lines]
    names = header.index("Tot.")
    rule = ["---"] * names + ["---:"] * (len(header) - names)
    return "\n".join(["| " + " | ".join(row) + " |" for row in (header, rule, *rows)]) + f"\n\n{note}\n"


TABLES: dict[str, tuple[Callable, Callable]] = {
    "tian21_table1": (tian21_table1, tian21_table1_markdown),
    "tian21_table3": (tian21_table3, tian21_table3_markdown),
    "tian21_table5": (tian21_table5, tian21_table5_markdown),
}
