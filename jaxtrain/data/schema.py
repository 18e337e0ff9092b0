"""The schema: what is learnt from the training rows and stored with the model; prediction and export reuse it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Schema:
    """What a model needs to know of its data.

    task: classes | binary | regression | tokens. outputs: numbers the model gives for a row (classes, labels or
    values), or for a token (the vocabulary). mean, sd: normalisation of inputs, lists that broadcast against a row, or
    None. image: how a picture becomes a row (`ImageForm`), tokenizer: how text becomes tokens, where there is a way.
    """

    task: str
    input_shape: tuple[int, ...]
    input_dtype: str
    outputs: int
    target_shape: tuple[int, ...]
    class_names: tuple[str, ...] | None = None
    mean: Any = None
    sd: Any = None
    image: dict[str, Any] | None = None
    tokenizer: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; `Schema.from_json` gives an equal schema."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def digest(self) -> str:
        """sha256 of all of it."""
        return hashlib.sha256(repr(sorted(self.to_json().items())).encode()).hexdigest()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Schema:
        """The schema that `to_json` wrote."""
        lists = ("input_shape", "target_shape", "class_names")
        plain: dict[str, Any] = {k: tuple(v) if k in lists and v is not None else v for k, v in values.items()}
        return cls(**plain)

    def preprocess(self) -> Callable[[jax.Array], jax.Array]:
        """Raw inputs [B, ...] -> float32, normalised; tokens -> int32. For use inside jit, in training, evaluation and
        prediction alike."""
        if self.task == "tokens":
            return lambda x: x.astype(jnp.int32)
        if self.mean is None:
            return lambda x: x.astype(jnp.float32)
        mean, factor = np.float32(self.mean), np.float32(1.0 / np.asarray(self.sd))
        return lambda x: (x.astype(jnp.float32) - mean) * factor
