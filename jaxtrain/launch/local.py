"""Several processes on this machine: each an interpreter of its own, with an equal share of the GPUs there are."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config.errors import PEER_FAILED, ConfigError
from jaxtrain.hardware.devices import gpus
from jaxtrain.parallel.processes import COORDINATOR, PROCESS, PROCESSES

GRACE, POLL = 10.0, 0.1
"""Seconds that the others have to end after the first that failed; seconds between two looks."""


def launch(command: Sequence[str], shares: Sequence[Mapping[str, str]], logs: Path) -> tuple[int, str]:
    """Run `python -m jaxtrain *command` in a process for each share; (exit code, what is to be said of it, or "").

    The first process has this terminal, the others write `run.1.log`, `run.2.log`, ... into `logs`. When one fails the
    others are ended: its code is the result, 70 when a signal killed it. SIGTERM is handed on; Ctrl-C reaches all.
    shares: more environment of each process, as `gpu_shares` gives it.
    """
    address = f"127.0.0.1:{free_port()}"
    children: list[subprocess.Popen[bytes]] = []
    files = []

    def pass_on(number: int, frame: Any) -> None:
        for child in children:
            child.send_signal(number)

    before = {
        name: signal.signal(name, act) for name, act in ((signal.SIGINT, signal.SIG_IGN), (signal.SIGTERM, pass_on))
    }
    try:
        for number, share in enumerate(shares):
            here = {COORDINATOR: address, PROCESSES: str(len(shares)), PROCESS: str(number), **share}
            output: Any = None
            if number:
                output = (logs / f"run.{number}.log").open("ab")
                files.append(output)
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "jaxtrain", *command],
                    env={**os.environ, **here},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=_default_interrupt,  # no thread has been started here
                )
            )
        return _wait(children, logs)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
        for file in files:
            file.close()
        for name, action in before.items():
            signal.signal(name, action)


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait(children: Sequence[subprocess.Popen[bytes]], logs: Path) -> tuple[int, str]:
    """The code of the first child that did not end well, else 0; and which one it was, unless it has said it here."""
    failed: int | None = None
    until = float("inf")
    while any(child.poll() is None for child in children) and time.monotonic() < until:
        if failed is None:
            failed = _first_failed(children)
            until = time.monotonic() + GRACE if failed is not None else until
        time.sleep(POLL)
    if failed is None:
        failed = _first_failed(children)
    if failed is None:
        return 0, ""
    code = children[failed].returncode
    why = f"process {failed} ended with {code}: see {logs / f'run.{failed}.log'}"
    return code if code > 0 else PEER_FAILED, why if code != children[0].returncode else ""


def _first_failed(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """One that a signal killed before those that failed because of it."""
    ended = [(code, i) for i, child in enumerate(children) if (code := child.poll())]
    return min(ended, key=lambda one: (one[0] > 0, one[1]))[1] if ended else None


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def gpu_shares(processes: int, environment: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """For each process, what it is to see of the GPUs; nothing where there are none.

    Raises ConfigError when they cannot be shared out equally.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    cards = [str(i) for i in range(gpus())] if listed is None else [card for card in listed.split(",") if card]
    if not cards or environment.get("JAX_PLATFORMS") == "cpu":
        return [{} for _ in range(processes)]
    if len(cards) % processes:
        fits = ", ".join(str(n) for n in range(1, len(cards) + 1) if len(cards) % n == 0)
        raise ConfigError(f"--processes: {processes} cannot share {len(cards)} GPUs equally; allowed: {fits}")
    each = len(cards) // processes
    return [{"CUDA_VISIBLE_DEVICES": ",".join(cards[i * each : (i + 1) * each])} for i in range(processes)]
