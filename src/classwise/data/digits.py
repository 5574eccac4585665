"""scikit-learn's embedded digits: 1,797 real handwritten digits of 8 x 8 pixels with 17 grey levels."""

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from classwise.data.dataset import Source, stratified_split
from classwise.parameters import Count, Natural

# Every class must be in both parts.
TrainSize = Annotated[Count, Field(ge=10, le=1787)]


def load(root: Path, *, train: TrainSize = 1000, split_seed: Natural = 0) -> dict[str, np.ndarray]:
    """`train` images to train on, the rest to test on, stratified by class and fixed by `split_seed`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype(np.uint8)
    chosen, rest = stratified_split(labels, train, split_seed)
    return {
        "train_images": images[chosen],
        "train_labels": labels[chosen],
        "test_images": images[rest],
        "test_labels": labels[rest],
    }


digits = Source(classes=tuple("0123456789"), shape=(1, 8, 8), levels=16, load=load)
