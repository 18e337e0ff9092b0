"""Checkpoints: sealed Orbax steps. Save, seal, list, verify, restore, retain.

The names load when first used: `files` serves those too who start no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.checkpoint.reading import SealedSteps
    from jaxtrain.checkpoint.seal import CorruptStep, Sealed
    from jaxtrain.checkpoint.store import Checkpoints

__all__ = ["Checkpoints", "CorruptStep", "Sealed", "SealedSteps"]

_HOME = {"Checkpoints": "store", "CorruptStep": "seal", "Sealed": "seal", "SealedSteps": "reading"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"jaxtrain.checkpoint.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
