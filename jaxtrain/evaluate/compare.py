"""Runs side by side: a listing, and what differs between some of them. Reads run folders only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import psutil

from jaxtrain.config import RunConfig, load
from jaxtrain.config.errors import ConfigError
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.words import flat_config


def listing(runs: Sequence[RunFolder]) -> str:
    """A line a run: name, id, state, step, best step, its evaluation, test figures."""
    if not runs:
        return "no runs here yet; jaxtrain train digits makes one"
    rows = [["name", "id", "state", "step", "best", "evaluation", "test"]]
    for run in runs:
        status, result = run.read_status(), run.read_result()
        best = result.get("best", {})
        value = (best.get("evaluation") or {}).get(best.get("metric"))
        rows.append(
            [
                run.path.parent.name,
                run.id,
                state_of(status),
                str(status.get("step", "")),
                str(status.get("best") or ""),
                f"{best['metric']} {value:.4g}" if isinstance(value, float) else "",
                _headline(result.get("test", {})),
            ]
        )
    return columns(rows)


def compare(runs: Sequence[RunFolder]) -> str:
    """The config keys that differ, then the results, a column a run."""
    if len(runs) < 2:
        raise ConfigError(f"runs to compare: {len(runs)} given; two or more are needed")
    configs = [flat_config(_config(run)) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [["", *(run.id for run in runs)]]
    for key in keys:
        values = [str(config.get(key, "-")) for config in configs]
        if len(set(values)) > 1:
            rows.append([key, *values])
    if len(rows) == 1:
        rows.append(["(configs are equal)", *("" for _ in runs)])
    results = [run.read_result() for run in runs]
    rows.append(["best step", *(str(r.get("best", {}).get("step", "-")) for r in results)])
    for name in dict.fromkeys(name for r in results for name in r.get("test", {})):
        rows.append([f"test/{name}", *(_figure(r.get("test", {}).get(name)) for r in results)])
    rows.append(["seconds", *(_figure(r.get("seconds")) for r in results)])
    return columns(rows)


def state_of(status: dict[str, Any]) -> str:
    """The state of a run; `running` of a process that is gone reads as `killed`."""
    state = str(status.get("state", "unknown"))
    here = status.get("host") == os.uname().nodename
    if state == "running" and here and not psutil.pid_exists(int(status.get("pid", -1))):
        return "killed"
    return state


def _config(run: RunFolder) -> RunConfig:
    return load(run.resolved)


def _headline(test: dict[str, float]) -> str:
    shown = next((name for name in ("accuracy", "rmse", "loss") if name in test), None)
    return f"{shown} {_figure(test[shown])}" if shown else ""


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def columns(rows: list[list[str]]) -> str:
    """Rows of equally many cells as lines, each column as wide as its widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
