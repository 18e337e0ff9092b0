"""jaxtrain plan: memory and time of a run before it runs."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from jaxtrain.cli.flags import Set, overlays
from jaxtrain.cli.train import Config


def plan(
    config: Config,
    memory: Annotated[
        str | None, typer.Option(help="plan for so much on each device, such as 8GiB; else what is there")
    ] = None,
    devices: Annotated[int | None, typer.Option(help="plan for N devices, simulated on the CPU", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="nothing on stderr but errors")] = False,
    set_: Set = None,
) -> None:
    """What CONFIG takes in memory and time, before it runs. Any key of it is a flag. Exit code 2: it does not fit."""
    from jaxtrain.config import load_with_notes

    parsed, notes = load_with_notes(config, overlays(set_).items())
    for note in () if quiet else [*(f"note: {text}" for text in notes), "loading jax ..."]:
        print(note, file=sys.stderr)
    if devices:  # read by jax when it starts
        more = f"--xla_force_host_platform_device_count={devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()
        os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxtrain.build import build
    from jaxtrain.hardware.memory import Limit
    from jaxtrain.plan import planned
    from jaxtrain.plan.units import to_bytes

    room = Limit(to_bytes(memory), "asked for on a device", shared=False) if memory else None
    job = build(parsed)
    for note in () if quiet else job.notes:
        print(f"note: {note}", file=sys.stderr)
    found = planned.plan(job, room)
    print(json.dumps(found.to_json()) if as_json else "\n".join(planned.lines(found, job)))
    raise typer.Exit(0 if found.fits else 2)
