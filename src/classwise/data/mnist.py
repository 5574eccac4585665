"""MNIST: 60,000 + 10,000 handwritten digits, 1 x 28 x 28."""

from pathlib import Path

import numpy as np

from classwise.data.dataset import Source
from classwise.errors import UserError


def load(root: Path) -> dict[str, np.ndarray]:
    """From `root/MNIST/raw` (idx files), by torchvision's download and checksums if they are not there."""
    from classwise.data.vision import torchvision

    arrays = {}
    for split in ("train", "test"):
        try:
            dataset = torchvision.datasets.MNIST(root, train=split == "train", download=True)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"MNIST is not in {root.resolve() / 'MNIST' / 'raw'} and could not be downloaded ({error}); put its "
                "four idx files there, or set `data_root` in config/config.yaml to the folder that has them"
            ) from error
        arrays[f"{split}_images"] = dataset.data.numpy()[:, None]
        arrays[f"{split}_labels"] = dataset.targets.numpy()
    return arrays


mnist = Source(classes=tuple("0123456789"), shape=(1, 28, 28), levels=255, load=load)
