"""jaxtrain train | resume."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from jaxtrain.cli.flags import Set, overlays


def _configs(incomplete: str) -> list[str]:
    from jaxtrain.config import shipped

    return [name for name in shipped() if name.startswith(incomplete)]


def _runs(incomplete: str) -> list[str]:
    from jaxtrain.hooks.folder import list_runs

    return [name for name in ["last", *(run.id for run in list_runs())] if name.startswith(incomplete)]


Config = Annotated[str, typer.Argument(help="a config file or a shipped name", autocompletion=_configs)]
RunArgument = Annotated[str, typer.Argument(help="a run folder, `last`, or the start of an id", autocompletion=_runs)]


def train(
    config: Config,
    run_dir: Annotated[str | None, typer.Option(help="the run folder; else runs/<name>/<UTC id>")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="empty a used --run-dir first")] = False,
    resume: Annotated[Literal["never", "auto"], typer.Option(help="auto: go on with an unfinished run")] = "never",
    print_config: Annotated[bool, typer.Option("--print-config", help="print the resolved config and end")] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="print the model's arrays and what a step costs, and end")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="2 steps through everything, then clean up")] = False,
    overfit_batches: Annotated[int, typer.Option(help="train and evaluate on N batches only", min=0)] = 0,
    eager: Annotated[int, typer.Option(help="run N steps unjitted, look at every layer, and end", min=0)] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="nothing on stderr but errors")] = False,
    set_: Set = None,
) -> None:
    """Train CONFIG. Any key of it is a flag: --optimizer.peak_lr=1e-3, --train.duration 20ep, --precision bf16."""
    from jaxtrain.config import dump, load_with_notes

    keys = overlays(set_)
    if overfit_batches:
        keys["train.overfit_batches"] = overfit_batches
    parsed, notes = load_with_notes(config, keys.items())
    for note in () if quiet else notes:
        print(f"note: {note}", file=sys.stderr)
    if print_config:
        print(dump(parsed), end="")
        return
    if not quiet:
        print("loading jax ...", file=sys.stderr)  # the first sign of life: it takes a second or two
    from jaxtrain import runner

    if summary:
        from jaxtrain.build import build
        from jaxtrain.words import model_summary

        print(model_summary(build(parsed)))
    elif eager:
        from jaxtrain.eager import run_eagerly

        raise typer.Exit(run_eagerly(parsed, eager))
    elif dry_run:
        print(runner.dry_run(parsed, quiet=quiet))
    else:
        run = runner.train(parsed, run_dir=run_dir, overwrite=overwrite, auto_resume=resume == "auto", quiet=quiet)
        _tell(run)


def resume(
    run: RunArgument,
    quiet: Annotated[bool, typer.Option("--quiet", help="nothing on stderr but errors")] = False,
    set_: Set = None,
) -> None:
    """Continue RUN from its newest intact checkpoint. A longer duration and another rate are allowed."""
    from jaxtrain import runner

    _tell(runner.resume(run, quiet=quiet, **overlays(set_)))


def _tell(run: object) -> None:
    """Results and the run folder to stdout; why it stopped to stderr."""
    from jaxtrain.parallel.processes import is_first
    from jaxtrain.runner import Run

    assert isinstance(run, Run)
    if run.exit_code or not run.result:
        print(f"{run.stop.state}: {run.stop.reason}", file=sys.stderr)
    elif run.state is None:
        print(run.stop.reason, file=sys.stderr)
    for name in sorted(run.test) if is_first() else ():
        print(f"test/{name} {run.test[name]:.6g}")
    if is_first():
        print(run.path)
    raise typer.Exit(run.exit_code)
