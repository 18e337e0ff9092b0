"""Feeding: how the batch at a position reaches the device. All three give the same rows in the same order.

resident   all training rows live on the device; the step gathers its own batch, the host sends nothing
direct     the loop gathers on the host and puts the batch
prefetch   a thread does that for the next batches while the device computes
A feeder is called with the position (step + data_offset) and gives the arguments of `advance` after the state.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.data.make import Data
from jaxtrain.data.order import batch_rows, permute, steps_per_epoch

Batch = dict[str, Any]
Put = Callable[[Batch], Batch]
RESIDENT_SHARE = 0.25  # of the device's memory that rows may take by themselves
_DEPTH = 3


def choose(feed: str, nbytes: int, memory: int, in_memory: bool = True) -> str:
    """`auto`: resident while the rows take a small share of the memory, else prefetch."""
    if feed != "auto":
        return feed
    return "resident" if in_memory and nbytes <= RESIDENT_SHARE * memory else "prefetch"


def gather(dataset: Data, resident: Batch, position: Any, seed: int, batch: int) -> Batch:
    """Inside jit: the training batch at `position` out of what is resident. Of the dataset only sizes are used."""
    rows, mask, epoch = batch_rows(seed, position, dataset.rows("train"), batch, jnp)
    return {**dataset.take(resident, rows, epoch), "mask": mask, "epoch": epoch}


class HostBatches:
    """The batch at a position, gathered on the host. The order of an epoch is computed once and kept.

    part: [first, last) of the rows of each batch, the only ones that are read; None: all.
    """

    def __init__(self, dataset: Data, split: str, seed: int, batch: int, part: tuple[int, int] | None = None) -> None:
        self._dataset, self._split, self._seed, self._batch = dataset, split, seed, batch
        self._part = part or (0, batch)
        self._rows = dataset.rows(split)
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int32))

    def __call__(self, position: int) -> Batch:
        epoch, k = divmod(position, steps_per_epoch(self._rows, self._batch))
        if self._order[0] != epoch:
            everything = np.arange(self._rows, dtype=np.int32)
            self._order = (epoch, permute(self._seed, epoch, everything, self._rows))
        start = k * self._batch
        real = min(self._rows - start, self._batch)
        slot = np.arange(*self._part)
        rows = self._order[1][start + slot % real]
        batch = self._dataset.read(self._split, rows, epoch)
        return {**batch, "mask": slot < real, "epoch": np.int32(epoch)}


class Resident:
    """Gives the rows on the device, whatever the position."""

    def __init__(self, rows: Batch) -> None:
        self._rows = rows

    def __call__(self, position: int) -> Batch:
        return self._rows

    def close(self) -> None:
        self._rows = {}


class Direct:
    """Gathers and puts in the caller's thread."""

    def __init__(self, batches: HostBatches, put: Put) -> None:
        self._batches, self._put = batches, put

    def __call__(self, position: int) -> Batch:
        return self._put(self._batches(position))

    def close(self) -> None:
        pass


class Prefetch:
    """A thread gathers and puts the next batches. A jump of the position starts it anew; its error is raised here.

    The thread holds no reference to its feeder: one that is dropped without `close()` ends it too.
    """

    def __init__(self, batches: HostBatches, put: Put) -> None:
        self._batches, self._put = batches, put
        self._queue: queue.Queue[tuple[int, Any]] = queue.Queue(_DEPTH)
        self._end: weakref.finalize[..., Prefetch] | None = None
        self._next = -1

    def __call__(self, position: int) -> Batch:
        if position != self._next:
            self.close()
            self._start(position)
        at, batch = self._queue.get()
        if isinstance(batch, BaseException):
            self.close()  # its thread has ended: the next call starts another
            raise batch
        assert at == position, (at, position)
        self._next = position + 1
        return batch  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None
        self._next = -1

    def _start(self, position: int) -> None:
        self._queue, stop = queue.Queue(_DEPTH), threading.Event()
        arguments = (self._batches, self._put, position, self._queue, stop)
        thread = threading.Thread(target=_read_ahead, args=arguments, name="jaxtrain-prefetch", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, thread, self._queue, stop)


def _read_ahead(
    batches: HostBatches, put: Put, position: int, out: queue.Queue[tuple[int, Any]], stop: threading.Event
) -> None:
    while not stop.is_set():
        try:
            item: Any = put(batches(position))
        except BaseException as error:
            out.put((position, error))
            return
        out.put((position, item))
        position += 1


def _end(thread: threading.Thread, out: queue.Queue[tuple[int, Any]], stop: threading.Event) -> None:
    """Stops a reading thread: once `stop` is set it puts at most one batch more, for which the queue is emptied."""
    stop.set()
    while thread.is_alive():
        with contextlib.suppress(queue.Empty):
            out.get(timeout=0.05)


Feeder = Resident | Direct | Prefetch


class Timed:
    """A feeder, and the seconds that its caller has waited for it so far."""

    def __init__(self, feeder: Feeder) -> None:
        self._feeder = feeder
        self.waited = 0.0

    def __call__(self, position: int) -> Batch:
        since = time.perf_counter()
        batch = self._feeder(position)
        self.waited += time.perf_counter() - since
        return batch

    def close(self) -> None:
        self._feeder.close()


FEEDERS: dict[str, Callable[[HostBatches, Put], Feeder]] = {"direct": Direct, "prefetch": Prefetch}
