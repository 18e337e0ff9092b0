"""Objectives: element losses and element weights; the step sums both over the whole global batch and divides once.

An objective is two functions of (outputs, targets):
  elements -> (loss, weight)  for training, in fp32, of the shape of the targets
  plain    -> loss            for evaluation: without smoothing, focusing and weights, comparable between configs
`task` says what the numbers mean: "classes" (outputs [..., C], integer targets [...]), "binary" (outputs and
targets of one shape, targets 0 or 1) or "regression" (outputs and targets of one shape).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config import schema

Batch = dict[str, Any]
RESERVED = ("loss", "weight", "count", "overflow", "skipped")
"""Names of sums that every training window has."""
LossParts = tuple[jax.Array, jax.Array, dict[str, jax.Array]]
LossFn = Callable[[Any, Batch], LossParts]
"""(model, batch) -> (sum of w*l, sum of w, sums to be divided by the number of real elements)."""


@dataclass(frozen=True)
class Objective:
    """See the head of this file."""

    task: str
    elements: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    plain: Callable[[jax.Array, jax.Array], jax.Array]


def _cross_entropy(c: schema.CrossEntropy, class_weights: tuple[float, ...] | None) -> Objective:
    table = None if class_weights is None else jnp.asarray(class_weights, jnp.float32)

    def plain(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.asarray(optax.softmax_cross_entropy_with_integer_labels(outputs, targets))

    def elements(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = jnp.ones(targets.shape, jnp.float32) if table is None else table[targets]
        loss = plain(outputs, targets)
        if c.focal_gamma:
            # Lin et al. 2017; 1 - p by expm1 keeps its digits where p is near 1.
            # The floor keeps the slope of a power below 1 finite where p has rounded to 1.
            loss = loss * jnp.maximum(-jnp.expm1(-loss), 1e-12) ** c.focal_gamma
        if c.label_smoothing:
            # Szegedy et al. 2016: the target is (1 - s) * one-hot + s / C.
            uniform = -jax.nn.log_softmax(outputs).mean(-1)
            loss = (1 - c.label_smoothing) * loss + c.label_smoothing * uniform
        return loss, weight

    return Objective("classes", elements, plain)


def _binary(c: schema.Binary, class_weights: tuple[float, ...] | None) -> Objective:
    def plain(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.asarray(optax.sigmoid_binary_cross_entropy(outputs, targets))

    def elements(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = jnp.where(targets > 0.5, c.positive_weight, 1.0).astype(jnp.float32)
        smooth = targets * (1 - c.label_smoothing) + 0.5 * c.label_smoothing
        return plain(outputs, smooth), weight

    return Objective("binary", elements, plain)


def _regression(loss: Callable[[jax.Array, jax.Array], jax.Array]) -> Objective:
    def elements(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss(outputs, targets), jnp.ones(targets.shape, jnp.float32)

    return Objective("regression", elements, loss)


OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "cross_entropy": _cross_entropy,
    "binary": _binary,
    "mse": lambda c, _: _regression(lambda o, t: jnp.square(o - t)),
    "mae": lambda c, _: _regression(lambda o, t: jnp.abs(o - t)),
    "huber": lambda c, _: _regression(lambda o, t: optax.huber_loss(o, t, delta=c.delta)),
}


def make_objective(config: schema.Objective, class_weights: tuple[float, ...] | None = None) -> Objective:
    """The objective of a config; `class_weights` as resolved from the training rows ([C], or None)."""
    return OBJECTIVES[config.kind](config, class_weights)


def call_model(model: Any, batch: Batch, takes_mask: bool) -> jax.Array:
    """model(inputs) or model(inputs, mask=mask): outputs in fp32."""
    outputs = model(batch["inputs"], mask=batch["mask"]) if takes_mask else model(batch["inputs"])
    return jnp.asarray(outputs, jnp.float32)


def align(outputs: jax.Array, targets: jax.Array, task: str) -> jax.Array:
    """Outputs [B, 1] as [B] where targets are [B]. Raises ValueError when the shapes cannot belong together."""
    if task != "classes" and outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs[..., 0]
    fits = outputs.shape[:-1] == targets.shape if task == "classes" else outputs.shape == targets.shape
    if not fits:
        raise ValueError(f"the model gives {outputs.shape} for targets {targets.shape} (task {task})")
    return outputs


def over_elements(rows: jax.Array, like: jax.Array) -> jax.Array:
    """A value per row [B] (or per token [B, T]), spread over the elements of `like`, [B, ...]."""
    return jnp.broadcast_to(rows.reshape(rows.shape + (1,) * (like.ndim - rows.ndim)), like.shape)


def built_in_loss(objective: Objective, sums: Callable[..., dict[str, jax.Array]], takes_mask: bool) -> LossFn:
    """The loss of a built-in objective. `sums(outputs, targets, mask)` adds cheap training metrics."""

    def loss(model: Any, batch: Batch) -> LossParts:
        targets = batch["targets"]
        outputs = align(call_model(model, batch, takes_mask), targets, objective.task)
        # Rows without weight are replaced before the loss, not after it: 0 * NaN is NaN in a gradient too.
        rows = row_weights(batch)
        counted = jnp.where(over_elements(rows, outputs) > 0, outputs, 0.0)
        wanted = jnp.where(over_elements(rows, targets) > 0, targets, 0)
        losses, weight = objective.elements(counted, wanted)
        weight = weight * over_elements(rows, losses)
        return jnp.sum(losses * weight), jnp.sum(weight), sums(outputs, targets, batch["mask"])

    return loss


def user_loss(function: Callable[[Any, Batch], Any]) -> LossFn:
    """A user's `loss(model, batch)`: a scalar (a mean over the batch) or (sum, count, metrics).

    `metrics` is {name: sum}, divided by count. A scalar counts as many elements as the batch has real rows.
    """

    def loss(model: Any, batch: Batch) -> LossParts:
        result = function(model, batch)
        if isinstance(result, tuple):
            if len(result) != 3:
                raise ValueError(f"loss returned {len(result)} values; allowed: a scalar or (sum, count, metrics)")
            total, count, metrics = result
        else:
            count = jnp.sum(batch["mask"])
            total, metrics = jnp.asarray(result, jnp.float32) * count, {}
        total, count = jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32)
        for what, value in (("loss", total), ("count", count)):
            if value.shape:
                raise ValueError(f"{what} has shape {value.shape}; a scalar is needed: take its mean or its sum")
        for name in metrics:
            if name in RESERVED:
                raise ValueError(f"a metric of the loss is named {name!r}, which the log uses itself; rename it")
        return (
            total,
            count,
            {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()},
        )

    return loss


def row_weights(batch: Batch) -> jax.Array:
    """mask * weights, float32, of the shape of the mask ([B], or [B, T] for tokens): what each row or token counts."""
    mask = batch["mask"].astype(jnp.float32)
    return jnp.asarray(mask * over_elements(batch["weights"], mask)) if "weights" in batch else mask
