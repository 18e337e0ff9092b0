"""A run in a Jupyter notebook: one display of the cell, which is drawn anew as the run goes on. No widgets.

In come lines and a `Frame` of where the run is; out go mime bundles (text/plain, text/html) to IPython's `display`.
IPython is never imported unless the process already has it: outside a kernel this file costs nothing. Whatever the
display raises goes to the caller, which then prints lines (hooks/console.py).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

_PAUSE = 0.5
"""Seconds between two drawings, unless a line is said: each is sent to the browser as a whole."""
_MOST = 200
"""So many lines are kept at most, for the same reason; a run says about ten."""
_FIRST = 20

_FONT = "var(--jp-code-font-family, var(--vscode-editor-font-family, ui-monospace, Menlo, Consolas, monospace))"
# Of the theme only the text colour is taken: it is dark or light, and all else is seen on both.
_PAGE = f"font:13px/1.5 {_FONT};font-variant-numeric:tabular-nums;white-space:pre-wrap;overflow-wrap:anywhere"
_DIM = "opacity:.65"
_COLOURS = {"yellow": "color:#b87000"}
"""By the name that rich has for it."""

Cells = list[tuple[str, str]]
Line = tuple[str, str]
"""(text, style)."""

_left: dict[str, tuple[Any, list[Line]]] = {}
"""{cell: (display handle, lines)} of what was shown before a run began; the next display of that cell goes on there."""


def kernel() -> Any:
    """The shell of the Jupyter kernel that this process is; None where it is none, as with IPython on a terminal."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell: Any = find() if find else None
    return None if getattr(shell, "kernel", None) is None else shell


class Frame(NamedTuple):
    """Where a run is at one moment. No `progress` as long as no step runs."""

    share: float
    progress: Cells
    values: Cells
    waiting: str


class Screen:
    """A way to show a run: lines, and between `start` and `stop`, if it is `moving`, the frame of the moment."""

    moving = False
    """It shows by itself what is going on; else the console says that in lines."""

    def start(self) -> None:
        """The run begins."""

    def line(self, text: str, style: str) -> None:
        """One line more, now."""

    def refresh(self) -> None:
        """Called a few times a second between `start` and `stop`."""

    def stop(self, more: bool) -> None:
        """Nothing but lines from now on. `more`: another screen goes on where this one ends."""


class Notebook(Screen):
    """One display, however many lines and frames there are."""

    def __init__(self, display: Callable[..., Any], cell: str, frame: Callable[[], Frame]) -> None:
        self._display, self._cell, self._frame = display, cell, frame
        self._lines: list[Line] = []
        self._dropped = 0
        self._handle: Any = None
        self._shown = _bundle([], 0, None)
        self._drawn = -_PAUSE
        self._lock = threading.RLock()  # lines come from the run, frames from the ticker: the newest must be the last

    @classmethod
    def here(cls, frame: Callable[[], Frame]) -> Notebook | None:
        """For the cell that runs now; None where this process is no kernel of Jupyter."""
        shell = kernel()
        if shell is None:
            return None
        try:
            from IPython.display import display

            return cls(display, shell.get_parent()["header"]["msg_id"], frame)
        except Exception:  # a kernel of an unknown kind gets lines
            return None

    def start(self) -> None:
        self.moving = True  # drawn by the first `refresh`: what is over before leaves no empty display behind

    def line(self, text: str, style: str) -> None:
        with self._lock:
            self._lines.append((text, style))
            if len(self._lines) > _MOST:
                del self._lines[_FIRST]
                self._dropped += 1
            self._draw()

    def refresh(self) -> None:
        if time.monotonic() - self._drawn >= _PAUSE:
            self._draw()

    def stop(self, more: bool) -> None:
        with self._lock:
            self.moving = False
            self._draw()
            if more and self._handle is not None:
                _left.clear()
                _left[self._cell] = self._handle, self._lines
                self._handle = None

    def _draw(self) -> None:
        with self._lock:
            if self._handle is None and self._cell in _left:
                self._handle, before = _left.pop(self._cell)
                self._lines[:0] = before
            bundle = _bundle(self._lines, self._dropped, self._frame() if self.moving else None)
            if bundle == self._shown:
                return
            if self._handle is None:
                self._handle = self._display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)
            self._shown, self._drawn = bundle, time.monotonic()


def _bundle(lines: list[Line], dropped: int, frame: Frame | None) -> dict[str, str]:
    """Both forms of the whole display. text/plain is what nbconvert and text-only front ends show."""
    said = lines
    if dropped:
        said = [*lines[:_FIRST], (f"... {dropped:,} lines are only in run.log ...", ""), *lines[_FIRST:]]
    plain = [text for text, _ in said]
    rows = [_div(escape(text), _COLOURS.get(style, "")) for text, style in said]
    if frame and frame.progress:
        plain += [f"{_words(frame.progress[:1])} {_right(frame)}", _words(frame.values)]
        rows += [_bar(frame), _grid(frame.values)]
    if frame:
        plain += [frame.waiting]
        # The row is there without a text too: a short phase must not move all that is below.
        rows += [_div(escape(frame.waiting), f"{_DIM};min-height:1.5em")]
    html = _div("".join(rows), _PAGE) if rows else ""
    return {"text/plain": "\n".join(text for text in plain if text), "text/html": html}


def _bar(frame: Frame) -> str:
    """step 272/680 [======      ]  40%  epoch 16.0  ETA 00:05"""
    step = _words(frame.progress[:1])
    done, _, total = frame.progress[0][1].partition("/")
    size = len(step) + len(total) - len(done)  # the bar must not move when `done` gets longer
    full = _div("", f"width:{frame.share:.1%};height:100%;background:#2e9e5b")
    track = "flex:1 1 12ch;max-width:40ch;height:8px;border-radius:4px;overflow:hidden;background:rgba(128,128,128,.3)"
    inner = _div(escape(step), f"font-weight:bold;min-width:{size}ch") + _div(full, track) + _div(escape(_right(frame)))
    return _div(inner, "display:flex;flex-wrap:wrap;align-items:center;gap:0 1ch;margin-top:6px")


def _right(frame: Frame) -> str:
    return f"{frame.share:4.0%}  {_words(frame.progress[1:])}"


def _grid(cells: Cells) -> str:
    """Names above values; columns of a least width, so that they stand still."""
    columns = [_div(_div(escape(name), _DIM) + _div(escape(value)), "min-width:8ch") for name, value in cells]
    return _div("".join(columns), "display:flex;flex-wrap:wrap;gap:4px 2ch;margin-top:4px")


def _div(inner: str, style: str = "") -> str:
    return f'<div style="{style}">{inner}</div>' if style else f"<div>{inner}</div>"


def _words(cells: Cells) -> str:
    return "  ".join(f"{name} {value}" for name, value in cells)
