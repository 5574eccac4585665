"""How one model is trained, as a study file says it."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from classwise.parameters import Count, Flag, Fraction01, Id, NonNegative, Parameters, Positive


class Kinded(Parameters):
    """A group whose other keys depend on its `kind`: `KEYS` says which belong to which."""

    KEYS: ClassVar[Mapping[str, tuple[str, ...]]]

    @model_validator(mode="after")
    def _no_keys_of_another_kind(self):
        foreign = sorted(self.model_fields_set - {"kind", *self.KEYS[self.kind]})
        if foreign:
            own = ", ".join(self.KEYS[self.kind]) or "nothing"
            text = f"{foreign[0]} is no key of kind {self.kind}; allowed beside the kind: {own}"
            raise PydanticCustomError("kind", "{text}", {"text": text})
        return self

    @model_serializer
    def _own_keys(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kind", *self.KEYS[self.kind])}


class Optimizer(Kinded):
    """Stochastic gradient descent with momentum, or Adam."""

    KEYS: ClassVar = {
        "sgd": ("lr", "momentum", "nesterov", "weight_decay", "decay_batch_norm"),
        "adam": ("lr", "weight_decay", "decay_batch_norm"),
    }

    kind: Literal["sgd", "adam"] = "sgd"
    lr: Positive
    momentum: Fraction01 = 0.9
    nesterov: Flag = False
    weight_decay: NonNegative = 0.0
    decay_batch_norm: Annotated[Flag, Field(description="whether batch norm's own parameters decay too")] = True

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self):
        if self.nesterov and not self.momentum:
            raise PydanticCustomError("nesterov", "nesterov: true needs a momentum above 0")
        return self


class Schedule(Kinded):
    """What the learning rate is multiplied by, update after update.

    `step`: by `factor` from each 1-based epoch in `milestones` on. `cosine`: half a wave from 1 to 0. `triangular`: up
    from 0 to 1 at the share `peak` of the run, then down to 0 (Wong et al. call it cyclic). `piecewise`: straight lines
    through `points`, each [epochs done, multiplier].
    """

    KEYS: ClassVar = {"step": ("milestones", "factor"), "cosine": (), "triangular": ("peak",), "piecewise": ("points",)}

    kind: Literal["step", "cosine", "triangular", "piecewise"] = "step"
    milestones: Annotated[list[Count], Field(default_factory=list)]
    factor: Positive = 0.1
    peak: Annotated[Fraction01, Field(gt=0, lt=1)] = 0.4
    points: Annotated[list[tuple[NonNegative, NonNegative]], Field(default_factory=list)]

    @model_validator(mode="after")
    def _points_rise(self):
        epochs = [epoch for epoch, _ in self.points]
        if self.kind == "piecewise" and (not epochs or epochs != sorted(set(epochs))):
            raise PydanticCustomError("points", "kind piecewise needs points with rising epochs: [[0, 0], [5, 1], ...]")
        return self

    def scale(self, done: float, epochs: int) -> float:
        """The multiplier after `done` of all `epochs` (2.5: in the middle of the third)."""
        if self.kind == "step":
            return self.factor ** sum(done + 1 >= milestone for milestone in self.milestones)
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done / epochs))
        points = self.points if self.kind == "piecewise" else [(0, 0), (self.peak * epochs, 1), (epochs, 0)]
        return float(np.interp(done, *zip(*points, strict=True)))


class Validation(Parameters):
    """Training images set aside, the same number of each class."""

    per_class: Count
    pick: Literal["first", "last", "seeded"] = "last"


class AtEpoch(Parameters):
    epoch: Count


MEASURES = ("robust", "worst", "natural")


class Best(Parameters):
    """The epoch with the highest validation measure: mean or worst class robust accuracy, or mean natural accuracy."""

    best: Literal[MEASURES]


def _selection(value: object) -> object:
    # Said here in one sentence; the union below would report each of its branches.
    number = value.get("epoch") if isinstance(value, dict) and set(value) == {"epoch"} else None
    best = value.get("best") if isinstance(value, dict) and set(value) == {"best"} else None
    known = value == "last" or isinstance(value, AtEpoch | Best) or best in MEASURES
    if not known and not (type(number) is int and number >= 1):
        raise PydanticCustomError(
            "selection",
            "must be `last`, `{epoch: N}` for the weights after 1-based epoch N, or `{best: M}` for those with the "
            "highest validation measure M, one of robust, worst, natural",
        )
    return value


class Training(Parameters):
    """One training run, apart from the defense's own keys."""

    epochs: Count
    batch_size: Count = 128
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    clip: Annotated[Positive | None, Field(description="largest norm of the gradient of all weights")] = None
    ema: Annotated[
        Fraction01 | None, Field(description="decay of a running mean of the weights, which is then the model")
    ] = None
    augment: Literal["none", "crop-flip"] = "none"
    precision: Annotated[
        Literal["fp32", "bf16"], Field(description="bf16: convolutions and matrices in bfloat16, weights in float32")
    ] = "fp32"
    compile: Annotated[Flag, Field(description="torch.compile the network")] = False
    processes: Annotated[Count, Field(description="that share each batch, one GPU each where there are some")] = 1
    validation: Validation | None = None
    select: Annotated[
        Literal["last"] | AtEpoch | Best,
        BeforeValidator(_selection),
        Field(description="`last`, `{epoch: N}` (1-based), or `{best: M}` by a validation measure; never by test"),
    ] = "last"
    evaluate: Annotated[
        Id | None, Field(description="attack id for the robust accuracies of the history; null: natural ones only")
    ] = None
    evaluate_every: Count = 1

    @model_validator(mode="after")
    def _best_needs_a_measure(self):
        if isinstance(self.select, Best) and self.validation is None:
            raise PydanticCustomError("select", "select: {best: ...} needs `validation`, images to choose by")
        return self
