"""The entry point: registers the verbs, turns errors into one line and an exit code (contract 15)."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from jaxtrain.cli import checkpoints, config, init, launch, look, plan, predict, train, tune, verify
from jaxtrain.cli.flags import KeyedCommand, normalise
from jaxtrain.config.errors import INTERRUPTED, OK, UNEXPECTED, USAGE, UserError, choices

TOUR = """jaxtrain trains JAX/Flax models: one config trains, checkpoints, resumes and evaluates, exactly.
  jaxtrain train digits              train on real data that comes along, to a tested model and a report
  jaxtrain plan digits               memory and time before it runs; train digits --dry-run: two steps of everything
  jaxtrain init                      a config and a model of your own to begin with
  jaxtrain runs | report last        what was trained, and how well
  jaxtrain predict last INPUT...     pictures, arrays or a prompt through the trained model
  jaxtrain config describe SECTION   every key, its default and meaning; jaxtrain --help lists all verbs"""

app = typer.Typer(add_completion=True, no_args_is_help=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command(cls=KeyedCommand)(train.train)
app.command(cls=KeyedCommand)(train.resume)
app.command("verify-resume", cls=KeyedCommand)(verify.verify_resume)
app.command(cls=KeyedCommand)(launch.launch)
app.command(cls=KeyedCommand)(plan.plan)
app.command("eval")(look.evaluate)
app.command()(predict.predict)
app.command()(look.runs)
app.command()(look.report)
app.command()(checkpoints.checkpoints)
app.command()(init.init)
app.add_typer(config.app, name="config")
app.add_typer(tune.app, name="tune")


@app.callback(invoke_without_command=True)
def tour(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="print the version and end"),
    debug: bool = typer.Option(False, "--debug", help="show tracebacks; may stand anywhere"),
) -> None:
    """Train JAX/Flax models. One config trains, checkpoints, resumes and evaluates, exactly."""
    if version:
        from jaxtrain import __version__

        print(f"jaxtrain {__version__}")
    elif context.invoked_subcommand is None:
        print(TOUR)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command and exit with its code."""
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    sys.exit(_run([token for token in arguments if token != "--debug"], debug))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        code = app(args=normalise(arguments), prog_name="jaxtrain", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else OK
    except UserError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        return _fail(_usage(error, arguments), USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe is gone: no traceback, but no claim of success either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNEXPECTED
    except Exception as error:
        if debug:
            raise
        what = str(error).splitlines()[0] if str(error) else "no message"
        more = "; ".join([*getattr(error, "__notes__", []), "--debug shows the traceback"])
        return _fail(f"{type(error).__name__}: {what} ({more})", UNEXPECTED)


def _fail(line: str, code: int) -> int:
    print(f"jaxtrain: {' '.join(line.split())}", file=sys.stderr)
    if code != OK and _has_peers():
        sys.stderr.flush()
        os._exit(code)  # an orderly end would wait for the others, and they wait for this process
    return code


def _has_peers() -> bool:
    processes = sys.modules.get("jaxtrain.parallel.processes")  # where nothing has loaded it there are none
    return processes is not None and processes.joined()


def _usage(error: Exception, arguments: list[str]) -> str:
    message = getattr(error, "format_message", lambda: str(error))()
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    verbs += [group.name for group in app.registered_groups if group.name]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in verbs:
        return f"{arguments[0]!r} is no verb; {choices(arguments[0], verbs)}"
    return message
