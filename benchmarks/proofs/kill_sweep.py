"""SIGKILL at random moments of a run that saves all the time; restarted by the same command until it ends.

python benchmarks/proofs/kill_sweep.py [KILLS] [SEED]       (200 kills: half an hour on 2 cores)
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import SealedSteps
from jaxtrain.hooks.folder import RunFolder

ROOMS = ["checkpoint", "runner.py", "resuming.py", "session.py", "loop.py", "hooks/folder.py", "hooks/control.py"]
STEPS, SPREAD = 800, 0.4
"""Of a run; seconds after its first new checkpoint within which a process is killed."""
CONFIG = ["digits", "--model.kind=mlp", "--model.hidden=[16]", "--augment.shift=0", "--log.tensorboard=false"]
CONFIG += ["--log.every=10", "--evaluate.every=70", "--checkpoint.every=20", "--checkpoint.keep_best=2"]
CONFIG += [f"--train.duration={STEPS}", "--train.steps_per_dispatch=1", "--quiet", "--resume=auto"]


def sweep(kills: int, seed: int, place: Path) -> dict[str, Any]:
    """Kill runs `kills` times in all, and compare each that ends with one that nobody disturbed.

    The result says what was found: `lost` are restarts that went on from another step than the newest sealed one,
    `wrong` the runs whose last state, rows or result are not bit for bit those of the undisturbed run.
    """
    draw = random.Random(seed)
    print(f"kill sweep: {kills} kills, seed {seed}", flush=True)
    whole = place / "undisturbed"
    assert _start(whole).wait() == 0
    wanted = outcome(whole)
    left, runs, found = kills, 0, {"lost": [], "wrong": [], "by_hand": 0, "left_over": 0}
    while left:
        runs += 1
        folder = RunFolder(place / f"killed-{runs}")
        while True:
            before, resumed = folder.newest_sealed(), len(_resumes(folder))
            process = _start(folder.path)
            killed = left > 0 and _kill(process, folder, before, draw.uniform(0, SPREAD))
            if not killed:
                found["by_hand"] += process.wait() != 0
            news = _resumes(folder)[resumed:]
            if news != ([before] if before is not None else []):
                found["lost"].append({"run": runs, "newest": before, "resumed": news})
            if not killed:
                break
            left -= 1
            found["left_over"] += any(
                path.name.startswith(".trash-") or (path.name.isdigit() and not (path / "manifest.json").exists())
                for path in folder.checkpoints.iterdir()
            )
        if outcome(folder.path) != wanted:
            found["wrong"].append(runs)
    return {"kills": kills, "seed": seed, "runs": runs, "steps": STEPS, **found}


def outcome(folder: Path) -> dict[str, Any]:
    """Digest of each array of the last step, the rows outside time/, and the result."""
    last = SealedSteps(folder / "checkpoints", metric="loss", mode="min").get("last")
    leaves = json.loads((last.path / "manifest.json").read_text())["leaves"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]
    result = json.loads((folder / "result.json").read_text())
    return {"step": last.step, "leaves": leaves, "rows": rows, "best": result["best"], "test": result["test"]}


def _start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jaxtrain", "train", *CONFIG, f"--run-dir={folder}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _kill(process: subprocess.Popen[bytes], folder: RunFolder, before: int | None, delay: float) -> bool:
    """Kill it so many seconds after it has sealed a step; False when it ended by itself."""
    while process.poll() is None and folder.newest_sealed() == before:
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    return process.wait() < 0


def _resumes(folder: RunFolder) -> list[int]:
    lines = folder.journal.read_text().splitlines() if folder.journal.exists() else []
    return [line["step"] for line in map(json.loads, lines) if line["event"] == "resume"]


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from record import record

    kills, seed = (int(word) for word in (*sys.argv[1:], *("200", "0")[len(sys.argv) - 1 :]))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        found = sweep(kills, seed, Path(place))
    found["seconds"] = time.monotonic() - begun
    lines = [
        f"A small run on digits that saves every 20 steps was killed {kills} times (SIGKILL, at a moment drawn within "
        f"{SPREAD} s after a checkpoint; seed {seed}) and restarted by the same command; {found['runs']} runs ended. "
        f"In {found['left_over']} cases the kill fell into a save or a deletion. Restarts that did not go on from the "
        f"newest sealed step: {len(found['lost'])}. Runs whose last state (sha256 of every array), metrics.jsonl "
        f"outside time/ or result differ in a bit from those of an undisturbed run: {len(found['wrong'])}. Steps by "
        f"hand: {found['by_hand']}. {found['seconds'] / 60:.0f} minutes."
    ]
    record("proof_kill_sweep", "Proof: kill -9 at random moments", lines, found, ROOMS)
    print("\n".join(lines))
    sys.exit(bool(found["lost"] or found["wrong"] or found["by_hand"]))


if __name__ == "__main__":
    main()
