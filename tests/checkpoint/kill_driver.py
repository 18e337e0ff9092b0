"""Runs that are killed (SIGKILL) at random moments and started again by the same command, until they end by themselves.

`python -m jaxtrain train digits --resume=auto` is a real process each time; it saves each step, so that nearly every
moment is one of a save, of a seal, or of the removal of an older step. Also used by benchmarks/proofs/kill_sweep.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 48
KEYS: dict[str, Any] = {
    "model.kind": "mlp",
    "model.hidden": "[16]",
    "augment.shift": 0,
    "train.duration": STEPS,
    "train.global_batch_size": 64,
    "checkpoint.every": 1,
    "evaluate.every": 5,
    "log.every": 1,
    "log.tensorboard": "false",
    "log.wrong_samples": 0,
}
WHOLE = 60.0
"""Seconds that no part of a run takes."""


@dataclass
class Swept:
    """What a sweep did. resumed: the newest complete step at each restart, where there was one."""

    kills: int = 0
    runs: int = 0
    resumed: list[int] = field(default_factory=list)
    unfinished_saves: int = 0
    half_removed: int = 0
    log: list[str] = field(default_factory=list)


def start(folder: Path) -> subprocess.Popen[str]:
    """The command, the same each time."""
    flags = [f"--{key}={value}" for key, value in KEYS.items()]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jaxtrain",
            "train",
            "digits",
            *flags,
            f"--run-dir={folder}",
            "--resume=auto",
            "--quiet",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )


def to_its_end(process: subprocess.Popen[str]) -> None:
    """Wait; the run must end well."""
    said, _ = process.communicate(timeout=WHOLE)
    assert process.returncode == 0, said


def seals(folder: Path) -> list[int]:
    """Steps that have a manifest."""
    return sorted(int(path.parent.name) for path in (folder / "checkpoints").glob("[0-9]*/manifest.json"))


def newest_complete(folder: Path) -> int | None:
    """The newest step all of whose files are there as its manifest says; found without the product."""
    for step in reversed(seals(folder)):
        path = folder / "checkpoints" / f"{step:09d}"
        listed = json.loads((path / "manifest.json").read_text())["files"]
        there = {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
        there.pop("manifest.json")
        if {name: hashlib.sha256(b).hexdigest() for name, b in there.items()} == {
            name: entry["sha256"] for name, entry in listed.items()
        }:
            return step
    return None


def events(folder: Path) -> list[dict[str, Any]]:
    """The journal."""
    path = folder / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def outcome(folder: Path) -> dict[str, Any]:
    """All that must be the same with kills and without: digests of the last state, metrics without a clock, result."""
    last = folder / "checkpoints" / f"{seals(folder)[-1]:09d}"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    return {
        "step": int(last.name),
        "leaves": json.loads((last / "manifest.json").read_text())["leaves"],
        "meta": {k: v for k, v in json.loads((last / "meta.json").read_text()).items() if k != "time"},
        "metrics": [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows],
        "result": {k: v for k, v in result.items() if k != "seconds"},
        "sealed": seals(folder),
    }


def strike(process: subprocess.Popen[str], folder: Path, rng: random.Random) -> str | None:
    """SIGKILL the process, and only it, at a random moment of its training; what was done, None if it had ended.

    Three times in ten counted from the beginning of the training, else from the first step that it has sealed.
    """
    opened, sealed = len(events(folder)), seals(folder)[-1:]
    early, delay = rng.random() < 0.3, rng.uniform(0.0, 0.3)
    delay *= 3 if early else 1
    end = time.monotonic() + WHOLE
    while process.poll() is None:
        assert time.monotonic() < end, "no progress"
        begun = len(events(folder)) > opened or (not sealed and (folder / "resolved.yaml").exists())
        if begun if early else seals(folder)[-1:] > sealed:
            break
        time.sleep(0.005)
    time.sleep(delay)
    process.kill()
    process.communicate(timeout=WHOLE)
    if process.returncode == 0:
        return None
    assert process.returncode == -9
    return f"{delay:.3f} s after {'the beginning' if early else 'its first seal'}, newest {seals(folder)[-1:]}"


def sweep(place: Path, kills: int, seed: int, wanted: dict[str, Any]) -> Swept:
    """Kill `kills` times; raises AssertionError where anything is not as without kills."""
    rng, done = random.Random(seed), Swept(log=[f"seed {seed}"])
    while done.kills < kills:
        folder = place / f"run-{done.runs}"
        ended = False
        while not ended:
            newest, before = newest_complete(folder), len(events(folder))
            assert seals(folder)[-1:] == ([] if newest is None else [newest]), "a sealed step is not complete"
            checkpoints = list((folder / "checkpoints").glob("*"))
            done.unfinished_saves += any(p.name.isdigit() and not (p / "manifest.json").exists() for p in checkpoints)
            done.half_removed += any(p.name.startswith(".trash-") for p in checkpoints)
            process = start(folder)
            if done.kills < kills and (what := strike(process, folder, rng)):
                done.kills += 1
                done.log.append(f"run {done.runs}, kill {done.kills}: {what}")
                print(done.log[-1], file=sys.stderr, flush=True)
            else:
                to_its_end(process)
                ended = True
            new = events(folder)[before:] if newest is not None else []
            assert [(e["event"], e.get("step")) for e in new] in ([], [("resume", newest)]), (newest, new)
            assert new or newest in (None, STEPS) or not ended
            done.resumed += [e["step"] for e in new]
        found = outcome(folder)
        assert {key for key in wanted if wanted[key] != found[key]} == set(), done.log
        done.runs += 1
    return done
