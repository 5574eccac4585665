"""The papers' figures, drawn from outcomes and histories. Functions are named like their targets; no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from classwise.estimates import estimate
from classwise.matrices import confusion_percent, misclassified_and_homing, square
from classwise.store import appearing

Card = Mapping[str, Any]  # a data set's data.json

THEME = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "figure.titlesize": 10,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # text stays text
    "svg.hashsalt": "classwise",
}
HEAT = "Blues"
# Ten colours that stay apart for colour-blind readers and readable as text on white (after Paul Tol's "muted" set).
CLASS_COLOURS = [
    "#332288",
    "#CC6677",
    "#117733",
    "#3C8DBC",
    "#882255",
    "#44AA99",
    "#8A8A2B",
    "#AA4499",
    "#B8860B",
    "#661100",
]
MAX_ANNOTATED = 20  # classes; beyond that numbers in the cells cannot be read


@dataclass(frozen=True)
class Drawn:
    """Figures by file stem, and the numbers that they show."""

    figures: dict[str, Figure]
    numbers: pd.DataFrame


def save(figure: Figure, path: Path) -> None:
    """PDF or PNG by the ending; the same figure gives the same bytes."""
    metadata = {"CreationDate": None} if path.suffix == ".pdf" else {"Software": None}
    with appearing(path) as temporary, plt.rc_context(THEME):
        figure.savefig(temporary, format=path.suffix[1:], bbox_inches="tight", metadata=metadata)


def tian21_figure1(histories: pd.DataFrame, cards: Mapping[str, Card], keys: Mapping[str, Any]) -> Drawn:
    """Class-wise robust test accuracy over the epochs; the gap between best and worst class is shaded."""
    panels, numbers = keys["panels"], []
    with sns.axes_style("ticks"), plt.rc_context(THEME):
        figure, axes = _grid(len(panels), width=4.4, height=3.2, sharey=True)
        for ax, panel in zip(axes, panels, strict=True):
            rows = _selected(histories, panel)
            curves = _curves(rows[(rows["split"] == "test") & rows["robust_accuracy"].notna()])
            names = cards[panel["dataset"]]["classes"]
            _draw_curves(ax, curves, names, _colours(len(names)))
            ax.set_title(_title(panel))
            numbers.append(curves.assign(**panel))
        for ax in axes[:: _columns(len(panels))]:
            ax.set_ylabel("robust accuracy on test images, %")
        _footnote(
            figure,
            f"Means over n = {len(keys['seeds'])} seeds; bars: 95 % intervals at the end; grey: best minus worst class",
        )
    return Drawn({"tian21_figure1": figure}, pd.concat(numbers, ignore_index=True))


def tian21_figure2(outcomes: pd.DataFrame, cards: Mapping[str, Card], keys: Mapping[str, Any]) -> Drawn:
    """Confusion matrix of robustness, in percent of the true class."""
    panels, numbers = keys["panels"], []
    with sns.axes_style("white"), plt.rc_context(THEME):
        figure, axes = _grid(len(panels), width=4.4, height=4.2)
        for ax, panel in zip(axes, panels, strict=True):
            names = cards[panel["dataset"]]["classes"]
            cells = confusion_percent(_selected(outcomes, panel), range(len(names)))
            _heat(ax, cells, names, top=100)
            ax.set(xlabel="predicted under attack", ylabel="true class")
            ax.set_title(f"{_title(panel)} under {panel['attack']}")
            numbers.append(cells.assign(**panel))
        _footnote(figure, f"% of the true class: mean ± half 95 % interval over n = {len(keys['seeds'])} seeds")
    return Drawn({"tian21_figure2": figure}, pd.concat(numbers, ignore_index=True))


def tian21_figure4(outcomes: pd.DataFrame, cards: Mapping[str, Card], keys: Mapping[str, Any]) -> Drawn:
    """(a) Misclassified examples, (b) those that are robust once their confound class is removed from training."""
    names = cards[keys["dataset"]]["classes"]
    matrices = misclassified_and_homing(outcomes, range(len(names)))
    total = {name: square(cells).to_numpy() for name, cells in matrices.items()}
    known = ~np.isnan(total["homing"])
    share = 100 * total["homing"][known].sum() / max(total["misclassified"][known].sum(), 1)
    top, figures = max(np.nanmax(total["misclassified"]), 1), {}
    texts = {
        "misclassified": ("a", "predicted under attack (confound class)", "examples that the attack moves"),
        "homing": (
            "b",
            "class removed from training",
            f"of these, home without the confound class: {share:.0f} %",
        ),
    }
    seeds = len(keys["seeds"])
    for name, (letter, xlabel, title) in texts.items():
        with sns.axes_style("white"), plt.rc_context(THEME):
            figure, (ax,) = _grid(1, width=4.6, height=4.2)
            _heat(ax, matrices[name], names, top=top, hide_diagonal=True)
            ax.set(xlabel=xlabel, ylabel="true class")
            ax.set_title(f"{_title(keys)} under {keys['attack']}\n{title}")
            _footnote(figure, f"Test images: mean ± half 95 % interval over n = {seeds} seeds")
        figures[f"tian21_figure4{letter}"] = figure
    numbers = pd.concat([cells.assign(matrix=name) for name, cells in matrices.items()], ignore_index=True)
    return Drawn(figures, numbers.assign(**{key: keys[key] for key in ("dataset", "arch", "defense", "attack")}))


FIGURES: dict[str, Callable[..., Drawn]] = {
    "tian21_figure1": tian21_figure1,
    "tian21_figure2": tian21_figure2,
    "tian21_figure4": tian21_figure4,
}


def _columns(count: int) -> int:
    return min(count, 3)


def _grid(count: int, width: float, height: float, **options) -> tuple[Figure, np.ndarray]:
    columns = _columns(count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        squeeze=False,
        layout="constrained",
        **options,
    )
    for ax in axes.flat[count:]:
        ax.remove()
    return figure, axes.flat[:count]


def _selected(table: pd.DataFrame, panel: Mapping[str, str]) -> pd.DataFrame:
    """The rows whose columns have the values that the panel names."""
    chosen = np.logical_and.reduce([table[name] == value for name, value in panel.items()])
    return table[chosen]


def _title(panel: Mapping[str, str]) -> str:
    return f"{panel['dataset']} · {panel['arch']} · {panel['defense']}"


def _colours(count: int) -> list:
    """The same colour for the same class in every figure."""
    return CLASS_COLOURS[:count] if count <= len(CLASS_COLOURS) else sns.husl_palette(count, l=0.5)


def _footnote(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=7, color="0.35")


def _curves(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean and interval over seeds of each class's robust accuracy in each epoch."""
    found = [
        (epoch, c, *astuple(estimate(group["robust_accuracy"], (0, 100))))
        for (epoch, c), group in rows.groupby(["epoch", "class"])
    ]
    return pd.DataFrame(found, columns=["epoch", "class", "mean", "low", "high", "half_width", "seeds"])


def _draw_curves(ax: Axes, curves: pd.DataFrame, names: Sequence[str], colours: Sequence) -> None:
    means = curves.pivot(index="epoch", columns="class", values="mean")
    first, last = means.index[0], means.index[-1]
    ax.fill_between(means.index, means.min(axis=1), means.max(axis=1), color="0.9", lw=0, zorder=0)
    for c, curve in curves.groupby("class"):
        ax.plot(curve["epoch"], curve["mean"], color=colours[c], lw=1.2)
    ax.plot(means.index, means.mean(axis=1), color="black", lw=1.4, ls="--")
    ax.set(xlabel="epoch", ylim=(0, 101), xlim=(first, last))
    ends = curves[curves["epoch"] == last].set_index("class")
    # Intervals stand beside the last epoch, where they do not hide the curves.
    unit = (last - first) / 100 or 1
    for place, (c, end) in enumerate(ends.iterrows()):
        if not np.isnan(end["low"]):
            x = last + unit * (2 + 1.3 * place)
            ax.plot([x, x], [end["low"], end["high"]], color=colours[c], lw=1.2, clip_on=False)
    labels = [(names[c], end["mean"], end["half_width"], colours[c]) for c, end in ends.iterrows()]
    labels.append(("mean", ends["mean"].mean(), np.nan, "black"))
    for (text, value, half, colour), place in zip(
        labels, _spread([label[1] for label in labels], gap=4.4), strict=True
    ):
        interval = "" if np.isnan(half) else f" ± {half:.0f}"
        ax.text(
            last + unit * (4 + 1.3 * len(ends)),
            place,
            f"{text}:  {value:.0f}{interval}",
            color=colour,
            va="center",
            fontsize=7,
        )
    sns.despine(ax=ax)


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """Places near the values, at least `gap` apart, in the same order: for labels at line ends."""
    order = np.argsort(values, kind="stable")
    places = np.asarray(values, dtype=float)[order]
    for _ in range(200):
        moved = False
        for k in range(len(places) - 1):
            lack = gap - (places[k + 1] - places[k])
            if lack > 1e-9:
                places[k] -= lack / 2
                places[k + 1] += lack / 2
                moved = True
        if not moved:
            break
    result = np.empty(len(places))
    result[order] = places
    return result.tolist()


def _heat(ax: Axes, cells: pd.DataFrame, names: Sequence[str], top: float, hide_diagonal: bool = False) -> None:
    means, halves = square(cells), square(cells, "half_width")
    annotate = len(names) <= MAX_ANNOTATED
    sns.heatmap(
        means,
        mask=means.isna() | (np.eye(len(names), dtype=bool) if hide_diagonal else False),
        vmin=0,
        vmax=top,
        cmap=HEAT,
        square=True,
        linewidths=0.5 if annotate else 0,
        cbar_kws={"shrink": 0.7},
        annot=_annotations(means, halves) if annotate else False,
        fmt="",
        annot_kws={"fontsize": 5.5},
        xticklabels=list(names) if annotate else "auto",
        yticklabels=list(names) if annotate else "auto",
        ax=ax,
    )
    long = annotate and max(map(len, names)) > 2
    ax.tick_params(axis="x", rotation=45 if long else 0, length=0)
    ax.tick_params(axis="y", rotation=0, length=0)
    if long:
        plt.setp(ax.get_xticklabels(), ha="right", rotation_mode="anchor")


def _annotations(means: pd.DataFrame, halves: pd.DataFrame) -> np.ndarray:
    """`68` over `±3`; cells that round to nothing stay empty."""

    def text(mean: float, half: float) -> str:
        if not mean >= 0.5:
            return ""
        return f"{mean:.0f}" if np.isnan(half) else f"{mean:.0f}\n±{half:.0f}"

    cells = [
        [text(*cell) for cell in zip(*rows, strict=True)] for rows in zip(means.values, halves.values, strict=True)
    ]
    return np.array(cells, dtype=object)
