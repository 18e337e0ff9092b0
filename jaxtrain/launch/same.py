"""Whether two runs are the same: what each has left at every step, and where they first differ. Imports no jax.

Compared are the digests of all arrays of every sealed step, what was saved beside them (figures, hook states, data),
and the rows of metrics.jsonl without what a clock decides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.files import read_json
from jaxtrain.hooks.folder import RunFolder, strict

NOTHING = "not there"


@dataclass
class Step:
    """What a run has left at a step: {name: value}. arrays: as the manifest tells them; None where none is sealed."""

    arrays: dict[str, Any] | None = None
    saved: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[Any]] = field(default_factory=dict)

    def named(self) -> dict[str, Any]:
        """All of it by the names that a person knows, arrays first."""
        arrays = self.arrays or {}
        return {
            **({} if self.arrays is None else {"the number of arrays": len(arrays)}),
            **{f"array {name}": arrays[name] for name in sorted(arrays)},
            **{f"{name} in meta.json": value for name, value in self.saved.items()},
            **{f"{name} in metrics.jsonl": values for name, values in self.rows.items()},
        }


Seen = dict[int, Step]


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ, its two values, and how many more there are at that step."""

    step: int
    name: str
    values: tuple[Any, Any]
    more: int

    def words(self, one: str, two: str) -> str:
        """In a line; one, two: what the runs are called."""
        more = f" (and {self.more} more at this step)" if self.more else ""
        a, b = map(_shown, self.values)
        return f"step {self.step}: {self.name} differs{more}: {one} {a}, {two} {b}"


def seen(run: RunFolder) -> Seen:
    """What there is at every step that is sealed or has a row."""
    found: Seen = {}
    for step, manifest in seals(run).items():
        meta = read_json(manifest.parent / "meta.json")
        meta.pop("time", None)  # what the clock said
        hooks = {f"hooks.{name}": state for name, state in meta.pop("hooks", {}).items()}
        found[step] = Step(read_json(manifest)["leaves"], {**hooks, **meta})
    for row in run.rows():
        rows = found.setdefault(row["step"], Step()).rows
        for name, value in strict(row).items():  # words for NaN, which would not equal itself
            if name != "step" and not name.startswith("time/"):
                rows.setdefault(name, []).append(value)
    return found


def seals(run: RunFolder) -> dict[int, Path]:
    """The manifest of each sealed step, oldest first."""
    return {int(path.parent.name): path for path in sorted(run.checkpoints.glob("[0-9]*/manifest.json"))}


def first_difference(one: Seen, two: Seen) -> Difference | None:
    """At the first step that differs: of the arrays, else of what was saved beside them, else of the rows."""
    for step in sorted(one.keys() | two.keys()):
        a, b = (part.get(step, Step()).named() for part in (one, two))
        names = [name for name in {**a, **b} if a.get(name, NOTHING) != b.get(name, NOTHING)]
        if names:
            first = names[0]
            return Difference(step, first, (a.get(first, NOTHING), b.get(first, NOTHING)), len(names) - 1)
    return None


def digest(arrays: Mapping[str, Any] | None) -> str:
    """Of all arrays of a step, by their names, shapes, types and digests."""
    return hashlib.sha256(json.dumps(arrays, sort_keys=True).encode()).hexdigest()[:16]


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "sha256" in value:
        return f"{value['sha256'][:16]} ({value['dtype']}{value['shape']})"
    if isinstance(value, list) and len(value) == 1:
        return _shown(value[0])
    return value if isinstance(value, str) else json.dumps(value)
