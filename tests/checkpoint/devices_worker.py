"""Train on all devices that are there, or restore and go on: prints "RESULT {...}".

python devices_worker.py train FOLDER        six steps, a checkpoint, five steps more, on fsdp=<devices>; restore step 6
python devices_worker.py resume FOLDER       restore step 6, then resume: five steps more
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

import jaxtrain as jt
from jaxtrain.build import build
from jaxtrain.checkpoint import seal
from jaxtrain.config import load
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.session import open_store

KEYS: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden": [256]},
    "train": {"duration": 11, "global_batch_size": 64},
    "optimizer": {"kind": "adamw"},
    "checkpoint": {"every": 6, "keep_last": 9},
    "evaluate": {"every": 6},
    "log": {"every": 1, "tensorboard": False, "wrong_samples": 0},
}


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    mesh = {"mesh.data": 1, "mesh.fsdp": jax.device_count()}
    result: dict[str, Any] = {"devices": jax.device_count()}
    if what == "train":
        run = jt.train(KEYS, run_dir=folder, quiet=True, **mesh)
    job = build(load(RunFolder(folder).resolved, mesh.items()))
    store = open_store(job, RunFolder(folder))
    state = store.restore(store.get(6), job.abstract_state)
    leaves, _ = seal.flat(state)
    result["restored"] = {name: seal.HostArray(x).description() for name, x in leaves.items()}
    result["parts"] = max(len({str(s.index) for s in x.addressable_shards}) for x in leaves.values())
    result["step"] = store.steps()[-1].step
    if what == "resume":
        run = jt.resume(folder, quiet=True, **mesh)
    result["losses"] = {row["step"]: row["train/loss"] for row in run.metrics() if "train/loss" in row}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
