"""A run of a moment for the tests of verify-resume: `train WAY flags` leaves a run folder as a training does.

Its state is one number in two arrays, the sum of all steps so far. WAY: "well", or how it is wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path


def leaf(value: float) -> dict[str, object]:
    digest = hashlib.sha256(str(value).encode()).hexdigest()
    return {"shape": [2], "dtype": "float32", "sha256": digest}


def seal(folder: Path, step: int, value: float, memory: int) -> None:
    path = folder / f"{step:09d}"
    path.mkdir(parents=True)
    meta = {"evaluation": {"loss": "NaN"}, "hooks": {"Saver": {"best": memory}}, "data": "d"}
    (path / "meta.json").write_text(json.dumps(meta))
    leaves = {"params.b": leaf(value), "params.a": leaf(-value), "step": leaf(step)}
    (path / "value.json").write_text(json.dumps(value))
    (path / ".manifest").write_text(json.dumps({"step": step, "leaves": leaves}))
    (path / ".manifest").rename(path / "manifest.json")


def main() -> None:
    _, way, *flags = sys.argv[1:]
    given = dict(flag.removeprefix("--").partition("=")[::2] for flag in flags)
    folder, steps, every = Path(given["run-dir"]), int(given["train.duration"]), int(given["checkpoint.every"])
    checkpoints, resume = folder / "checkpoints", given.get("resume") == "auto"
    (folder.parent / "starts").open("a").write(f"{folder.name}\n")
    starts = (folder.parent / "starts").read_text().split()
    if way == "refused":
        fail(2, "train.sed: no such key")
    if way == "lost" and resume:
        fail(78, "no room for a checkpoint")
    fast = way == "fast" or (way == "fast-once" and starts.count("resumed") == 1)
    evaluated = steps if way == "evaluates-late" else 2
    if way == "anew" and resume:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    first, value, memory = 0, 0.0, 0
    if resume and way != "anew":
        newest = max(int(path.parent.name) for path in checkpoints.glob("[0-9]*/manifest.json"))
        first, value, memory = newest, json.loads((checkpoints / f"{newest:09d}/value.json").read_text()), newest
        with (folder / "journal.jsonl").open("a") as journal:
            journal.write(json.dumps({"event": "resume", "step": newest}) + "\n")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= newest]
        (folder / "metrics.jsonl").write_text("".join(kept))
    if way == "forgets" and resume:
        memory = -1
    place = folder / "hidden" if fast else checkpoints
    for step in range(first + 1, steps + 1):
        value += step + (0.5 if way == "unsound" and resume else 0) + (os.getpid() if way == "chance" else 0)
        memory += memory >= 0
        with (folder / "metrics.jsonl").open("a") as rows_file:
            row = {"step": step, "epoch": step / 3, "train/loss": "NaN", "time/step": time.time()}
            rows_file.write(json.dumps(row | ({"eval/loss": value} if step == evaluated else {})) + "\n")
        if step % every == 0 or step == steps:
            seal(place, step, value, memory)
        time.sleep(0 if fast or resume or folder.name != "resumed" else 0.05)  # the one that is to be killed
    if fast:
        place.rename(checkpoints)


def fail(code: int, line: str) -> None:
    print(f"loading jax ...\njaxtrain: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
