"""Which curves a run has: grouped by what belongs on one axis, the important ones first, the rest folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

import numpy as np

from jaxtrain.hooks.folder import names
from jaxtrain.report.charts import Line, Marks, chart
from jaxtrain.report.record import Record

_TOGETHER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("loss",)),
    ("accuracy", ("accuracy", r"top\d+_accuracy", "exact_match")),
    ("macro average", ("f1_macro", "precision_macro", "recall_macro")),
    ("share", ("f1", "precision", "recall")),
    ("AUROC", ("auroc",)),
    ("error", ("mae", "rmse")),
    ("R²", ("r2",)),
)
"""(axis, names on it): curves of one meaning and one unit share a plot."""

_FOLDED = (
    ("micro average", ("f1_micro", "precision_micro", "recall_micro")),
    ("weighted average", ("f1_weighted", "precision_weighted", "recall_weighted")),
)

_COURSE = (
    ("learning rate", "train/lr"),
    ("grad_norm", "train/grad_norm"),
    ("examples/s", "time/examples_per_s"),
    ("loss scale", "train/loss_scale"),
)
"""How the run went, rather than how good the model is."""

_NOT_A_METRIC = {"train/in_row", "train/skipped", "train/overflow", *(name for _, name in _COURSE)}
_COLOURS = ("eval", "third", "fourth", "fifth")


def curves_html(record: Record) -> str:
    """All charts, and in words what they cannot show."""
    marks = marks_of(record)
    known = [n for n in names(record.rows) if n.startswith(("train/", "eval/")) and n not in _NOT_A_METRIC]
    groups = [(axis, _lines(record, known, wanted)) for axis, wanted in _TOGETHER]
    folded = [(axis, _lines(record, known, wanted)) for axis, wanted in _FOLDED]
    told = {line.series.name for _, lines in (*groups, *folded) for line in lines}
    for name in dict.fromkeys(n.split("/", 1)[1] for n in known if n not in told):
        groups.append((name, _lines(record, known, (re.escape(name),))))
    course = [(axis, [Line(record.series(name), name, "train")]) for axis, name in _COURSE]
    large = "".join(_figure(axis, lines, marks) for axis, lines in groups)
    small = "".join(_figure(axis, lines, marks, small=True) for axis, lines in course)
    more = "".join(_figure(axis, lines, marks) for axis, lines in folded)
    if not (large or small):
        return "<p>No finite value was recorded yet.</p>" + _gaps(record, [*groups, *course])
    parts = [f"<p>{_legend(record, marks)}</p>", _gaps(record, [*groups, *folded, *course])]
    parts += [f'<div class="charts">{large}</div><div class="charts small">{small}</div>']
    if more:
        parts.append(
            f'<details><summary>Micro and weighted averages</summary><div class="charts">{more}</div></details>'
        )
    return "".join(parts)


def marks_of(record: Record) -> Marks:
    """The step axis, the best step, journal events and skipped updates."""
    skipped = record.series("train/skipped")
    events = [(int(e["step"]), str(e.get("event", "event"))) for e in record.journal if isinstance(e.get("step"), int)]
    return Marks(
        first=0 if record.steps > 1 else 1,
        last=max(record.steps, 1),
        best=record.best_step,
        events=tuple(sorted(events)),
        skipped=tuple(int(s) for s in skipped.steps[np.nan_to_num(skipped.values) > 0]),
    )


def _lines(record: Record, known: list[str], wanted: Iterable[str]) -> list[Line]:
    """train in its colour, eval in its own; further evaluations in the next colours."""
    lines: list[Line] = []
    colours = iter((*_COLOURS, *("fifth",) * len(known)))
    for pattern in wanted:
        for name in known:
            split, short = name.split("/", 1)
            if re.fullmatch(pattern, short):
                colour = "train" if split == "train" else next(colours)
                lines.append(Line(record.series(name), name, colour))
    return lines


def _figure(axis: str, lines: list[Line], marks: Marks, small: bool = False) -> str:
    drawn = chart(axis, lines, marks, small=small, best=not small)
    if not drawn:
        return ""
    shown = [line for line in lines if not np.isnan(line.series.values).all()]
    keys = "".join(f'<span class="key {line.colour}">{escape(line.label)}</span>' for line in shown)
    return f"<figure><figcaption>{keys}</figcaption>{drawn}</figure>"


def _legend(record: Record, marks: Marks) -> str:
    parts = []
    per_epoch = next((r["step"] / r["epoch"] for r in reversed(record.rows) if r.get("epoch")), None)
    if per_epoch:
        parts.append(f"One epoch is {per_epoch:,.4g} steps.")
    if marks.best is not None and record.best:
        parts.append(f"The dotted line is the best step by {escape(record.metric)}.")
    if marks.events:
        parts.append("Dashed lines are events of the journal.")
    if marks.skipped:
        count = int(np.nansum(record.series("train/skipped").values))
        parts.append(f"Red ticks on the axis: {count:,} updates were skipped because they were not finite.")
    return " ".join(parts)


def _gaps(record: Record, groups: list[tuple[str, list[Line]]]) -> str:
    """Values that are not finite, counted: a curve only has a gap there."""
    found = [line.series for _, lines in groups for line in lines if line.series.gaps]
    if not found:
        return ""
    told = ", ".join(f"{s.gaps:,} of {len(s.values):,} values of {escape(s.name)}" for s in found)
    return f'<p class="warning">Not finite (NaN or infinite), drawn as gaps: {told}.</p>'
