"""Keeping a run alive: start it, look at how it ended, start it again where that helps.

A run that was stopped and saved goes on at once, one that a signal killed or that lost a peer after a pause. What would
come again (a wrong config, an exception, what needs a person) ends the supervision, and so do RESTARTS restarts in a
row that have sealed no newer step. Imports no jax and starts no backend: a supervisor must outlive what it supervises.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxtrain.config.errors import INTERRUPTED, NEEDS_PERSON, PEER_FAILED, PREEMPTED, UNEXPECTED
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.launch.local import HandOn, launch, told

RESTARTS = 3
"""In a row without a newer sealed step, after which the supervision ends."""

LONGEST = 60.0
"""Seconds of the longest pause; the first is 1 s, each further one twice as long until the run ends otherwise."""


class Note(Protocol):
    """Something that writes an event down."""

    def __call__(self, event: str, **values: object) -> None:
        """One event."""


def keep_running(command: Sequence[str], shares: Sequence[Mapping[str, str]], folder: RunFolder, resume: bool) -> int:
    """Train in `folder` by `jaxtrain *command`, a process for each share, until it ends for good; its exit code.

    resume: the first start goes on with what is in the folder, as every later one does.
    """

    def note(event: str, **values: object) -> None:
        if folder.is_used():
            folder.note(event, **values)

    with HandOn() as signals:

        def start(again: bool) -> tuple[int, str]:
            more = ["--resume=auto"] if again or resume else []
            return launch([*command, f"--run-dir={folder.path}", *more], shares, folder.path, signals)

        return supervise(
            start,
            folder.newest_sealed,
            say=lambda line: print(f"jaxtrain: {line}", file=sys.stderr, flush=True),
            note=note,
            look=f"{folder.log} and, where there is one, {folder.path / 'crash'}",
            stopped=lambda: signals.first is not None,
            sleep=signals.sleep,
        )


def supervise(
    start: Callable[[bool], tuple[int, str]],
    newest: Callable[[], int | None],
    *,
    say: Callable[[str], None],
    note: Note,
    look: str,
    stopped: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Call `start` until it ends for good; its exit code, or 78 when restarts do not help.

    start: (whether it is a restart) -> (exit code, what is to be said of it or ""). newest: the newest sealed step.
    say, note: told of each restart. look: where a person finds more. stopped: whether somebody wants the run to end.
    sleep: takes seconds.
    """
    restarts = vain = failures = 0
    while True:
        before = newest()
        code, why = start(restarts > 0)
        step, ended = newest(), why or f"the run ended with {told(code)}"
        if stopped() or not _may_pass(code):
            if code == UNEXPECTED and not stopped():
                say(f"not restarted: {ended}, an error that would come again; look at {look}")
            elif why:
                say(why)
            return code if code >= 0 else PEER_FAILED
        newer = step is not None and (before is None or step > before)
        vain = 0 if newer or not restarts else vain + 1
        reached = "the first step, as none is sealed" if step is None else f"sealed step {step}"
        if vain == RESTARTS:
            say(f"given up after {RESTARTS} restarts without a newer step: {ended}; at {reached}; look at {look}")
            return NEEDS_PERSON
        failures = 0 if code == PREEMPTED else failures + 1
        seconds = min(2.0 ** min(failures - 1, 10), LONGEST) if failures else 0.0
        restarts += 1
        reason, when = ("it has saved", "now") if not failures else ("this may pass", f"in {seconds:g} s")
        say(f"restart {restarts}: {ended}: {reason}; goes on {when} from {reached}")
        note("restart", step=step, code=code, why=ended, seconds=seconds)
        sleep(seconds)
        if stopped():
            say(f"not restarted: a signal came in the pause; {ended}")
            return code if code >= 0 else PEER_FAILED


def _may_pass(code: int) -> bool:
    """Whether a restart can help: it was stopped and saved, lost a peer, or a signal killed it."""
    return code in (PREEMPTED, PEER_FAILED) or code < 0 or (code > 128 and code != INTERRUPTED)
