"""The console, on stderr: on a terminal one live table, piped plain lines without escape codes.

Nothing is silent for long: compiling, evaluating and training all tick. Wall time is read here and nowhere decides.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxtrain.hooks.control import BestSoFar
from jaxtrain.loop import Evaluation, Hook

log = logging.getLogger("jaxtrain")

_FIRST_MINUTE, _LATER = 2.0, 10.0


class Console(Hook):
    """Shows one run. Also usable by itself for phases and lines before the run begins."""

    def __init__(self, metric: str, mode: str, rich: RichConsole | None = None, quiet: bool = False) -> None:
        self.rich = rich or RichConsole(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
        self._metric = metric
        self._handler = _Handler(self)
        self._phase: tuple[str, float] | None = None
        self._begun = time.monotonic()
        self._training = False
        self._step = self._total = self._first = self._rows = 0
        self._per_epoch = 1
        self._since = 0.0
        self._recent: deque[tuple[float, int]] = deque(maxlen=64)
        self._figures: dict[str, float] = {}
        self._evaluated: tuple[int, dict[str, float]] | None = None
        self._best = BestSoFar(mode)
        self._live: Live | None = None
        self._ticker: threading.Thread | None = None
        self._closed = threading.Event()

    # ------------------------------------------------------------ lines and phases

    def open(self) -> None:
        """Start ticking; log records of jaxtrain go through here."""
        logging.getLogger("jaxtrain").addHandler(self._handler)
        if self.rich.is_terminal:
            self._live = Live(get_renderable=self._render, console=self.rich, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._ticker = threading.Thread(target=self._tick, name="jaxtrain-console", daemon=True)
            self._ticker.start()

    def shut(self) -> None:
        """Stop ticking. What was printed stays."""
        self._closed.set()
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._ticker is not None:
            self._ticker.join()
            self._ticker = None
        logging.getLogger("jaxtrain").removeHandler(self._handler)

    def line(self, text: str) -> None:
        """One line, above the live table, and in run.log."""
        self.rich.print(Text(text))
        log.info(text)

    @contextlib.contextmanager
    def phase(self, name: str, told: bool = True) -> Iterator[None]:
        """`name ...` at once, and how long it took at the end."""
        self._phase = (name, time.monotonic())
        if told and self._live is None:
            self.line(f"{name} ...")
        try:
            yield
        finally:
            took = time.monotonic() - self._phase[1]
            self._phase = None
            if told:
                self.line(f"{name}: {took:.1f} s")

    # ------------------------------------------------------------ the run

    def plan(self, total: int, per_epoch: int, rows_per_step: int) -> None:
        """How long the run is."""
        self._total, self._per_epoch, self._rows = total, per_epoch, rows_per_step

    def start(self, step: int) -> None:
        self._step = self._first = step
        self._since = time.monotonic()
        self._training = True

    def after_step(self, step: int) -> None:
        self._step = step

    def on_metrics(self, step: int, figures: dict[str, float]) -> None:
        self._figures = figures
        if figures.get("skipped"):
            self.line(f"step {step}: {figures['skipped']:.0f} updates were not finite and were skipped")

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._evaluated = (step, evaluation.figures)
        self._best.update(step, evaluation.figures.get(self._metric, math.nan))

    def state_dict(self) -> dict[str, Any]:
        return self._best.state_dict()

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._best.load_state_dict(values)

    def close(self, stop: Any) -> None:
        self._training = False

    # ------------------------------------------------------------ drawing

    def _rate(self) -> float:
        """Steps per second of late; 0 before the first."""
        now = time.monotonic()
        self._recent.append((now, self._step))
        old = self._recent[0]
        if self._step == self._first or now - self._since < 1e-3:
            return 0.0
        if self._step > old[1] and now - old[0] > 0.5:
            return (self._step - old[1]) / (now - old[0])
        return (self._step - self._first) / (now - self._since)

    def _cells(self) -> list[tuple[str, str]]:
        rate = self._rate()
        cells = [
            ("step", f"{self._step}/{self._total}"),
            ("epoch", f"{self._step / self._per_epoch:.1f}"),
        ]
        cells += [(k, _short(self._figures[k])) for k in self._figures if k not in ("in_row", "skipped", "lr")]
        if "lr" in self._figures:
            cells.append(("lr", _short(self._figures["lr"])))
        if self._evaluated is not None:
            shown = dict.fromkeys(("loss", self._metric, "accuracy", "mae", "rmse"))
            figures = self._evaluated[1]
            cells += [(f"eval {k}", _short(figures[k])) for k in shown if k in figures]
        if self._best.value is not None:
            cells.append(("best", f"{_short(self._best.value)} @ {self._best.step}"))
        if rate:
            cells.append(("examples/s", f"{rate * self._rows:,.0f}"))
            # Over the whole of this process, evaluations and saves included; a resume starts a new count.
            steady = (self._step - self._first) / (time.monotonic() - self._since)
            cells.append(("ETA", _clock((self._total - self._step) / steady)))
        return cells

    def _render(self) -> Any:
        parts: list[Any] = []
        if self._training:
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            cells = self._cells()
            for name, _ in cells:
                table.add_column(name, no_wrap=True)
            table.add_row(*(value for _, value in cells))
            parts.append(table)
        phase = self._phase
        if phase is not None:
            parts.append(Text(f"{phase[0]} ... {time.monotonic() - phase[1]:.0f} s", style="dim"))
        return Group(*parts)

    def _tick(self) -> None:
        last = time.monotonic()
        shown: Any = None
        while not self._closed.wait(0.25):
            now = time.monotonic()
            if now - last < (_FIRST_MINUTE if now - self._begun < 60 else _LATER) - 0.3:
                continue
            phase = self._phase
            if phase is not None:
                self.line(f"{phase[0]} ... {now - phase[1]:.0f} s")
            elif self._training and self._step != shown:
                shown = self._step
                self.line("  ".join(f"{name} {value}" for name, value in self._cells()))
            elif self._training:
                self.line(f"step {self._step}/{self._total} is still running")
            last = now


class _Handler(logging.Handler):
    """Log records as lines above the live table."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.line(f"{record.levelname.lower()}: {record.getMessage()}")


def _short(value: float) -> str:
    return f"{value:.4g}"


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
