"""jaxtrain plan: memory and time of a run before it runs."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from jaxtrain.cli.flags import Set, overlays
from jaxtrain.cli.train import Config

if TYPE_CHECKING:
    from jaxtrain.config import RunConfig


def plan(
    config: Config,
    memory: Annotated[
        str | None, typer.Option(help="plan for so much on each device, such as 8GiB; else what is there")
    ] = None,
    devices: Annotated[int | None, typer.Option(help="plan for N devices, simulated on the CPU", min=1)] = None,
    gpu: Annotated[str | None, typer.Option(help="plan for a card that need not be here, such as 3060-12gb")] = None,
    all_gpus: Annotated[bool, typer.Option("--all-gpus", help="a line for every card that jax can use")] = False,
    have: Annotated[str | None, typer.Option(help="with --all-gpus: compare with the card that you have")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="nothing on stderr but errors")] = False,
    set_: Set = None,
) -> None:
    """What CONFIG takes in memory and time, before it runs. Any key of it is a flag. Exit code 2: it does not fit."""
    from jaxtrain.config import ConfigError, load_with_notes

    if have and not all_gpus:
        raise ConfigError("--have goes with --all-gpus, which compares cards; for one card: --gpu")
    if gpu and all_gpus:
        raise ConfigError("--gpu and --all-gpus: one card or all of them, not both")
    parsed, notes = load_with_notes(config, overlays(set_).items())
    for note in () if quiet else [*(f"note: {text}" for text in notes), "loading jax ..."]:
        print(note, file=sys.stderr)
    if devices:  # read by jax when it starts
        more = f"--xla_force_host_platform_device_count={devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()
    if devices or gpu or all_gpus:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if all_gpus:
        _compare(parsed, have, as_json)
    else:
        _one(parsed, gpu, memory, as_json, quiet)


def _one(parsed: RunConfig, gpu: str | None, memory: str | None, as_json: bool, quiet: bool) -> NoReturn:
    from jaxtrain.build import build
    from jaxtrain.hardware.catalogue import named
    from jaxtrain.hardware.memory import Limit
    from jaxtrain.plan import cards, planned
    from jaxtrain.plan.units import to_bytes

    room = Limit(to_bytes(memory), "asked for on a device", shared=False) if memory else None
    card = named(gpu) if gpu else None
    job = build(_on(parsed, cards.precision(card)) if card else parsed)
    for note in () if quiet else job.notes:
        print(f"note: {note}", file=sys.stderr)
    found = cards.plan_for(job, card, room) if card else planned.plan(job, room)
    print(json.dumps(found.to_json()) if as_json else "\n".join(planned.lines(found, job)))
    raise typer.Exit(2 if found.verdict == "no" else 0)


def _compare(parsed: RunConfig, have: str | None, as_json: bool) -> None:
    from jaxtrain.build import build
    from jaxtrain.hardware.catalogue import named
    from jaxtrain.plan import cards

    own = named(have) if have else None
    found = cards.ranked(lambda precision: build(_on(parsed, precision)))
    if as_json:
        rows = [{"card": r.card.name, "seconds": r.seconds, **r.plan.to_json()} for r in found]
        print(json.dumps(rows))
    else:
        print("\n".join(cards.table(found, own)))


def _on(parsed: RunConfig, precision: str) -> RunConfig:
    """The config as it is on a card whose `precision: auto` is this."""
    from jaxtrain.config import load

    return load(parsed, [("precision", precision)]) if parsed.precision == "auto" else parsed
