"""Processes on this machine: each an interpreter of its own, with an equal share of the GPUs there are."""

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
from jaxtrain.parallel.environment import COORDINATOR, HANDED_ON, PROCESS, PROCESSES

GRACE, POLL = 10.0, 0.1
"""Seconds that the others have to end after the first that failed; between two looks."""

SIGNALS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM}
"""What is handed on, and as what: a terminal that is closed asks to stop and save, too."""
if hasattr(signal, "SIGHUP"):  # Windows has none of these
    SIGNALS |= {signal.SIGHUP: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1}


class HandOn:
    """Takes the signals of this process while it stands, and gives each to the children. For the main thread.

    A signal is kept until there are children to have it. They are in process groups of their own, so that Ctrl-C,
    which a terminal sends to all of a group, reaches them once: from here.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._due: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> HandOn:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        self.first = self.first or number
        self._due.append(SIGNALS[signal.Signals(number)])

    def to(self, children: Sequence[subprocess.Popen[bytes]]) -> None:
        """Give the children what has come since the last call."""
        while children and self._due:
            number = self._due.pop(0)
            for child in children:
                child.send_signal(number)

    def sleep(self, seconds: float) -> None:
        """Wait; not any longer than until the first signal."""
        until = time.monotonic() + seconds
        while self.first is None and time.monotonic() < until:
            time.sleep(POLL)


def launch(command: Sequence[str], shares: Sequence[Mapping[str, str]], logs: Path, signals: HandOn) -> tuple[int, str]:
    """Run `python -m jaxtrain *command` in a process for each share; (exit code, what is to be said of it, or "").

    The first process has this terminal, the others write `run.1.log`, `run.2.log`, ... into `logs`. When one fails the
    others are ended: its code is the result, 70 when a signal killed it. One process alone joins no others.
    shares: more environment of each process, as `gpu_shares` gives it.
    """
    several = len(shares) > 1
    address = f"127.0.0.1:{free_port()}"
    children: list[subprocess.Popen[bytes]] = []
    files = []
    try:
        for number, share in enumerate(shares):
            here = {COORDINATOR: address, PROCESSES: str(len(shares)), PROCESS: str(number)} if several else {}
            output: Any = None
            if number:
                output = (logs / f"run.{number}.log").open("ab")
                files.append(output)
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "jaxtrain", *command],
                    env={**os.environ, HANDED_ON: "1", **here, **share},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0 if hasattr(os, "setpgid") else None,
                )
            )
        return _wait(children, logs, signals)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()  # what is started next must not meet it in the run folder
        for file in files:
            file.close()


def _wait(children: Sequence[subprocess.Popen[bytes]], logs: Path, signals: HandOn) -> tuple[int, str]:
    """The code of the first child that did not end well, else 0; and which one it was, unless it has said it here."""
    failed: int | None = None
    until = float("inf")
    while any(child.poll() is None for child in children) and time.monotonic() < until:
        signals.to(children)
        if failed is None:
            failed = _first_failed(children)
            until = time.monotonic() + GRACE if failed is not None else until
        time.sleep(POLL)
    if failed is None:
        failed = _first_failed(children)
    if failed is None:
        return 0, ""
    code = children[failed].returncode
    why = f"process {failed} ended with {told(code)}" + (f": see {logs / f'run.{failed}.log'}" if failed else "")
    return code if code > 0 else PEER_FAILED, why if code < 0 or code != children[0].returncode else ""


def _first_failed(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """One that a signal killed before those that failed because of it."""
    ended = [(code, i) for i, child in enumerate(children) if (code := child.poll())]
    return min(ended, key=lambda one: (one[0] > 0, one[1]))[1] if ended else None


def told(code: int) -> str:
    """An exit code, and the name of the signal that a negative one, or one above 128, stands for."""
    try:
        return f"{code} ({signal.Signals(-code if code < 0 else code - 128).name})"
    except ValueError:
        return str(code)


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
    from jaxtrain.hardware.devices import gpus  # imports jax, which a supervisor of one process does without

    listed = environment.get("CUDA_VISIBLE_DEVICES")
    cards = [str(i) for i in range(gpus())] if listed is None else [card for card in listed.split(",") if card]
    if not cards or environment.get("JAX_PLATFORMS") == "cpu":
        return [{} for _ in range(processes)]
    if len(cards) % processes:
        fits = ", ".join(str(n) for n in range(1, len(cards) + 1) if len(cards) % n == 0)
        raise ConfigError(f"--processes: {processes} cannot share {len(cards)} GPUs equally; allowed: {fits}")
    each = len(cards) // processes
    return [{"CUDA_VISIBLE_DEVICES": ",".join(cards[i * each : (i + 1) * each])} for i in range(processes)]
