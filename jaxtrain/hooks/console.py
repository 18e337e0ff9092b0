"""The console, a `Screen` of three: in a notebook one display; else on stderr, on a terminal one live table, elsewhere
(pipe, TERM=dumb) plain lines without escape codes.

Nothing is silent for long: from `open` to `shut` there is always a phase or a running step, and it ticks. run.log gets
the same lines on all of them. Wall time is read here and decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from datetime import timedelta
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.text import Text

from jaxtrain.hooks.control import BestSoFar
from jaxtrain.hooks.notebook import Frame, Notebook, Screen
from jaxtrain.loop import Evaluation, Hook

log = logging.getLogger("jaxtrain")

_CALM = ((60.0, 2.0), (600.0, 10.0), (math.inf, 60.0))
"""(seconds since `open`, seconds between lines up to then)."""
_POLL = 0.25
_HIDDEN = ("in_row", "skipped", "overflow")
_LAST = ("lr", "grad_norm")


class Console(Hook):
    """Shows one run. Also usable by itself for phases and lines before the run begins."""

    def __init__(self, metric: str, mode: str, rich: RichConsole | None = None, quiet: bool = False) -> None:
        # Decided by the stream itself: FORCE_COLOR, which CI systems set, must not start a live table in a log file.
        terminal = sys.stderr.isatty()
        options: dict[str, Any] = {"soft_wrap": not terminal, "force_terminal": terminal, "force_jupyter": False}
        self.rich = rich or RichConsole(stderr=True, highlight=False, quiet=quiet, **options)
        moving = self.rich.is_terminal and not self.rich.is_dumb_terminal and not self.rich.quiet
        notebook = None if rich or quiet else Notebook.here(self._frame)
        self._screen: Screen = notebook or (_Table if moving else _Lines)(self.rich, self._render)
        self._metric = metric
        self._handler = _Handler(self)
        self._begun = self._told = self._idle = time.monotonic()
        self._phases: list[tuple[str, float]] = []
        self._notice = ""
        self._training = False
        self._step, self._total, self._per_epoch, self._rows = 0, 0, 1, 0
        self._pace = _Pace(0)
        self._figures: dict[str, float] = {}
        self._evaluated: dict[str, float] = {}
        self._best = BestSoFar(mode)
        self._ticker: threading.Thread | None = None
        self._closed = threading.Event()

    # ------------------------------------------------------------ lines and phases

    def open(self) -> None:
        """Start ticking; warnings of jaxtrain go through here."""
        self._begun = self._told = self._idle = time.monotonic()
        log.addHandler(self._handler)
        self._on_screen(lambda screen: screen.start())
        # In this thread's context: a kernel finds by it the cell that output belongs to.
        self._ticker = threading.Thread(None, copy_context().run, "jaxtrain-console", (self._tick,), daemon=True)
        self._ticker.start()

    def shut(self, more: bool = False) -> None:
        """Stop ticking. What was said stays. `more`: another console goes on where this one ends."""
        self._closed.set()
        if self._ticker is not None:
            self._ticker.join()
            self._ticker = None
        self._tell_notice()
        self._on_screen(lambda screen: screen.stop(more))
        log.removeHandler(self._handler)

    def line(self, text: str) -> None:
        """One line, above the live table, and in run.log."""
        self._show(text)
        log.info(text)

    def notice(self, text: str) -> None:
        """A line that is shown a moment later by the ticker; the only method that a signal handler may call."""
        self._notice = text

    @contextlib.contextmanager
    def phase(self, name: str, told: bool = True, hint: str = "") -> Iterator[None]:
        """`name ...` and a hint at once, how long it took at the end; untold, it is seen only when it takes long."""
        begun = time.monotonic()
        self._phases.append((name, begun))
        if told and not self._screen.moving:
            self.line(f"{name} ...{hint}")
        try:
            yield
        finally:
            self._phases.remove((name, begun))
            self._idle = time.monotonic()
            if told:
                self.line(f"{name}: {self._idle - begun:.1f} s")

    # ------------------------------------------------------------ the run

    def plan(self, total: int, per_epoch: int, rows_per_step: int) -> None:
        """How long the run is."""
        self._total, self._per_epoch, self._rows = total, per_epoch, rows_per_step

    def start(self, step: int) -> None:
        self._step, self._pace = step, _Pace(step)
        self._training = True

    def after_step(self, step: int) -> None:
        self._step = step
        self._pace.mark(step)

    def on_metrics(self, step: int, figures: dict[str, float]) -> None:
        self._figures = figures
        if figures.get("skipped"):
            self.line(f"step {step:,}: {figures['skipped']:.0f} updates were not finite and were skipped")

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._evaluated = evaluation.figures
        self._best.update(step, evaluation.figures.get(self._metric, math.nan))

    def state_dict(self) -> dict[str, Any]:
        return self._best.state_dict()

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._best.load_state_dict(values)

    def close(self, stop: Any) -> None:
        self._training = False

    # ------------------------------------------------------------ what is shown

    def _waiting(self) -> str:
        """What is going on now, with its seconds; "" while steps are running, or stand still for less than a second."""
        name, begun = [("getting ready", self._idle), *self._phases][-1]  # at once: another thread may end the phase
        took = time.monotonic() - begun
        return f"{name} ... {took:.0f} s" if not self._training or (self._phases and took >= 1.0) else ""

    def _progress(self) -> list[tuple[str, str]]:
        cells = [("step", f"{self._step:,}/{self._total:,}"), ("epoch", f"{self._step / self._per_epoch:.1f}")]
        left = self._pace.seconds_for(self._total - self._step)
        return [*cells, ("ETA", "-:--" if left is None else _clock(left))]

    def _values(self) -> list[tuple[str, str]]:
        """(name, value) of the newest rows: training, evaluation, best; then how fast, and the step's own figures."""
        train = [k for k in self._figures if k not in (*_HIDDEN, *_LAST, "loss")]
        shown = dict.fromkeys(("loss", self._metric, "accuracy", "mae", "rmse"))
        cells = [(k, _short(self._figures[k])) for k in ("loss", *train) if k in self._figures]
        cells += [(f"eval {k}", _short(self._evaluated[k])) for k in shown if k in self._evaluated]
        if self._best.value is not None:
            cells.append(("best", f"{_short(self._best.value)} @ {self._best.step:,}"))
        cells += [(k, _short(self._figures[k])) for k in _LAST if k in self._figures]
        rate = self._pace.late()
        if rate:
            cells.append(("examples/s", f"{rate * self._rows:,.0f}"))
        return cells

    def _frame(self) -> Frame:
        cells = (self._progress(), self._values()) if self._training else ([], [])
        return Frame(self._step / max(self._total, 1), *cells, self._waiting())

    def _render(self) -> Any:
        frame, width = self._frame(), self.rich.width
        parts: list[Any] = []
        if frame.progress:
            parts = [_bar(frame.progress, frame.share, width, self.rich.encoding), *_grid(frame.values, width)]
        return Group(*parts, Text(frame.waiting, style="dim")) if frame.waiting else Group(*parts)

    def _tick(self) -> None:
        shown: tuple[int, float] = (-1, 0.0)
        while not self._closed.wait(_POLL):
            self._tell_notice()
            self._on_screen(lambda screen: screen.refresh())
            now = time.monotonic()
            pause = next(seconds for until, seconds in _CALM if now - self._begun < until)
            if now - self._told < pause - _POLL - 0.05:
                continue
            text = self._waiting()
            if not text and self._step != shown[0]:
                shown = self._step, now
                text = "  ".join(f"{name} {value}" for name, value in [*self._progress(), *self._values()])
            elif not text:
                text = f"step {self._step:,}/{self._total:,} ... {now - shown[1]:.0f} s"
            self._told = now
            if not self._screen.moving:
                self._show(text)
            log.info(text)

    def _tell_notice(self) -> None:
        text, self._notice = self._notice, ""
        if text:
            self.line(text)

    def _show(self, text: str, style: str = "") -> None:
        self._told = time.monotonic()
        self._on_screen(lambda screen: screen.line(text, style))

    def _on_screen(self, action: Callable[[Screen], None]) -> None:
        """A screen that fails is given up for plain lines; the run goes on."""
        try:
            action(self._screen)
        except Exception as error:  # whatever a front end raises must not end a training run
            self._screen = _Lines(self.rich, self._render)
            log.warning("the display failed (%s: %s); lines from here on", type(error).__name__, error)
            action(self._screen)


@contextlib.contextmanager
def waiting(name: str, quiet: bool = False) -> Iterator[None]:
    """`name ...` while something takes its time outside a run; it ticks as a run does and leaves no line at its end."""
    console = Console("loss", "min", quiet=quiet)
    console.open()
    try:
        with console.phase(name, told=False):
            if not console._screen.moving:
                console.line(f"{name} ...")
            yield
    finally:
        console.shut(more=True)


class _Lines(Screen):
    """Plain lines on stderr; the ticker says what is going on."""

    def __init__(self, rich: RichConsole, render: Callable[[], Any]) -> None:
        self._rich, self._render = rich, render

    def line(self, text: str, style: str) -> None:
        try:
            self._rich.print(Text(text, style=style))
        except (Exception, SystemExit):  # stderr is gone (rich exits on a broken pipe): the run and run.log go on
            self._rich.quiet = True


class _Table(_Lines):
    """Lines on a terminal, above one live table, which rich draws in a thread of its own."""

    def start(self) -> None:
        own = sys.stdout.isatty()  # what a user's model prints into a file must stay there
        self._live = Live(console=self._rich, get_renderable=self._render, transient=True, redirect_stdout=own)
        self._live.start()
        self.moving = True
        self._rich.show_cursor(True)  # a process that is killed cannot give the cursor back

    def stop(self, more: bool) -> None:
        if self.moving:
            self._live.stop()
        self.moving = False


class _Pace:
    """How fast steps go, by moments at least _POLL apart; a resume counts the steps of its own process only."""

    def __init__(self, step: int) -> None:
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), step)], maxlen=4000)
        self._begun = self._marks[0][0]

    def mark(self, step: int) -> None:
        """`step` was dispatched now."""
        now = time.monotonic()
        if now - self._marks[-1][0] >= _POLL:
            self._marks.append((now, step))

    def late(self) -> float:
        """Steps per second of the last ten seconds or 40 steps; 0.0 as long as it is not known."""
        return self._slope(0 if len(self._marks) < 40 else -40)

    def seconds_for(self, steps: int) -> float | None:
        """How long `steps` more will take, by the second half of this process's time: its evaluations and saves count,
        the compilations at its beginning soon do not. None as long as it is not known."""
        marks = list(self._marks)
        half = (self._begun + marks[-1][0]) / 2
        rate = self._slope(next((i for i in reversed(range(len(marks))) if marks[i][0] <= half), 0))
        return max(steps / rate - (time.monotonic() - marks[-1][0]), 0.0) if rate else None

    def _slope(self, first: int) -> float:
        old, new = self._marks[first], self._marks[-1]
        return (new[1] - old[1]) / (new[0] - old[0]) if new != old else 0.0


class _Handler(logging.Handler):
    """Warnings and errors as lines above the live table; run.log has a handler of its own."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console._show(f"{record.levelname.lower()}: {record.getMessage()}", style="yellow")


def _bar(cells: list[tuple[str, str]], share: float, width: int, encoding: str) -> Text:
    """step 272/680 ━━━━━━━━━━━━────────────  40%  epoch 16.0  ETA 0:05"""
    (_, step), *others = cells
    left, right = f"step {step} ", "  ".join([f" {share:4.0%}", *(f"{name} {value}" for name, value in others)])
    room = max(min(width - len(left) - len(right), 40), 0)
    full, rest = "━─" if encoding.startswith("utf") else "#-"
    done = round(room * share)
    parts = [(left, "bold"), (full * done, "green"), (rest * (room - done), "dim"), (right, "")]
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


def _grid(cells: list[tuple[str, str]], width: int) -> list[Text]:
    """Names above values, in as many rows as the width asks for; columns of a least width, so that they stand still."""
    rows = [["", ""]]
    for name, value in cells:
        size = max(len(name), len(value), 8)
        if rows[-1][0] and len(rows[-1][0]) + size > width:
            rows.append(["", ""])
        rows[-1] = [old + f"{new:<{size}}  " for old, new in zip(rows[-1], (name, value), strict=True)]
    return [Text(row[i], ("dim", "")[i], no_wrap=True, overflow="crop") for row in rows if row[0] for i in (0, 1)]


def _short(value: float) -> str:
    return f"{value:.4g}"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
