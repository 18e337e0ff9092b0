"""How a figure gets into RESULTS.md: a script records raw JSON here, and the page is written anew from all of it.

Raw files hold date, commit, command, machine, versions, and a digest of the rooms that the figure depends on: a
fast test (tests/test_benchmarks.py) fails when a room has changed since, naming the script to run again. Ratios of
speed depend on the processor, so the last figures of every other machine stay beside the new ones, under "earlier".
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tokenize
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[1]
RAW = REPO / "benchmarks" / "raw"
PAGE = REPO / "benchmarks" / "RESULTS.md"


def rooms_digest(rooms: list[str]) -> str:
    """sha256 of the code of some rooms (folders or files below jaxtrain/) or configs; words for people do not count."""
    digest = hashlib.sha256()
    for room in rooms:
        path = REPO / room if room.startswith("configs/") else REPO / "jaxtrain" / room
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text = file.read_text()
            digest.update(file.relative_to(REPO).as_posix().encode())
            digest.update((code_of(text) if file.suffix == ".py" else repr(yaml.safe_load(text))).encode())
    return digest.hexdigest()


def code_of(source: str) -> str:
    """Python source without comments, docstrings and white space, alike on every version of Python."""
    lines = source.splitlines(keepends=True)
    cuts = [
        (token.start, token.end)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            cuts.append(((first.lineno, first.col_offset), (first.end_lineno, first.end_col_offset)))
    for (row, column), (last, end) in sorted(cuts, reverse=True):
        tail = lines[last - 1].encode()[end:].decode() if row != last else lines[row - 1][end:]
        lines[row - 1 : last] = [lines[row - 1][:column] + tail, *[""] * (last - row)]
    return "".join("".join(lines).split())


def record(name: str, title: str, lines: list[str], raw: dict[str, Any], rooms: list[str]) -> None:
    """Keep the raw figures of script `name` and write the page anew. `lines`: Markdown under the title."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True).stdout.strip()
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--", "jaxtrain", "configs"], cwd=REPO, capture_output=True, text=True
    ).stdout.strip()
    packages = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scikit-learn")
    entry = {
        "title": title,
        "lines": lines,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit + (" with uncommitted changes" if dirty else ""),
        "command": " ".join(["python", *map(shown, sys.argv)]),
        "machine": f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {package: metadata.version(package) for package in packages},
        "rooms": rooms,
        "rooms_sha256": rooms_digest(rooms),
        "raw": raw,
    }
    RAW.mkdir(exist_ok=True)
    path = RAW / f"{name}.json"
    entry["earlier"] = _of_other_machines(json.loads(path.read_text()), entry) if path.exists() else []
    path.write_text(json.dumps(entry, indent=1) + "\n")
    PAGE.write_text(page())


def shown(argument: str) -> str:
    """A word of the command for other machines: of an absolute path only its name, in angle brackets."""
    return f"<{Path(argument).name}>" if Path(argument).is_absolute() else argument


def page() -> str:
    """RESULTS.md from all raw files."""
    parts = [
        "# Results\n\nWritten by the scripts in this folder from `raw/*.json`; never by hand. "
        "All figures are from a CPU: nothing here was run on a GPU.\n"
    ]
    for path in sorted(RAW.glob("*.json")):
        newest = json.loads(path.read_text())
        parts.append(f"## {newest['title']}\n")
        for entry in (newest, *newest.get("earlier", ())):
            versions = ", ".join(f"{k} {v}" for k, v in entry["versions"].items())
            parts += [] if entry is newest else [f"Recorded before ({entry['machine']}):\n"]
            parts += [
                *entry["lines"],
                "",
                f"`{entry['command']}`, {entry['date']}, commit {entry['commit']}, {entry['machine']}; {versions}. "
                f"Raw figures: `raw/{path.name}`.\n",
            ]
    return "\n".join(parts)


def _of_other_machines(before: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """The last entry of each machine but this one, newest first."""
    entries = [before, *before.get("earlier", ())]
    kept = ("date", "commit", "command", "machine", "versions", "lines", "raw")
    return [{key: entry[key] for key in kept} for entry in entries if entry["machine"] != now["machine"]]


def _processor() -> str:
    """Its name, and the family and model where the name alone does not tell (a virtual machine's may not)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in said:
        return platform.machine()
    return f"{said['model name']} (family {said.get('cpu family', '?')}, model {said.get('model', '?')})"
