"""jaxtrain verify-resume: prove that a killed and resumed run equals an undisturbed one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxtrain.cli.flags import Set, overlays
from jaxtrain.cli.train import Config, child_flags


def verify_resume(
    config: Config,
    steps: Annotated[
        int | None, typer.Option(help="length of the runs; else that of the config, at most 20", min=2)
    ] = None,
    every: Annotated[int, typer.Option(help="steps between saves; each saved step is compared", min=1)] = 1,
    kill_after: Annotated[
        int | None, typer.Option(help="kill once this step is saved; else about the middle", min=1)
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="an empty folder in which the runs stay")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="nothing on stderr but errors")] = False,
    set_: Set = None,
) -> None:
    """Prove that a killed and resumed run of CONFIG equals an undisturbed one, here. Any key of it is a flag."""
    from jaxtrain.config import load_with_notes
    from jaxtrain.launch.proof import prove

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    parsed, notes = load_with_notes(config, overlays(set_).items())
    for note in notes:
        say(f"note: {note}")
    command = ["train", config, *child_flags(True, set_)]
    passed, line = prove(command, parsed, steps=steps, every=every, kill_after=kill_after, keep=keep, say=say)
    print(line)
    raise typer.Exit(0 if passed else 1)
