"""Files appear whole or not at all, and broken contracts are refused by name."""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classwise.errors import UserError
from classwise.store import (
    OUTCOMES,
    appearing,
    fingerprint,
    outcomes_problem,
    read_json,
    read_metadata,
    read_outcomes,
    read_table,
    write_json,
    write_outcomes,
    write_table,
)


def good(n: int = 6, classes=(0, 1, 2)) -> pd.DataFrame:
    label = np.resize(classes, n)
    return pd.DataFrame(
        {
            "index": np.arange(n),
            "label": label,
            "natural": label,
            "predicted": np.resize(classes[::-1], n),
            "p_label": 0.25,
            "p_max": 0.5,
            "p_var": 0.01,
            "linf": 0.1,
            "steps": 20,
        }
    )


def problem(table: pd.DataFrame, **changes) -> str | None:
    keys = {"expected": np.arange(6), "classes": (0, 1, 2), "epsilon": 0.1, **changes}
    return outcomes_problem(table, **keys)


def test_a_good_table_has_no_problem():
    assert problem(good()) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.assign(linf=0.1001), "larger than epsilon"),
        (lambda t: t.assign(linf=np.nan), "larger than epsilon"),
        (lambda t: t.assign(predicted=5), "classes [5]"),
        (lambda t: t.assign(natural=-1), "classes [-1]"),
        (lambda t: t.iloc[:-1], "5 rows"),
        (lambda t: t.assign(index=[0, 1, 2, 3, 4, 4]), "once each"),
        (lambda t: t.iloc[::-1], "in order"),
        (lambda t: t.assign(p_label=1.5), "p_label"),
        (lambda t: t.assign(p_var=np.nan), "p_var"),
        (lambda t: t.drop(columns="steps"), "columns"),
    ],
)
def test_each_way_to_break_the_contract_is_told(change, told):
    assert told in problem(change(good()))


def test_a_removed_class_in_the_predictions_is_refused():
    assert "classes [2]" in problem(good(), classes=(0, 1))


@given(st.floats(1e-4, 1), st.floats(-1e-5, 1e-5))
def test_the_ball_is_checked_to_a_millionth(epsilon, excess):
    found = problem(good().assign(linf=epsilon + excess), epsilon=epsilon)
    assert (found is None) == (epsilon + excess <= epsilon + 1e-6)


METADATA = {"classes": [0, 1, 2], "attack": {"kind": "pgd", "epsilon": 0.1}, "seed": "0"}


def test_outcomes_come_back_with_their_types_and_metadata(tmp_path):
    path = tmp_path / "deep" / "pgd.parquet"
    write_outcomes(path, good(), METADATA, expected=np.arange(6))
    found = read_outcomes(path)
    assert list(found.columns) == OUTCOMES.names
    assert found["label"].dtype == np.int16
    assert read_metadata(path) == METADATA


def test_a_broken_table_is_not_written(tmp_path):
    path = tmp_path / "pgd.parquet"
    with pytest.raises(ValueError, match="larger than epsilon"):
        write_outcomes(path, good().assign(linf=0.2), METADATA, expected=np.arange(6))
    assert list(tmp_path.iterdir()) == []


def test_nothing_appears_when_writing_fails_and_the_old_file_stays(tmp_path):
    path = tmp_path / "table.json"
    write_json(path, {"old": 1})

    def fail():
        with appearing(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert read_json(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "table.json"
    write_json(path, {"old": 1})
    code = (
        "import os, sys; from classwise.store import appearing\n"
        "with appearing(sys.argv[1]) as temporary:\n    temporary.write_text('half'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == -9
    assert read_json(path) == {"old": 1}


def test_written_files_have_the_usual_permissions(tmp_path):
    write_json(tmp_path / "a.json", 1)
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_unreadable_files_are_named(tmp_path):
    for name, read in (("a.parquet", read_table), ("a.parquet", read_metadata), ("a.json", read_json)):
        path = tmp_path / name
        path.write_bytes(b"PAR1 nonsense")
        with pytest.raises(UserError, match=name):
            read(path)


def test_a_table_with_other_columns_is_named(tmp_path):
    write_table(tmp_path / "a.parquet", pd.DataFrame({"x": [1]}))
    with pytest.raises(UserError, match="columns"):
        read_outcomes(tmp_path / "a.parquet")


def test_the_fingerprint_depends_on_names_shapes_types_and_values_only():
    a = np.arange(6, dtype=np.uint8)
    base = fingerprint({"a": a, "b": a})
    assert base == fingerprint({"b": a.copy(), "a": a[::-1][::-1]})
    assert base != fingerprint({"a": a, "b": a.reshape(2, 3)})
    assert base != fingerprint({"a": a, "b": a.astype(np.int8)})
    assert base != fingerprint({"a": a, "c": a})


def test_no_temporary_files_outside_the_target_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json("a.json", {})
    assert os.listdir(tmp_path) == ["a.json"]
