"""The README run over five split and initialisation seeds, every one reported: `python benchmarks/digits_seeds.py`."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from record import record

import jaxtrain as jt

SEEDS = range(5)
ROOMS = [
    *("configs/digits.yaml", "core", "loop.py", "models/cnn.py", "models/layers.py"),
    *("data/dataset.py", "data/feed.py", "data/order.py", "data/sources.py", "data/split.py"),
]


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for seed in SEEDS:
            begun = time.perf_counter()
            keys = {"train.seed": seed, "data.split_seed": seed}
            with jt.train("digits", run_dir=Path(place) / str(seed), **keys) as run:
                rows.append(
                    {
                        "seed": seed,
                        "test_accuracy": run.test["accuracy"],
                        "test_rows": run.result["rows"]["test"],
                        "best_step": run.result["best"]["step"],
                        "seconds": time.perf_counter() - begun,
                    }
                )
    figures = [row["test_accuracy"] for row in rows]
    seconds = [row["seconds"] for row in rows]
    lines = [
        "`jaxtrain train digits`, 60/20/20 split; the step is chosen by the validation loss, the test split is read "
        "once. Split seed and initialisation seed are both the number in the first column.\n",
        "| seed | test accuracy | test rows | best step | seconds |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {r['seed']} | {r['test_accuracy']:.4f} | {r['test_rows']} | {r['best_step']} | {r['seconds']:.1f} |"
            for r in rows
        ),
        "",
        f"All {len(rows)}: mean {statistics.mean(figures):.4f}, sd {statistics.stdev(figures):.4f}, least "
        f"{min(figures):.4f}; median time {statistics.median(seconds):.1f} s with imports, compilation and report.",
    ]
    record("digits_seeds", "digits, five seeds", lines, {"runs": rows}, ROOMS)


if __name__ == "__main__":
    main()
