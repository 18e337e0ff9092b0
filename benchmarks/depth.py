"""What depth costs a gpt before its first step, with its blocks in a list or in one stack, and what remat spares.

    python benchmarks/depth.py

Seconds to trace and to compile a step, without the compile cache, forms interleaved; memory is what the compiler says
that the step needs beside its arguments (`memory_analysis`), so it is exact and the same each time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # before jax reads it

from record import record

from jaxtrain.build import build
from jaxtrain.config import load

DEPTHS, REMATS = (2, 8, 24), ("none", "dots", "full")
ROOMS = ["models/gpt.py", "models/layers.py", "core/step.py"]


def lowered(layers: int, stack: bool, remat: str) -> tuple[float, Any]:
    """(seconds to trace a step, what is left to compile)."""
    keys = {"model.layers": layers, "model.scan_layers": stack, "model.remat": remat, "train.lanes": 1}
    job = build(load("pystdlib_gpt", [*keys.items(), ("model.width", 128), ("model.heads", 4), ("mesh.data", 1)]))
    begun = time.perf_counter()
    program = job.lower()
    return time.perf_counter() - begun, program


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    times: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, int] = {}
    for number in range(rounds):
        for layers in DEPTHS:
            for stack in ((False, True), (True, False))[number % 2]:
                traced, program = lowered(layers, stack, "none")
                begun = time.perf_counter()
                program.compile()
                own = times.setdefault(f"{layers} {'stack' if stack else 'list'}", [])
                own.append((traced, time.perf_counter() - begun))
    for stack in (False, True):
        for remat in REMATS:
            needed = lowered(8, stack, remat)[1].compile().memory_analysis().temp_size_in_bytes
            memory[f"{remat} {'stack' if stack else 'list'}"] = needed

    def cell(layers: int, form: str, part: int) -> str:
        return f"{statistics.median(pair[part] for pair in times[f'{layers} {form}']):.1f}"

    lines = [
        f"A gpt of width 128 (config pystdlib_gpt), one lane, CPU, median seconds of {rounds} rounds.\n",
        "| blocks | list: trace | compile | stack: trace | compile |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {n} | " + " | ".join(cell(n, form, part) for form in ("list", "stack") for part in (0, 1)) + " |"
            for n in DEPTHS
        ),
        "\nMiB that a step of 8 blocks needs beside its arguments.\n",
        "| remat | list | stack |",
        "| --- | --- | --- |",
        *(f"| {r} | {memory[f'{r} list'] / 2**20:.1f} | {memory[f'{r} stack'] / 2**20:.1f} |" for r in REMATS),
    ]
    print("\n".join(lines))
    record("depth", "Depth and rematerialisation of a gpt", lines, {"times": times, "memory": memory}, ROOMS)


if __name__ == "__main__":
    main()
