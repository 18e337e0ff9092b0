"""Going back to a sealed step, and on past the batches that did harm; the journal says it first (contract 9).

A rollback to step R moves `data_offset` so that the next batch is the one after the last that was seen. The journal's
line makes it hold: a run that is killed after it goes on from R with the same offset, and leaves what the steps after R
had sealed, which belongs to batches that are now jumped over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain.checkpoint import Checkpoints, Sealed
from jaxtrain.core.state import State
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.loop import Rollback
from jaxtrain.parallel import processes

EVENT, GAVE_UP = "rollback", "gave_up"


def before(store: Checkpoints, first: int) -> int | None:
    """The newest sealed step before `first`, else the oldest there is, else None; the same in all processes."""
    there = [sealed.step for sealed in store.steps()]
    older = [step for step in there if step < first]
    return processes.agree(older[-1] if older else there[0] if there else None)  # type: ignore[no-any-return]


def in_a_row(folder: RunFolder, step: int) -> int:
    """How often a run has gone back, to `step` too, without having sealed a step beyond the trouble before."""
    count, seen = 0, -1
    for event in folder.events():
        if event["event"] == GAVE_UP:
            count = 0  # a person was asked since
        elif event["event"] == EVENT:
            count = count + 1 if event["step"] <= seen else 1
            seen = event["last"]
    return processes.agree(count + 1 if count and step <= seen else 1)  # type: ignore[no-any-return]


def note(folder: RunFolder, back: Rollback, step: int, data_offset: int, why: str) -> None:
    """Write down that the run goes on from `step` with this offset."""
    folder.note(EVENT, step=step, first=back.first, last=back.last, data_offset=data_offset, why=why)


def left_behind(folder: RunFolder) -> Callable[[Sealed], bool]:
    """Whether a sealed step is one that the last rollback has left behind: after it, of batches since jumped over."""
    event = _last(folder)

    def behind(sealed: Sealed) -> bool:
        offset = sealed.meta.get("data_offset", 0)
        return event is not None and sealed.step > event["step"] and offset < event["data_offset"]

    return behind


def continued(state: State, folder: RunFolder) -> State:
    """A restored or new state as the last rollback wants it, where that went back to this very step."""
    event = processes.agree(_last(folder) if processes.is_first() else None)
    offset, guard = state["data_offset"], state["guard"]
    if not event or event["step"] != int(state["step"]) or event["data_offset"] <= int(offset):
        return state
    moved = processes.put(np.int32(event["data_offset"]), offset.sharding)
    in_row = processes.put(np.int32(0), guard["in_row"].sharding)
    return {**state, "data_offset": moved, "guard": {**guard, "in_row": in_row}}


def _last(folder: RunFolder) -> dict[str, Any] | None:
    return next((event for event in reversed(folder.events()) if event["event"] == EVENT), None)
