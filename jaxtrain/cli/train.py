"""jaxtrain train | resume."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from jaxtrain.cli.flags import Set, overlays


def _configs(incomplete: str) -> list[str]:
    from jaxtrain.config import shipped

    return [name for name in shipped() if name.startswith(incomplete)]


def _runs(incomplete: str) -> list[str]:
    from jaxtrain.hooks.folder import list_runs

    return [name for name in ["last", *(run.id for run in list_runs())] if name.startswith(incomplete)]


Config = Annotated[str, typer.Argument(help="a config file or a shipped name", autocompletion=_configs)]
SUPERVISE = "train in a child process, and start it again when it was preempted or killed"
RunArgument = Annotated[str, typer.Argument(help="a run folder, `last`, or the start of an id", autocompletion=_runs)]


def train(
    config: Config,
    run_dir: Annotated[str | None, typer.Option(help="the run folder; else runs/<name>/<UTC id>")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="empty a used --run-dir first")] = False,
    resume: Annotated[Literal["never", "auto"], typer.Option(help="auto: go on with an unfinished run")] = "never",
    allow_fresh: Annotated[
        bool, typer.Option("--allow-fresh", help="with --resume=auto: begin anew where all checkpoints are lost")
    ] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="print the resolved config and end")] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="print the model's arrays and what a step costs, and end")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="2 steps through everything, then clean up")] = False,
    overfit_batches: Annotated[int, typer.Option(help="train and evaluate on N batches only", min=0)] = 0,
    init_from: Annotated[
        str | None, typer.Option(help="begin with the weights of a run folder or a step, as far as they fit")
    ] = None,
    no_plan: Annotated[bool, typer.Option("--no-plan", help="train even where memory looks too small")] = False,
    eager: Annotated[int, typer.Option(help="run N steps unjitted, look at every layer, and end", min=0)] = 0,
    supervise: Annotated[bool, typer.Option("--supervise", help=SUPERVISE)] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="nothing on stderr but errors")] = False,
    set_: Set = None,
) -> None:
    """Train CONFIG. Any key of it is a flag: --optimizer.peak_lr=1e-3, --train.duration 20ep, --precision bf16."""
    from jaxtrain.config import ConfigError, dump, load_with_notes

    keys = overlays(set_)
    if overfit_batches:
        keys["train.overfit_batches"] = overfit_batches
    if init_from:
        keys["train.init_from"] = init_from
    if no_plan:
        keys["train.fit"] = "never"
    if allow_fresh and resume != "auto":
        raise ConfigError("--allow-fresh goes with --resume=auto; without it a run begins anew by itself")
    if supervise:
        others = {
            "overwrite": overwrite,
            "print-config": print_config,
            "summary": summary,
            "dry-run": dry_run,
            "allow-fresh": allow_fresh,
        }
        _refuse_beside_supervise({**others, "eager": eager})
        given = {"overfit-batches": overfit_batches, "init-from": init_from}
        more = [f"--{name}={value}" for name, value in given.items() if value] + ["--no-plan"] * no_plan
        _supervise(config, keys, run_dir, resume == "auto", [*child_flags(quiet, set_), *more])
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
        run = runner.train(
            parsed,
            run_dir=run_dir,
            overwrite=overwrite,
            auto_resume=resume == "auto",
            allow_fresh=allow_fresh,
            quiet=quiet,
        )
        _tell(run)


def child_flags(quiet: bool, set_: list[str] | None) -> list[str]:
    """What every process of a run is given as this one was."""
    plain = [flag for flag, given in (("--quiet", quiet), ("--debug", "--debug" in sys.argv)) if given]
    return [*plain, *(f"--{pair}" for pair in set_ or [])]


def _refuse_beside_supervise(others: dict[str, object]) -> None:
    from jaxtrain.config import ConfigError
    from jaxtrain.parallel.environment import launcher

    for name in (name for name, given in others.items() if given):
        raise ConfigError(f"--{name}: not together with --supervise, which trains in a new or a resumed run folder")
    by = launcher()
    if by:
        raise ConfigError(
            f"--supervise: {by} has started this process as one of several, and all must be started again together; "
            "leave --supervise out here, or let one `jaxtrain launch --supervise` start them"
        )


def _supervise(config: str, keys: dict[str, Any], run_dir: str | None, resume: bool, flags: list[str]) -> NoReturn:
    from jaxtrain.config import ConfigError, load
    from jaxtrain.hooks.folder import RunFolder, new_folder
    from jaxtrain.launch.supervise import keep_running
    from jaxtrain.resuming import absolute_paths, unfinished

    parsed = load(config, keys.items())
    there = RunFolder(Path(run_dir)) if run_dir else unfinished(absolute_paths(parsed)) if resume else None
    if there and there.is_used() and not resume:
        raise ConfigError(f"run folder {str(there.path)!r} is used; go on with it: --resume=auto, or name another one")
    folder = there or new_folder(parsed.name)
    folder.create()
    code = keep_running(["train", config, *flags], [{}], folder, resume)
    if not run_dir:
        with contextlib.suppress(OSError):  # it goes only when it is empty: the run was refused
            folder.path.rmdir()
    raise typer.Exit(code)


def resume(
    run: RunArgument,
    cast: Annotated[bool, typer.Option("--cast", help="convert saved floats to the type that is asked for")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="nothing on stderr but errors")] = False,
    set_: Set = None,
) -> None:
    """Continue RUN from its newest intact checkpoint. A longer duration and another rate are allowed."""
    from jaxtrain import runner

    _tell(runner.resume(run, cast=cast, quiet=quiet, **overlays(set_)))


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
