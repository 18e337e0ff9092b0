"""The state of a run: one dict of plain arrays (contract 1). What is not in here is not in a checkpoint.

step          int32, batches consumed; drives data, randomness, logs, checkpoints; always advances
updates       int32, updates applied; drives the schedule and the EMA
data_offset   int32, batches jumped over by rollbacks
lr_scale      float32, multiplies the schedule
params, model_state, opt_state
ema           {"params", "model_state"} averaged, or {} when off
loss_scale    {"scale", "good"}: float32 factor and int32 clean updates since it changed
guard         int32 counters of skipped updates
window        sums of the metrics since the last row of the log
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.core.objectives import RESERVED

State = dict[str, Any]


def init_state(
    params: dict[str, Any],
    model_state: dict[str, Any],
    optimizer: optax.GradientTransformation,
    *,
    ema: bool,
    loss_scale: float,
    sums: Iterable[str] = (),
) -> State:
    """The state before the first step. `sums`: names of the metric sums that the objective adds to the window."""
    return {
        "step": _zero(),
        "updates": _zero(),
        "data_offset": _zero(),
        "lr_scale": jnp.ones((), jnp.float32),
        "params": params,
        "model_state": model_state,
        "opt_state": optimizer.init(params),
        # A copy: a donated buffer must not be there twice.
        "ema": {"params": _copy(params), "model_state": _copy(model_state)} if ema else {},
        "loss_scale": {"scale": jnp.asarray(loss_scale, jnp.float32), "good": _zero()},
        "guard": {"skipped": _zero(), "in_row": _zero()},
        "window": {name: jnp.zeros((), jnp.float32) for name in (*RESERVED, *sums)},
    }


def weights_for_evaluation(state: State) -> tuple[dict[str, Any], dict[str, Any]]:
    """(params, model_state) that are evaluated and exported: the averaged ones when there are any."""
    source = state["ema"] or state
    return source["params"], source["model_state"]


def _zero() -> jax.Array:
    # A new one each time: the state is donated, and one buffer must not be given away twice.
    return jnp.zeros((), jnp.int32)


def _copy(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.array(x) for name, x in arrays.items()}
