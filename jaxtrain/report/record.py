"""What a run folder holds, read once, and what can be said of it in words. Every figure is one of the files.

A file that is missing is empty: an unfinished run has no result.json, a library user's folder may have no journal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jaxtrain.core.metrics import best_is
from jaxtrain.hooks.folder import RunFolder, loose

HEADLINES = ("accuracy", "f1_macro", "f1", "auroc", "rmse", "mae", "r2", "loss")
"""What a test is told by, the first that exists first."""

_ENDED = ("done", "early_stop", "time_budget")


@dataclass(frozen=True)
class Series:
    """One name of metrics.jsonl: steps [n] ascending, values [n]; what is not finite is NaN."""

    name: str
    steps: np.ndarray
    values: np.ndarray

    @property
    def gaps(self) -> int:
        """How many values are not finite."""
        return int(np.isnan(self.values).sum())

    def at(self, step: int) -> float | None:
        """The finite value at a step, if there is one."""
        here = np.flatnonzero((self.steps == step) & ~np.isnan(self.values))
        return float(self.values[here[0]]) if len(here) else None


@dataclass(frozen=True)
class Record:
    """The files of one run."""

    id: str
    status: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)
    resolved: str = ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """resolved.yaml as a tree."""
        tree = yaml.safe_load(self.resolved)
        return tree if isinstance(tree, dict) else {}

    def setting(self, section: str, name: str, default: Any = None) -> Any:
        """One setting of the resolved config."""
        part = self.config.get(section)
        return part.get(name, default) if isinstance(part, dict) else default

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.config.get("name", "run"))

    @property
    def steps(self) -> int:
        """The last step that any file knows of."""
        sealed = self.status.get("last_sealed") or 0
        return max(self.status.get("step") or 0, sealed, *(row["step"] for row in self.rows[-2:]), 0)

    @cached_property
    def test(self) -> dict[str, float]:
        """The figures on the test split."""
        return loose(self.result.get("test") or {})

    @cached_property
    def best(self) -> dict[str, float]:
        """The evaluation of the best step; empty when no split is for validation."""
        return loose(self.result.get("best", {}).get("evaluation") or {})

    @cached_property
    def metric(self) -> str:
        """The name that chooses the best step, with eval/."""
        chosen = self.result.get("best", {}).get("metric") or self.setting("evaluate", "metric", "loss")
        return f"eval/{chosen}"

    @cached_property
    def best_step(self) -> int | None:
        """The step of result.json, or before there is one, the best evaluation so far."""
        if "best" in self.result:
            return int(self.result["best"]["step"])
        found = self.series(self.metric)
        finite = np.flatnonzero(~np.isnan(found.values))
        if not len(finite):
            return None
        mode = self.setting("evaluate", "mode", "auto")
        lowest = (best_is(self.metric[5:]) if mode == "auto" else mode) == "min"
        values = found.values[finite]
        return int(found.steps[finite[values.argmin() if lowest else values.argmax()]])

    @cached_property
    def confusion(self) -> np.ndarray | None:
        """Counts [C, C], rows are the truth."""
        counts = self.result.get("details", {}).get("confusion")
        return np.asarray(counts, np.int64) if counts else None

    def class_name(self, index: int) -> str:
        """The word for a class, or its number."""
        names = self.result.get("class_names")
        return str(names[index]) if names and index < len(names) else str(index)

    def series(self, name: str) -> Series:
        """All values of a name."""
        found = [(row["step"], row[name]) for row in self.rows if name in row]
        steps = np.array([step for step, _ in found], np.float64)
        values = np.array([v if isinstance(v, (int, float)) else np.nan for _, v in found], np.float64)
        values[~np.isfinite(values)] = np.nan
        order = np.argsort(steps, kind="stable")
        return Series(name, steps[order], values[order])


def read_record(folder: RunFolder) -> Record:
    """Read all files. A half line, which a killed process may leave at the end, is passed over."""
    return Record(
        id=folder.path.resolve().name,
        status=folder.read_status(),
        result=folder.read_result(),
        rows=[loose(row) for row in _lines(folder.metrics) if "step" in row],
        journal=list(_lines(folder.journal)),
        env=json.loads(folder.env.read_text(encoding="utf-8")) if folder.env.exists() else {},
        resolved=folder.resolved.read_text(encoding="utf-8") if folder.resolved.exists() else "",
    )


def headline_metric(record: Record) -> str | None:
    """The name of the figure that the test is told by."""
    own = record.metric[5:]
    wanted = (own, *HEADLINES) if own != "loss" else HEADLINES
    return next((name for name in (*wanted, *record.test) if name in record.test), None)


def headline(record: Record) -> tuple[str, list[str]]:
    """(the result in one sentence, what else belongs to it)."""
    name = headline_metric(record)
    if name is None:
        return _without_test(record), _unfinished(record)
    rows = record.result.get("rows", {}).get("test")
    on = f" on {rows:,} rows" if rows else ""
    where = f", read once, at step {record.best_step:,}, {_chosen(record)}"
    return f"test {name} {figure(record.test[name])}{on}{where}", [*_behind(record), *_unfinished(record)]


def figure(value: Any) -> str:
    """A number for people: four places, or four digits where places would say nothing."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value == 0 or 1e-2 <= abs(value) < 1e4:
        # Almost 1 is not 1: an AUROC of 0.99997 must not read as perfect.
        return f"{value:.4f}" if value == 1.0 or f"{value:.4f}" != "1.0000" else f"{value:.6g}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def seconds(value: float) -> str:
    """A time span: 12.1 s, 3 min 20 s, 2 h 05 min."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def wilson(right: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927): honest also for few rows and shares near 1."""
    share, square = right / count, z * z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row


def _chosen(record: Record) -> str:
    if not record.best:
        return "the last one saved (nothing was there to choose it by)"
    count = len(record.series(record.metric).steps)
    return f"the best of {count:,} by {record.metric}" if count != 1 else f"the only evaluation of {record.metric}"


def _behind(record: Record) -> list[str]:
    """How much the headline is worth: its interval, and what guessing would give."""
    counts = record.confusion
    if counts is None or record.result.get("split") != "test" or not counts.sum():
        return []
    right, total = int(np.trace(counts)), int(counts.sum())
    low, high = wilson(right, total)
    often = int(counts.sum(1).max())
    return [
        f"{total - right:,} of {total:,} wrong; 95 % interval of the accuracy {low:.3f} to {high:.3f} (Wilson).",
        f"Always saying the most frequent class would reach {often / total:.4f}.",
    ]


def _without_test(record: Record) -> str:
    if record.result:
        rows = record.result.get("rows", {})
        if record.best:
            reached = figure(record.best.get(record.metric[5:]))
            count = len(record.series(record.metric).steps)
            return (
                f"No test figure: this run has no test rows. Best {record.metric} {reached} at step "
                f"{record.best_step:,}, of {count:,} evaluations; it chose the step, so it flatters"
            )
        missing = "neither validation nor test rows" if not rows.get("validation") else "no evaluation and no test rows"
        return f"No test figure: this run has {missing}; the last checkpoint is of step {record.best_step:,}"
    state, reason = record.status.get("state", ""), record.status.get("reason") or ""
    so_far = ""
    if record.best_step is not None:
        value = record.series(record.metric).at(record.best_step)
        so_far = f"; best {record.metric} so far {figure(value)} at step {record.best_step:,}"
    if state == "running" or not state:
        return f"No result yet: {'the run goes on' if state else 'no state is recorded'}, step {record.steps:,}{so_far}"
    ending = f"state {state}" + (f" ({reason})" if reason else "")
    return f"No result: {ending}, at step {record.steps:,}{so_far}"


def _unfinished(record: Record) -> list[str]:
    state = record.status.get("state", "")
    if record.test and record.rows and not any("test/best_step" in row for row in record.rows[-50:]):
        return ["The run was continued after this result; the figure is of the earlier, shorter run."]
    if state in ("preempted", "interrupted"):
        return [f"Continue with: jaxtrain resume {record.id}"]
    if state in _ENDED and not record.result:
        return ["The run ended but wrote no result.json."]
    return []
