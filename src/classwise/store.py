"""Every file of a study appears whole or not at all, and says where it came from.

The heart is the outcomes table: one row for each test example under one attack on one model. No torch in here, so
that tables and figures start fast.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from classwise.errors import UserError

METADATA_KEY = b"classwise"
LINF_TOLERANCE = 1e-6

OUTCOMES = pa.schema(
    [
        ("index", pa.int32()),  # position in the test split
        ("label", pa.int16()),
        ("natural", pa.int16()),  # prediction on the clean image
        ("predicted", pa.int16()),  # prediction under the attack
        ("p_label", pa.float32()),  # softmax probabilities under the attack
        ("p_max", pa.float32()),
        ("p_var", pa.float32()),  # variance of the softmax vector over classes; CVC is its class mean
        ("linf", pa.float32()),  # size of the perturbation really applied
        ("steps", pa.int32()),  # gradient or query steps spent
    ]
)

HISTORY = pa.schema(
    [
        ("epoch", pa.int32()),  # 1-based
        ("split", pa.string()),  # train (running), validation, test
        ("class", pa.int16()),
        ("n", pa.int32()),
        ("natural_accuracy", pa.float64()),
        ("robust_accuracy", pa.float64()),
        ("loss", pa.float64()),
        ("learning_rate", pa.float64()),
        ("class_weight", pa.float64()),
        ("seconds", pa.float64()),  # since the training began, resumed parts added up
        ("images_per_second", pa.float64()),  # of the epoch's updates, evaluation not counted
        ("peak_memory_mb", pa.float64()),  # the most that the process held so far
    ]
)


@contextmanager
def appearing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place, synced to disk, when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: str | Path, text: str) -> None:
    with appearing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); delete it and run again") from error


def write_table(
    path: str | Path,
    table: pd.DataFrame,
    metadata: Mapping[str, Any] | None = None,
    schema: pa.Schema | None = None,
) -> None:
    """One parquet file, zstd, with `metadata` as one JSON value under the key `classwise`."""
    arrow = pa.Table.from_pandas(table, schema=schema, preserve_index=False)
    arrow = arrow.replace_schema_metadata({METADATA_KEY: json.dumps(metadata or {}, sort_keys=True).encode()})
    with appearing(path) as temporary:
        pq.write_table(arrow, temporary, compression="zstd")


def read_table(path: str | Path, schema: pa.Schema | None = None) -> pd.DataFrame:
    """A parquet file of ours; with `schema`, exactly its columns and types."""
    try:
        arrow = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    if schema is not None and not arrow.schema.remove_metadata().equals(schema):
        raise UserError(f"{path}: columns {arrow.schema.names} are not {schema.names}; delete it and run again")
    return arrow.to_pandas()


def _unreadable(path: str | Path, error: Exception) -> UserError:
    return UserError(f"{path}: not a readable parquet file ({error}); delete it and run again")


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The JSON value that `write_table` stored."""
    try:
        return json.loads((pq.read_schema(path).metadata or {}).get(METADATA_KEY, b"{}"))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def write_outcomes(
    path: str | Path, outcomes: pd.DataFrame, metadata: Mapping[str, Any], *, expected: np.ndarray
) -> None:
    """Check an outcomes table against its contract, then write it. `expected[row]` are the test indices to cover."""
    problem = outcomes_problem(
        outcomes,
        expected=expected,
        classes=metadata["classes"],
        epsilon=metadata["attack"].get("epsilon", 0.0),
    )
    if problem:
        raise ValueError(f"{path}: outcomes break their contract and were not written: {problem}")
    write_table(path, outcomes, metadata, OUTCOMES)


def read_outcomes(path: str | Path) -> pd.DataFrame:
    return read_table(path, OUTCOMES)


def gather_outcomes(paths: Iterable[str | Path]) -> pd.DataFrame:
    """Many outcomes files as one table, with the model, the view and the attack id of each row from the metadata."""
    parts = []
    for path in paths:
        facts = read_metadata(path)
        names = {name: facts[name] for name in ("dataset", "arch", "defense", "removed", "view")}
        keys = {
            "attack": facts["attack_id"],
            "inverse_temperature": facts["attack"].get("inverse_temperature", 1.0),
        }
        parts.append(read_outcomes(path).assign(**names, seed=int(facts["seed"]), **keys))
    return pd.concat(parts, ignore_index=True)


def gather_histories(paths: Iterable[str | Path]) -> pd.DataFrame:
    """Many training histories as one table, with the model of each row from the metadata."""
    parts = []
    for path in paths:
        facts = read_metadata(path)
        names = {name: facts[name] for name in ("dataset", "arch", "removed")}
        parts.append(read_table(path, HISTORY).assign(**names, defense=facts["defense_id"], seed=int(facts["seed"])))
    return pd.concat(parts, ignore_index=True)


def outcomes_problem(outcomes: pd.DataFrame, *, expected: np.ndarray, classes, epsilon: float) -> str | None:
    """What is wrong with a table of outcomes, or None: rows, classes, perturbation, probabilities."""
    if list(outcomes.columns) != OUTCOMES.names:
        return f"columns {list(outcomes.columns)} are not {OUTCOMES.names}"
    if not np.array_equal(np.asarray(outcomes["index"]), np.asarray(expected)):
        return f"{len(outcomes)} rows do not cover the {len(expected)} test examples once each, in order"
    for column in ("label", "natural", "predicted"):
        strangers = set(outcomes[column].unique()) - set(classes)
        if strangers:
            return f"{column} holds classes {sorted(map(int, strangers))}, which the model does not have"
    largest = float(outcomes["linf"].max()) if len(outcomes) else 0.0
    if not largest <= epsilon + LINF_TOLERANCE:
        return f"perturbation {largest:.8f} is larger than epsilon {epsilon:.8f}"
    for column in ("p_label", "p_max", "p_var"):
        if not outcomes[column].between(0, 1 + 1e-6).all():
            return f"{column} is not within [0, 1] everywhere (a model with NaN outputs?)"
    return None


def fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, types, shapes and bytes of the arrays, independent of any file format."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
