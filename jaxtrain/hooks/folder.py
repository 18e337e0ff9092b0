"""The run folder: the one place that names its files (contract 14), finds runs, and truncates logs for a resume.

config.yaml resolved.yaml env.json metrics.jsonl journal.jsonl events.* checkpoints/ samples/ report.html
result.json run.log status.json chosen.json crash/ .lock .run-id; in a mirror .mirror-of (checkpoint/mirror.py)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.files import Lock, fsync, read_json, write_json, write_text
from jaxtrain.config.errors import ConfigError, UserError

ROOT = Path("runs")


class RunFolder:
    """Paths and small files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.resolved = path / "resolved.yaml"
        self.env = path / "env.json"
        self.metrics = path / "metrics.jsonl"
        self.journal = path / "journal.jsonl"
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"
        self.report = path / "report.html"
        self.result = path / "result.json"
        self.log = path / "run.log"
        self.status = path / "status.json"
        self.chosen_file = path / "chosen.json"
        self.crash = path / "crash"

    @property
    def id(self) -> str:
        """The UTC id, the last part of the path."""
        return self.path.name

    def create(self) -> None:
        """Make the folder, readable by its owner only. Raises ConfigError when it cannot be written."""
        try:
            self.path.mkdir(parents=True, mode=0o700, exist_ok=True)
            probe = self.path / ".probe"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"run folder {str(self.path)!r} cannot be written: {error.strerror}") from None

    def is_used(self) -> bool:
        """Whether a run lives here."""
        return self.resolved.exists() or self.status.exists()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """While this is open no other process can write here. Raises ConfigError naming the one that does."""
        lock = Lock(self.path / ".lock", f"run folder {str(self.path)!r}")
        try:
            yield
        finally:
            lock.release()

    def clear(self, *, all_of_it: bool) -> None:
        """Remove what a run wrote; its journal, the logs that its launcher holds open and the checkpoints that were set
        aside as corrupt only with `all_of_it`."""
        aside = set(self.checkpoints.glob(".quarantine-*"))
        kept = set() if all_of_it else {self.journal, *self.path.glob("run.*.log"), *aside}
        kept |= {self.path / ".lock", *(path.parent for path in kept & aside)}
        for path in [*self.path.iterdir(), *self.checkpoints.glob("*")]:
            if path not in kept and path.exists():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def had_steps(self) -> bool:
        """Whether a step was ever sealed here, as far as the status and what was set aside tell."""
        aside = any(self.checkpoints.glob(".quarantine-*"))
        return aside or self.read_status().get("last_sealed") is not None or self.newest_sealed() is not None

    def newest_sealed(self) -> int | None:
        """The number of the newest sealed step, or None; not verified."""
        steps = [path.parent.name for path in self.checkpoints.glob("[0-9]*/manifest.json")]
        return max(map(int, steps), default=None)

    def write_status(self, **values: Any) -> None:
        """Merge `values` into status.json."""
        now = {**self.read_status(), **values, "updated": datetime.now(UTC).isoformat(timespec="seconds")}
        write_json(self.status, strict(now))

    def read_status(self) -> dict[str, Any]:
        """status.json, or nothing yet."""
        return read_json(self.status) if self.status.exists() else {}

    def read_result(self) -> dict[str, Any]:
        """result.json, or nothing yet."""
        return read_json(self.result) if self.result.exists() else {}

    def chosen(self) -> dict[str, Any]:
        """chosen.json: what was chosen by measuring, or nothing yet."""
        return read_json(self.chosen_file) if self.chosen_file.exists() else {}

    def note(self, event: str, **values: Any) -> None:
        """Add a line to the journal, on the disk before this returns (contract 9)."""
        line = {"event": event, "time": datetime.now(UTC).isoformat(timespec="seconds"), **values}
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(strict(line), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        fsync(self.path)

    def told(self, event: str, why: str) -> None:
        """Note an event and its reason."""
        self.note(event, why=why)

    def events(self) -> list[dict[str, Any]]:
        """All lines of the journal."""
        return [event for _, event in _lines(self.journal)]

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl, "NaN" and its kin as floats again."""
        return [loose(row) for _, row in _lines(self.metrics)]

    def truncate(self, step: int, log_every: int, evaluate_every: int) -> None:
        """Drop from metrics.jsonl what a resume at `step` will write again, or what only the stop there wrote."""
        kept = []
        for line, row in _lines(self.metrics):
            regular = _on_schedule(row, log_every, evaluate_every)
            if any(name.startswith("test/") for name in row):
                continue  # the longer run reads the test split again, on its own best step
            if row["step"] < step or (row["step"] == step and regular):
                kept.append(line)
        write_text(self.metrics, "".join(line + "\n" for line in kept))


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            yield line, json.loads(line)
        except json.JSONDecodeError:
            continue  # the half line of a killed process


def _on_schedule(row: dict[str, Any], log_every: int, evaluate_every: int) -> bool:
    step = row["step"]
    if any(name.startswith("train/") for name in row):
        return step == 1 or step % log_every == 0
    if any(name.startswith("eval/") for name in row):
        return bool(evaluate_every) and step % evaluate_every == 0
    return False


def new_folder(name: str, root: Path | None = None) -> RunFolder:
    """runs/<name>/<UTC id>, an id that nobody has."""
    parent = (root or ROOT) / name
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        folder = RunFolder(parent / f"{stamp}{suffix}")
        try:
            folder.path.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"run folder {str(folder.path)!r} cannot be made: {error.strerror}") from None
        return folder
    raise UserError(f"{parent}: a thousand runs in one second")


def list_runs(root: Path | None = None) -> list[RunFolder]:
    """All runs below `root`, oldest first."""
    root = root or ROOT
    found = [RunFolder(path.parent) for path in root.glob("*/*/resolved.yaml")] if root.is_dir() else []
    return sorted(found, key=lambda f: (f.id, str(f.path)))


def find_run(reference: str | Path, root: Path | None = None) -> RunFolder:
    """A path, `last`, or the start of an id. Raises ConfigError naming what is there."""
    path = Path(reference)
    if (path / "resolved.yaml").exists():
        return RunFolder(path)
    runs = list_runs(root)
    if not runs:
        raise ConfigError(f"run {str(reference)!r}: no runs in {(root or ROOT).absolute()}; jaxtrain train makes one")
    if str(reference) == "last":
        return runs[-1]
    matches = [run for run in runs if run.id.startswith(str(reference))]
    if len(matches) == 1:
        return matches[0]
    shown = matches or runs
    many = "is ambiguous" if matches else "is no run folder and no start of an id"
    raise ConfigError(f"run {str(reference)!r} {many}; newest: {', '.join(r.id for r in shown[-5:])} (or: last)")


def strict(value: Any) -> Any:
    """A value for strict JSON: not-a-number and infinities as the words "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def loose(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the words of `strict` as floats again."""
    words = {"NaN", "Infinity", "-Infinity"}
    return {k: float(v) if isinstance(v, str) and v in words else v for k, v in row.items()}


def names(rows: Iterable[dict[str, Any]]) -> list[str]:
    """All names in rows, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))
