"""Told, when a step is compiled again in the middle of a run: which array changed, from what to what.

A step is compiled once, before the run. One batch of another shape or type compiles it again, silently, and then a run
that takes an hour takes a day.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.core.module import name_of

log = logging.getLogger("jaxtrain")
_TOLD = 5
"""Warnings in one run; a batch that differs each time would fill the log."""


class Sentinel:
    """A jitted step (state, fed, ...) that says why it was compiled again. Costs a look at a counter each call."""

    def __init__(self, step: Callable[..., Any], *expected: Any) -> None:
        """expected: the arguments that it was compiled for, arrays or `jax.ShapeDtypeStruct`."""
        self._step = step
        self._known = expected
        self._programs = self._told = 0

    def __call__(self, *args: Any) -> Any:
        since = time.perf_counter()
        out = self._step(*args)
        programs = self._step._cache_size()  # type: ignore[attr-defined]
        if programs != self._programs:
            self._programs = programs
            self._compare(args, time.perf_counter() - since)
        return out

    def _compare(self, args: tuple[Any, ...], seconds: float) -> None:
        """The state is donated by now; its shapes, types and shardings are still there."""
        pairs = zip(self._known, args, strict=False)
        changed = [text for before, now in pairs for text in _changed(_leaves(before), _leaves(now))]
        if changed and self._told < _TOLD:  # nothing: the first call found the program that was compiled before
            self._told += 1
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            log.warning("the step was compiled again (%.1f s): %s%s", seconds, changed[0], more)


def _leaves(tree: Any) -> dict[str, Any]:
    return {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    texts = [f"{name} is gone" for name in before if name not in now]
    for name, x in now.items():
        if name not in before:
            texts.append(f"{name} is new: {_type(x)}")
        elif _type(before[name]) != _type(x):
            texts.append(f"{name} was {_type(before[name])}, is {_type(x)}")
        elif (laid := before[name].sharding) is not None and not laid.is_equivalent_to(x.sharding, x.ndim):
            texts.append(f"{name} was laid out as {laid}, is {x.sharding}")
    return texts


def _type(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]{' (weak type)' if getattr(x, 'weak_type', False) else ''}"
