"""CIFAR-10: 50,000 + 10,000 photographs, 3 x 32 x 32. Read from its binary version: no pickle is ever opened."""

import hashlib
from pathlib import Path

import numpy as np

from classwise.data.dataset import Source
from classwise.data.download import fetch
from classwise.errors import UserError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
GROUPS = {"transportation": (0, 1, 8, 9), "animals": (2, 3, 4, 5, 6, 7)}
ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
SHA1 = {
    "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c",
}


def load(root: Path) -> dict[str, np.ndarray]:
    """From `root/cifar-10-batches-bin`, downloaded if it is not there."""
    folder = root / "cifar-10-batches-bin"
    if not all((folder / name).exists() for name in SHA1):
        fetch(ARCHIVE, ARCHIVE_MD5, root)
    # A record is a label byte, then the red, green and blue planes.
    records = {name: _verified(folder / name, sha1).reshape(-1, 1 + 3 * 32 * 32) for name, sha1 in SHA1.items()}
    test = records.pop("test_batch.bin")
    train = np.concatenate(list(records.values()))
    return {
        f"{split}_{part}": array
        for split, rows in (("train", train), ("test", test))
        for part, array in (("images", rows[:, 1:].reshape(-1, 3, 32, 32)), ("labels", rows[:, 0]))
    }


def _verified(path: Path, sha1: str) -> np.ndarray:
    data = path.read_bytes()
    if hashlib.sha1(data).hexdigest() != sha1:
        raise UserError(f"{path}: not the published file (its SHA-1 should be {sha1}); delete it and run again")
    return np.frombuffer(data, dtype=np.uint8)


cifar10 = Source(classes=CLASSES, shape=(3, 32, 32), levels=255, load=load, groups=GROUPS)
