"""How one model is trained, as a study file says it."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from classwise.parameters import Count, Flag, Fraction01, Id, NonNegative, Parameters, Positive


class Optimizer(Parameters):
    """Stochastic gradient descent."""

    kind: Literal["sgd"] = "sgd"
    lr: Positive
    momentum: Fraction01 = 0.9
    nesterov: Flag = False
    weight_decay: NonNegative = 0.0

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self):
        if self.nesterov and not self.momentum:
            raise PydanticCustomError("nesterov", "nesterov: true needs a momentum above 0")
        return self


class Schedule(Parameters):
    """`step`: the rate is multiplied by `factor` from each 1-based epoch in `milestones` on."""

    kind: Literal["step"] = "step"
    milestones: Annotated[list[Count], Field(default_factory=list)]
    factor: Positive = 0.1

    def scale(self, epoch: int) -> float:
        """What the learning rate is multiplied by in the 1-based `epoch`."""
        return self.factor ** sum(epoch >= milestone for milestone in self.milestones)


class Validation(Parameters):
    """Training images set aside, the same number of each class."""

    per_class: Count
    pick: Literal["first", "last", "seeded"] = "last"


class AtEpoch(Parameters):
    epoch: Count


def _selection(value: object) -> object:
    # Said here in one sentence; the union below would report each of its branches.
    number = value.get("epoch") if isinstance(value, dict) and set(value) == {"epoch"} else None
    if value != "last" and not isinstance(value, AtEpoch) and not (type(number) is int and number >= 1):
        raise PydanticCustomError("selection", "must be `last`, or `{epoch: N}` for the weights after 1-based epoch N")
    return value


class Training(Parameters):
    """One training run, apart from the defense's own keys."""

    epochs: Count
    batch_size: Count = 128
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    augment: Literal["none", "crop-flip"] = "none"
    validation: Validation | None = None
    select: Annotated[
        Literal["last"] | AtEpoch,
        BeforeValidator(_selection),
        Field(description="`last`, or `{epoch: N}` for the weights after 1-based epoch N; never by test accuracy"),
    ] = "last"
    evaluate: Annotated[
        Id | None, Field(description="attack id for the robust accuracies of the history; null: natural ones only")
    ] = None
    evaluate_every: Count = 1
