"""report.html: one file that says what a run gave, why to believe it, and what went on. Mail it, print it, keep it.

In: the files of a run folder, nothing else. Out: one self-contained page; its policy forbids every request, so
opening it tells nobody. Every text that is not ours is escaped. The same files give the same page.
"""

from __future__ import annotations

import json
import shlex
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.checkpoint.files import write_text
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.hooks.ledger import goodput, wall
from jaxtrain.report.curves import curves_html
from jaxtrain.report.record import HEADLINES, Record, figure, headline, headline_metric, read_record, seconds
from jaxtrain.report.tables import confusion_html, exact, journal_html, per_class_html, times_html, wrong_html

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = Path(__file__).with_name("report.css")


def write_report(folder: RunFolder) -> Path:
    """Write report.html of a run, finished or not; gives its path."""
    write_text(folder.report, page(read_record(folder), folder))
    return folder.report


def page(record: Record, folder: RunFolder) -> str:
    """The whole page."""
    split = str(record.result.get("split", ""))
    where = f" ({escape(split)} split, step {record.best_step:,})" if split and record.best_step is not None else ""
    sections = [
        ("Curves", curves_html(record)),
        (f"Confusion matrix{where}", confusion_html(record)),
        (f"Classes, the worst first{where}", per_class_html(record)),
        (f"Wrong predictions{where}", wrong_html(record, folder)),
        ("Where the time went", times_html(record)),
        ("Journal", journal_html(record)),
        ("How it was made", _made(record)),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content)
    title = escape(f"{record.name} · {record.id}")
    version = escape(str(record.env.get("packages", {}).get("jaxtrain", "")))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n<main>\n{_head(record)}{body}\n</main>\n"
        f"<footer>jaxtrain {version}, from the files of run {escape(record.id)}.</footer>\n</body>\n</html>\n"
    )


def _head(record: Record) -> str:
    sentence, more = headline(record)
    state, reason = record.status.get("state", "unknown"), record.status.get("reason") or ""
    # While the report of a finished run is written, its status may still say that it runs.
    over = state == "running" and bool(record.result)
    badge = "" if over else f'<span class="state {escape(state, quote=True)}">{escape(state.replace("_", " "))}</span>'
    told = f"<span>{escape(reason)}</span>" if reason and not over else ""
    rest = "".join(f"<p>{escape(text)}</p>" for text in more)
    return (
        f"<header><p class='run'><b>{escape(record.name)}</b> <span>{escape(record.id)}</span> {badge} {told}</p>"
        f'<h1>{escape(sentence)}.</h1><div class="more">{rest}</div>{_tiles(record)}</header>'
        f'<section><h2>Key facts</h2><div class="side facts">{_facts(record)}{_figures(record)}</div></section>'
    )


def _tiles(record: Record) -> str:
    first = headline_metric(record)
    names = [n for n in dict.fromkeys((first, *HEADLINES)) if n in record.test][:4]
    tiles = "".join(f"<div><dt>test {escape(str(n))}</dt><dd>{exact(record.test[str(n)])}</dd></div>" for n in names)
    return f'<dl class="tiles">{tiles}</dl>' if tiles else ""


def _facts(record: Record) -> str:
    rows = record.result.get("rows") or {}
    parts = [f"{rows[name]:,} {name}" for name in ("train", "validation", "test") if name in rows]
    speed = record.series("time/examples_per_s").values
    fast = f"{np.nanmedian(speed):,.0f} examples/s (median)" if np.isfinite(speed).any() else None
    epochs = next((r["epoch"] for r in reversed(record.rows) if r.get("epoch")), None)
    reached = f"{record.steps:,} steps" + (f", {epochs:,.4g} epochs" if epochs else "")
    wanted = record.setting("train", "duration")
    spent = record.status.get("time")
    host = record.env.get("host")
    parameters = record.result.get("parameters")
    optimizer, schedule = record.setting("optimizer", "kind"), record.setting("schedule", "kind")
    facts: list[tuple[str, Any]] = [
        ("model", record.setting("model", "target") or record.setting("model", "kind")),
        ("parameters", f"{parameters:,}" if parameters is not None else None),
        ("data", record.result.get("data") or record.setting("data", "path") or record.setting("data", "kind")),
        ("rows", ", ".join(parts)),
        ("duration", reached + (f" ({wanted} asked for)" if wanted is not None else "")),
        ("wall time", f"{seconds(wall(spent))}, goodput {goodput(spent):.0%}" if spent else None),
        ("speed", fast),
        ("device", str(record.env["devices"]) + (f" on {host}" if host else "") if "devices" in record.env else None),
        ("precision", record.env.get("precision") or record.config.get("precision")),
        ("batch", record.setting("train", "global_batch_size")),
        (
            "optimizer",
            f"{optimizer}, peak_lr {record.setting('optimizer', 'peak_lr')}, {schedule}" if optimizer else None,
        ),
        ("seed", record.setting("train", "seed")),
        ("updated", record.status.get("updated")),
    ]
    lines = "".join(
        f'<tr><th scope="row">{name}</th><td>{escape(str(value))}</td></tr>'
        for name, value in facts
        if value not in (None, "")
    )
    return f'<table class="plain"><tbody>{lines}</tbody></table>' if lines else "<p>Nothing is recorded yet.</p>"


def _figures(record: Record) -> str:
    """All figures of the best step, both splits side by side."""
    names = list(dict.fromkeys((*record.best, *record.test)))
    columns = [(title, values) for title, values in (("validation", record.best), ("test", record.test)) if values]
    if not names:
        return ""
    head = "".join(f'<th scope="col">{title}</th>' for title, _ in columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{exact(values.get(name))}</td>" for _, values in columns)
        + "</tr>"
        for name in names
    )
    step = f"{record.best_step:,}" if record.best_step is not None else figure(None)
    return (
        f'<div class="wide"><table class="figures"><caption>All figures of step {step}</caption>'
        f'<thead><tr><th scope="col">metric</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _made(record: Record) -> str:
    parts = []
    if record.resolved:
        parts.append(
            f"<details><summary>Config (resolved.yaml)</summary><pre>{escape(record.resolved)}</pre></details>"
        )
    if record.env:
        parts.append(f"<details><summary>Environment</summary>{_environment(record.env)}</details>")
    return "".join(parts)


def _environment(env: dict[str, Any]) -> str:
    flat = [(k, v) for k, v in env.items() if not isinstance(v, dict)]
    flat += [(name, version) for part in env.values() if isinstance(part, dict) for name, version in part.items()]
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(_plain(value))}</td></tr>' for name, value in flat
    )
    return f'<table class="plain"><tbody>{rows}</tbody></table>'


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return shlex.join(str(part) for part in value)
    return value if isinstance(value, str) else json.dumps(value)
