"""Writers: metrics.jsonl (the truth), TensorBoard, status.json. A broken writer is told once and never stops a run."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain.hooks.folder import RunFolder, strict
from jaxtrain.hooks.ledger import Ledger
from jaxtrain.loop import Evaluation, Hook, Stop

log = logging.getLogger("jaxtrain")


class Guarded(Hook):
    """A hook whose own faults (a full disk, a closed mount) are told once; from then on it is silent."""

    def __init__(self, name: str) -> None:
        self._name, self._broken = name, False

    def guarded(self, action: Callable[[], None]) -> None:
        """Run `action` unless this writer broke before."""
        if self._broken:
            return
        try:
            action()
        except Exception as error:  # whatever a writer raises must not end a training run
            self._broken = True
            log.warning("%s stopped writing: %s: %s; training goes on", self._name, type(error).__name__, error)


class Clock(Hook):
    """What steps take, for the writers behind it: the steps since the last row, evaluation or save.

    figures: step and data_wait, in seconds a step (data_wait: of these, what the loop waited for its batches);
    examples_per_s; mfu, the share of the devices' peak that the model's operations come to.
    """

    def __init__(self, rows: int, waited: Callable[[], float]) -> None:
        """rows: of a step. waited: for batches, seconds so far."""
        self._rows, self._waited = rows, waited
        self._least: float | None = None
        self._mark = (0, 0.0, 0.0)
        self.figures: dict[str, float] = {}

    def knows(self, flops: int, peak: float | None) -> None:
        """The model's operations in a step, and those that all devices can do in a second (None: not known)."""
        self._least = flops / peak if peak else None

    def start(self, step: int) -> None:
        self._mark = (step, time.perf_counter(), self._waited())

    on_save = start

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.start(step)

    def on_metrics(self, step: int, figures: dict[str, float]) -> None:
        before, since, waited = self._mark
        self.start(step)
        _, now, waiting = self._mark
        self.figures = {}
        if step == before:  # the row comes after an evaluation of its step: nothing has been timed
            return
        took = (now - since) / (step - before)
        self.figures = {
            "step": took,
            "data_wait": (waiting - waited) / (step - before),
            "examples_per_s": self._rows / took,
        }
        if self._least is not None:
            self.figures["mfu"] = self._least / took


class Jsonl(Guarded):
    """metrics.jsonl: a row of training metrics, a row an evaluation. Wall-clock names live under time/."""

    def __init__(self, folder: RunFolder, steps_per_epoch: int, clock: Clock) -> None:
        super().__init__("metrics.jsonl")
        self._folder, self._per_epoch, self._clock = folder, steps_per_epoch, clock

    def on_metrics(self, step: int, figures: dict[str, float]) -> None:
        row = {f"train/{name}": value for name, value in figures.items()}
        self.write(step, row | {f"time/{name}": value for name, value in self._clock.figures.items()})

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.write(step, {f"eval/{name}": value for name, value in evaluation.figures.items()})

    def write(self, step: int, figures: dict[str, float]) -> None:
        """One row."""
        row = {"step": step, "epoch": step / self._per_epoch, **figures}

        def append() -> None:
            with self._folder.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(strict(row), allow_nan=False) + "\n")

        self.guarded(append)


class TensorBoard(Guarded):
    """Events in the run folder: scalars, images, hparams. A resume purges what is newer than its step."""

    def __init__(
        self, folder: RunFolder, clock: Clock, samples: np.ndarray | None = None, enabled: bool = True
    ) -> None:
        super().__init__("TensorBoard")
        self._folder, self._clock, self._samples, self._broken = folder, clock, samples, not enabled
        self._writer: Any = None
        self._files = 0

    def start(self, step: int) -> None:
        def begin() -> None:
            from tensorboardX import SummaryWriter

            again = self._writer is not None  # the run went back; a second file of the same second needs another name
            if again:
                self._writer.close()
            self._files += 1
            self._writer = SummaryWriter(
                str(self._folder.path),
                purge_step=step + 1 if step or again else None,
                filename_suffix=f".{self._files}" if again else "",
            )
            if self._samples is not None and step == 0 and not again:
                self._writer.add_images("samples", self._samples, 0, dataformats="NHWC")

        self.guarded(begin)

    def on_metrics(self, step: int, figures: dict[str, float]) -> None:
        row = {f"train/{name}": value for name, value in figures.items()}
        self.scalars(step, row | {f"time/{name}": value for name, value in self._clock.figures.items()})

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.scalars(step, {f"eval/{name}": value for name, value in evaluation.figures.items()})

    def scalars(self, step: int, figures: dict[str, float]) -> None:
        """All figures of one step."""

        def add() -> None:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

        self.guarded(add)

    @property
    def enabled(self) -> bool:
        """Whether anything is written."""
        return not self._broken

    def image(self, name: str, pixels: np.ndarray, step: int) -> None:
        """A picture [H, W, 3], bytes."""
        self.guarded(lambda: self._writer.add_image(name, pixels, step, dataformats="HWC"))

    def hparams(self, values: dict[str, Any], figures: dict[str, float]) -> None:
        """The table of settings and results."""
        plain = {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in values.items()}
        self.guarded(lambda: self._writer.add_hparams(plain, figures, name="hparams"))

    def finish(self) -> None:
        """After the last row of the run."""
        if self._writer is not None:
            self.guarded(self._writer.close)


class Status(Guarded):
    """status.json, every two seconds and at each event."""

    def __init__(self, folder: RunFolder, sealed: Callable[[], tuple[int | None, int | None]], ledger: Ledger) -> None:
        super().__init__("status.json")
        self._folder, self._sealed, self._ledger = folder, sealed, ledger
        self._written, self._step = 0.0, 0

    def start(self, step: int) -> None:
        self._step = step
        self._write("running", "")

    def after_step(self, step: int) -> None:
        self._step = step
        if time.monotonic() - self._written > 2.0:
            self._write("running", "")

    def close(self, stop: Stop) -> None:
        self._write(stop.state, stop.reason)

    def _write(self, state: str, reason: str) -> None:
        self._written = time.monotonic()
        last, best = self._sealed()
        values = {"state": state, "reason": reason, "step": self._step, "last_sealed": last, "best": best}
        values["time"] = self._ledger.account()
        self.guarded(lambda: self._folder.write_status(**values, pid=os.getpid(), host=os.uname().nodename))


class RunLog:
    """run.log: what the console says, with times, from the records of the `jaxtrain` logger, and longer texts."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.log
        self._handler = logging.FileHandler(folder.log, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("jaxtrain").addHandler(self._handler)
        self._before = log.level, log.propagate
        log.setLevel(logging.INFO)
        log.propagate = False  # libraries put handlers on the root logger, which would print every line again

    def text(self, text: str) -> None:
        """Several lines, as they are."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def close(self) -> None:
        """No more records."""
        logging.getLogger("jaxtrain").removeHandler(self._handler)
        level, log.propagate = self._before
        log.setLevel(level)
        self._handler.close()
