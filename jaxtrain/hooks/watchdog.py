"""The watchdog: a run that stands still is ended, with the stacks of all its threads, so that it can be restarted."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from jaxtrain.config.errors import PEER_FAILED
from jaxtrain.loop import Evaluation, Hook, Stop


class Watchdog(Hook):
    """Ends the process with 70 when no step, evaluation batch or save was seen for `seconds`.

    A step that is only dispatched counts: the loop waits for the device before it is more than a few steps ahead. It
    watches from the first step to `close`; compiling takes what it takes. A device or a peer that never answers holds
    the main thread in native code, which no exception can reach.
    dump: called with what to say; writes the stacks and gives back where they are.
    """

    def __init__(self, seconds: float, dump: Callable[[str], str]) -> None:
        self._seconds, self._dump = seconds, dump
        self._step, self._seen = 0, time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        """Something has gone on."""
        self._seen = time.monotonic()

    def start(self, step: int) -> None:
        self._step = step
        self.beat()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="jaxtrain-watchdog", daemon=True)
            self._thread.start()

    def after_step(self, step: int) -> None:
        self._step = step
        self.beat()

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.beat()

    def on_save(self, step: int) -> None:
        self.beat()

    def close(self, stop: Stop) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(self._seconds / 4, 1.0)):
            if time.monotonic() - self._seen > self._seconds:
                why = f"no progress for {self._seconds:g} s after step {self._step} (guard.stall_limit)"
                where = self._dump(why)
                print(f"jaxtrain: {why}; stacks: {where}", file=sys.stderr, flush=True)
                os._exit(PEER_FAILED)
