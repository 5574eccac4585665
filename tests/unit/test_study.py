"""Study files: every mistake is one clear sentence, and never a traceback."""

import copy
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from classwise.errors import ConfigError
from classwise.study import Study, load_config, load_study
from conftest import ROOT

FOLDER = ROOT / "config" / "studies"
DIGITS = yaml.safe_load((FOLDER / "digits.yaml").read_text())

BENCH = {"rows": [{"dataset": "digits", "arch": "conv2", "defense": "madry", "attack": "fgsm", "images": 8}]}


def study(content) -> Study:
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    return Study(FOLDER / "digits.yaml", text)


def changed(path: str, value) -> dict:
    """The digits study with the value at `path` (dots between keys) replaced, or removed for `...`."""
    content = copy.deepcopy(DIGITS)
    *outer, last = path.split(".")
    place = content
    for key in outer:
        place = place[int(key) if isinstance(place, list) else key]
    last = int(last) if isinstance(place, list) else last
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("attacks.pgd20.epsilonn", 1, "unknown key; did you mean 'epsilon'?"),
        ("trainning", {}, "trainning = {}: unknown key; did you mean 'training'?"),
        ("training.optimizer.lrr", 1, "training.optimizer.lrr = 1: unknown key; did you mean 'lr'?"),
        ("defenses.madry.attack.step", 1, "did you mean 'steps'?"),
        ("attacks.pgd20.steps", "twenty", "attacks.pgd20.steps = 'twenty': must be a valid integer"),
        ("attacks.pgd20.steps", 2.5, "must be a valid integer"),
        ("attacks.pgd20.steps", True, "must be a valid integer"),
        ("attacks.pgd20.steps", 0, "must be greater than or equal to 1"),
        ("training.epochs", None, "training.epochs = None"),
        ("defenses.trades.beta", "six", "such as 0.031, 8/255 or 5e-4"),
        ("defenses.trades.beta", ".nan", "must be a finite number"),
        (
            "defenses.madry.kind",
            "madri",
            "unknown defense kind; did you mean 'madry'? allowed: standard, madry, trades, mart",
        ),
        ("attacks.pgd20.kind", "pdg", "unknown attack kind; did you mean 'pgd'?"),
        ("architectures.conv2.kind", "conv3", "unknown architecture kind; did you mean 'conv2'?"),
        ("datasets.digits.kind", "digit", "unknown data set kind; did you mean 'digits'?"),
        ("datasets.digits.kind", None, "a data set kind is needed"),
        ("artefacts.tian21_table1.defenses", ["madry", "trade"], "did you mean 'trades'?"),
        ("artefacts.tian21_figure4.attack", "pgd200", "no such attack in this study; did you mean 'pgd20'?"),
        ("artefacts.tian21_figure9", {}, "unknown artefact"),
        ("attacks.pgd20.epsilon", 0, "epsilon = 0: must be in (0, 1]"),
        ("attacks.pgd20.epsilon", 1.5, "epsilon = 1.5: must be in (0, 1]"),
        ("attacks.fgsm.epsilon", "-8/255", "must be in (0, 1]"),
        ("defenses.madry.attack.epsilon", 8, "defenses.madry.attack.epsilon = 8: must be in (0, 1]"),
        ("artefacts.tian21_figure4.removed", [3, 10], "removed.1 = 10: digits has no such class; allowed: 0 to 9"),
        ("artefacts.tian21_figure4.removed", [3, 3], "3 is there twice"),
        ("seeds", [0, 1, 1], "seeds = [0, 1, 1]: must be different from each other; 1 is there twice"),
        ("seeds", [], "seeds = []: needs at least 1 entry"),
        ("seeds", [-1], "greater than or equal to 0"),
        ("seeds", ["0"], "must be a valid integer"),
        ("artefacts.tian21_table1.seeds", [4, 4], "4 is there twice"),
        ("training.select", "best", "must be `last`, `{epoch: N}`"),
        ("training.select", {"epoch": 31}, "must be at most epochs = 30"),
        ("training.evaluate", "pgd99", "unknown attack of this study; did you mean"),
        ("training.optimizer.kind", "adagrad", "must be 'sgd' or 'adam'"),
        ("defenses.madry.training", {"epoch": 3}, "defenses.madry.training.epoch = 3: unknown key"),
        ("attacks.pgd20.overrides", [{"when": {"dataset": "mnist"}, "epsilon": 0.3}], "unknown dataset of this study"),
        ("attacks.pgd20.overrides", [{"epsilon": 0.3}], "must have a key `when"),
        ("attacks.pgd20.overrides", [{"when": {"dataset": "digits"}, "epsilon": 3}], "overrides.0.epsilon = 3"),
        ("attacks.pgd20.overrides", {"when": 1}, "must be a list"),
        ("attacks.pgd20.overrides", [{"when": {"dataset": "digits"}, "kind": "fgsm"}], "cannot change the kind"),
        ("architectures.conv2.mean", [0.1, 0.2, 0.3], "has 1 channel"),
        ("architectures.conv2.width", 0, "greater than or equal to 1"),
        ("attacks.bad name", {"kind": "none"}, "must be a name"),
        ("title", ..., "the key `title` is missing"),
        ("defenses.madry.training", None, "defenses.madry.training = None: must be a mapping"),
        ("training.optimizer.nesterov", "yes", "must be a valid boolean"),
        ("training.optimizer", {"lr": 0.1, "momentum": 0, "nesterov": True}, "needs a momentum above 0"),
        ("training.evaluate", None, "tian21_figure1 shows the robust accuracies of its history"),
        ("datasets.digits.train", 1790, "must be less than or equal to 1787"),
        ("artefacts.tian21_figure4.removed", "all", "removed = 'all': must be `each`, or a list of class ids"),
        ("artefacts.tian21_figure4.removed", [], "must be `each`, or a list"),
        ("artefacts.tian21_table1.seeds", [], "needs at least 1 entry"),
        ("artefacts.tian21_table1.defenses", ["madry", "madry"], "madry is there twice"),
        ("attacks.pgd20.overrides", [{"when": {"dataset": None}}], "a dataset of this study is needed"),
        ("attacks.pgd20.steps", ..., "attacks.pgd20: the key `steps` is missing"),
        ("datasets", {}, "needs at least 1 entry"),
        ("attacks.pgd20", 5, "attacks.pgd20 = 5: must be a mapping of keys"),
        ("defenses.madry.attack", 5, "defenses.madry.attack = 5: must be a mapping of keys"),
        ("training.schedule.milestones", 21, "training.schedule.milestones = 21: must be a list"),
        ("attacks.pgd20.epsilon", "1e999999999", "must be a finite number"),
        ("attacks.pgd20.epsilon", "1e-99999999", "must be in (0, 1]"),
        ("attacks.pgd20.steps", 10**25, "must be less than or equal to"),
        ("seeds", [10**25], "must be less than or equal to"),
        ("architectures.conv2", {"kind": "small-cnn"}, "needs images of at least 16 x 16 pixels"),
        ("artefacts.tian21_table5.rows.0.natural", "pgd20", "must be an attack of kind none"),
        (
            "artefacts.bench_attacks",
            BENCH,
            "rows.0.attack = 'fgsm': must be an attack of kind pgd or cw-linf or nattack",
        ),
        ("attacks.pgd20.batch_size", "automatic", "must be a count such as 256, or `auto`"),
        ("attacks.pgd20.batch_size", 0, "must be a count such as 256, or `auto`"),
        ("training.schedule", {"kind": "cosine", "peak": 0.2}, "peak is no key of kind cosine"),
        ("training.schedule", {"kind": "triangular", "peak": 1}, "must be less than 1"),
        ("training.schedule", {"kind": "piecewise"}, "needs points with rising epochs"),
        ("training.schedule", {"kind": "piecewise", "points": [[2, 1], [1, 0]]}, "needs points with rising epochs"),
        ("training.optimizer", {"kind": "adam", "lr": 0.1, "momentum": 0.5}, "momentum is no key of kind adam"),
        ("training.select", {"best": "robust"}, "needs `validation`, images to choose by"),
        ("training.select", {"best": "median"}, "one of robust, worst, natural"),
        ("attacks.cw-linf.shrink", 1, "must be less than 1"),
        ("training.processes", 0, "must be greater than or equal to 1"),
        ("training.precision", "fp16", "must be 'fp32' or 'bf16'"),
        (
            "defenses.trades.beta",
            [6, 6],
            "defenses.trades.beta = [6.0, 6.0]: must be one number, or one for each of the 10 classes of digits",
        ),
        ("defenses.trades.beta", [], "or a list with one for each class"),
        ("defenses.trades.beta", [6, -1], "or a list with one for each class"),
        ("defenses.trades.beta", {"5": 1}, "or a list with one for each class"),
        ("defenses.mart.beta", [6] * 10, "such as 0.031, 8/255 or 5e-4"),
        ("defenses.mart.beta", ..., "defenses.mart: the key `beta` is missing"),
        ("defenses.he.variant", "alp", "must be 'pgd' or 'trades'"),
        ("defenses.he.variant", "trades", "variant trades needs the key `beta`"),
        ("defenses.he.beta", 6, "`beta` is a key of variant trades"),
        ("defenses.he.scale", 0, "must be greater than 0"),
        ("defenses.he.margin", -0.1, "must be greater than or equal to 0"),
        ("defenses.he-lis.final", "many", "such as 0.031, 8/255 or 5e-4"),
        ("defenses.he-lis.over", 0, "must be greater than or equal to 1"),
        ("defenses.he-lis.count_from", 2, "must be 0 or 1"),
        ("defenses.he-lis.scale", 15, "unknown key"),
        ("defenses.he-cmp.reading", "mean", "must be 'bound', 'data' or 'example'"),
        ("defenses.he-cmp.summary", "median", "must be 'mean' or 'largest'"),
        ("defenses.he-cmp.final_probability", 1.5, "must be less than or equal to 1"),
        ("defenses.he-cmp.s_max", 0, "must be greater than 0"),
        ("defenses.he-cmp.examples", 0.5, "must be a valid integer"),
        ("defenses.fast.epsilon", 8, "must be in (0, 1]"),
        ("defenses.fast.step_size", 0, "must be greater than 0"),
        ("defenses.fast.start", "R4", "must be 'R1', 'R2', 'R3' or 'none'"),
        ("defenses.fast.guard", True, "must be a mapping of keys"),
        ("defenses.fast.guard", {"drops": 0.2}, "defenses.fast.guard.drops = 0.2: unknown key; did you mean 'drop'?"),
        ("defenses.fast.guard", {"drop": 2}, "defenses.fast.guard.drop = 2: must be less than or equal to 1"),
    ],
)
def test_a_mistake_is_one_sentence_with_file_key_and_what_is_allowed(path, value, told):
    with pytest.raises(ConfigError) as caught:
        study(changed(path, value))
    sentences = [sentence for sentence in caught.value.problems if told in sentence]
    assert sentences, caught.value.problems
    assert all("\n" not in sentence and "digits.yaml: " in sentence for sentence in caught.value.problems)


def test_combinations_are_checked_as_they_will_be_trained():
    content = changed("training.overrides", [{"when": {"defense": "madry"}, "epochs": 3}])
    content["defenses"]["madry"]["training"] = {"select": {"epoch": 4}}
    with pytest.raises(ConfigError, match="must be at most 3, the epochs of madry on digits"):
        study(content)


def test_several_mistakes_are_told_at_once():
    content = changed("attacks.pgd20.epsilon", 3)
    content["seeds"] = [1, 1]
    with pytest.raises(ConfigError) as caught:
        study(content)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("title: [", "not valid YAML"),
        ("- a", "must be a mapping"),
        ("", "must be a mapping"),
        ("title: a\ntitle: b", "'title' is there twice"),
        ("? [a]\n: 1", "is not a name"),
        ("a: &x [*x]", "not valid YAML"),
        ("\x00", "not valid YAML"),
        ("title: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_what_is_not_a_study_at_all_is_told_too(text, told):
    with pytest.raises(ConfigError, match=told):
        study(text)


def places(content, prefix=()):
    """The path of every key and list item of a study."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield (*prefix, key)
        if isinstance(value, dict | list):
            yield from places(value, (*prefix, key))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


@settings(max_examples=300)
@given(st.data())
def test_no_mutation_of_a_study_ends_in_a_traceback(data):
    content = copy.deepcopy(DIGITS)
    for _ in range(data.draw(st.integers(1, 3))):
        options = list(places(content))
        if not options:
            break
        *outer, last = data.draw(st.sampled_from(options))
        place = content
        for key in outer:
            place = place[key]
        action = data.draw(st.sampled_from(["replace", "delete", "rename"]))
        if action == "replace":
            place[last] = data.draw(VALUES)
        elif action == "delete" or isinstance(place, list):
            del place[last]
        else:
            place[data.draw(st.text(max_size=8))] = place.pop(last)
    try:
        found = study(content)
    except ConfigError as error:
        sentences = error.problems
    else:
        sentences = ["digits.yaml: nothing wrong"]
        resolve_all(found)
    assert sentences
    assert all("digits.yaml" in sentence and "\n" not in sentence for sentence in sentences)


def resolve_all(found: Study) -> None:
    """What Snakemake would ask of the study while planning."""
    for name in found.artefacts:
        artefact = found.artefact(name)
        for outcome in artefact.outcomes(artefact.seeds, found.class_counts):
            model = outcome.model
            found.train_job(model.dataset, model.arch, model.defense)
            found.attack(outcome.attack, model.dataset, model.defense)


@settings(max_examples=100)
@given(st.text(max_size=200))
def test_no_text_ends_in_a_traceback(text):
    with pytest.raises(ConfigError):
        study(text)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"study": "digit"}, "no file .*digit.yaml; did you mean 'digits'"),
        ({"study": "../digits"}, "must be a name"),
        ({"study": 5}, "must be a name"),
        ({"studdy": "digits"}, "unknown key; did you mean 'study'"),
        ({"device": "tpu"}, "must be 'auto', 'cpu' or 'cuda'"),
        ({"data_root": ""}, "data_root"),
    ],
)
def test_mistakes_in_the_configuration_are_told(values, told):
    with pytest.raises(ConfigError, match=told):
        load_study(load_config(values), FOLDER)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_study_is_right(file):
    assert Study(file).artefacts


def test_an_override_of_another_kind_replaces_the_whole_block():
    content = changed("training.overrides", [{"when": {"defense": "madry"}, "schedule": {"kind": "cosine"}}])
    assert study(content).training("madry", "digits").schedule.kind == "cosine"
    assert study(content).training("trades", "digits").schedule.milestones == [21, 27]


def test_dear_attacks_are_those_that_take_minutes():
    digits = Study(FOLDER / "digits.yaml")
    assert digits.dear_attacks == ["cw-linf", "nattack", "autoattack"]
    assert set(digits.cheap_attacks) == set(digits.file.attacks) - set(digits.dear_attacks)


def test_overrides_apply_where_they_fit_and_merge_key_by_key():
    paper = Study(FOLDER / "paper.yaml")
    assert paper.attack("pgd", "mnist", "madry")["epsilon"] == 0.3
    assert paper.attack("pgd", "cifar10", "madry")["epsilon"] == 0.031
    training = paper.training("madry", "mnist")
    assert (training.optimizer.lr, training.optimizer.weight_decay) == (0.01, 2e-4)
    assert training.schedule.milestones == [55, 75, 90]
    assert paper.training("trades", "cifar10").epochs == 76
    assert paper.training("trades", "mnist").epochs == 100
    assert paper.defense("trades", "mnist")["beta"] == 1


def test_numbers_may_be_written_as_people_write_them():
    found = study(changed("attacks.pgd20.epsilon", "8/255"))
    assert found.attack("pgd20", "digits", "madry")["epsilon"] == 8 / 255


def test_a_job_knows_exactly_what_it_uses():
    """Editing the attack of the history changes the training; editing another attack does not."""
    before = study(DIGITS).train_job("digits", "conv2", "madry")
    assert study(changed("attacks.pgd10.steps", 11)).train_job("digits", "conv2", "madry") != before
    assert study(changed("attacks.pgd20.steps", 21)).train_job("digits", "conv2", "madry") == before
    assert study(changed("defenses.trades.beta", 5)).train_job("digits", "conv2", "madry") == before
    assert study(changed("attacks.pgd10.batch_size", 100)).train_job("digits", "conv2", "madry") == before


def test_the_defense_decides_the_head_of_the_network():
    heads = {
        name: study(DIGITS).train_job("digits", "conv2", name)["architecture"]["head"] for name in DIGITS["defenses"]
    }
    assert {name for name, head in heads.items() if head == "cosine"} == {"he", "he-lis", "he-cmp"}
    assert set(heads.values()) == {"linear", "cosine"}


def test_planning_does_not_import_torch():
    code = (
        "import sys; from pathlib import Path; from classwise.study import Study; "
        f"s = Study(Path({str(FOLDER / 'paper.yaml')!r})); s.train_job('cifar10', 'resnet18', 'trades'); s.resolved(); "
        "assert not [m for m in sys.modules if m.startswith('torch.')], 'torch was loaded'; "
        "import torch; assert torch.zeros(1).item() == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
