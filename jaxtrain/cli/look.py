"""jaxtrain runs | eval | report: look at what was trained."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxtrain.cli.train import RunArgument


def runs(
    which: Annotated[list[str] | None, typer.Argument(help="two or more runs to compare")] = None,
) -> None:
    """List the runs below runs/, or compare some: what differs in their configs, and their results."""
    from jaxtrain.evaluate.compare import compare, listing
    from jaxtrain.hooks.folder import find_run, list_runs

    print(compare([find_run(reference) for reference in which]) if which else listing(list_runs()))


def evaluate(
    run: RunArgument,
    split: Annotated[str, typer.Option(help="train, validation or test")] = "test",
    step: Annotated[str, typer.Option(help="best, last or a saved step")] = "best",
    path: Annotated[str | None, typer.Option(help="other data, as data.path takes it, or an .npz")] = None,
) -> None:
    """Figures of a saved step of RUN on one of its splits, or on data that it has never seen."""
    from jaxtrain.evaluate import evaluate_run

    evaluation, sealed = evaluate_run(run, split, step, path=path)
    split = "other" if path else split
    for name, value in sorted(evaluation.figures.items()):
        print(f"{split}/{name} {value:.6g}")
    print(f"step {sealed.step}")


def report(run: RunArgument) -> None:
    """Write the report of RUN anew: one HTML file that needs nothing else."""
    from jaxtrain.hooks.folder import find_run
    from jaxtrain.report import write_report

    print(write_report(find_run(run)))
