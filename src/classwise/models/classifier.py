"""A classifier: normalisation, features, a head. Images in [0, 1] in, logits of the classes kept out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from classwise.errors import UserError
from classwise.models import ARCHITECTURES
from classwise.store import appearing, fingerprint, read_json


class Cosine(nn.Linear):
    """Cosines between the features and one unit vector for each class: the hypersphere embedding of Pang et al. (2020).

    In training mode the rows are overwritten by their normalised values, and the gradient is that of a free row:
    projected gradient descent, as in the authors' code, not a reparametrisation. Written to `data`, because a loss with
    two passes renormalises between the first one and its backward pass, by rounding only.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        weight = nn.functional.normalize(self.weight, dim=1)
        if self.training:
            self.weight.data.copy_(weight)
            weight = self.weight
        return nn.functional.linear(nn.functional.normalize(features, dim=1), weight)


HEADS: dict[str, Callable[[int, int], nn.Linear]] = {"linear": nn.Linear, "cosine": Cosine}


class Classifier(nn.Module):
    """Normalisation is the first layer, so that epsilon is in pixel units everywhere.

    `classes[k]` is the original id of output k. A model trained without class 5 has no output for it, and nothing
    that is stored ever shifts: predictions are mapped back to original ids by `classes`.
    """

    def __init__(
        self,
        features: nn.Module,
        classes: Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        head: str = "linear",
    ):
        super().__init__()
        self.classes = tuple(classes)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1))
        self.features = features
        self.head = HEADS[head](features.out_features, len(self.classes))
        if head == "linear" and getattr(features, "zero_head", False):  # a zero row has no direction
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features((x - self.mean) / self.std))


def build(architecture: Mapping[str, Any], shape: Sequence[int], classes: Sequence[int], seed: int = 0) -> Classifier:
    """A freshly initialised classifier for images of `shape` (channels, height, width).

    `architecture` has `kind`, its keys, and optionally `mean` and `std` for each channel (default 0 and 1: none) and
    `head`, of HEADS, which the defense decides (default: linear).
    """
    keys = dict(architecture)
    kind, channels = keys.pop("kind"), shape[0]
    head = keys.pop("head", "linear")
    mean, std = keys.pop("mean", None) or [0.0] * channels, keys.pop("std", None) or [1.0] * channels
    # torch's initialisers draw from the global generator; the fork keeps that from touching anything else.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        features = ARCHITECTURES[kind](shape, **keys)
        return Classifier(features, classes, mean, std, head)


def save_weights(path: str | Path, state: Mapping[str, torch.Tensor]) -> None:
    """Weights only, as safetensors: equal weights give equal bytes."""
    with appearing(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, temporary)


def weights_fingerprint(state: Mapping[str, torch.Tensor]) -> str:
    return fingerprint({name: tensor.cpu().numpy() for name, tensor in state.items()})


def load_model(weights: str | Path, card: str | Path) -> tuple[Classifier, dict[str, Any]]:
    """The model of `model.safetensors` and `model.json`, in evaluation mode, with the card."""
    facts = read_json(card)
    missing = {"architecture", "shape", "classes", "fingerprint"} - set(facts)
    if missing:
        raise UserError(f"{card}: lacks {', '.join(sorted(missing))}; delete it and run again")
    model = build(facts["architecture"], facts["shape"], facts["classes"])
    try:
        model.load_state_dict(load_file(weights))
        if weights_fingerprint(model.state_dict()) != facts["fingerprint"]:
            raise RuntimeError("they were changed after training")
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(
            f"{weights}: not the weights that {card} describes ({error}); delete both and run again"
        ) from error
    return model.eval().requires_grad_(False), facts
