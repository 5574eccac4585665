"""The sanity report: each check warns of what it is for, of nothing else, and everybody who reads a table is told."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classwise.attacks import ATTACKS
from classwise.evaluation import sanity_facts
from classwise.page import item, render
from classwise.sanity import MARK, NOTED, WEAKER_RELATIVES, markdown, report, weaker
from classwise.store import OUTCOMES, gather_outcomes, read_metadata, write_outcomes, write_table, write_text

TABLE = "| defense | Tot. |\n| --- | ---: |\n| madry | 50.0 |\n\nA note.\n"


def attacked(kind: str, fooled, *, name=None, epsilon=0.2, seed=0, defense="madry", index=None, sanity=None):
    """Rows as `gather_outcomes` gives them, and the metadata of their file; `fooled[example]`."""
    fooled = np.asarray(fooled, dtype=bool)
    model = {"dataset": "toy", "arch": "net", "defense": defense, "removed": "all"}
    name = name or kind
    index = np.arange(len(fooled)) if index is None else index
    rows = pd.DataFrame({"index": index, "label": 0, "predicted": fooled.astype(int)})
    facts = {**model, "seed": str(seed), "attack_id": name, "attack": {"kind": kind, "epsilon": epsilon}}
    if sanity:
        facts["sanity"] = {"zero_gradient": 0.0, "not_finite": 0, "not_repeatable": 0, **sanity}
    return rows.assign(**model, seed=seed, attack=name), facts


def warnings(*parts) -> list[str]:
    tables, files = zip(*parts, strict=True)
    return report(pd.concat(tables, ignore_index=True), files)


def first(count: int, of: int = 100) -> np.ndarray:
    return np.arange(of) < count


RELATIONS = [(strong, weak) for strong, weaks in WEAKER_RELATIVES.items() for weak in weaks]


def test_relations_are_between_attacks_that_exist():
    assert {kind for pair in RELATIONS for kind in pair} <= set(ATTACKS)
    assert "targeted-pgd" not in {kind for pair in RELATIONS for kind in pair}
    assert ("pgd", "fgsm") in RELATIONS
    assert ("pgd", "transfer") in RELATIONS
    assert ("autoattack", "pgd") in RELATIONS


@pytest.mark.parametrize(("strong", "weak"), RELATIONS)
def test_an_attack_that_its_weaker_relative_outdoes_is_named_with_numbers(strong, weak):
    (sentence,) = warnings(attacked(strong, first(30), name="a"), attacked(weak, first(60), name="b"))
    assert sentence == (
        "a on madry (toy, net), seed 0: weaker than b, which should be the weaker one. "
        "Of 100 examples, b alone fools 30 and a alone 0."
    )


@pytest.mark.parametrize(("strong", "weak"), RELATIONS)
def test_the_expected_order_is_no_warning(strong, weak):
    assert warnings(attacked(strong, first(60)), attacked(weak, first(30))) == []


@pytest.mark.parametrize(
    "other", [{"epsilon": 0.1}, {"defense": "trades"}, {"seed": 1}, {"index": np.arange(100, 200)}]
)
def test_only_the_same_model_seed_epsilon_and_examples_are_compared(other):
    assert warnings(attacked("pgd", first(30)), attacked("fgsm", first(60), **other)) == []


def test_attacks_without_a_relation_are_left_alone():
    assert warnings(attacked("targeted-pgd", first(0)), attacked("fgsm", first(60)), attacked("pgd", first(90))) == []
    natural, facts = attacked("none", first(80))
    del facts["attack"]["epsilon"]
    assert warnings((natural, facts), attacked("pgd", first(0))) == []


def test_examples_that_only_one_attack_has_seen_do_not_count():
    few = attacked("cw-linf", first(0, of=10), index=np.arange(90, 100))
    assert warnings(few, attacked("fgsm", first(90))) == []
    (sentence,) = warnings(few, attacked("fgsm", first(100)))
    assert "Of 10 examples, fgsm alone fools 10 and cw-linf alone 0." in sentence


def test_one_unlucky_start_is_no_warning():
    assert not weaker(0, 4)  # 1 / 16 by chance
    assert weaker(0, 5)  # 1 / 32
    assert warnings(attacked("pgd", first(50)), attacked("fgsm", first(54))) == []


FOOLED = st.lists(st.booleans(), min_size=1, max_size=60)


@given(fooled=FOOLED, relation=st.sampled_from(RELATIONS))
def test_no_attack_is_weaker_than_one_that_fools_the_same(fooled, relation):
    strong, weak = relation
    assert warnings(attacked(strong, fooled), attacked(weak, fooled)) == []


@given(pairs=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_fooling_a_superset_is_never_weaker_and_nobody_is_weaker_both_ways(pairs):
    weak, extra = np.array(pairs).T
    assert warnings(attacked("pgd", weak | extra), attacked("fgsm", weak)) == []
    one, other = int((weak & ~extra).sum()), int((extra & ~weak).sum())
    assert not (weaker(one, other) and weaker(other, one))


@given(only_strong=st.integers(0, 200), only_weak=st.integers(0, 200))
def test_more_evidence_never_withdraws_a_warning(only_strong, only_weak):
    if weaker(only_strong, only_weak):
        assert only_weak > only_strong
        assert weaker(only_strong, only_weak + 1)


def test_seeds_with_the_same_warning_share_a_sentence():
    parts = [attacked("pgd", first(30), seed=seed, sanity={"zero_gradient": 0.1 * seed}) for seed in (0, 1, 2)]
    parts += [attacked("fgsm", first(fooled), seed=seed) for seed, fooled in enumerate((60, 30, 50))]
    stalled, outdone = warnings(*parts)
    assert stalled.startswith("pgd on madry (toy, net), seeds 1 and 2: 10.0 to 20.0 % of the examples count as robust")
    assert outdone.startswith("pgd on madry (toy, net), seeds 0 and 2: weaker than fgsm")
    assert "Of 200 examples, fgsm alone fools 50 and pgd alone 0." in outdone


@pytest.mark.parametrize(
    ("noted", "told"),
    [
        ({"zero_gradient": 0.051}, "5.1 % of the examples count as robust though their first gradient was zero"),
        ({"not_finite": 1}, "logits of 1 example are not finite"),
        ({"not_repeatable": 1200}, "other logits for 1,200 examples of the first batch"),
    ],
)
def test_what_the_attack_noted_is_told(noted, told):
    (sentence,) = warnings(attacked("pgd", first(5), sanity=noted))
    assert sentence.startswith("pgd on madry (toy, net), seed 0: ")
    assert told in sentence


def test_every_fact_that_an_attack_notes_has_its_sentence():
    columns = {"label": [0], "predicted": [0], "zero_gradient": [True], "finite": [False], "repeatable": [False]}
    assert set(sanity_facts(pd.DataFrame(columns))) == set(NOTED)


def test_a_few_zero_gradients_are_no_warning_and_older_files_noted_nothing():
    assert warnings(attacked("pgd", first(5), sanity={"zero_gradient": 0.05})) == []
    assert warnings(attacked("pgd", first(5), sanity=None)) == []


def test_it_reads_the_outcomes_files_as_they_are_stored(tmp_path):
    paths = []
    for kind, count in (("pgd", 0), ("transfer", 50)):
        rows, facts = attacked(kind, first(count, of=80), sanity={"not_finite": 2} if kind == "pgd" else None)
        table = pd.DataFrame(0, index=rows.index, columns=OUTCOMES.names)
        table = table.assign(**rows[["index", "label", "predicted"]])
        paths.append(tmp_path / f"{kind}.parquet")
        write_outcomes(paths[-1], table, {**facts, "view": "test", "classes": [0, 1]}, expected=rows["index"])
    found = report(gather_outcomes(paths), [read_metadata(path) for path in paths])
    assert ["not finite" in found[0], "weaker than transfer" in found[1], len(found)] == [True, True, 2]


def test_the_markdown_counts_the_warnings_and_marks_each():
    assert markdown([]).startswith("Sanity: no warning (")
    assert markdown(["One."]) == f"Sanity: 1 warning.\n\n{MARK}One.\n"
    assert markdown(["One.", "Two."]).splitlines()[::2] == ["Sanity: 2 warnings.", f"{MARK}One.", f"{MARK}Two."]


def page(folder, found: list[str]) -> str:
    write_text(folder / "tian21_table1.md", f"{TABLE}\n{markdown(found)}")
    write_table(folder / "tian21_table1.parquet", pd.DataFrame({"mean": [50.0]}), {"sanity": found})
    one = item("tian21_table1", "A caption.", sorted(folder.iterdir()), folder)
    return render({"study": "toy", "title": "Toy", "description": "", "seeds": [0]}, [one], {}, "abc")


def test_the_page_shows_warnings_at_the_table_and_links_to_it_from_the_top(tmp_path):
    text = page(tmp_path, ["pgd < fgsm."])
    top, table = text.split("</header>")
    assert "The sanity report has 1 warning:" in top
    assert '<a href="#tian21_table1">tian21 Table 1</a> (1)' in top
    assert f'<p class="warning">{MARK}pgd &lt; fgsm.</p>' in table
    assert '<p class="note">Sanity: 1 warning.</p>' in table
    assert '<p class="note">A note.</p>' in table


def test_a_page_without_warnings_says_so_at_the_table_only(tmp_path):
    text = page(tmp_path, [])
    assert 'class="warning"' not in text
    assert text.count("Sanity: no warning") == 1
