"""The arm `jit loop`: flax and optax by hand, without a trainer and without jaxtrain's tricks.

One jitted step over `nnx.split` and `nnx.merge`, its state donated; all rows live on the device and are gathered in
the step. The state crosses the border of the program as a list of arrays, as flax's guide to performance has it: as
nnx.State objects it costs 0.07 ms a step more (tiny mlp).
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import work
from flax import nnx
from flax_nets import make
from work import Workload


def train(own: Workload, net: nnx.Module, arrays: Any, orders: Any) -> tuple[float, list[jax.Array]]:
    """(seconds of the timed epochs, the loss of each step)."""
    data = {name: jnp.asarray(x) for name, x in arrays.items()}
    orders = [jnp.asarray(order) for order in orders]
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    optimizer = optax.adamw(work.RATE, work.B1, work.B2, work.EPS, weight_decay=0)

    def train_step(params: Any, rest: Any, opt_state: Any, place: Any, data: Any, order: Any) -> Any:
        rows = jax.lax.dynamic_slice_in_dim(order, place, own.batch)
        inputs, targets = work.take(data, rows)

        def loss_of(params: Any) -> Any:
            net = nnx.merge(graph, params, rest, copy=True)
            logits = net(inputs).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return losses.mean(), nnx.split(net, nnx.Param, ...)[2]

        (loss, after), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), after, opt_state, (place + own.batch) % own.rows, loss

    initial = (params, rest, optimizer.init(params), jnp.zeros((), jnp.int32))
    state, tree = jax.tree.flatten(initial)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, data: Any, order: Any) -> Any:
        *after, loss = train_step(*tree.unflatten(state), data, order)
        return jax.tree.leaves(after), loss

    losses: list[jax.Array] = []
    begun = 0.0
    for epoch in range(own.epochs):
        if epoch == own.warm:
            jax.block_until_ready((state, losses))
            begun = time.perf_counter()
        for _ in range(own.steps):
            state, loss = step(state, data, orders[epoch])
            losses.append(loss)
    jax.block_until_ready((state, losses))
    return time.perf_counter() - begun, losses


def main() -> None:
    options = work.parse()
    own = work.WORKLOADS[options.workload]
    start = work.load(options.folder, options.workload)
    net = make(own.model, own.shape, own.outputs, start.weights)
    work.report_losses(own, *train(own, net, work.arrays(own), start.orders))


if __name__ == "__main__":
    main()
