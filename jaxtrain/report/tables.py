"""What the best step gets right and wrong: confusion matrix, figures a class, wrong samples; and the journal."""

from __future__ import annotations

import base64
import io
import math
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.hooks.folder import RunFolder
from jaxtrain.hooks.ledger import SHARES, goodput, wall
from jaxtrain.report.confusion import ANNOTATED, shares, shorten
from jaxtrain.report.record import Record, figure, seconds

_DRAWN = 100
"""With more classes a matrix says nothing to the eye; the pairs do."""
_OPEN = 25
_PAIRS = 10
_THUMB, _HEAVY = 192, 60_000
"""A picture of more bytes than _HEAVY is put on the page as a JPEG of this many pixels."""


_SPENT_ON = {
    "init": "building, restoring, the first state, choosing the steps a dispatch",
    "compile": "compiling the step, or reading it from the cache",
    "train": "steps",
    "data_wait": "steps that waited for their batches",
    "evaluate": "validation, and the test of the best step; compiling it too",
    "save": "saves that held the run, and sealing the last one",
    "lost": "steps that were done again after a restart, or left by a rollback",
    "pause": "no process of the run was there",
    "other": "files, report, console",
}


def exact(value: Any) -> str:
    """A figure as people read it, with the exact one of the file beside it."""
    if value is None or isinstance(value, str):
        return escape(figure(value))
    return f'<data value="{value!r}" title="{value!r}">{figure(value)}</data>'


def confusion_html(record: Record) -> str:
    """The matrix, and the pairs that are confused most; empty when there is none."""
    counts = record.confusion
    if counts is None:
        return ""
    names = [record.class_name(i) for i in range(len(counts))]
    drawn = _matrix(counts, names) if len(counts) <= _DRAWN else ""
    note = "" if drawn else f"<p>{len(counts):,} classes are too many for a picture of the matrix.</p>"
    return f'{note}<div class="side">{drawn}<div>{_pairs(counts, names)}</div></div>'


def per_class_html(record: Record) -> str:
    """A row a class, the worst f1 first; empty when there is none."""
    table = record.result.get("details", {}).get("per_class")
    if not table:
        return ""
    columns = [c for c in ("precision", "recall", "f1", "support", "auroc") if c in table]
    labels = len(table[columns[0]])
    single = labels == 1
    order = sorted(range(labels), key=lambda i: (_number(table.get("f1", [0.0] * labels)[i]), i))
    rows = []
    for i in order:
        name = "1 (positive)" if single and not record.result.get("class_names") else record.class_name(i)
        cells = "".join(f"<td{_bar(c, table[c][i])}>{exact(_value(c, table[c][i]))}</td>" for c in columns)
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{c}</th>' for c in columns)
    head = f'<thead><tr><th scope="col">class</th>{head}</tr></thead>'
    shown = f'<div class="wide"><table class="figures">{head}<tbody>{"".join(rows[:_OPEN])}</tbody></table></div>'
    if len(rows) <= _OPEN:
        return shown
    rest = f'<div class="wide"><table class="figures">{head}<tbody>{"".join(rows[_OPEN:])}</tbody></table></div>'
    return f"{shown}<details><summary>the other {len(rows) - _OPEN:,} classes</summary>{rest}</details>"


def wrong_html(record: Record, folder: RunFolder) -> str:
    """Pictures of wrong predictions, true -> predicted (probability); empty when none are known."""
    wrong = record.result.get("wrong")
    if not wrong:
        return ""
    counts = record.confusion
    known = f" of {int(counts.sum() - np.trace(counts)):,}" if counts is not None else ""
    pictured = any(one.get("image") for one in wrong)
    cards = []
    for one in wrong:
        words = f'<b>{escape(str(one["true"]))}</b> → <b class="bad">{escape(str(one["predicted"]))}</b>'
        probability, number = exact(one["probability"]), escape(str(one["id"]))
        told = f"row {one['id']}: {one['true']}, predicted {one['predicted']}"
        picture = _picture(folder, one.get("image"), told) if pictured else ""
        cards.append(
            f"<figure>{picture}<figcaption>{words} <span>({probability})</span><small>row {number}</small>"
            "</figcaption></figure>"
        )
    return (
        f"<p>The {len(wrong):,}{known} wrong predictions that the model was surest of: true → predicted (probability). "
        f'A wrong label shows up here first.</p><div class="samples">{"".join(cards)}</div>'
    )


def times_html(record: Record) -> str:
    """What the wall time went to, the largest share first; empty for a run that did not write it down."""
    spent = record.status.get("time")
    if not spent:
        return ""
    whole = wall(spent)
    rows = []
    for share in sorted((s for s in SHARES if spent.get(s, 0.0) > 0), key=lambda s: -spent[s]):
        part = spent[share] / whole
        cells = f"<td>{seconds(spent[share])}</td><td{_bar('f1', part)}>{part:.1%}</td>"
        rows.append(f'<tr><th scope="row">{share.replace("_", " ")}</th>{cells}<td>{_SPENT_ON[share]}</td></tr>')
    head = "".join(f'<th scope="col">{title}</th>' for title in ("", "time", "share", "what"))
    caption = f"{seconds(whole)} of wall time; goodput {goodput(spent):.1%}: the share that trained and counts"
    return (
        f'<div class="wide"><table class="figures times"><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def journal_html(record: Record) -> str:
    """What happened between the first and the last step."""
    if not record.journal:
        return "<p>Nothing: no resume, no change, no fault.</p>"
    rows = []
    for event in record.journal:
        rest = {k: v for k, v in event.items() if k not in ("event", "time", "step")}
        words = "; ".join(_told(k, v) for k, v in rest.items() if v not in (None, {}, []))
        cells = (event.get("time", ""), event.get("event", ""), figure(event.get("step")), words or "–")
        rows.append("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in cells) + "</tr>")
    head = "".join(f'<th scope="col">{c}</th>' for c in ("time", "event", "step", "what"))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _matrix(counts: np.ndarray, names: list[str]) -> str:
    classes = len(counts)
    cell = max(6.0, min(38.0, 620.0 / classes)) if classes > 2 else 80.0
    shown = [shorten(n, 14) for n in names]
    margin = 34 + 7.2 * max(len(n) for n in shown)
    every = math.ceil(13.0 / cell)
    whole = classes * cell
    side = margin + whole + 4
    part = shares(counts)
    # Cells of one strength are one path: a matrix of 100 classes stays small.
    paths: dict[tuple[str, int], list[str]] = {}
    for row, column in np.argwhere(counts):
        strength = max(1, math.ceil(10 * math.sqrt(part[row, column])))
        where = f"M{margin + column * cell:.1f} {margin + row * cell:.1f}h{cell:.1f}v{cell:.1f}h-{cell:.1f}z"
        paths.setdefault(("right" if row == column else "bad", strength), []).append(where)
    parts = [f'<rect class="plate" x="{margin:.1f}" y="{margin:.1f}" width="{whole:.1f}" height="{whole:.1f}"/>']
    parts += [f'<path class="{kind}" fill-opacity="{s / 10:g}" d="{"".join(d)}"/>' for (kind, s), d in paths.items()]
    if classes <= ANNOTATED:
        for row, column in np.argwhere(counts):
            x, y = margin + (column + 0.5) * cell, margin + (row + 0.5) * cell + 4
            strong = " strong" if part[row, column] > 0.35 else ""
            told = escape(f"{names[row]} → {names[column]}: {counts[row, column]:,} of {counts[row].sum():,}")
            parts.append(
                f'<text class="count{strong}" x="{x:.1f}" y="{y:.1f}">{counts[row, column]}<title>{told}</title></text>'
            )
    for i in range(0, classes, every):
        middle = margin + (i + 0.5) * cell
        parts.append(f'<text x="{margin - 6:.1f}" y="{middle + 4:.1f}" text-anchor="end">{escape(shown[i])}</text>')
        turn = f'transform="translate({middle + 4:.1f} {margin - 6:.1f}) rotate(-90)"'
        flat = f'x="{middle:.1f}" y="{margin - 8:.1f}" text-anchor="middle"'
        parts.append(f"<text {flat if max(map(len, shown)) <= 3 and every == 1 else turn}>{escape(shown[i])}</text>")
    centre = margin + whole / 2
    parts.append(f'<text class="name" x="{centre:.1f}" y="13" text-anchor="middle">predicted</text>')
    parts.append(
        f'<text class="name" transform="translate(13 {centre:.1f}) rotate(-90)" text-anchor="middle">true</text>'
    )
    spoken = f"confusion matrix: {int(np.trace(counts)):,} of {int(counts.sum()):,} right"
    style = f'style="max-width:{side:.0f}px"'
    return (
        f'<svg class="matrix" viewBox="0 0 {side:.0f} {side:.0f}" {style} role="img" aria-label="{spoken}">'
        f"{''.join(parts)}</svg>"
    )


def _pairs(counts: np.ndarray, names: list[str]) -> str:
    off = counts - np.diag(np.diag(counts))
    order = np.argsort(-off, axis=None, kind="stable")[:_PAIRS]
    rows = []
    for place in order:
        row, column = divmod(int(place), len(counts))
        if off[row, column] > 0:
            share = off[row, column] / counts[row].sum()
            rows.append(
                f"<tr><td>{escape(names[row])} → {escape(names[column])}</td><td>{off[row, column]:,}</td>"
                f"<td>{share:.1%}</td></tr>"
            )
    if not rows:
        return "<p>No row is confused with another class.</p>"
    head = "".join(f'<th scope="col">{c}</th>' for c in ("true → predicted", "rows", "of the class"))
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<table class="figures"><caption>Confused most</caption>{body}</table>'


def _picture(folder: RunFolder, image: Any, words: str) -> str:
    """An image as data: URI. Only files of samples/ are read, whatever result.json says."""
    path = folder.samples / Path(str(image)).name
    if not image or not path.is_file():
        return f'<div class="none">{"no picture" if image else "row is no image"}</div>'
    data, kind = path.read_bytes(), "png"
    if len(data) > _HEAVY:
        from PIL import Image

        with Image.open(path) as opened:
            opened.thumbnail((_THUMB, _THUMB))
            buffer = io.BytesIO()
            opened.convert("RGB").save(buffer, "JPEG", quality=85)
        data, kind = buffer.getvalue(), "jpeg"
    encoded = base64.b64encode(data).decode("ascii")
    return f'<img alt="{escape(words, quote=True)}" src="data:image/{kind};base64,{encoded}">'


def _told(name: str, value: Any) -> str:
    """An entry of the journal; a change [before, after] of a resume as before -> after."""
    if isinstance(value, dict):
        return ", ".join(_told(k, v) for k, v in value.items())
    if isinstance(value, list) and len(value) == 2:
        return f"{name}: {value[0]} → {value[1]}"
    return f"{name}: {value}"


def _value(column: str, value: Any) -> Any:
    return int(value) if column == "support" and value is not None else value


def _number(value: Any) -> float:
    """A sort key; what is no number comes first, as the worst."""
    return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else -1.0


def _bar(column: str, value: Any) -> str:
    if column != "f1" or _number(value) < 0:
        return ""
    return f' class="bar" style="--part:{100 * float(value):.1f}%"'
