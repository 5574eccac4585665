"""What a data set is: facts known before loading, and its images as the project stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from classwise.errors import UserError
from classwise.store import appearing, fingerprint, read_json, write_json

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class Source:
    """A data set that can be prepared. `load(root, *, <keys of the study file>)` returns the four `ARRAYS`."""

    classes: tuple[str, ...]  # names; the class id is the position
    shape: tuple[int, int, int]  # channels, height, width
    levels: int  # the stored integer that means 1.0
    load: Callable[..., dict[str, np.ndarray]]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # superclasses, where there are some


@dataclass(frozen=True)
class Dataset:
    """A prepared data set. Images are uint8[example, channel, row, column]; divided by `levels` they are in [0, 1]."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    card: dict[str, Any]  # what data.json holds

    @property
    def levels(self) -> int:
        return self.card["levels"]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.card["shape"])


def prepare(kind: str, source: Source, keys: Mapping[str, Any], root: Path, arrays_path: Path, card_path: Path) -> None:
    """Load, check and store a data set: the arrays as safetensors, the facts with a fingerprint as JSON."""
    arrays = _checked(kind, source, source.load(root, **keys))
    with appearing(arrays_path) as temporary:
        save_file(arrays, temporary)
    counts = {
        split: np.bincount(arrays[f"{split}_labels"], minlength=len(source.classes)).tolist()
        for split in ("train", "test")
    }
    card = {
        "kind": kind,
        **keys,
        "classes": list(source.classes),
        "groups": {name: list(members) for name, members in source.groups.items()},
        "shape": list(source.shape),
        "levels": source.levels,
        "class_counts": counts,
        "fingerprint": fingerprint(arrays),
    }
    write_json(card_path, card)


def read_dataset(arrays_path: str | Path, card_path: str | Path) -> Dataset:
    """A prepared data set, refused if its bytes are not the ones that its card vouches for."""
    card = read_json(card_path)
    try:
        arrays = load_file(arrays_path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{arrays_path}: not a readable data file ({error}); delete it and run again") from error
    if fingerprint(arrays) != card["fingerprint"]:
        raise UserError(f"{arrays_path}: its contents are not those that {card_path} names; delete both and run again")
    return Dataset(**arrays, card=card)


def stratified_split(labels: np.ndarray, first: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted indices of `first` examples and of the rest, each class in its share of the whole."""
    from sklearn.model_selection import train_test_split

    chosen, rest = train_test_split(np.arange(len(labels)), train_size=first, stratify=labels, random_state=seed)
    return np.sort(chosen), np.sort(rest)


def _checked(kind: str, source: Source, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if sorted(arrays) != sorted(ARRAYS):
        raise ValueError(f"the loader of {kind!r} returned {sorted(arrays)}, not {sorted(ARRAYS)}")
    for split in ("train", "test"):
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if images.dtype != np.uint8 or images.shape[1:] != source.shape or len(images) != len(labels):
            raise ValueError(f"{kind} {split}: images {images.dtype}{images.shape}, labels {labels.shape} do not fit")
        if images.max(initial=0) > source.levels:
            raise ValueError(f"{kind} {split}: a pixel is above {source.levels}")
        if set(np.unique(labels)) != set(range(len(source.classes))):
            raise ValueError(f"{kind} {split}: labels are not 0..{len(source.classes) - 1}, each present")
    return {
        name: np.ascontiguousarray(array, dtype=np.int64 if name.endswith("labels") else np.uint8)
        for name, array in arrays.items()
    }
