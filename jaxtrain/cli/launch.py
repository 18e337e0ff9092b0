"""jaxtrain launch: one run in several processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxtrain.cli.flags import Set, overlays
from jaxtrain.cli.train import SUPERVISE, Config, child_flags


def launch(
    config: Config,
    processes: Annotated[int, typer.Option(help="processes that train one model together", min=1, max=64)],
    run_dir: Annotated[str | None, typer.Option(help="the run folder; else runs/<name>/<UTC id>")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --run-dir")] = False,
    supervise: Annotated[bool, typer.Option("--supervise", help=SUPERVISE)] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="nothing on stderr but errors")] = False,
    set_: Set = None,
) -> None:
    """Train CONFIG in several processes, each with its share of the GPUs. Any key of the config is a flag."""
    from jaxtrain.config import ConfigError, load
    from jaxtrain.hooks.folder import RunFolder, new_folder
    from jaxtrain.launch.local import HandOn, gpu_shares
    from jaxtrain.launch.local import launch as start
    from jaxtrain.launch.supervise import keep_running

    parsed = load(config, overlays(set_).items())  # so that a wrong key ends here, once
    shares = gpu_shares(processes)
    folder = RunFolder(Path(run_dir)) if run_dir else new_folder(parsed.name)
    if folder.is_used() and not resume:
        raise ConfigError(f"run folder {str(folder.path)!r} is used; go on with it: --resume, or name another one")
    folder.create()
    command = ["train", config, *child_flags(quiet, set_)]
    if supervise:
        raise typer.Exit(keep_running(command, shares, folder, resume))
    with HandOn() as signals:
        more = [f"--run-dir={folder.path}", *(["--resume=auto"] if resume else [])]
        code, why = start([*command, *more], shares, folder.path, signals)
    if why:
        print(f"jaxtrain: {why}", file=sys.stderr)
    raise typer.Exit(code)
