"""jaxtrain: train JAX/Flax models. One config trains, checkpoints, resumes and evaluates, exactly.

Importing this module starts no backend and imports neither jax nor flax; the names below load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxtrain.config import ConfigError, NeedsPerson, RunConfig, UserError
    from jaxtrain.evaluate import LoadedModel, evaluate_run, load_model
    from jaxtrain.runner import Run, Trainer, load_run, resume, train

_HOMES = {
    "ConfigError": "config",
    "NeedsPerson": "config",
    "RunConfig": "config",
    "UserError": "config",
    "LoadedModel": "evaluate",
    "evaluate_run": "evaluate",
    "load_model": "evaluate",
    "Run": "runner",
    "Trainer": "runner",
    "load_run": "runner",
    "resume": "runner",
    "train": "runner",
}

__all__ = [  # noqa: RUF022 (grouped by room)
    "ConfigError",
    "NeedsPerson",
    "RunConfig",
    "UserError",
    "LoadedModel",
    "evaluate_run",
    "load_model",
    "Run",
    "Trainer",
    "load_run",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"jaxtrain.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
