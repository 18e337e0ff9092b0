"""Steps without jit: every layer's output looked at. For finding where a NaN or a wrong shape comes from."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import initial
from jaxtrain.build import Job, build
from jaxtrain.config import RunConfig
from jaxtrain.config.errors import NEEDS_PERSON, OK
from jaxtrain.core.precision import cast_floats
from jaxtrain.core.rng import stream_key
from jaxtrain.core.step import gradients, make_train_step

Row = tuple[str, str, tuple[int, ...], str, bool]


def run_eagerly(config: RunConfig, steps: int) -> int:
    """Print every layer of the first step, then loss and gradient norm of each; the exit code."""
    # Without jit nothing fetches what the host's memory holds.
    near = config.optimizer.model_copy(update={"offload": "none"})
    job = build(config.model_copy(update={"optimizer": near}))
    state = initial.state(job)
    train_step, batches = make_train_step(job.spec), job.host_batches()
    for step in range(steps):
        batch = {name: jnp.asarray(x) for name, x in batches(step).items()}
        with jax.disable_jit():
            rows = layers(job, state, batch)
            bad = [f"output of layer {row[0]}" for row in rows if not row[4]]
            grads = gradients(job.spec, state, batch)
            bad += [f"gradient of {name}" for name, g in grads.items() if not np.isfinite(np.asarray(g)).all()]
            state, metrics = train_step(state, batch)
        if step == 0:
            for path, kind, shape, dtype, finite in rows:
                print(
                    f"  {path:<28} {kind:<12} {list(shape)!s:<20} {dtype:<9} {'' if finite else 'NOT FINITE'}".rstrip()
                )
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        print(f"step {step + 1}: loss {loss:.6g}  grad_norm {norm:.6g}")
        if bad:
            ids = ", ".join(map(str, np.asarray(batch["ids"])[:8]))
            print(f"first not finite: {bad[0]} (rows {ids}, ...)", file=sys.stderr)
            return NEEDS_PERSON
    return OK


def layers(job: Job, state: Any, batch: dict[str, Any]) -> list[Row]:
    """(path, class, shape, dtype, finite) of what each submodule gives on a batch, in the order of the calls."""
    spec = job.spec
    params = cast_floats(state["params"], spec.precision.compute)
    key = stream_key(spec.seed, "module", state["step"], 0)
    model = spec.module.bind(params, state["model_state"], key)
    inputs = cast_floats(spec.preprocess(batch["inputs"]), spec.precision.compute)
    rows: list[Row] = []
    with _recorded(model, rows):
        spec.loss(model, {**batch, "inputs": inputs})
    return rows


@contextlib.contextmanager
def _recorded(model: nnx.Module, rows: list[Row]) -> Iterator[None]:
    """While this is open, every call of a submodule of `model` adds a row."""
    names = {id(m): ".".join(map(str, path)) or "(model)" for path, m in nnx.iter_modules(model)}
    classes = {type(m) for _, m in nnx.iter_modules(model) if "__call__" in vars(type(m))}
    originals = {cls: vars(cls)["__call__"] for cls in classes}

    def wrap(call: Any) -> Any:
        def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = call(self, *args, **kwargs)
            if id(self) in names and hasattr(out, "shape"):
                finite = bool(jnp.isfinite(out.astype(jnp.float32)).all())
                rows.append((names[id(self)], type(self).__name__, tuple(out.shape), str(out.dtype), finite))
            return out

        return recording

    for cls, call in originals.items():
        setattr(cls, "__call__", wrap(call))  # noqa: B010
    try:
        yield
    finally:
        for cls, call in originals.items():
            setattr(cls, "__call__", call)  # noqa: B010
