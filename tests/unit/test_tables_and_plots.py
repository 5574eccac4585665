"""Tables, matrices and figures from outcomes whose answers are known."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from classwise.estimates import estimate
from classwise.matrices import confusion_percent, misclassified_and_homing, square
from classwise.page import item, markdown_table, render
from classwise.plots import FIGURES, _spread, save
from classwise.store import write_table, write_text
from classwise.tables import TABLES

CARDS = {"toy": {"classes": ["cat", "dog", "car"], "class_counts": {"train": [4, 4, 4], "test": [4, 4, 4]}}}


def outcomes(hits: dict[int, int], *, attack="pgd", defense="madry", removed="all", seed=0, wrong=None) -> pd.DataFrame:
    """Four examples of each class; the first `hits[c]` are right, the others go to the next class (or `wrong`)."""
    rows = []
    for c in (k for k in range(3) if removed != f"no-{k}"):
        for place in range(4):
            other = (c + 1) % 3 if wrong is None else wrong[c]
            rows.append((4 * c + place, c, c if place < hits[c] else other))
    table = pd.DataFrame(rows, columns=["index", "label", "predicted"])
    names = {"dataset": "toy", "arch": "net", "defense": defense, "removed": removed, "view": "test"}
    inverse = float(attack.removeprefix("tpgd")) if attack.startswith("tpgd") else 1.0
    return table.assign(**names, seed=seed, attack=attack, inverse_temperature=inverse)


def several(*parts) -> pd.DataFrame:
    return pd.concat(parts, ignore_index=True)


BLOCK1 = {"dataset": "toy", "arch": "net", "defenses": ["madry"], "attacks": ["natural", "pgd"], "seeds": [0, 1]}


def table1():
    parts = [
        outcomes({0: 4, 1: 4, 2: 4}, attack="natural", seed=0),
        outcomes({0: 4, 1: 4, 2: 4}, attack="natural", seed=1),
        outcomes({0: 1, 1: 2, 2: 4}, seed=0),
        outcomes({0: 1, 1: 4, 2: 4}, seed=1),
    ]
    build, markdown = TABLES["tian21_table1"]
    table = build(several(*parts), CARDS, BLOCK1)
    return table, markdown(table, CARDS)


def test_table1_has_the_mean_of_seeds_and_measures_taken_seed_by_seed():
    table, _ = table1()
    pgd = table[table["attack"] == "pgd"].set_index("quantity")
    assert pgd.loc["0", "mean"] == 25
    assert pgd.loc["1", "mean"] == 75
    assert pgd.loc["total", "mean"] == pytest.approx((175 / 3 + 75) / 2)
    assert pgd.loc["cv", "mean"] == pytest.approx((np.var([25, 50, 100]) + np.var([25, 100, 100])) / 2)
    assert pgd.loc["mcd", "mean"] == 75
    assert (table["seeds"] == 2).all()
    assert (table["images"] == 12).all()


def test_intervals_are_students_and_cut_to_what_is_possible():
    table, _ = table1()
    row = table[(table["attack"] == "pgd") & (table["quantity"] == "1")].iloc[0]
    assert row["half_width"] == pytest.approx(12.706 * 25, rel=1e-3)  # t(1) times the standard error of 50 and 100
    assert (row["low"], row["high"]) == (0, 100)


def test_one_seed_has_no_interval_and_says_so():
    found = estimate([3.0])
    assert (found.mean, found.n) == (3.0, 1)
    assert np.isnan([found.low, found.high, found.half_width]).all()
    build, markdown = TABLES["tian21_table1"]
    one = build(outcomes({0: 1, 1: 2, 2: 4}), CARDS, {**BLOCK1, "attacks": ["pgd"]})
    assert "one seed, so no interval" in markdown(one, CARDS)
    assert "±" not in markdown(one, CARDS)


def test_table1_marks_the_most_robust_and_the_most_vulnerable_class_and_states_n():
    _, text = table1()
    rows = text.splitlines()
    assert rows[0].startswith("| defense | attack | images | Tot. | 0 cat | 1 dog | 2 car | CV | MCD |")
    attacked = [cell.strip() for cell in rows[3].split("|")]
    assert attacked[3] == "12"
    assert attacked[5].startswith("▼ 25.0")
    assert attacked[7].startswith("▲ 100.0")
    assert "▲" not in rows[2]  # all classes equal: nothing to mark
    assert "n = 2 seeds, 12 test images" in text


def test_tied_classes_are_all_marked():
    build, markdown = TABLES["tian21_table1"]
    table = build(outcomes({0: 1, 1: 1, 2: 4}), CARDS, {**BLOCK1, "attacks": ["pgd"]})
    assert markdown(table, CARDS).splitlines()[2].count("▼") == 2


def test_table3_takes_differences_seed_by_seed():
    parts = []
    for seed, (base, hot) in enumerate([(4, 3), (2, 1)]):
        parts += [
            outcomes({0: base, 1: 4, 2: 4}, attack="pgd", seed=seed),
            outcomes({0: hot, 1: 4, 2: 4}, attack="tpgd5", seed=seed),
        ]
    build, markdown = TABLES["tian21_table3"]
    block = {"defenses": ["madry"], "baseline": "pgd", "attacks": ["tpgd5"]}
    table = build(several(*parts), CARDS, block)
    row = table[(table["attack"] == "tpgd5") & (table["quantity"] == "0")].iloc[0]
    assert row["inverse_temperature"] == 5
    assert row["mean"] == 50
    # the accuracies of the two seeds differ by 50 points; their differences to PGD not at all
    assert (row["mean_difference"], row["half_width_difference"]) == (-25, 0)
    assert "-25.0 ± 0.0" in markdown(table, CARDS)


def test_table5_sets_standard_against_adversarial_training():
    parts = [
        outcomes({0: 4, 1: 4, 2: 3}, attack="natural", defense="standard"),
        outcomes({0: 1, 1: 2, 2: 4}, attack="pgd", defense="madry"),
    ]
    row = {"dataset": "toy", "arch": "net", "standard": "standard", "natural": "natural"}
    build, markdown = TABLES["tian21_table5"]
    table = build(several(*parts), CARDS, {"rows": [{**row, "adversarial": "madry", "attack": "pgd"}]})
    mcd = table[table["quantity"] == "mcd"].set_index("training")["mean"]
    assert mcd.to_dict() == {"standard": 25, "adversarial": 75}
    assert "| toy | net | adversarial | madry | pgd |" in markdown(table, CARDS)


def test_one_data_set_may_stand_in_several_rows_and_two_attacks_may_share_a_temperature():
    parts = [
        outcomes({0: 4, 1: 4, 2: 3}, attack="natural", defense="standard"),
        outcomes({0: 1, 1: 2, 2: 4}, attack="pgd"),
        outcomes({0: 1, 1: 1, 2: 4}, attack="fgsm"),
    ]
    row = {"dataset": "toy", "arch": "net", "standard": "standard", "natural": "natural", "adversarial": "madry"}
    build, markdown = TABLES["tian21_table5"]
    table = build(several(*parts), CARDS, {"rows": [{**row, "attack": "pgd"}, {**row, "attack": "fgsm"}]})
    assert markdown(table, CARDS).count("| toy |") == 4
    build, markdown = TABLES["tian21_table3"]
    table = build(several(*parts[1:]), CARDS, {"defenses": ["madry"], "baseline": "pgd", "attacks": ["fgsm"]})
    assert markdown(table, CARDS).count("| madry |") == 2


def test_confusion_is_in_percent_of_the_true_class():
    cells = square(confusion_percent(outcomes({0: 1, 1: 2, 2: 4}), range(3)))
    assert cells.loc[0].tolist() == [25, 75, 0]
    assert cells.sum(axis=1).tolist() == [100, 100, 100]


def homing_outcomes() -> pd.DataFrame:
    parts = []
    for seed in (0, 1):
        parts.append(outcomes({0: 1, 1: 4, 2: 4}, seed=seed))  # three cats are taken for dogs
        parts.append(outcomes({0: 3, 2: 4}, removed="no-1", seed=seed, wrong={0: 2, 2: 0}))
    return several(*parts)


def test_homing_joins_the_outcomes_of_full_and_reduced_models():
    matrices = misclassified_and_homing(homing_outcomes(), range(3))
    lost, home = square(matrices["misclassified"]), square(matrices["homing"])
    assert lost.loc[0, 1] == 3
    assert home.loc[0, 1] == 2  # places 1 and 2 come home, place 3 does not
    assert home[2].isna().all()
    assert (matrices["homing"]["seeds"] == 2).all()


def history() -> pd.DataFrame:
    rows = [
        (epoch, "test", c, seed, min(100.0, 10.0 * epoch * (c + 1) + seed))
        for epoch in (1, 2, 3)
        for c in range(3)
        for seed in (0, 1)
    ]
    table = pd.DataFrame(rows, columns=["epoch", "split", "class", "seed", "robust_accuracy"])
    return table.assign(dataset="toy", arch="net", defense="madry", removed="all")


PANEL = {"dataset": "toy", "arch": "net", "defense": "madry"}
DRAWINGS = {
    "tian21_figure1": (history, {"panels": [PANEL], "seeds": [0, 1]}),
    "tian21_figure2": (homing_outcomes, {"panels": [{**PANEL, "attack": "pgd"}] * 4, "seeds": [0, 1]}),
    "tian21_figure4": (homing_outcomes, {**PANEL, "attack": "pgd", "removed": [1], "seeds": [0, 1]}),
}


@pytest.mark.parametrize("name", list(FIGURES))
def test_every_figure_draws_and_is_the_same_twice(tmp_path, name):
    data, block = DRAWINGS[name]
    for turn in ("a", "b"):
        drawn = FIGURES[name](data(), CARDS, block)
        assert len(drawn.numbers)
        for stem, figure in drawn.figures.items():
            assert stem.startswith(name)
            assert isinstance(figure, Figure)
            for ending in ("png", "pdf"):
                save(figure, tmp_path / turn / f"{stem}.{ending}")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_saved_figures_have_the_theme_for_print(tmp_path):
    figure = FIGURES["tian21_figure1"](history(), CARDS, DRAWINGS["tian21_figure1"][1]).figures["tian21_figure1"]
    for ending in ("png", "pdf"):
        save(figure, tmp_path / f"a.{ending}")
    width = int.from_bytes((tmp_path / "a.png").read_bytes()[16:20], "big")
    assert width > 150 * figure.get_figwidth() * 0.9  # 200 dots an inch, cropped; not matplotlib's 100
    assert b"/Type3" not in (tmp_path / "a.pdf").read_bytes()


def test_labels_at_line_ends_do_not_overlap_and_keep_their_order():
    places = _spread([50.0, 50.0, 51.0, 90.0, 49.9], gap=4)
    assert np.diff(np.sort(places)).min() >= 4 - 1e-6
    assert np.argsort(places).tolist() == [4, 0, 1, 2, 3]


def test_the_page_is_self_contained_and_carries_everything(tmp_path):
    table, text = table1()
    write_text(tmp_path / "tables" / "tian21_table1.md", text)
    write_table(tmp_path / "tables" / "tian21_table1.parquet", table, {"provenance": {"models": 7}})
    drawn = FIGURES["tian21_figure1"](history(), CARDS, DRAWINGS["tian21_figure1"][1])
    save(drawn.figures["tian21_figure1"], tmp_path / "figures" / "tian21_figure1.png")
    write_table(tmp_path / "tables" / "tian21_figure1.parquet", drawn.numbers, {})
    items = [
        item(name, f"What {name} <shows>.", sorted(tmp_path.rglob(f"{name}.*")), tmp_path)
        for name in ("tian21_table1", "tian21_figure1")
    ]
    study = {"study": "toy", "title": "A <toy>", "description": "", "seeds": [0, 1]}
    page = render(study, items, CARDS, "abc1234")
    for needed in (
        "What tian21_table1 &lt;shows&gt;.",
        "A &lt;toy&gt;",
        "snakemake tian21_figure1 --config study=toy",
        "data:image/png;base64,",
        'href="tables/tian21_table1.parquet"',
        "&#34;models&#34;: 7",
        "abc1234",
        "▼ 25.0",
    ):
        assert needed in page
    for address in ("http://", "https://", "<script"):
        assert address not in page


def test_markdown_cells_are_escaped():
    assert "&lt;b&gt;" in markdown_table("| a | b | c |\n| --- | --- | ---: |\n| <b> | x | 1 |")
