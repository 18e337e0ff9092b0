"""The learning-rate range test: a few runs from the start with a rate that grows at each step (Smith 2017).

In: a config. Out: the losses, and what `lr_rules` makes of them. Each run has a state of its own, which is thrown away;
nothing is written, and a training afterwards is the same to the bit. Only training rows are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.build import Job, build
from jaxtrain.config import ConfigError, RunConfig, load
from jaxtrain.loop import fetch
from jaxtrain.tune.lr_rules import Stopper, Suggestion, suggest

LOW, HIGH, STEPS, SEEDS = 1e-6, 10.0, 140, 3
"""Learning rates of the first and the last step, steps of a run, runs."""


@dataclass(frozen=True)
class RangeTest:
    """lrs [N]; losses [S, N] of S seeds, NaN from where one was stopped; what follows from them."""

    lrs: np.ndarray
    losses: np.ndarray
    seeds: tuple[int, ...]
    suggestion: Suggestion

    def to_json(self) -> dict[str, Any]:
        """Strict JSON: what is not finite is null."""

        def plain(values: np.ndarray) -> list[Any]:
            return [plain(v) if v.ndim else float(v) if np.isfinite(v) else None for v in values]  # type: ignore[misc]

        return {
            "lr": self.suggestion.lr,
            "why": self.suggestion.why,
            "rules": self.suggestion.rules,
            "seeds": list(self.seeds),
            "lrs": plain(self.lrs),
            "losses": plain(self.losses),
            "smoothed": plain(self.suggestion.smoothed),
        }


def range_test(
    config: RunConfig,
    *,
    low: float = LOW,
    high: float = HIGH,
    steps: int = STEPS,
    seeds: int = SEEDS,
    tell: Callable[[str], None] = lambda line: None,
    **given: Any,
) -> RangeTest:
    """Train from the start with each of `seeds` seeds, from train.seed on, each step at a larger rate.

    A run ends when its averaged loss is four times its best, or not finite. given: model, loss, source as `build` has
    them. Raises ConfigError for a range that is none.
    """
    if not 0 < low < high:
        raise ConfigError(f"learning rates from {low:g} to {high:g} are no range; allowed: 0 < low < high")
    lrs = np.geomspace(low, high, steps)
    numbers = tuple(config.train.seed + i for i in range(seeds))
    losses = np.full((seeds, steps), np.nan)
    job: Job | None = None
    for i, seed in enumerate(numbers):
        # A schedule of one leaves the rate to the state's lr_scale, so that all steps are one program.
        keys = [("schedule", {"kind": "constant", "warmup": 0}), ("optimizer.peak_lr", 1.0), ("train.seed", seed)]
        changed = load(config, [*keys, ("train.duration", steps)])
        job = build(changed, **given) if job is None else job.remake(changed)
        _run(job, lrs, losses[i])
        count = int(np.isfinite(losses[i]).sum())
        tell(f"seed {seed}: {count} steps, learning rates {lrs[0]:.1e} to {lrs[max(count - 1, 0)]:.1e}")
    return RangeTest(lrs, losses, numbers, suggest(lrs, losses))


def _run(job: Job, lrs: np.ndarray, losses: np.ndarray) -> None:
    """Fill `losses` step by step, until it diverges."""
    state, stopper = job.init(), Stopper()
    sharding = job.abstract_state["lr_scale"].sharding
    feeder = job.feeder()
    try:
        for position, lr in enumerate(lrs):
            rate = jax.device_put(jnp.asarray(lr, jnp.float32), sharding)
            state, metrics = job.advance({**state, "lr_scale": rate}, feeder(position))
            loss = float(fetch(metrics["loss"]))
            if stopper.diverged(loss):
                return
            losses[position] = loss
    finally:
        feeder.close()


def write(test: RangeTest, folder: Path, name: str) -> tuple[Path, Path]:
    """`NAME-lr.json` and `NAME-lr.png` in `folder`."""
    from jaxtrain.tune.lr_plot import figure

    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / f"{name}-lr.json", folder / f"{name}-lr.png"
    data.write_text(json.dumps(test.to_json(), allow_nan=False) + "\n")
    figure(test.lrs, test.losses, test.suggestion).savefig(picture)
    return data, picture
