"""jaxtrain tune lr: what to set by trying, before a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxtrain.cli.flags import KeyedCommand, Set, overlays
from jaxtrain.cli.train import Config

app = typer.Typer(no_args_is_help=True, help="Find the learning rate of a config by trying.")


@app.command("lr", cls=KeyedCommand)
def learning_rate(
    config: Config,
    low: Annotated[float, typer.Option(help="learning rate of the first step")] = 1e-6,
    high: Annotated[float, typer.Option(help="learning rate of the last step")] = 10.0,
    steps: Annotated[int, typer.Option(help="steps of a run", min=20)] = 140,
    seeds: Annotated[int, typer.Option(help="runs, each from the start with a seed of its own", min=1)] = 3,
    output: Annotated[Path, typer.Option(help="the folder of the picture and the JSON")] = Path("tune"),
    apply: Annotated[bool, typer.Option("--apply", help="write it into CONFIG, a file")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="nothing on stderr but errors")] = False,
    set_: Set = None,
) -> None:
    """A learning rate for CONFIG by a range test, or why there is none (exit code 1). Any key of it is a flag.

    Some short runs raise the rate at each step. They leave nothing behind but a picture and their figures.
    """
    from jaxtrain.config import ConfigError, load_with_notes

    if apply and not Path(config).is_file():
        raise ConfigError(
            f"--apply: {config!r} is a shipped config; copy it (jaxtrain train {config} --print-config > my.yaml) "
            "and name the file, or leave --apply out"
        )
    parsed, notes = load_with_notes(config, overlays(set_).items())

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    for note in notes:
        say(f"note: {note}")
    say("loading jax ...")
    from jaxtrain.config.edit import changed
    from jaxtrain.tune import range_test

    test = range_test.range_test(parsed, low=low, high=high, steps=steps, seeds=seeds, tell=say)
    written = range_test.write(test, output, parsed.name)
    found = test.suggestion
    say(found.why)
    if found.lr is not None and apply:
        path, rate = Path(config), float(f"{found.lr:.2g}")
        path.write_text(changed(path.read_text(), "optimizer.peak_lr", rate))
        say(f"{path}: optimizer.peak_lr is {rate:g} now")
    if as_json:
        print(json.dumps(test.to_json(), allow_nan=False))
    else:
        print("no suggestion" if found.lr is None else f"optimizer.peak_lr {found.lr:.2g}")
        for path in written:
            print(path)
    raise typer.Exit(0 if found.lr is not None else 1)
