"""Every shipped config on its data over several seeds, every one reported; none is chosen.

python benchmarks/seeds.py mnist ../shared/data/mnist_idx
python benchmarks/seeds.py images FOLDER             (sign digits, unpacked)
python benchmarks/seeds.py shakespeare ../shared/data/tinyshakespeare/input.txt
python benchmarks/seeds.py pystdlib_gpt
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import record

import jaxtrain as jt

_CORE = ("core", "loop.py", "models/layers.py", "data/feed.py", "data/order.py")
_ROWS = ("data/dataset.py", "data/sources.py", "data/split.py")


@dataclass(frozen=True)
class Claim:
    """figure: which one; split: where it is read. seeds: of initialisation and order (and of the split of rows)."""

    split: str
    figure: str
    what: str
    rooms: tuple[str, ...]
    seeds: int = 3
    split_seed: bool = True


CLAIMS = {
    "mnist": Claim(
        "test",
        "accuracy",
        "The 10,000 test images are read once, at the step that a tenth of the 60,000 training images chose.",
        (*_CORE, *_ROWS, "models/cnn.py"),
    ),
    "images": Claim(
        "test",
        "accuracy",
        "Sign Language Digits (Mavi 2020), 2,062 pictures, random split 60/20/20; the same persons are on both sides "
        "of a random split, so this is no figure for new persons. Logistic regression on 32x32 grey: 0.80.",
        (*_CORE, *_ROWS, "data/images.py", "data/folders.py", "models/resnet.py"),
    ),
    "shakespeare": Claim(
        "eval",
        "loss",
        "nanoGPT's CPU setting (its README: 1.88) with rotary positions, RMSNorm and SwiGLU. Mean loss in nats a "
        "character over the whole last tenth of the text at the last step, 2,000: no step was chosen.",
        (*_CORE, "data/text.py", "data/tokens.py", "models/gpt.py"),
        split_seed=False,
    ),
    "pystdlib_gpt": Claim(
        "test",
        "loss",
        "Nats a byte on whole files of the standard library that training never saw, read once.",
        (*_CORE, "data/text.py", "data/tokens.py", "models/gpt.py"),
        seeds=1,
    ),
}


def main() -> None:
    name, path = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    claim = CLAIMS[name]
    rows = [_run(name, claim, path, seed) for seed in range(claim.seeds)]
    figures = [row["figure"] for row in rows]
    spread = f", sd {statistics.stdev(figures):.4f}" if len(figures) > 1 else ""
    lines = [
        f"`jaxtrain train {name}`. {claim.what}\n",
        f"| seed | {claim.split}/{claim.figure} | rows | step | steps | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {r['seed']} | {r['figure']:.4f} | {r['rows']:,} | {r['step']:,} | {r['steps']:,} | {r['seconds']:.0f} |"
            for r in rows
        ),
        "",
        f"All {len(rows)}: mean {statistics.mean(figures):.4f}{spread}, least {min(figures):.4f}, greatest "
        f"{max(figures):.4f}; median time {statistics.median(r['seconds'] for r in rows):.0f} s.",
    ]
    record(f"seeds_{name}", f"{name}, {len(rows)} seeds", lines, {"runs": rows}, [f"configs/{name}.yaml", *claim.rooms])


def _run(name: str, claim: Claim, path: str | None, seed: int) -> dict[str, Any]:
    keys: dict[str, Any] = {"train.seed": seed}
    keys |= {"data.split_seed": seed} if claim.split_seed else {}
    keys |= {"data.path": path} if path else {}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place, jt.train(name, run_dir=Path(place) / "run", **keys) as run:
        seconds = time.perf_counter() - begun
        last = [row for row in run.metrics() if f"{claim.split}/{claim.figure}" in row][-1]
        return {
            "seed": seed,
            "figure": last[f"{claim.split}/{claim.figure}"],
            "rows": run.result["rows"]["test" if claim.split == "test" else "validation"],
            "step": run.result["best"]["step"] if claim.split == "test" else last["step"],
            "steps": run.result["steps"]["done"],
            "seconds": seconds,
        }


if __name__ == "__main__":
    main()
