"""The batch size: what fits, what is fast, and beyond what a larger batch hardly helps.

In: a config. Out: `BatchTest`. Steps of several sizes run on one state that is trained a little and then stands still,
so that speed and the noise of gradients come from the same steps; the states are thrown away, nothing is written, and
only training rows are read.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.build import Job, build
from jaxtrain.config import RunConfig, load
from jaxtrain.hardware.memory import Limit, limit
from jaxtrain.loop import fetch
from jaxtrain.parallel import mesh as meshes
from jaxtrain.plan import fitting, memory

WARM_UP, LEAST_STEPS, MOST_STEPS, SECONDS = 50, 6, 200, 0.7
"""Steps of training before anything is measured; steps of a size, at least and at most, and how long they go on."""
SIZES = 6
"""Sizes that are timed, each half of the one before."""
NEAR = 0.95
"""The smallest size that is as fast as this share of the fastest is taken."""


@dataclass(frozen=True)
class Size:
    """rows of a step; seconds of it, median; grad_norm2: the mean of the squared norms of its gradients."""

    rows: int
    seconds: float
    grad_norm2: float

    @property
    def rows_per_second(self) -> float:
        """How fast."""
        return self.rows / self.seconds


@dataclass(frozen=True)
class BatchTest:
    """largest: rows of one forward pass that fit; limited: by what. sizes: rising, as measured. chosen: rows.

    noise: rows at which the gradient's noise is as large as the gradient (the simple noise scale, McCandlish et al.
    2018, arXiv 1812.06162); None: it could not be told. keys: {config key: value} for the config as it is.
    """

    largest: int
    limited: str
    sizes: tuple[Size, ...]
    chosen: int
    noise: float | None
    keys: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return dataclasses.asdict(self)


def batch_test(
    config: RunConfig, room: Limit | None = None, *, tell: Callable[[str], None] = lambda line: None, **given: Any
) -> BatchTest:
    """Find it. room: instead of the memory that there is. given: model, loss, source as `build` takes them.

    The global batch stays: `keys` say in which micro-batches it is best taken.
    """
    job = build(load(config, [("train.micro_batch_size", None)]), **given)
    room = room or limit(job.devices)
    largest, limited = _largest(job, room)
    tell(f"up to {largest:,} rows in one pass ({limited})")
    parts = meshes.row_parts(job.mesh)
    sizes = [n for n in (largest >> i for i in range(SIZES)) if n >= parts and n % parts == 0]
    state = _trained(_of_size(job, min(largest, job.config.train.global_batch_size)))
    found = []
    for rows in sorted(sizes):
        found.append(_measured(_of_size(job, rows), state, rows))
        tell(f"{rows:,} rows: {1e3 * found[-1].seconds:.3g} ms a step, {found[-1].rows_per_second:,.0f} rows/s")
    chosen = chosen_size(found)
    noise = noise_scale([(s.rows, s.grad_norm2) for s in found])
    return BatchTest(largest, limited, tuple(found), chosen, noise, _keys(job, chosen))


def chosen_size(sizes: list[Size]) -> int:
    """The smallest that is nearly as fast as the fastest."""
    fastest = max(size.rows_per_second for size in sizes)
    return min(size.rows for size in sizes if size.rows_per_second >= NEAR * fastest)


def noise_scale(norms: list[tuple[int, float]]) -> float | None:
    """Rows B at which S / B = |G|^2, by a line through mean |G_b|^2 = |G|^2 + S / b over pairs (b, mean |G_b|^2).

    None where the line has no such place: too few sizes, or noise of the estimate that is larger than what it tells.
    """
    if len(norms) < 2:
        return None
    inverse, squares = np.array([[1 / rows, norm2] for rows, norm2 in norms]).T
    noise, gradient = np.polyfit(inverse, squares, 1)
    return float(noise / gradient) if noise > 0 and gradient > 0 else None


def _largest(job: Job, room: Limit) -> tuple[int, str]:
    """A power of two (times the devices that split rows) of at most the training rows, and what limits it."""
    parts, rows = meshes.row_parts(job.mesh), job.dataset.rows("train")
    sizes = [parts << i for i in range(64) if parts << i <= max(rows, parts)]

    def need(size: int) -> int:
        other = _of_size(job, size)
        return fitting.needed(memory.compiled_step(other), other, room)

    found = fitting.largest(sizes, need, room.bytes)
    if found is None:
        raise fitting.refusal(fitting.search(job, room, most=1), need(sizes[0]), room)
    return found, "training rows" if found == sizes[-1] else "memory"


def _of_size(job: Job, rows: int) -> Job:
    keys = [("train.global_batch_size", rows), ("train.steps_per_dispatch", 1)]
    return job.remake(load(job.config, keys))


def _trained(job: Job) -> Any:
    """The state after some steps of the config as it is, on the host."""
    state, feeder = job.init(), job.feeder()
    for position in range(min(WARM_UP, job.steps.total)):
        state, _ = job.advance(state, feeder(position))
    feeder.close()
    return fetch(state)


def _measured(job: Job, state: Any, rows: int) -> Size:
    """Steps at a rate of zero, from the same parameters each."""
    here = {**state, "lr_scale": jnp.zeros((), jnp.float32)}
    here = jax.tree.map(lambda x, own: jax.device_put(x, own.sharding), here, job.abstract_state)
    feeder, seconds, squares = job.feeder(), [], []
    until = time.perf_counter() + SECONDS
    for position in range(MOST_STEPS):
        fed = feeder(position)
        since = time.perf_counter()
        here, metrics = job.advance(here, fed)
        norm = float(fetch(metrics["grad_norm"]))
        seconds.append(time.perf_counter() - since)
        squares.append(norm**2)
        if position == 0:
            until = time.perf_counter() + SECONDS  # that one has compiled
        elif position + 1 >= LEAST_STEPS and time.perf_counter() > until:
            break
    feeder.close()
    return Size(rows, statistics.median(seconds[1:]), statistics.fmean(squares))


def _keys(job: Job, chosen: int) -> dict[str, Any]:
    """Micro-batches of at most the chosen size that divide the global batch; none, where it is no larger."""
    if job.config.train.global_batch_size <= chosen:
        return {"train.micro_batch_size": None}
    return {"train.micro_batch_size": max((n for n in fitting.micro_sizes(job) if n <= chosen), default=None)}
