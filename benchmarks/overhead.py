"""What the product adds to a step: guard and metrics inside it, the runner around it.

    python benchmarks/overhead.py

bare     a hand-written jitted step without guard and metrics, donated, its rows gathered on the device, in a bare loop
step     the product's step (guard, metrics, window of sums) in the same bare loop
runner   `jaxtrain train`: hooks, metrics.jsonl, TensorBoard, run folder, signals; a checkpoint every 30 s
A round times the three after each other; the runner's figure is the mean over its steps after the first hundred,
without the evaluations between them. A quiet machine is needed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from record import record

import jaxtrain as jt
from jaxtrain.build import Job, build
from jaxtrain.config import load
from jaxtrain.data import feed

ROUNDS = 7
NETWORKS = {
    "mlp 64-64-10, batch 32": ((64,), [64], 32, 4000),
    "mlp 784-512-512-10, batch 128": ((784,), [512, 512], 128, 400),
}


def tree_of(path: str, hidden: list[int], batch: int, steps: int) -> dict[str, Any]:
    return {
        "name": "overhead",
        "model": {"kind": "mlp", "hidden": hidden},
        "data": {"kind": "arrays", "path": path, "normalize": "none"},
        "optimizer": {"kind": "adamw", "clip_norm": 1.0},
        "train": {"duration": steps, "global_batch_size": batch},
        "evaluate": {"every": steps},
        "checkpoint": {"every": "30s"},
    }


class Bare:
    """What one writes without a trainer."""

    def __init__(self, job: Job) -> None:
        spec, train = job.spec, job.config.train

        def step(params: Any, opt_state: Any, n: Any, rows: Any) -> Any:
            batch = feed.gather(job.dataset, rows, n, train.seed, train.global_batch_size)

            def loss(params: Any) -> Any:
                logits = spec.module.bind(params, {}, jax.random.key(0))(spec.preprocess(batch["inputs"]))
                return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

            value, grads = jax.value_and_grad(loss)(params)
            shrink = jnp.minimum(1.0, spec.clip_norm / (optax.tree.norm(grads) + 1e-6))
            grads = jax.tree.map(lambda g: g * shrink, grads)
            direction, opt_state = spec.optimizer.update(grads, opt_state, params)
            rate = spec.schedule(n)
            return jax.tree.map(lambda p, d: p - rate * d, params, direction), opt_state, n + 1, value

        state = job.init()
        self._step = jax.jit(step, donate_argnums=(0, 1, 2))
        self._state: Any = (state["params"], state["opt_state"], jnp.zeros((), jnp.int32))
        self._rows = job.feeder()(0)

    def steps(self, count: int) -> float:
        """Seconds a step."""
        begun = time.perf_counter()
        for _ in range(count):
            *self._state, value = self._step(*self._state, self._rows)
        jax.block_until_ready(value)
        return (time.perf_counter() - begun) / count


class Step:
    """The product's step, without the product's loop."""

    def __init__(self, job: Job) -> None:
        self._advance, self._state, self._rows = job.advance, job.init(), job.feeder()(0)

    def steps(self, count: int) -> float:
        """Seconds a step."""
        begun = time.perf_counter()
        for _ in range(count):
            self._state, metrics = self._advance(self._state, self._rows)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - begun) / count


def runner(tree: dict[str, Any]) -> float:
    """Seconds a step of a whole run."""
    with tempfile.TemporaryDirectory() as place, jt.train(tree, run_dir=Path(place) / "run", quiet=True) as run:
        rows = [row for row in run.metrics() if "time/step" in row and row["step"] > 100]
        return statistics.fmean(row["time/step"] for row in rows)


def main() -> None:
    raw: dict[str, Any] = {}
    lines = [
        f"{ROUNDS} rounds, the arms after each other in each; medians, and the least and greatest of the rounds.\n",
        "| network | bare, µs | guard + metrics | of bare | runner | of step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as place:
        for name, (shape, hidden, batch, steps) in NETWORKS.items():
            path = Path(place) / "rows.npz"
            rng = np.random.default_rng(0)
            inputs = rng.normal(size=(4096, *shape)).astype(np.float32)
            np.savez(path, inputs=inputs, targets=rng.integers(0, 10, 4096))
            tree = tree_of(str(path), hidden, batch, steps)
            job = build(load(tree))
            bare, step = Bare(job), Step(job)
            times: dict[str, list[float]] = {"bare": [], "step": [], "runner": []}
            bare.steps(100)
            step.steps(100)
            loops: list[tuple[str, Bare | Step]] = [("bare", bare), ("step", step)]
            for number in range(ROUNDS):
                for arm, loop in loops[:: 1 if number % 2 else -1]:
                    times[arm].append(loop.steps(steps))
                times["runner"].append(runner(tree))
                print(name, {arm: f"{1e6 * own[-1]:.0f}" for arm, own in times.items()}, flush=True)
            raw[name] = times
            lines.append(
                f"| {name} | {1e6 * statistics.median(times['bare']):.0f} | {_added(times, 'step', 'bare')} | "
                f"{_added(times, 'runner', 'step')} |"
            )
    rooms = ["core", "loop.py", "session.py", "hooks/writers.py", "hooks/control.py", "hooks/console.py"]
    rooms += ["data/feed.py", "data/order.py", "models/mlp.py"]
    record("overhead", "What the product adds to a step", lines, raw, rooms)


def _added(times: dict[str, list[float]], arm: str, base: str) -> str:
    added = [1e6 * (a - b) for a, b in zip(times[arm], times[base], strict=True)]
    share = [100 * (a / b - 1) for a, b in zip(times[arm], times[base], strict=True)]
    spread = f"{statistics.median(added):.0f} µs ({min(added):.0f} to {max(added):.0f})"
    return f"{spread} | {statistics.median(share):.1f} % ({min(share):.1f} to {max(share):.1f})"


if __name__ == "__main__":
    main()
