"""The keys of a study file are the keyword-only arguments of the functions they configure.

An attack `def pgd(model, x, y, *, epsilon: Epsilon, steps: Count, ...)` is configured by `{kind: pgd, epsilon: 8/255,
steps: 20}`: names, types and defaults are stated once, in the signature. Arguments without an annotation from this
module's types (the generator, say) are the caller's business and are not keys.
"""

import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError


class Parameters(BaseModel):
    """A frozen group of keys; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def plain(self) -> dict[str, Any]:
        """The group as plain JSON values, defaults filled in."""
        return self.model_dump(mode="json")


def _number(value: object) -> float:
    """Numbers as people write them: 0.031, 8/255, 5e-4 (which YAML reads as a string)."""
    wrong = PydanticCustomError("number", "must be a finite number such as 0.031, 8/255 or 5e-4")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong
    try:
        # Fractions only where there is one: of 1e999999999 it would write out every digit.
        number = float(Fraction(value.strip())) if isinstance(value, str) and "/" in value else float(value)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise wrong from None
    if not math.isfinite(number):
        raise wrong
    return number


# The default JSON schema of these types would say "number" only; a study may also write "8/255".
_schema = {"type": ["number", "string"]}
Number = Annotated[float, BeforeValidator(_number), Field(json_schema_extra=_schema)]
Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction01 = Annotated[Number, Field(ge=0, le=1)]
Count = Annotated[int, Field(strict=True, ge=1, le=10**9)]
Natural = Annotated[int, Field(strict=True, ge=0, le=10**9)]
Flag = Annotated[bool, Field(strict=True)]


def _per_class(value: object) -> object:
    # Said here in one sentence; the union below would report each of its branches.
    try:
        numbers = [_number(each) for each in (value if isinstance(value, list) else [value])]
    except PydanticCustomError:
        numbers = []
    if not numbers or min(numbers) < 0:
        raise PydanticCustomError(
            "per_class",
            "must be a finite number ≥ 0 such as 0.031, 8/255 or 5e-4, or a list with one for each class",
        )
    return value


# What a check that knows the data set recognises such keys by.
ONE_FOR_EACH_CLASS = BeforeValidator(_per_class)
PerClass = Annotated[NonNegative | list[NonNegative], ONE_FOR_EACH_CLASS]


def _epsilon(value: float) -> float:
    if not 0 < value <= 1:
        raise PydanticCustomError("epsilon", "must be in (0, 1], as images are in [0, 1]; 8/255 can be written so")
    return value


Epsilon = Annotated[Number, AfterValidator(_epsilon)]


def _id(value: object) -> str:
    if not isinstance(value, str) or len(value) > 60 or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise PydanticCustomError(
            "id",
            "must be a name of at most 60 letters, digits, '.', '_' and '-' (it becomes a folder); quote numbers",
        )
    return value


Id = Annotated[str, BeforeValidator(_id)]

# How an attack chooses its first point; "random start" means three different things in the literature.
Start = Annotated[
    Literal["R1", "R2", "R3", "none"],
    Field(
        description="R1: x + 0.001 N(0,1), not clipped; R2: x + U(-ε,ε), not clipped to [0,1]; "
        "R3: the same, clipped; none: x itself"
    ),
]


@cache
def parameters_of(function: Callable) -> type[Parameters]:
    """The keyword-only, annotated arguments of `function` (of `__init__` for a class) as a checked group of keys.

    A class whose keys depend on each other has a static method `contradiction(keys)`: what is wrong, or None.
    """
    target = function.__init__ if inspect.isclass(function) else function
    fields = {
        name: (
            _evaluate(target, argument.annotation),
            ... if argument.default is argument.empty else argument.default,
        )
        for name, argument in inspect.signature(target).parameters.items()
        if argument.kind is argument.KEYWORD_ONLY and argument.annotation is not argument.empty
    }
    contradiction = getattr(function, "contradiction", None)
    validators = {"consistent": _consistent(contradiction)} if contradiction else {}
    return create_model(function.__name__, __base__=Parameters, __validators__=validators, **fields)


def _consistent(contradiction: Callable[[Any], str | None]):
    def check(keys):
        text = contradiction(keys)
        if text:
            raise PydanticCustomError("contradiction", "{text}", {"text": text})
        return keys

    return model_validator(mode="after")(check)


def _evaluate(function: Callable, annotation):
    # One annotation at a time: typing.get_type_hints would evaluate the tensors' too, and so import torch for planning.
    return eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation
