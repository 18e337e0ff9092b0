"""A save killed before each of its calls that change files, those of Orbax's threads too; needs gcc.

    python benchmarks/proofs/syscall_sweep.py

tests/checkpoint/test_checkpoint_calls.py does every third with the same driver.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "benchmarks"), str(REPO / "tests" / "checkpoint")]

from crash_driver import Forks, prepared, sweep  # noqa: E402
from record import record  # noqa: E402


def main() -> None:
    told: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        with Forks(place) as forks:
            store, calls = prepared(forks, place)
            found, wrong = sweep(forks, place, store, range(1, calls + 1), tell=told.append)
            _, failed = sweep(forks, place, store, range(1, calls + 1), "manifest_first")
    if wrong:
        sys.exit("\n".join(wrong))
    lines = [
        "A store with steps 1 and 2 sealed saves step 3 and then removes step 1. The process is killed before its k-th "
        "call of open for writing, write, fsync, rename, unlink, mkdir or their kin below the store; then another one "
        "restores the newest step, compares it in bits, and saves step 3 again and step 4.\n",
        "| calls | killed | ended before | step 2 found | step 3 found | errors, wrong values, steps set aside |",
        "| --- | --- | --- | --- | --- | --- |",
        f"| {calls} | {found['killed']} | {found['ended']} | {found['step 2']} | {found['step 3']} | {len(wrong)} |",
        "",
        f"The control arm, in which the seal is written before the arrays: {len(failed)} of {calls} fail.",
    ]
    raw = {"calls": calls, "found": dict(found), "wrong": wrong, "control": failed, "log": told}
    record("proof_syscall_sweep", "Killed before each call", lines, raw, ["checkpoint"])


if __name__ == "__main__":
    main()
