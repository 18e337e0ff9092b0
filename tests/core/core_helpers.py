"""What the tests of the core share: one tiny module, one batch, one spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxtrain.config import schema
from jaxtrain.core.metrics import METRICS
from jaxtrain.core.module import ModuleDef
from jaxtrain.core.objectives import built_in_loss, make_objective
from jaxtrain.core.precision import PRECISIONS
from jaxtrain.core.state import State, init_state
from jaxtrain.core.step import StepSpec, make_train_step


class Affine(nnx.Module):
    """One dense layer: [B, inputs] -> [B, outputs]."""

    def __init__(self, rngs: nnx.Rngs, inputs: int = 5, outputs: int = 3, use_bias: bool = True) -> None:
        self.dense = nnx.Linear(inputs, outputs, use_bias=use_bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


class Normed(nnx.Module):
    """Dense, BatchNorm, dense: a module with model_state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(5, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.last = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.norm(self.first(x)))


def as_float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def make_spec(make: Callable[[nnx.Rngs], nnx.Module] = Affine, **changes: Any) -> StepSpec:
    """fp32, SGD at 0.1, cross-entropy over 3 classes; `changes` are fields of StepSpec."""
    module = ModuleDef(make)
    objective = make_objective(schema.CrossEntropy())
    fields: dict[str, Any] = {
        "module": module,
        "loss": built_in_loss(objective, METRICS["classes"](3, 5).train_sums, module.takes_mask),
        "optimizer": optax.identity(),
        "schedule": lambda n: 0.1,
        "precision": PRECISIONS["fp32"],
        "preprocess": as_float,
        "augment": schema.Augment(),
        "seed": 0,
        "micro_batches": 1,
        "unroll": False,
        "lanes": 1,
        "branch": False,
        "clip_norm": 0.0,
        "ema_decay": 0.0,
        "log_every": 1000,
    }
    return StepSpec(**(fields | changes))


def start(spec: StepSpec, *, sums: tuple[str, ...] = ("accuracy",), params: dict[str, Any] | None = None) -> State:
    """The first state of a spec; `params` replace the fresh ones."""

    fresh, model_state = spec.module.init(spec.seed)
    return init_state(
        {name: jnp.asarray(x) for name, x in params.items()} if params else fresh,
        model_state,
        spec.optimizer,
        ema=bool(spec.ema_decay),
        loss_scale=spec.precision.initial_scale,
        sums=sums,
    )


def step_of(spec: StepSpec) -> Any:
    return jax.jit(make_train_step(spec))


def make_batch(rows: int = 16, *, seed: int = 0, inputs: int = 5, classes: int = 3) -> dict[str, Any]:
    """A learnable batch: the class is the largest of the first inputs."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, inputs)).astype(np.float32)
    return {
        "inputs": x,
        "targets": x[:, :classes].argmax(1).astype(np.int32),
        "mask": np.ones(rows, bool),
        "ids": np.arange(rows, dtype=np.int32),
        "epoch": np.int32(0),
    }


def spoil(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with one NaN in one row."""
    inputs = batch["inputs"].copy()
    inputs[3, 1] = np.nan
    return {**batch, "inputs": inputs}


def assert_bit_equal(left: Any, right: Any) -> None:
    """Same structure, same types, same bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def bit_equal(left: Any, right: Any) -> bool:
    try:
        assert_bit_equal(left, right)
    except AssertionError:
        return False
    return True
