"""kill -9 at N random moments of a run that saves each step, each followed by the same command.

    python benchmarks/proofs/kill_sweep.py [N=200] [SEED]

tests/checkpoint/test_checkpoint_killed.py does fifteen of these with the same driver. About five seconds a kill.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "benchmarks"), str(REPO / "tests" / "checkpoint")]

from kill_driver import STEPS, outcome, start, sweep, to_its_end  # noqa: E402
from record import record  # noqa: E402


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(10**6)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        to_its_end(start(Path(place) / "whole"))
        done = sweep(Path(place), kills, seed, outcome(Path(place) / "whole"))
    minutes = (time.monotonic() - begun) / 60
    lines = [
        f"An mlp on digits, {STEPS} steps, a checkpoint each step, `--resume=auto`. SIGKILL at a random moment "
        "after the beginning of the training (0 to 0.9 s, 3 in 10) or after the first seal of the process (0 to "
        f"0.3 s), then the same command again; seed {seed}.\n",
        "| kills | runs that they hit | restarts from the newest complete step | of them after an unfinished save | "
        "after an unfinished removal | steps by hand | runs whose end differs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| {done.kills} | {done.runs} | {len(done.resumed)} of {len(done.resumed)} | {done.unfinished_saves} | "
        f"{done.half_removed} | 0 | 0 |",
        "",
        "An end is compared by the sha256 of every array of the last step, the hooks' states, every row of "
        "metrics.jsonl outside `time/`, result.json and the steps that are kept; at the first difference the script "
        f"ends and records nothing. {minutes:.0f} minutes.",
    ]
    raw = {"seed": seed, "kills": done.kills, "runs": done.runs, "resumed": done.resumed, "log": done.log}
    rooms = ["checkpoint", "runner.py", "resuming.py", "session.py", "loop.py", "hooks/folder.py", "hooks/control.py"]
    record("proof_kill_sweep", "Killed at random moments", lines, raw, rooms)


if __name__ == "__main__":
    main()
