"""jaxtrain checkpoints: look at the sealed steps of a run, and tidy them."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from jaxtrain.cli.train import RunArgument


def checkpoints(
    run: RunArgument,
    verify: Annotated[bool, typer.Option("--verify", help="verify every file and array of every step")] = False,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(help="in which arrays two steps differ: best, last or a number")
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="remove what is neither newest nor best")] = False,
    keep_last: Annotated[int | None, typer.Option(help="with --prune: newest steps that stay", min=1)] = None,
    keep_best: Annotated[int | None, typer.Option(help="with --prune: best steps that stay", min=0)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="with --prune: only say what would go")] = False,
) -> None:
    """List the sealed steps of RUN; verify them, compare two of them, or remove those that need not stay."""
    chosen = {"--verify": verify, "--diff": diff is not None, "--prune": prune}
    extra = {"--keep-last": keep_last is not None, "--keep-best": keep_best is not None, "--dry-run": dry_run}
    _refuse_contradictions(
        [name for name, given in chosen.items() if given], [n for n, given in extra.items() if given]
    )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a GPU that trains has no memory to spare for a look at files
    from jaxtrain.evaluate import checkpoints as steps
    from jaxtrain.hooks.folder import find_run

    folder = find_run(run)
    if verify:
        intact = True
        for words, good in steps.verify(folder):
            print(words, flush=True)  # each takes its time
            intact &= good
        raise typer.Exit(0 if intact else 1)
    if diff is not None:
        text, equal = steps.diff(folder, *diff)
        print(text)
        raise typer.Exit(0 if equal else 1)
    if prune:
        print("\n".join(steps.prune(folder, keep_last=keep_last, keep_best=keep_best, dry_run=dry_run)))
    else:
        print(steps.table(folder))


def _refuse_contradictions(chosen: list[str], extra: list[str]) -> None:
    from jaxtrain.config import ConfigError

    if len(chosen) > 1:
        raise ConfigError(f"{' with '.join(chosen)} is not allowed; allowed: one of --verify, --diff, --prune")
    if extra and "--prune" not in chosen:
        raise ConfigError(f"{', '.join(extra)} without --prune is not allowed; add --prune, or leave it out")
