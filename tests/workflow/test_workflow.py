"""The workflow, run for real on a tiny study: what it makes, what it reruns, what it says."""

import copy
import json
import re

import pandas as pd
import pytest
from checkout import MODEL, TINY, Checkout

from classwise.artefacts import ARTEFACTS
from classwise.metrics import homing, misclassified
from classwise.sanity import markdown, report
from classwise.store import gather_outcomes, read_metadata, read_outcomes


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Checkout:
    """A checkout in which the tiny study has been built once. Tests that edit it put it back."""
    checkout = Checkout.at(tmp_path_factory.mktemp("built"))
    checkout.snakemake()
    return checkout


@pytest.fixture
def editable(built):
    """The built checkout; files edited through it are restored, with their times."""
    import os

    saved = {}

    class Editor:
        folder = built.folder
        planned = staticmethod(built.planned)

        def keep(self, file):
            path = built.folder / file
            saved.setdefault(path, (path.read_bytes(), path.stat()))
            return path

        def append(self, file, text):
            with self.keep(file).open("a") as handle:
                handle.write(text)

        def study(self, change):
            self.keep("config/studies/tiny.yaml")
            content = copy.deepcopy(TINY)
            change(content)
            built.write_study(content)

    yield Editor()
    for path, (content, stat) in saved.items():
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def outcomes(checkout: Checkout, **names):
    names = {"defense": "madry", "removed": "all", "seed": "0", "attack": "pgd", **names}
    return checkout.result("outcomes/digits/conv2/{defense}/{removed}/{seed}/test/{attack}.parquet".format(**names))


def test_everything_is_there(built):
    for name in ARTEFACTS:
        place = name.removeprefix("bench_") if name.startswith("bench_") else f"tables/{name}"
        assert built.result(f"{place}.parquet").stat().st_size
    for stem in ("tian21_figure1", "tian21_figure2", "tian21_figure4a", "tian21_figure4b"):
        assert built.result(f"figures/{stem}.pdf").read_bytes().startswith(b"%PDF")
        assert built.result(f"figures/{stem}.png").read_bytes().startswith(b"\x89PNG")
    page = built.result("index.html").read_text()
    for name in ARTEFACTS:
        assert f'id="{name}"' in page
    assert json.loads(built.result("study.json").read_text())["study"] == "tiny"


def test_a_second_run_finds_nothing_to_do_and_says_so(built):
    assert "Nothing to be done" in built.snakemake()


def test_no_checkpoint_and_no_temporary_file_is_left(built):
    files = [path for path in built.result("").rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix == ".pt" or path.name.startswith(".")]


def test_logs_show_a_progress_bar_and_benchmarks_are_kept(built):
    log = built.result("logs/train/digits/conv2/madry/all/0.log").read_text()
    # 300 images in batches of 50, twice
    assert re.search(r"12/12 \[.*update/s, epoch=2/2, loss=\d\.\d+, natural=[\d.]+%, robust=[\d.]+%", log)
    assert built.result("benchmarks/train/digits/conv2/madry/all/0.jsonl").stat().st_size
    assert built.result("benchmarks/attack/digits/conv2/madry/all/0/test/pgd.jsonl").stat().st_size


def test_outcomes_say_where_they_come_from(built):
    facts = read_metadata(outcomes(built))
    assert facts["attack"] == {**TINY["attacks"]["pgd"], "start": "R3", "restarts": 1, "protocol": "last"}
    for key in ("study", "dataset", "arch", "removed", "seed", "data", "model", "rng_seed", "precision", "device"):
        assert facts[key] not in (None, ""), key
    for key in ("versions", "source", "seconds", "peak_memory_mb", "classes"):
        assert facts[key], key


def test_models_without_a_class_never_predict_it(built):
    table = read_outcomes(outcomes(built, removed="no-3"))
    assert not (table[["label", "natural", "predicted"]] == 3).any().any()
    assert len(table) < len(read_outcomes(outcomes(built)))
    card = json.loads(built.result(f"{MODEL}/madry/no-3/0/model.json").read_text())
    assert card["classes"] == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_the_homing_figure_is_a_join_of_outcomes(built):
    """Recomputed here from the outcome files alone."""
    homes, losts = [], []
    for seed in (0, 1):
        files = {name: outcomes(built, removed=name, seed=seed) for name in ("all", "no-3", "no-8")}
        full, reduced = read_outcomes(files["all"]), {j: read_outcomes(files[f"no-{j}"]) for j in (3, 8)}
        homes.append(homing(full, reduced, range(10)))
        losts.append(misclassified(full["label"], full["predicted"], range(10)))
    numbers = pd.read_parquet(built.result("tables/tian21_figure4.parquet"))
    found = numbers[numbers["matrix"] == "homing"].pivot(index="true", columns="other", values="mean")
    for j in (3, 8):
        assert found[j].tolist() == ((homes[0] + homes[1]) / 2)[j].tolist()
        assert (found[j] <= ((losts[0] + losts[1]) / 2)[j]).all()
    assert found.drop(columns=[3, 8]).isna().all().all()


def test_tables_are_what_the_outcomes_say(built):
    table = pd.read_parquet(built.result("tables/tian21_table1.parquet"))
    rows = gather_outcomes([outcomes(built, seed=seed) for seed in (0, 1)])
    accuracy = 100 * (rows["label"] == rows["predicted"]).groupby([rows["seed"], rows["label"]]).mean()
    cell = table[(table["defense"] == "madry") & (table["attack"] == "pgd")].set_index("quantity")["mean"]
    assert cell["total"] == pytest.approx(accuracy.mean())
    assert cell["cv"] == pytest.approx(accuracy.groupby(level=0).var(ddof=0).mean())


@pytest.mark.parametrize(
    ("table", "attacks"),
    [
        ("tian21_table1", [("standard", "natural"), ("standard", "pgd"), ("madry", "natural"), ("madry", "pgd")]),
        ("tian21_table3", [("madry", "pgd"), ("madry", "tpgd-5")]),
        ("tian21_table5", [("standard", "natural"), ("madry", "pgd")]),
    ],
)
def test_every_table_carries_the_sanity_report_of_its_outcomes(built, table, attacks):
    files = [outcomes(built, defense=defense, attack=attack, seed=s) for defense, attack in attacks for s in (0, 1)]
    assert set(read_metadata(files[0])["sanity"]) == {"zero_gradient", "not_finite", "not_repeatable"}
    expected = report(gather_outcomes(files), [read_metadata(file) for file in files])
    found = read_metadata(built.result(f"tables/{table}.parquet"))["sanity"]
    assert sorted(found) == sorted(expected)
    assert built.result(f"tables/{table}.md").read_text().endswith(f"\n\n{markdown(found)}")


def test_an_attack_that_stalls_is_warned_of_in_the_table_its_metadata_and_the_page(tmp_path):
    study = copy.deepcopy(TINY)
    study.update(seeds=[0], artefacts={"tian21_table3": study["artefacts"]["tian21_table3"]})
    study["attacks"]["tpgd-5"]["inverse_temperature"] = 1e9
    fresh = Checkout.at(tmp_path / "fresh", study)
    fresh.snakemake()
    (warning,) = read_metadata(fresh.result("tables/tian21_table3.parquet"))["sanity"]
    assert re.match(
        r"tpgd-5 on madry \(digits, conv2\), seed 0: [\d.]+ % of the examples count as robust though", warning
    )
    assert fresh.result("tables/tian21_table3.md").read_text().endswith(markdown([warning]))
    assert f'<p class="warning">⚠ {warning}</p>' in fresh.result("index.html").read_text()


def test_a_transfer_attack_waits_for_its_surrogate(tmp_path):
    fresh = Checkout.at(tmp_path / "fresh")
    path = "results/tiny/outcomes/digits/conv2/madry/no-3/1/test/transfer.parquet"
    text = fresh.snakemake("-n", path)
    assert "models/digits/conv2/standard/no-3/1/model.safetensors" in text
    assert fresh.planned(path) == {"prepare": 1, "train": 2, "attack": 1}


def test_a_view_shows_some_images_of_each_class(built):
    built.snakemake("results/tiny/outcomes/digits/conv2/madry/all/0/n5/few.parquet")
    path = built.result("outcomes/digits/conv2/madry/all/0/n5/few.parquet")
    assert read_outcomes(path).groupby("label").size().tolist() == [5] * 10
    assert read_metadata(path)["subset"] == {"per_class": 5, "seed": 0}
    assert not built.result("checkpoints/digits/conv2/madry/all/0/n5/few").exists()


def test_editing_one_attack_reruns_that_attack_and_what_depends_on_it(editable):
    editable.study(lambda s: s["attacks"]["tpgd-5"].update(epsilon=0.1))
    assert editable.planned() == {"attack": 2, "tian21_table3": 1, "page": 1}


def test_editing_one_defense_retrains_that_defense_only(editable):
    editable.study(lambda s: s["defenses"]["standard"].update(training={"batch_size": 60}))
    # two seeds; natural and pgd outcomes of each; what reads them
    assert editable.planned() == {"train": 2, "attack": 4, **STANDARD, "bench_attacks": 1, "page": 1}


def test_adding_a_seed_trains_the_new_models_only(editable):
    editable.study(lambda s: s.update(seeds=[0, 1, 2]))
    planned = editable.planned()
    assert planned["train"] == 4  # standard, madry, and madry without 3 and without 8
    assert "prepare" not in planned


def test_adding_an_unused_method_reruns_nothing_but_the_page(editable):
    editable.study(lambda s: s["attacks"].update(unused={"kind": "fgsm", "epsilon": 0.1}))
    assert editable.planned() == {"page": 1}  # which shows the study as it was understood


TABLES = {"tian21_table1": 1, "tian21_table3": 1, "tian21_table5": 1}
STANDARD = {"tian21_table1": 1, "tian21_table5": 1}  # what reads the standard model
FIGURES = {"tian21_figure1": 1, "tian21_figure2": 1, "tian21_figure4": 1}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        # all eight models; every outcome depends on them
        ("src/classwise/training.py", {"train": 8, "attack": 14, **TABLES, **FIGURES, "bench_attacks": 1, "page": 1}),
        # six adversarially trained models, and standard ones through the attack of their history
        (
            "src/classwise/attacks/pgd.py",
            {"train": 8, "attack": 14, **TABLES, **FIGURES, "bench_attacks": 1, "page": 1},
        ),
        # the module of a defense retrains that defense
        (
            "src/classwise/defenses/standard.py",
            {"train": 2, "attack": 4, **STANDARD, "bench_attacks": 1, "page": 1},
        ),
        ("src/classwise/defenses/trades.py", {}),
        # natural outcomes of two defenses and two seeds
        ("src/classwise/attacks/none.py", {"attack": 4, **STANDARD, "page": 1}),
        ("src/classwise/plots.py", {**FIGURES, "page": 1}),
        ("src/classwise/tables.py", {**TABLES, "page": 1}),
        ("src/classwise/sanity.py", {**TABLES, "page": 1}),  # another word in a warning attacks no model again
        ("src/classwise/page.py", {"page": 1}),
        ("src/classwise/templates/page.html", {"page": 1}),
        ("workflow/scripts/figure.py", {**FIGURES, "page": 1}),
        ("src/classwise/attacks/__init__.py", {}),
    ],
)
def test_editing_a_module_reruns_the_rules_that_use_it_and_no_others(editable, file, expected):
    editable.append(file, "\nEDITED = 1\n")
    assert editable.planned() == expected


def test_editing_a_comment_or_a_docstring_reruns_nothing(editable):
    editable.append("src/classwise/training.py", "\n# a remark\n")
    editable.append("src/classwise/attacks/pgd.py", "\n# another\n")
    editable.append("workflow/scripts/train.py", "\n# a third\n")
    assert editable.planned() == {}


def test_a_single_target_by_name_or_by_path_builds_just_its_part(built, tmp_path):
    fresh = Checkout.at(tmp_path / "fresh")
    by_name = fresh.planned("tian21_figure1")
    assert by_name == {"prepare": 1, "train": 2, "tian21_figure1": 1}
    assert fresh.planned("results/tiny/figures/tian21_figure1.pdf") == by_name
    assert fresh.planned("results/tiny/figures/tian21_figure4b.pdf")["train"] == 6


def test_list_describes_every_target(built):
    text = built.snakemake("--list")
    for name in [*ARTEFACTS, "prepare", "train", "attack", "page", "all"]:
        assert re.search(rf"^{name}\n?\s+\S.{{20,}}", text, re.M), f"{name} is not described in\n{text}"


def test_the_slurm_profile_of_this_repository_plans(built, tmp_path):
    fresh = Checkout.at(tmp_path / "fresh")
    planned = fresh.planned("--profile", "slurm")
    assert planned["train"] == 8
    assert "workflow/profiles/default" in fresh.snakemake("--profile", "slurm", "-n", "tian21_table5")


def test_the_cheap_attacks_of_one_model_share_a_cluster_job_and_the_dear_ones_do_not(tmp_path):
    study = copy.deepcopy(TINY)
    study["attacks"]["dear"] = {"kind": "nattack", "epsilon": 0.2, "view": "n5"}
    study["artefacts"]["tian21_table1"]["attacks"] = ["natural", "pgd", "transfer", "dear"]
    plan = Checkout.at(tmp_path / "fresh", study).snakemake("--profile", "slurm", "-n", "tian21_table1")
    groups = re.findall(r"Group job (\S+) .*\n((?:\n|    .*\n)+)", plan)
    cheap = [members for name, members in groups if name.startswith("attacks-of-digits/conv2/")]
    dear = [members for name, members in groups if name.startswith("attack-of-digits/conv2/")]
    assert len(cheap) == len(dear) == 4  # two defenses, two seeds
    for members in cheap:
        assert sorted(re.findall(r"with (\S+)$", members, re.M)) == ["natural", "pgd", "transfer"]
    assert [re.findall(r"with (\S+)$", members, re.M) for members in dear] == [["dear"]] * 4


def test_the_shipped_studies_plan(built):
    assert built.planned("--config", "study=paper")["train"] > 40
    assert built.planned("--config", "study=digits")["train"] == 39


def test_the_report_builds(built):
    built.snakemake("--report", "report.html")
    assert "tian21_figure4b" in (built.folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s["attacks"]["pgd"].update(epsilonn=1), "attacks.pgd.epsilonn = 1: unknown key; did you mean"),
        (lambda s: s["attacks"]["pgd"].update(epsilon=2), "attacks.pgd.epsilon = 2: must be in (0, 1]"),
        (lambda s: s.update(seeds=[1, 1]), "seeds = [1, 1]"),
        (lambda s: s["artefacts"]["tian21_figure4"].update(removed=[12]), "artefacts.tian21_figure4.removed.0 = 12: "),
        (lambda s: s["defenses"]["madry"].update(kind="madri"), "defenses.madry.kind = 'madri': unknown defense"),
        (lambda s: s["training"].update(epochs="ten"), "training.epochs = 'ten'"),
    ],
)
def test_a_wrong_study_stops_before_any_job_with_one_sentence(tmp_path, change, told):
    content = copy.deepcopy(TINY)
    change(content)
    text = Checkout.at(tmp_path / "wrong", content).snakemake(fails=True)
    assert f"config/studies/tiny.yaml: {told}" in text
    assert "Traceback" not in text
    assert "rule train" not in text


def test_a_study_that_does_not_exist_is_named(built):
    text = built.snakemake("--config", "study=digit", fails=True)
    assert "no file config/studies/digit.yaml; did you mean 'digits'?" in text
    assert "Traceback" not in text


def test_an_artefact_that_the_study_does_not_build_is_told(tmp_path):
    content = copy.deepcopy(TINY)
    del content["artefacts"]["tian21_table3"]
    text = Checkout.at(tmp_path / "less", content).snakemake("tian21_table3", fails=True)
    assert "this study does not build tian21_table3" in text
    assert "Traceback" not in text


def test_a_class_that_the_data_set_does_not_have_cannot_be_asked_for_by_path(built):
    text = built.snakemake("-n", f"results/tiny/{MODEL}/madry/no-10/0/model.safetensors", fails=True)
    assert "MissingRuleException" in text


def test_a_damaged_input_is_named_in_one_sentence(tmp_path):
    broken = Checkout.at(tmp_path / "broken")
    broken.snakemake("results/tiny/data/digits/data.json")
    data = broken.result("data/digits/data.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"\x01")
    text = broken.snakemake(f"results/tiny/{MODEL}/standard/all/0/model.safetensors", fails=True)
    assert "data.safetensors: its contents are not those that" in text
    assert "Traceback" not in text
