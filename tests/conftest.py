"""Shared pieces: the repository, prepared digits, and small random models."""

from pathlib import Path

import pytest
import torch  # first of all: `classwise.study` defers torch where nobody has imported it yet
from hypothesis import settings

from classwise.data import DATASETS
from classwise.data.dataset import Dataset, prepare, read_dataset
from classwise.models.classifier import Classifier, build

ROOT = Path(__file__).parents[1]

# The machines that run this are shared and slow at times; a deadline would only report that.
settings.register_profile("classwise", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("classwise")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("digits")
    arrays, card = folder / "data.safetensors", folder / "data.json"
    prepare("digits", DATASETS["digits"], {"train": 1000, "split_seed": 0}, folder, arrays, card)
    return read_dataset(arrays, card)


def small_model(seed: int = 0, classes=range(10), shape=(1, 8, 8)) -> Classifier:
    return build({"kind": "conv2", "width": 2}, shape, classes, seed).eval().requires_grad_(False)
