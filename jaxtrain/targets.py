"""From what a config names to Python objects: the module of `model`, and `file.py:name` targets."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx

from jaxtrain.config import RunConfig, schema
from jaxtrain.config.errors import ConfigError, choices
from jaxtrain.data.schema import Schema
from jaxtrain.models import MODELS

Make = Callable[[nnx.Rngs], nnx.Module]
GIVEN = "python"
"""`python:Net` as a target: the object was handed over in Python, a config file cannot name it."""


def load_target(target: str, section: str) -> Any:
    """The object behind `file.py:name` or `package.module:name`. Raises ConfigError."""
    where, _, name = target.partition(":")
    if where == GIVEN:
        raise ConfigError(
            f"{section}.target: {name!r} was given in Python and is not here; give it again: "
            "jt.Trainer(config, model=..., loss=...).resume(run)"
        )
    if not name:
        raise ConfigError(f"{section}.target: {target!r}: a name is needed, as in my_model.py:Net")
    try:
        if where.endswith(".py"):
            path = Path(where).resolve()
            if not path.is_file():
                raise ConfigError(f"{section}.target: {where!r}: no such file (looked in {path.parent})")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(path.stem, module)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's file raises is about the user's file
        raise ConfigError(f"{section}.target: {where!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{section}.target: {where!r} has no {name!r}; {choices(name, public)}")
    return getattr(module, name)


def maker(config: RunConfig, data: Schema, model: nnx.Module | Make | None = None) -> Make:
    """rngs -> the module of a config (or `model`, which replaces it) for data of this schema. Raises ConfigError."""
    if isinstance(model, nnx.Module):
        # Only its structure is taken from here; its arrays are the initial state.
        graph, state = nnx.split(model)
        return lambda rngs: nnx.merge(graph, state)
    if model is not None:
        return model
    if isinstance(config.model, schema.CustomModel):
        cls, args = load_target(config.model.target, "model"), config.model.args
        try:
            inspect.signature(cls).bind(rngs=None, **args)
        except TypeError as error:
            raise ConfigError(f"model.args: {config.model.target} does not take them with `rngs`: {error}") from None
        return lambda rngs: cls(rngs=rngs, **args)
    kind = MODELS[config.model.kind]
    _check_fits(config, kind.takes, data)
    return lambda rngs: kind.make(config.model, data.input_shape, data.outputs, rngs=rngs)


def _check_fits(config: RunConfig, takes: str, data: Schema) -> None:
    """Raise ConfigError when a kind of model cannot read rows of this shape."""
    shape, given = data.input_shape, "tokens" if data.task == "tokens" else "numbers"
    what = f"model.kind={config.model.kind}"
    if (takes == "tokens") != (given == "tokens"):
        fitting = ", ".join(name for name, kind in MODELS.items() if (kind.takes == "tokens") == (given == "tokens"))
        raise ConfigError(f"{what} needs {takes}; data.kind={config.data.kind} gives {given}; allowed: {fitting}")
    if takes == "images" and len(shape) != 3:
        hint = "; add a channel axis: inputs[..., None]" if len(shape) == 2 else ""
        raise ConfigError(f"{what} needs images [H, W, C]; the data has rows of shape {list(shape)}{hint}")
    if takes == "sequences" and len(shape) not in (1, 2):
        raise ConfigError(f"{what} needs sequences [T] or [T, C]; the data has rows of shape {list(shape)}")
    if (config.augment.shift or config.augment.flip) and len(shape) != 3:
        raise ConfigError(f"augment needs images [H, W, C]; the data has rows of shape {list(shape)}")
