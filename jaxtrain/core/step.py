"""The step: `train_step(state, batch) -> (state, metrics)` and `eval_step`, pure, for one plain `jax.jit`.

A batch is a dict: inputs, targets [B, ...], mask [B] bool, ids [B] int32, epoch (scalar), weights [B] (optional).
The loss is sum(w*l) / sum(w) over the whole global batch, divided once, whatever the micro-batches hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.schema import Augment
from jaxtrain.core import guard
from jaxtrain.core.augment import augment
from jaxtrain.core.cost import Cost, cost_of
from jaxtrain.core.metrics import Metrics
from jaxtrain.core.module import ModuleDef
from jaxtrain.core.objectives import Batch, LossFn, Objective, align, call_model, over_elements
from jaxtrain.core.precision import Precision, cast_floats, next_scale
from jaxtrain.core.rng import stream_key
from jaxtrain.core.state import State

StepMetrics = dict[str, jax.Array]


@dataclass(frozen=True)
class StepSpec:
    """All that a step is made of; static, so that one spec is one program.

    preprocess: raw inputs [B, ...] -> normalised float32, the same in training, evaluation and export.
    micro_batches: forward passes that are accumulated into one update.
    unroll: write the accumulation out (XLA:CPU runs convolutions in a loop more than ten times slower).
    lanes: parts of a micro-batch that are computed side by side in one program: XLA:CPU keeps its cores busier with
        two products at once than with each product split over the cores. Needs a model without batch statistics.
    branch: skip a non-finite update by a branch (see `guard.apply`).
    """

    module: ModuleDef
    loss: LossFn
    optimizer: optax.GradientTransformation
    schedule: Callable[[Any], Any]
    precision: Precision
    preprocess: Callable[[jax.Array], jax.Array]
    augment: Augment
    seed: int
    micro_batches: int
    unroll: bool
    lanes: int
    branch: bool
    clip_norm: float
    ema_decay: float
    log_every: int


def make_train_step(spec: StepSpec) -> Callable[[State, Batch], tuple[State, StepMetrics]]:
    """The pure training step. Metrics are scalars: loss, grad_norm, lr, and the window sums so far."""

    def train_step(state: State, batch: Batch) -> tuple[State, StepMetrics]:
        step = state["step"]
        rows = batch["mask"].shape[0]
        # Scaled per row, so that fp16 sees gradients of a mean and not of a sum.
        scale = state["loss_scale"]["scale"] / rows
        batch = _prepare(spec, batch, stream_key(spec.seed, "augment", step))
        grads, model_state, total, weight, sums = _accumulate(spec, state, batch, scale)

        weight = jnp.where(weight > 0, weight, 1.0)
        loss = total / weight
        per_weight = 1.0 / (weight * scale)
        grad_norm = optax.tree.norm(grads) * per_weight
        finite = guard.is_finite(loss, grad_norm)
        lr = jnp.asarray(spec.schedule(state["updates"]), jnp.float32) * state["lr_scale"]

        def update(old: dict[str, Any]) -> dict[str, Any]:
            factor = per_weight
            if spec.clip_norm:
                factor *= jnp.minimum(1.0, spec.clip_norm / (grad_norm + 1e-6))
            mean = jax.tree.map(lambda g: g * factor, grads)
            direction, opt_state = spec.optimizer.update(mean, old["opt_state"], old["params"])
            params = jax.tree.map(lambda p, d: (p - lr * d).astype(p.dtype), old["params"], direction)
            ema = _averaged(spec, old["ema"], state["updates"], params, model_state)
            return {"params": params, "model_state": model_state, "opt_state": opt_state, "ema": ema}

        old = {name: state[name] for name in ("params", "model_state", "opt_state", "ema")}
        new = guard.apply(finite, update, old, branch=spec.branch)

        # An fp16 overflow above the smallest scale is how the scale is found, not a fault.
        scaled = spec.precision.scales_loss
        overflow = ~finite & (state["loss_scale"]["scale"] > 1.0) if scaled else jnp.zeros((), bool)
        loss_scale = state["loss_scale"]
        if scaled:
            value, good = next_scale(loss_scale["scale"], loss_scale["good"], finite)
            loss_scale = {"scale": value, "good": good}

        window = _window(spec, state, finite, overflow, total, weight, sums)
        new_state: State = {
            **state,
            **new,
            "step": step + 1,
            "updates": state["updates"] + finite.astype(jnp.int32),
            "loss_scale": loss_scale,
            "guard": guard.count(state["guard"], finite, ~overflow),
            "window": window,
        }
        metrics = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "in_row": new_state["guard"]["in_row"]}
        if scaled:
            metrics["loss_scale"] = loss_scale["scale"]
        return new_state, metrics | {f"window/{name}": value for name, value in window.items()}

    return train_step


def make_eval_step(
    spec: StepSpec, objective: Objective | None, metrics: Metrics | None
) -> Callable[[Any, Any, Batch], dict[str, Any]]:
    """`eval_step(params, model_state, batch) -> mergeable state`. The loss is unweighted and counts the mask.

    objective None: the user's loss is what is evaluated. metrics None: only the loss.
    """

    def eval_step(params: Any, model_state: Any, batch: Batch) -> dict[str, Any]:
        batch = _cast_inputs(spec, {**batch, "inputs": spec.preprocess(batch["inputs"])})
        model = spec.module.bind(cast_floats(params, spec.precision.compute), model_state, None)
        state: dict[str, Any] = {}
        if objective is None:
            total, count, sums = spec.loss(model, batch)
            state = {"loss_sum": total, "loss_count": count, **{f"sum_{k}": v for k, v in sums.items()}}
        if metrics is None:
            return state
        task = objective.task if objective else "classes"
        outputs = align(call_model(model, batch, spec.module.takes_mask), batch["targets"], task)
        if objective is not None:
            losses = objective.plain(outputs, batch["targets"])
            real = over_elements(batch["mask"], losses)
            state = {"loss_sum": jnp.sum(jnp.where(real, losses, 0.0)), "loss_count": jnp.sum(real)}
        return state | metrics.update(outputs, batch["targets"], batch["mask"])

    return eval_step


def step_cost(spec: StepSpec, batch: Batch) -> Cost:
    """What a step on a batch of these shapes costs; only traced. saved_bytes: of one micro-batch, as the step keeps it.

    batch: the global batch, abstract. The model's share: the optimizer, which is element-wise, is not counted.
    """
    rows = batch["mask"].shape[0]
    micro = jax.eval_shape(lambda b: jax.tree.map(lambda x: _split(x, spec.micro_batches)[0], b), batch)

    def loss(params: Any, model_state: Any, batch: Batch) -> Any:
        batch = _prepare(spec, batch, stream_key(spec.seed, "augment", 0))
        key = stream_key(spec.seed, "module", 0, 0)
        model = spec.module.bind(cast_floats(params, spec.precision.compute), model_state, key)
        return spec.loss(model, batch)[0]

    one = cost_of(loss, spec.module.params, spec.module.model_state, micro, rows=rows)
    n = spec.micro_batches
    return Cost(rows, n * one.forward_flops, n * one.step_flops, one.saved_bytes)


def gradients(spec: StepSpec, state: State, batch: Batch) -> dict[str, jax.Array]:
    """The gradient of the mean loss of a batch for every parameter, as the step takes it (before clipping)."""
    scale = jnp.ones((), jnp.float32)
    batch = _prepare(spec, batch, stream_key(spec.seed, "augment", state["step"]))
    grads, _, _, weight, _ = _accumulate(spec, state, batch, scale)
    return {name: g / jnp.where(weight > 0, weight, 1.0) for name, g in grads.items()}


def _prepare(spec: StepSpec, batch: Batch, key: jax.Array) -> Batch:
    inputs = batch["inputs"]
    if inputs.ndim == 4:
        inputs = augment(spec.augment, key, inputs)
    return _cast_inputs(spec, {**batch, "inputs": spec.preprocess(inputs)})


def _cast_inputs(spec: StepSpec, batch: Batch) -> Batch:
    return {**batch, "inputs": cast_floats(batch["inputs"], spec.precision.compute)}


def _accumulate(
    spec: StepSpec, state: State, batch: Batch, scale: jax.Array
) -> tuple[Any, Any, jax.Array, jax.Array, dict[str, jax.Array]]:
    """Sums over the micro-batches: (gradients, model_state, sum of w*l, sum of w, metric sums)."""

    def scaled_loss(params: Any, model_state: Any, micro: Batch, key: jax.Array) -> Any:
        model = spec.module.bind(cast_floats(params, spec.precision.compute), model_state, key)
        total, weight, sums = spec.loss(model, micro)
        _, after = spec.module.extract(model)
        # The statistics keep their types, whatever the computation ran in.
        after = {name: after[name].astype(old.dtype) for name, old in model_state.items()}
        return total * scale, (after, total, weight, sums)

    def one(model_state: Any, micro: Batch, index: jax.Array | int) -> Any:
        parts = []
        for lane in range(spec.lanes):
            rows = jax.tree.map(lambda x: _split(x, spec.lanes)[lane], micro)  # noqa: B023 called at once
            key = stream_key(spec.seed, "module", state["step"], index * spec.lanes + lane)
            grads, (after, *sums) = jax.grad(scaled_loss, has_aux=True)(state["params"], model_state, rows, key)
            parts.append((grads, sums))
        grads, sums = jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *parts)
        return grads, after, sums

    count = spec.micro_batches
    if count == 1:
        grads, model_state, (total, weight, sums) = one(state["model_state"], batch, 0)
        return grads, model_state, total, weight, sums

    micros = jax.tree.map(lambda x: _split(x, count), batch)

    def body(carry: Any, xs: Any) -> tuple[Any, None]:
        so_far, model_state = carry
        index, micro = xs
        grads, model_state, sums = one(model_state, micro, index)
        return (jax.tree.map(jnp.add, so_far, (grads, sums)), model_state), None

    shapes = jax.eval_shape(one, state["model_state"], jax.tree.map(lambda x: x[0], micros), 0)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0], shapes[2]))
    xs = (jnp.arange(count), micros)
    unroll = count if spec.unroll else 1
    ((grads, (total, weight, sums)), model_state), _ = jax.lax.scan(
        body, (zeros, state["model_state"]), xs, unroll=unroll
    )
    return grads, model_state, total, weight, sums


def _split(x: jax.Array, count: int) -> jax.Array:
    """[B, ...] -> [count, B / count, ...]: micro-batch u takes rows u, u + count, ...

    So real rows, which come first, are spread over all micro-batches, and a batch sharded over devices is split
    without moving a row. Scalars are repeated.
    """
    if x.ndim == 0:
        return jnp.broadcast_to(x, (count,))
    return x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)


def _averaged(spec: StepSpec, ema: Any, updates: jax.Array, params: Any, model_state: Any) -> Any:
    """The exponential moving average, slower as it has more to average: min(decay, (1 + n) / (10 + n))."""
    if not spec.ema_decay:
        return ema
    n = updates.astype(jnp.float32)
    decay = jnp.minimum(spec.ema_decay, (1.0 + n) / (10.0 + n))

    def average(old: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(old.dtype, jnp.floating):
            return new
        return decay * old + (1.0 - decay) * new

    return jax.tree.map(average, ema, {"params": params, "model_state": model_state})


def _window(
    spec: StepSpec,
    state: State,
    finite: jax.Array,
    overflow: jax.Array,
    total: jax.Array,
    weight: jax.Array,
    sums: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """Sums since the last multiple of log_every. A skipped step adds to the count of skips and to nothing else."""
    fresh = state["step"] % spec.log_every == 0
    old = {name: jnp.where(fresh, 0.0, value) for name, value in state["window"].items()}
    added = {"loss": total, "weight": weight, "count": weight, **sums}
    window = {name: old[name] + jnp.where(finite, value, 0.0) for name, value in added.items()}
    window["overflow"] = old["overflow"] + overflow
    window["skipped"] = old["skipped"] + (~finite & ~overflow)
    return window
