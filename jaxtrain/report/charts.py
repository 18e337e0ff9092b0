"""Curves as inline SVG: crisp at any size, coloured by the page's style sheet, so light, dark and print all fit.

In: series of metrics.jsonl. Out: one `<svg>`. A curve has gaps where values are not finite; a long one is thinned to
what a screen shows: the mean of each bucket, on a pale line through its lowest and highest value, so that no spike is
lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from jaxtrain.report.record import Series, figure

BUCKETS = 300
_LOG_FROM = 30.0
"""A positive curve whose values span more than this factor is drawn on a logarithmic axis."""
_TINY, _HUGE = 1e-200, 1e200
"""Where arithmetic on an axis would under- or overflow."""


@dataclass(frozen=True)
class Line:
    """A series as it is drawn: its label, its colour class (train, eval, third, fourth, fifth)."""

    series: Series
    label: str
    colour: str


@dataclass(frozen=True)
class Marks:
    """What all charts of a run share: steps of the x axis, the best step, events [(step, text)], skipped steps."""

    first: float
    last: float
    best: int | None = None
    events: tuple[tuple[int, str], ...] = ()
    skipped: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Frame:
    """Where numbers lie: plot area in SVG units, ranges of both axes, the marked values of y."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    marked: tuple[float, ...]
    log: bool

    left, right, top, bottom = 70, 14, 32, 44

    def across(self, step: float) -> float:
        low, high = self.x
        return self.left + (step - low) / (high - low) * (self.width - self.left - self.right)

    def down(self, value: float) -> float:
        low, high = (math.log10(v) for v in self.y) if self.log else self.y
        place = (math.log10(value) if self.log else value) - low
        return self.height - self.bottom - place / (high - low) * (self.height - self.top - self.bottom)


def chart(title: str, lines: Sequence[Line], marks: Marks, *, small: bool = False, best: bool = True) -> str:
    """One SVG; empty when no value of any line is finite."""
    lines = [replace(line, series=_bounded(line.series)) for line in lines]
    finite = [line.series.values[~np.isnan(line.series.values)] for line in lines]
    values = np.concatenate(finite) if finite else np.zeros(0)
    if not len(values):
        return ""
    frame = _frame(values, marks, small)
    parts = [*_grid(frame, title), *_events(frame, marks)]
    if best and marks.best is not None:
        parts.append(_vertical(frame, marks.best, "best", f"best step {marks.best:,}"))
    for line in lines:
        extremes, middle = thin(line.series), means(line.series)
        if middle is not line.series:
            parts.append(f'<path class="curve {line.colour} noise" d="{_path(frame, extremes)}"/>')
        parts.append(f'<path class="curve {line.colour}" d="{_path(frame, middle)}"/>')
        value = line.series.at(marks.best) if best and marks.best is not None else None
        if value is not None and marks.best is not None and line.colour != "train":
            tip = escape(f"{line.label} {figure(value)} at the best step {marks.best:,}")
            place = f'cx="{frame.across(marks.best):.1f}" cy="{frame.down(value):.1f}"'
            parts.append(f'<circle class="dot {line.colour}" {place} r="4"><title>{tip}</title></circle>')
    spoken = escape("; ".join(_spoken(line) for line in lines), quote=True)
    box = f'viewBox="0 0 {frame.width} {frame.height}"'
    return f'<svg class="chart" {box} role="img" aria-label="{spoken}">{"".join(parts)}</svg>'


def thin(series: Series, buckets: int = BUCKETS) -> Series:
    """Two points a bucket of steps at most, its lowest and highest value in their order; a bucket of NaN is a gap."""
    steps, values = series.steps, series.values
    if len(steps) <= 2 * buckets:
        return series
    kept = {0, len(steps) - 1}
    for low, high in _buckets(steps, buckets):
        part = values[low:high]
        gap = np.isnan(part).all()
        kept |= {low} if gap else {low + int(np.nanargmin(part)), low + int(np.nanargmax(part))}
    index = np.array(sorted(kept))
    return Series(series.name, steps[index], values[index])


def means(series: Series, buckets: int = BUCKETS) -> Series:
    """The mean of each bucket at its middle step; NaN where all are. A short series is itself."""
    steps, values = series.steps, series.values
    if len(steps) <= 2 * buckets:
        return series
    places = _buckets(steps, buckets)
    parts = [values[low:high][~np.isnan(values[low:high])] for low, high in places]
    middle = np.array([steps[low:high].mean() for low, high in places])
    return Series(series.name, middle, np.array([part.mean() if len(part) else np.nan for part in parts]))


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) from at or below `low` to at or above `high`."""
    step = _nice((high - low) / max(about - 1, 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between `low` and `high`, with 2 and 5 times them when there are few."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if last - first >= 3:
        fine = [float(f"1e{e}") for e in range(first, last + 1, -(-(last - first) // 7))]
    else:
        fine = [float(f"{m}e{e}") for e in range(first - 1, last + 1) for m in (1, 2, 5)]
    inside = [t for t in fine if low <= t <= high]
    return inside if len(inside) >= 2 else [low, high]


def tick_text(value: float) -> str:
    """A short number: 0.02, 1e-5, 12k, 3M."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):g}{letter}"
    text = f"{value:.6g}"
    return text.replace("e-0", "e-").replace("e+0", "e")


def _buckets(steps: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Ranges of places, [low, high), that hold equal spans of steps; empty ones are left out."""
    edges = np.searchsorted(steps, np.linspace(steps[0], steps[-1], count + 1)[1:-1]).tolist()
    return [(low, high) for low, high in zip([0, *edges], [*edges, len(steps)], strict=True) if low < high]


def _bounded(series: Series) -> Series:
    return replace(series, values=np.clip(series.values, -_HUGE, _HUGE))


def _nice(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next((m * power for m in (1, 2, 5) if raw <= m * power * 1.0001), 10 * power)


def _frame(values: np.ndarray, marks: Marks, small: bool) -> _Frame:
    low, high = float(values.min()), float(values.max())
    log = low > _TINY and high / low >= _LOG_FROM
    if log:
        low, high = low / 1.15, high * 1.15
        marked = log_ticks(low, high)
    else:
        room = (high - low) or abs(high) * 0.1 or 1.0
        low, high = (low, high) if high > low else (low - room / 2, high + room / 2)
        # Many axes are honest only from zero, when it is near.
        low = 0.0 if 0 < low < 0.35 * high else low
        low, high = low - (0.04 * room if low else 0.0), high + 0.04 * room
        marked = [t for t in ticks(low, high) if low <= t <= high]
    first, last = (marks.first, marks.last) if marks.last > marks.first else (marks.first - 0.5, marks.first + 0.5)
    size = (360, 220) if small else (520, 290)
    return _Frame(*size, (first, last), (low, high), tuple(marked), log)


def _grid(frame: _Frame, title: str) -> list[str]:
    right, floor = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for value in frame.marked:
        y = frame.down(value)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{frame.left - 7}" y="{y + 4:.1f}" text-anchor="end">{tick_text(value)}</text>')
    for step in (t for t in ticks(*frame.x) if frame.x[0] <= t <= frame.x[1] and t == int(t)):
        x = frame.across(step)
        parts.append(f'<path class="axis" d="M{x:.1f} {floor}v5"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 19}" text-anchor="middle">{tick_text(step)}</text>')
    parts.append(f'<path class="axis" d="M{frame.left} {floor}H{right}"/>')
    middle = (frame.left + right) / 2
    parts.append(f'<text class="name" x="{middle:.0f}" y="{frame.height - 6}" text-anchor="middle">step</text>')
    y_name = escape(title + (" (log)" if frame.log else ""))
    turn = f'transform="translate(11 {(frame.top + floor) / 2:.0f}) rotate(-90)"'
    return [*parts, f'<text class="name" {turn} text-anchor="middle">{y_name}</text>']


def _events(frame: _Frame, marks: Marks) -> list[str]:
    parts, free = [], -1e9
    for step, text in marks.events:
        if _inside(frame, step):
            # Of events close together the first is named; the lines of all are there.
            named = frame.across(step) - free > 80
            parts.append(_vertical(frame, step, "event", text if named else ""))
            free = frame.across(step) if named else free
    floor = frame.height - frame.bottom
    places = dict.fromkeys(round(frame.across(s), 1) for s in marks.skipped if _inside(frame, s))
    if places:
        drawn = "".join(f"M{x} {floor}v-9" for x in places)
        parts.append(f'<path class="skipped" d="{drawn}"><title>skipped updates</title></path>')
    return parts


def _vertical(frame: _Frame, step: int, kind: str, text: str) -> str:
    x, floor = frame.across(step), frame.height - frame.bottom
    anchor = "end" if x > frame.width - 90 else "start" if x < frame.left + 40 else "middle"
    y = 11 if kind == "best" else 25
    label = f'<text class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>' if text else ""
    return f'<path class="{kind}" d="M{x:.1f} {y + 3}V{floor}"/>{label}'


def _inside(frame: _Frame, step: float) -> bool:
    return frame.x[0] <= step <= frame.x[1]


def _path(frame: _Frame, data: Series) -> str:
    parts, pen_down = [], False
    for step, value in zip(data.steps.tolist(), data.values.tolist(), strict=True):
        if math.isnan(value):
            pen_down = False
            continue
        x, y = frame.across(step), frame.down(value)
        # A line of length zero with round ends is a dot: a lone value between two gaps stays visible.
        parts.append(f"L{x:.1f} {y:.1f}" if pen_down else f"M{x:.1f} {y:.1f}h0")
        pen_down = True
    return "".join(parts)


def _spoken(line: Line) -> str:
    finite = line.series.values[~np.isnan(line.series.values)]
    if not len(finite):
        return f"{line.label}: no finite value"
    return f"{line.label} from {figure(float(finite[0]))} to {figure(float(finite[-1]))}"
