"""Names in the environment by which a launcher tells a process of the others. Imports no jax, unlike `processes`."""

from __future__ import annotations

import os
from collections.abc import Mapping

COORDINATOR, PROCESSES, PROCESS = "JAXTRAIN_COORDINATOR", "JAXTRAIN_PROCESSES", "JAXTRAIN_PROCESS"
HANDED_ON = "JAXTRAIN_HANDED_ON"
"""Set in a process whose parent hands its own signals on."""

LAUNCHERS = {
    "Slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
"""Where each says how many processes of this very program there are, which one this is, and which of its machine."""


def launcher(environment: Mapping[str, str] = os.environ) -> str | None:
    """Who has started this process as one of several; None when nobody has."""
    if PROCESSES in environment:
        return "jaxtrain launch"
    found = [name for name, (count, *_) in LAUNCHERS.items() if int(environment.get(count, 1)) > 1]
    return found[0] if found else None
