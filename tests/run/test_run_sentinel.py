"""A step that is compiled again in the middle of a run is told, with the array that changed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import tiny

from jaxtrain.data import feed
from jaxtrain.sentinel import Sentinel


def told(text: str) -> list[str]:
    """What follows each "the step was compiled again (1.2 s): "."""
    return [part.split(" s): ", 1)[1].splitlines()[0] for part in text.split("the step was compiled again (")[1:]]


@pytest.mark.parametrize(("kind", "steps"), [("resident", 1), ("resident", 50), ("direct", 1), ("prefetch", 1)])
def test_a_run_compiles_its_step_once(kind: str, steps: int, tmp_path: Path) -> None:
    tiny(tmp_path, **{"data.feed": kind, "train.steps_per_dispatch": steps}).close()
    assert told((tmp_path / "run.log").read_text()) == []


@pytest.mark.parametrize("form", ["type", "shape", "more", "less"])
def test_the_array_that_changed_is_named(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = feed.HostBatches.__call__
    changes: dict[str, Any] = {
        "type": lambda batch: {**batch, "inputs": batch["inputs"].astype(np.int32)},
        "shape": lambda batch: {n: x[:32] if x.ndim else x for n, x in batch.items()},
        "more": lambda batch: {**batch, "weights": np.ones(64, np.float32)},
        "less": lambda batch: {n: x for n, x in batch.items() if n != "ids"},
    }
    odd = changes[form]
    monkeypatch.setattr(
        feed.HostBatches, "__call__", lambda self, at: odd(plain(self, at)) if at == 10 else plain(self, at)
    )
    tiny(tmp_path, **{"data.feed": "direct", "mesh.data": 1}).close()
    expected = {
        "type": "inputs was float32[64,8,8,1], is int32[64,8,8,1]",
        "shape": "ids was int32[64], is int32[32] and 3 more",
        "more": "weights is new: float32[64]",
        "less": "ids is gone",
    }
    assert told((tmp_path / "run.log").read_text()) == [expected[form]]


def test_another_layout_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Layout(str):
        def is_equivalent_to(self, other: str, ndim: int) -> bool:
            return self == other

    def array(layout: str) -> Any:
        return SimpleNamespace(dtype=jnp.dtype("float32"), shape=(8,), ndim=1, sharding=Layout(layout))

    programs = iter([1, 1, 2])
    plain: Any = lambda state: state  # noqa: E731
    plain._cache_size = lambda: next(programs)
    step = Sentinel(plain, {"kernel": array("whole")})
    with caplog.at_level(logging.WARNING, "jaxtrain"):
        step({"kernel": array("whole")})
        step({"kernel": array("whole")})
        assert told(caplog.text) == []
        step({"kernel": array("in parts")})
    assert told(caplog.text) == ["kernel was laid out as whole, is in parts"]


def test_a_weak_type_is_seen_and_a_flood_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    step = Sentinel(jax.jit(lambda state, fed: (state, fed)), jax.ShapeDtypeStruct((), jnp.float32), {})
    with caplog.at_level(logging.WARNING, "jaxtrain"):
        step(jnp.float32(1.0), {})
        assert told(caplog.text) == []
        step(jnp.asarray(1.0), {})
        assert told(caplog.text) == [" was float32[], is float32[] (weak type)"]
        for size in range(1, 9):
            step(jnp.float32(1.0), {"x": jnp.ones(size)})
    assert len(told(caplog.text)) == 5
    assert told(caplog.text)[-1] == "x is new: float32[4]"
