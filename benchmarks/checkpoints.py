"""What a save of 500 MB costs: how long the loop is blocked, how fast it is sealed and verified.

python benchmarks/checkpoints.py [FOLDER]     (where the checkpoints go; else a temporary folder; a minute)
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from record import record

from jaxtrain.checkpoint import Checkpoints, seal

ROUNDS, ARRAYS, SIDE = 7, 20, 2500
"""Saves; arrays of SIDE x SIDE float32 in each."""


def main() -> None:
    state = {f"w{i}": jax.random.normal(jax.random.key(i), (SIDE, SIDE)) for i in range(ARRAYS)}
    jax.block_until_ready(state)
    nbytes = sum(x.nbytes for x in state.values())
    rows = []
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as place:
        store = Checkpoints(Path(place) / "checkpoints", metric="loss", mode="min", keep_last=1, keep_best=0)
        store.save(0, state, {})  # the first one loads Orbax
        store.wait()
        for step in range(1, ROUNDS + 1):
            rows.append(_round(store, step, state))
        store.close()
    names = list(rows[0])
    raw = {name: [row[name] for row in rows] for name in names}
    middle = {name: statistics.median(values) for name, values in raw.items()}
    rate = {name: nbytes / 1e9 / middle[name] for name in ("seal", "verify", "verify_arrays")}
    share = statistics.median(b / w for b, w in zip(raw["blocked"], raw["whole"], strict=True))
    lines = [
        f"{nbytes / 1e6:.0f} MB in {ARRAYS} arrays of noise, {ROUNDS} saves, medians (and range); the files stay in "
        f"the page cache; {os.cpu_count()} cores.\n",
        "| | seconds | |",
        "| --- | --- | --- |",
        f"| the loop is blocked | {_words(raw['blocked'])} | {share:.1%} of the save's own time |",
        f"| the save, until it is sealed | {_words(raw['whole'])} | |",
        f"| of it sealing: fsync and digests of the files | {_words(raw['seal'])} | {rate['seal']:.2f} GB/s |",
        f"| verifying the files | {_words(raw['verify'])} | {rate['verify']:.2f} GB/s |",
        f"| verifying files and arrays (`checkpoints --verify`) | {_words(raw['verify_arrays'])} | "
        f"{rate['verify_arrays']:.2f} GB/s |",
    ]
    record("checkpoints", "What a checkpoint costs", lines, {"bytes": nbytes, "seconds": raw}, ["checkpoint"])
    print("\n".join(lines))


def _round(store: Checkpoints, step: int, state: dict[str, Any]) -> dict[str, float]:
    sealing: list[float] = []
    real = seal.close

    def timed(*arguments: Any) -> None:
        since = time.perf_counter()
        real(*arguments)
        sealing.append(time.perf_counter() - since)

    seal.close = timed
    try:
        since = time.perf_counter()
        store.save(step, state, {})
        blocked = time.perf_counter() - since
        store.wait()
        whole = time.perf_counter() - since
    finally:
        seal.close = real
    found = {"blocked": blocked, "whole": whole, "seal": sealing[0]}
    for name in ("verify", "verify_arrays"):
        since = time.perf_counter()
        getattr(store, name)(store.get(step))
        found[name] = time.perf_counter() - since
    return found


def _words(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
