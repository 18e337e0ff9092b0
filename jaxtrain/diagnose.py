"""What a non-finite update came from: rows of the batch, the first layer or gradient; the batch for a replay."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.build import Job
from jaxtrain.core.precision import cast_floats
from jaxtrain.core.state import State
from jaxtrain.core.step import gradients
from jaxtrain.eager import layers
from jaxtrain.parallel import processes

log = logging.getLogger("jaxtrain")

_SHOWN = 8


def bad_rows(job: Job, state: State, batch: dict[str, Any]) -> list[int]:
    """Ids of the rows whose own loss is not finite, by the model in evaluation form, without augmentation."""
    spec = job.spec

    @jax.jit
    def losses(params: Any, model_state: Any, batch: dict[str, Any]) -> jax.Array:
        inputs = cast_floats(spec.preprocess(batch["inputs"]), spec.precision.compute)
        model = job.plain.bind(cast_floats(params, spec.precision.compute), model_state, None)
        rows = {name: x for name, x in {**batch, "inputs": inputs}.items() if x.ndim}

        def one(row: dict[str, jax.Array]) -> jax.Array:
            alone = {name: x[None] for name, x in row.items()}
            total, weight, _ = spec.loss(model, {**batch, **alone})
            return total / weight

        return jax.vmap(one)(rows)

    real = np.asarray(batch["mask"]).reshape(len(batch["ids"]), -1).any(1)
    bad = ~np.isfinite(np.asarray(losses(state["params"], state["model_state"], batch))) & real
    return sorted({int(i) for i in np.asarray(batch["ids"])[bad]})


def named(job: Job, state: State, positions: range) -> str:
    """The rows of these batches whose loss is not finite, in words; "" when all are. Reads them again. Never raises."""
    batches, found = job.host_batches(), set[int]()
    try:
        with jax.transfer_guard("allow"):
            for position in positions:
                found |= set(bad_rows(job, state, batches(position)))
    except Exception as error:
        return f"the rows were not found ({type(error).__name__}: {error})".splitlines()[0]
    return _words(sorted(found))


def cause(job: Job, state: State, position: int, place: Path) -> str:
    """Where the update on the batch at `position` is first not finite, in words; the batch goes into `place`.

    A second pass without jit looks at every layer. Never raises: it explains a fault that is told anyway.
    """
    try:
        batch = job.host_batches()(position)
        texts = ["" if processes.several() else _words(bad_rows(job, state, batch))]
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = place / "batch.npz"
        arrays: dict[str, Any] = {name: np.asarray(x) for name, x in batch.items()}
        np.savez(file, **arrays)
        file.chmod(0o600)
        if not processes.several():  # of several each holds a part of the arrays
            texts.append(_layer(job, state, batch))
        return "; ".join(text for text in [*texts, f"the batch is in {file}"] if text)
    except Exception as error:
        log.debug("no cause found", exc_info=True)
        return f"no cause was found ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"


def _layer(job: Job, state: State, batch: dict[str, Any]) -> str:
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    with jax.disable_jit():
        for row in layers(job, state, arrays):
            if not row[4]:
                return f"first not finite: the output of layer {row[0]} ({row[1]})"
        for name, gradient in gradients(job.spec, state, arrays).items():
            if not np.isfinite(np.asarray(gradient)).all():
                return f"first not finite: the gradient of {name}"
    return "every layer and gradient is finite in a second pass"


def _words(rows: list[int]) -> str:
    if not rows:
        return ""
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"the loss of row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:_SHOWN]))}{more} is not finite"
