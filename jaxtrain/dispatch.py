"""How many steps one dispatch runs: chosen by measuring both forms, on copies, where that can pay.

A short step costs less than handing it to the device. Over rows that live on the device several steps can run in one
program, a loop whose length is an argument: with the single step that makes two programs, whatever the lengths. It is
used only where both forms give the same bits, so the choice changes nothing but the time.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.build import Job
from jaxtrain.checkpoint.files import write_json
from jaxtrain.core.state import State
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel import processes

log = logging.getLogger("jaxtrain")

SECONDS = 0.25
"""The most that one dispatch may take: a signal, a stop and the console are that late."""
MOST = 256
SHORT = 5e-3
"""Seconds of a step from which its dispatch (0.1 to 0.4 ms) does not matter."""
WORTH = 3.0
"""Seconds of training below which a second compilation is not worth it."""
GAIN = 0.95
LARGE = 1 << 28
"""Bytes of a state that is not copied for measuring: its step is not short."""
SHORT_RUN, ASKED = "the run is short", "asked for"
_TRIED, _TIMES = 16, 5


@dataclass(frozen=True)
class Choice:
    """steps: at most so many in one dispatch. why: a line for the log and the run folder."""

    steps: int
    why: str


class Many:
    """`run(state, fed, count) -> (state, metrics of the last step)` for 1..steps, ready under the transfer guard."""

    def __init__(self, job: Job, steps: int) -> None:
        self.steps = steps
        self._advance = job.advance_many
        self._everywhere = meshes.replicated(job.mesh)
        self._counts: dict[int, jax.Array] = {}

    def __call__(self, state: State, fed: Any, count: int) -> tuple[State, dict[str, Any]]:
        if count not in self._counts:  # a few lengths come again and again, whatever `steps` is
            self._counts[count] = jax.device_put(np.int32(count), self._everywhere)
        return self._advance(state, fed, self._counts[count])  # type: ignore[no-any-return]


def kept(job: Job, folder: RunFolder, state: State, feeder: Callable[[int], Any], left: int) -> Many | None:
    """The steps a dispatch: those of an earlier part of this run, or chosen now; kept in the run folder."""
    if processes.several():  # what one of them measures is not what another does
        return None
    known, here = folder.chosen(), {"devices": str(job.devices), "feed": job.feed_kind}
    stands = known.get("why") not in (SHORT_RUN, ASKED) and {name: known.get(name) for name in here} == here
    steps = known.get("steps_per_dispatch") if stands and job.config.train.steps_per_dispatch == "auto" else None
    if steps is None:
        choice = choose(job, state, feeder, left)
        steps = choice.steps
        log.debug("steps a dispatch: %d (%s)", steps, choice.why)
        write_json(folder.chosen_file, {"steps_per_dispatch": steps, "why": choice.why, **here})
    return Many(job, steps) if steps > 1 else None


def choose(job: Job, state: State, feeder: Callable[[int], Any], left: int) -> Choice:
    """What `train.steps_per_dispatch` says; `auto` measures. left: steps to go. `state` is only read."""
    asked = job.config.train.steps_per_dispatch
    if asked != "auto":
        return Choice(int(asked), ASKED)
    if job.feed_kind != "resident":
        return Choice(1, f"rows come from the host (data.feed {job.feed_kind})")
    if job.spec.unroll:
        return Choice(1, "convolutions are slow in a loop on this device")
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    if size > LARGE:
        return Choice(1, f"a step over a state of {size / 2**20:,.0f} MiB is not short")
    fed = feeder(0)  # all rows, whatever the position
    single = _seconds(lambda s: _steps(job, s, fed, 4), state, 4)
    if single > SHORT:
        return Choice(1, f"a step takes {1e3 * single:.1f} ms, which its dispatch does not change")
    if left * single < WORTH:
        return Choice(1, SHORT_RUN)
    many = Many(job, _TRIED)
    differing = _differing(_steps(job, _copy(state), fed, _TRIED), many(_copy(state), fed, _TRIED))
    if differing:
        return Choice(1, f"the loop rounds otherwise ({differing[0]} and {len(differing) - 1} more)")
    loop = _seconds(lambda s: many(s, fed, _TRIED), state, _TRIED)
    if loop > GAIN * single:
        return Choice(1, f"{1e6 * single:.0f} µs a step, {1e6 * loop:.0f} in a loop")
    steps = max(min(MOST, int(SECONDS / loop)), 1)
    return Choice(steps, f"{1e6 * single:.0f} µs a step, {1e6 * loop:.0f} in a loop")


def _steps(job: Job, state: State, fed: Any, count: int) -> tuple[State, dict[str, Any]]:
    metrics: dict[str, Any] = {}
    for _ in range(count):
        state, metrics = job.advance(state, fed)
    return state, metrics


def _copy(state: State) -> State:
    return jax.tree.map(lambda x: x.copy(), state)  # type: ignore[no-any-return]


def _seconds(run: Callable[[State], Any], state: State, steps: int) -> float:
    """Median seconds a step, after one run that may compile."""
    times = []
    for _ in range(_TIMES + 1):
        mine = jax.block_until_ready(_copy(state))
        begun = time.perf_counter()
        jax.block_until_ready(run(mine))
        times.append((time.perf_counter() - begun) / steps)
    return statistics.median(times[1:])


def _differing(left: Any, right: Any) -> list[str]:
    """Paths of the leaves whose bits differ."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True)
    same = ((path, np.asarray(a).tobytes() == np.asarray(b).tobytes()) for (path, a), b in pairs)
    return [jax.tree_util.keystr(path) for path, equal in same if not equal]
