"""What the tests of several processes share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_OTHERS = ("SLURM_", "OMPI_", "JAXTRAIN_")
_OWN = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
ONE_DEVICE = {**_OWN, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]
