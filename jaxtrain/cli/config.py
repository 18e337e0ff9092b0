"""jaxtrain config list | schema | describe."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="What a config may hold.", invoke_without_command=True)


@app.callback()
def show_help(context: typer.Context) -> None:
    """What a config may hold."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list")
def list_() -> None:
    """The configs that come with jaxtrain."""
    from jaxtrain.config import shipped

    for name, path in shipped().items():
        print(f"{name}  {path}")


@app.command()
def schema() -> None:
    """JSON Schema of a config file, for editors."""
    from jaxtrain.config.describe import schema_json

    print(schema_json())


@app.command()
def describe(
    section: Annotated[str | None, typer.Argument(help="as in `optimizer`, `optimizer.sgd`, `train.seed`")] = None,
) -> None:
    """Fields of a section: type, default, meaning."""
    from jaxtrain.config.describe import describe as words

    print(words(section))
