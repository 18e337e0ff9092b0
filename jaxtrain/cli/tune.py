"""jaxtrain tune lr | batch: what to set by trying, before a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxtrain.cli.flags import KeyedCommand, Set, overlays
from jaxtrain.cli.train import Config

if TYPE_CHECKING:
    from jaxtrain.config import RunConfig

app = typer.Typer(no_args_is_help=True, help="Find the learning rate or the batch size of a config by trying.")


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
    parsed, say = _begin(config, set_, apply, quiet)
    from jaxtrain.tune import range_test

    test = range_test.range_test(parsed, low=low, high=high, steps=steps, seeds=seeds, tell=say)
    written = range_test.write(test, output, parsed.name)
    found = test.suggestion
    say(found.why)
    if found.lr is not None and apply:
        _write(config, "optimizer.peak_lr", float(f"{found.lr:.2g}"), say)
    if as_json:
        print(json.dumps(test.to_json(), allow_nan=False))
    else:
        print("no suggestion" if found.lr is None else f"optimizer.peak_lr {found.lr:.2g}")
        for path in written:
            print(path)
    raise typer.Exit(0 if found.lr is not None else 1)


@app.command("batch", cls=KeyedCommand)
def batch(
    config: Config,
    memory: Annotated[str | None, typer.Option(help="as if there were so much on each device, such as 8GiB")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="write it into CONFIG, a file")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="nothing on stderr but errors")] = False,
    set_: Set = None,
) -> None:
    """How many rows of CONFIG one pass takes best: what fits, what is fast. Any key of it is a flag.

    The global batch stays, and with it steps, epochs and schedule. The noise of the gradients says from where on a
    larger one hardly helps.
    """
    parsed, say = _begin(config, set_, apply, quiet)
    from jaxtrain.hardware.memory import Limit
    from jaxtrain.plan.units import to_bytes
    from jaxtrain.tune.batch import batch_test

    room = Limit(to_bytes(memory), "asked for on a device", shared=False) if memory else None
    test = batch_test(parsed, room, tell=say)
    for key, value in test.keys.items() if apply else ():
        _write(config, key, value, say)
    if as_json:
        print(json.dumps(test.to_json(), allow_nan=False))
        return
    print(f"largest {test.largest} rows in one pass, limited by {test.limited}")
    print(f"fast enough from {test.chosen} rows in one pass on")
    if test.noise is None:
        print("noise scale: not told by these steps")
    else:
        print(f"noise scale {test.noise:.3g} rows: a larger global batch hardly saves steps")
    for key, value in test.keys.items():
        print(f"{key} {'none: the whole batch at once' if value is None else value}")


def _begin(config: str, set_: list[str] | None, apply: bool, quiet: bool) -> tuple[RunConfig, Callable[[str], None]]:
    """The config, and how to say something on stderr. Raises ConfigError for a config that --apply cannot write to."""
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
    return parsed, say


def _write(config: str, key: str, value: float | int | None, say: Callable[[str], None]) -> None:
    from jaxtrain.config.edit import changed

    path = Path(config)
    path.write_text(changed(path.read_text(), key, value))
    say(f"{path}: {key} is {'none' if value is None else f'{value:g}'} now")
