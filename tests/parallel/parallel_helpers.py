"""What the tests of this folder share: a worker on 8 simulated devices, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def result_of(worker: str) -> dict[str, Any]:
    """What a script beside this file prints as "RESULT {...}" on 8 simulated CPU devices."""
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__).with_name(worker))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0][7:])
    return found
