"""From nothing to the end of the first step, in a new process: without and with what an earlier process compiled.

    python benchmarks/startup.py

cold: an empty compile cache. warm: the cache that the cold process before it has left. Interleaved; the time runs from
the start of the interpreter, so it holds imports, data, tracing, compiling, initialisation and one step.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import record

ROUNDS = 5
CONFIGS = {
    "gpt": {"config": "shakespeare", "data.path": os.__file__, "data.tokenizer": "byte"},
    "resnet-20": {"config": "images", "model.depth": 20, "data.path": "{pictures}"},
}
FIRST_STEP = """
import json, sys
import jax
from jaxtrain.build import build
from jaxtrain.config import load
keys = json.loads(sys.argv[1])
job = build(load(keys.pop("config"), list(keys.items())))
job.compile()
state, feeder = job.init(), job.feeder()
jax.block_until_ready(job.advance(state, feeder(0)))
feeder.close()
"""


def first_step(keys: dict[str, Any], cache: str) -> float:
    """Seconds of a new process."""
    import json

    environment = {k: v for k, v in os.environ.items() if "CACHE" not in k} | {"XDG_CACHE_HOME": cache}
    begun = time.perf_counter()
    command = [sys.executable, "-c", FIRST_STEP, json.dumps(keys)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.perf_counter() - begun


def pictures(place: Path) -> str:
    """A folder of a few pictures in two classes."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        (place / name).mkdir(parents=True)
        for number in range(120):
            pixels = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / name / f"{number}.png")
    return str(place)


def main() -> None:
    raw: dict[str, Any] = {}
    lines = [
        f"Seconds from the start of the interpreter to the end of the first step; {ROUNDS} pairs, medians.\n",
        "| network | cold | warm | warm / cold (least to greatest) |",
        "| --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = pictures(Path(place) / "pictures")
        for name, keys in CONFIGS.items():
            own = {k: v.format(pictures=folder) if isinstance(v, str) else v for k, v in keys.items()}
            times: dict[str, list[float]] = {"cold": [], "warm": []}
            for number in range(ROUNDS):
                cache = str(Path(place) / f"{name}-{number}")
                for arm in times:
                    times[arm].append(first_step(own, cache))
                print(name, {arm: round(own[-1], 2) for arm, own in times.items()}, flush=True)
            raw[name] = times
            ratios = [warm / cold for cold, warm in zip(*times.values(), strict=True)]
            cold, warm = (statistics.median(own) for own in times.values())
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lines.append(f"| {name} | {cold:.1f} | {warm:.1f} | {spread} |")
    record("startup", "Start of a process", lines, raw, ["hardware/compile_cache.py", "build.py", "core/module.py"])


if __name__ == "__main__":
    main()
