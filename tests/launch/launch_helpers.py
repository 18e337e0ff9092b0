"""What the tests of several processes share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.checkpoint import Checkpoints

_OTHERS = ("SLURM_", "OMPI_", "JAXTRAIN_")
_OWN = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
ONE_DEVICE = {**_OWN, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """What a sealed step holds, read without any run."""
    import orbax.checkpoint as ocp

    sealed = Checkpoints(folder / "checkpoints", metric="loss", mode="min").get(step)
    names = json.loads((sealed.path / "manifest.json").read_text())["leaves"]
    plain = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    with ocp.PyTreeCheckpointer() as reader:
        found: dict[str, np.ndarray] = reader.restore(
            sealed.path.absolute() / "state", args=ocp.args.PyTreeRestore(item=plain, restore_args=plain)
        )
    return found
