"""The types of config fields: checked numbers, names, durations; the base of all sections."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Number
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


def _as_tuple(value: object) -> object:
    """A single value may stand for a list of one: `--model.hidden=128`."""
    if isinstance(value, (str, Number)) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise ValueError("a list is needed")
    return value


def _as_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _auto_or_size(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("allowed: auto, or a whole number from 1")


def _as_yaml(value: Any) -> Any:
    """Own arguments hold what a file can hold, so that a dump loads back equal; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: _as_yaml(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_yaml(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError("allowed: numbers, words, true, false, null, and lists and mappings of them")


NoBool = BeforeValidator(_no_bool)
ListOfOne = BeforeValidator(_as_tuple)
Fraction = Annotated[float, NoBool, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, NoBool, Field(gt=0.0)]
NonNegative = Annotated[float, NoBool, Field(ge=0.0)]
Count = Annotated[int, NoBool, Field(ge=0)]
Size = Annotated[int, NoBool, Field(ge=1)]
AutoOrSize = Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_size)]
Seed = Annotated[int, NoBool, Field(ge=0, lt=2**32)]  # jax.random.key(2**32) is jax.random.key(0)
Sizes = Annotated[tuple[Size, ...], ListOfOne]
Yaml = BeforeValidator(_as_yaml)
PathText = Annotated[str, BeforeValidator(_as_text)]
Initialiser = Literal[
    "he_normal",
    "he_uniform",
    "xavier_normal",
    "xavier_uniform",
    "lecun_normal",
    "lecun_uniform",
    "truncated_normal",
    "orthogonal",
    "zeros",
]
Activation = Literal["relu", "gelu", "silu", "tanh"]
Norm = Literal["batch", "group", "layer", "none"]
MomentDtype = Literal["float32", "bfloat16", "int8"]


def described(default: Any, description: str, **checks: Any) -> Any:
    return Field(default, description=description, **checks)


class Section(BaseModel):
    """The base of all parts of a config: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
