"""Source fingerprints: what a job imports counts, nothing else does."""

import shutil

import pytest

import classwise.sources as sources
from conftest import ROOT


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of the library and the scripts that can be edited."""
    shutil.copytree(ROOT / "src" / "classwise", tmp_path / "classwise")
    shutil.copytree(ROOT / "workflow" / "scripts", tmp_path / "scripts")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "classwise")
    sources._parsed.cache_clear()
    return tmp_path


def prints(tree):
    """Fingerprints of a Madry training, a PGD attack, a table and a figure."""
    sources._parsed.cache_clear()
    scripts = tree / "scripts"
    return {
        "train": sources.source_fingerprint(
            scripts / "train.py", ["classwise.models.conv2", "classwise.defenses.madry", "classwise.attacks.pgd"]
        ),
        "attack": sources.source_fingerprint(
            scripts / "attack.py", ["classwise.models.conv2", "classwise.attacks.pgd"]
        ),
        "table": sources.source_fingerprint(scripts / "table.py"),
        "figure": sources.source_fingerprint(scripts / "figure.py"),
    }


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("classwise/attacks/pgd.py", {"train", "attack"}),
        ("classwise/defenses/madry.py", {"train"}),
        ("classwise/defenses/trades.py", set()),
        ("classwise/defenses/defense.py", {"train"}),
        ("classwise/training.py", {"train"}),
        ("classwise/evaluation.py", {"train", "attack"}),
        ("classwise/models/conv2.py", {"train", "attack"}),
        ("classwise/models/resnet.py", set()),
        ("classwise/plots.py", {"figure"}),
        ("classwise/tables.py", {"table"}),
        ("classwise/metrics.py", {"table", "figure"}),
        ("classwise/study.py", set()),
        ("classwise/artefacts.py", set()),
        ("classwise/page.py", set()),
        ("classwise/attacks/__init__.py", set()),
        ("scripts/train.py", {"train"}),
        ("scripts/job.py", {"train", "attack", "table", "figure"}),
    ],
)
def test_an_edit_reaches_just_the_jobs_that_use_it(tree, file, changes):
    before = prints(tree)
    with (tree / file).open("a") as text:
        text.write("\nEDITED = 1\n")
    after = prints(tree)
    assert {name for name in before if before[name] != after[name]} == changes


def test_comments_docstrings_and_layout_do_not_count(tree):
    before = prints(tree)
    path = tree / "classwise" / "training.py"
    text = path.read_text()
    path.write_text(
        "# a comment\n" + text.replace('"""The one training loop.', '"""The very one training loop.') + "\n\n\n"
    )
    assert path.read_text() != text
    assert prints(tree) == before


def test_a_module_that_does_not_exist_is_not_silently_left_out(tree):
    with pytest.raises(ModuleNotFoundError, match=r"classwise\.attacks\.nothing"):
        sources.source_fingerprint(tree / "scripts" / "attack.py", ["classwise.attacks.nothing"])
