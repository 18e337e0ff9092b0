"""The proof that a killed and resumed run equals an undisturbed one: the same config is trained twice and compared.

Each run is a child, `python -m jaxtrain train ...`; one is killed (SIGKILL) between two saves and goes on by
`--resume=auto`. Imports no jax: the devices and their memory belong to the children.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.files import in_words, size_of
from jaxtrain.config import ConfigError, NeedsPerson, RunConfig, UserError, load
from jaxtrain.config.errors import PEER_FAILED
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.launch.local import SIGNALS, told
from jaxtrain.launch.same import Seen, digest, first_difference, seals, seen
from jaxtrain.parallel.environment import launcher

STEPS, TRIES = 20, 3
"""Steps of a run, unless others are asked for; times that a kill is tried when the run has ended before it."""

POLL = 0.002
"""Seconds between two looks for a sealed step: a step may take no longer than its save."""

LARGE = 10**9
"""Bytes of checkpoints from which they are told beforehand."""

PROGRAM = (sys.executable, "-m", "jaxtrain")
UNDISTURBED, AGAIN, RESUMED = "undisturbed", "undisturbed-again", "resumed"

Say = Callable[[str], None]


class ChildFailed(UserError):
    """A run that ended otherwise than by the kill: its code, and its last line."""

    def __init__(self, name: str, code: int, said: str) -> None:
        line = (said.splitlines() or [""])[-1].removeprefix("jaxtrain: ")
        wrong_config = code == ConfigError.exit_code and line
        super().__init__(line if wrong_config else f"the run {name!r} ended with {told(code)}: {line or 'no message'}")
        self.exit_code = code if code > 0 else PEER_FAILED


@dataclass(frozen=True)
class Shortened:
    """How the runs differ from what the config says. every: steps between saves. kill_after: None = the middle."""

    steps: int
    every: int
    kill_after: int | None
    log_every: int

    def keys(self) -> dict[str, Any]:
        """As keys of the config: every saved step stays, only the last one ends a run, nothing goes to a mirror."""
        return {
            "train.duration": self.steps,
            "train.time_budget": None,
            "early_stopping.patience": 0,
            "checkpoint.every": self.every,
            "checkpoint.keep_last": self.steps,
            "checkpoint.mirror": None,
            "log.every": self.log_every,
            "log.tensorboard": False,
            "log.wrong_samples": 0,
        }

    def flags(self) -> list[str]:
        """The same, for a command."""
        return [f"--{key}={json.dumps(value)}" for key, value in self.keys().items()]


def prove(
    command: Sequence[str],
    config: RunConfig,
    *,
    steps: int | None = None,
    every: int = 1,
    kill_after: int | None = None,
    keep: Path | None = None,
    say: Say = lambda line: None,
    program: Sequence[str] = PROGRAM,
) -> tuple[bool, str]:
    """Train `config` by `program command` undisturbed, and killed and resumed; (whether both are equal, that in words).

    keep: where both runs stay; else they are in a temporary folder, which stays when they differ. say: told the phases.
    Raises ConfigError for figures that do not fit together, ChildFailed, NeedsPerson where the disk has no room,
    UserError where the run is too fast to be killed.
    """
    short = shorten(config, steps, every, kill_after)
    place, kept = _new_place(keep), keep is not None
    try:
        with _signals_interrupt():
            passed, line = _proved(_Runs([*program, *command, *short.flags()], place), short, say)
        kept = kept or not passed
        return passed, line if passed else f"{line}; the runs are kept in {place}"
    finally:
        if not kept:
            shutil.rmtree(place, ignore_errors=True)


def shorten(config: RunConfig, steps: int | None, every: int, kill_after: int | None) -> Shortened:
    """The length, and where to save and to kill. Raises ConfigError for what does not fit together."""
    by = launcher()
    if by:
        raise ConfigError(f"verify-resume: {by} has started this process as one of several; start it as one")
    planned = config.train.duration
    total = steps or (min(planned, STEPS) if isinstance(planned, int) else STEPS)
    if total < 2:
        raise ConfigError(f"--steps: a run of {total} cannot be killed on its way; at least 2 are needed")
    if every >= total:
        raise ConfigError(f"--every: {every} saves no step before the last, {total}; allowed: 1 to {total - 1}")
    if kill_after is not None and (kill_after >= total or kill_after % every):
        saved = f"{every}, {2 * every}, ... below {total}" if every > 1 else f"1 to {total - 1}"
        raise ConfigError(f"--kill-after: {kill_after} is no step that is saved before the last; allowed: {saved}")
    short = Shortened(total, every, kill_after, min(config.log.every, every))
    load(config, short.keys().items())
    return short


def _proved(runs: _Runs, short: Shortened, say: Say) -> tuple[bool, str]:
    say(f"training {short.steps} steps undisturbed")
    undisturbed = runs.whole(UNDISTURBED, lambda run: _check_space(run, short, say))
    wanted = seen(undisturbed)
    after, newest = _kill(runs, short, _middle(undisturbed, short), say)
    say(f"killed after step {after}; resuming from step {newest}")
    resumed = runs.whole(RESUMED, more=["--resume=auto"])
    found, begun = seen(resumed), _resumed_from(resumed)
    killed = f"killed after step {after} (kill -9)"
    if begun is None:
        return False, f"FAIL {killed}: the run began anew, and did not go on from step {newest}"
    killed += f", resumed from step {begun}"
    if not any(name.startswith("eval/") for row in undisturbed.rows() if row["step"] <= begun for name in row):
        say("note: no evaluation before the kill; --evaluate.every=STEPS puts what hooks keep of one to the test, too")
    difference = first_difference(wanted, found)
    if difference:
        say(f"step {difference.step} differs; training {short.steps} steps undisturbed again")
        return False, _whose_fault(runs, wanted, f"FAIL {difference.words(UNDISTURBED, RESUMED)}; {killed}")
    arrays, count = wanted[short.steps].arrays, sum(here.arrays is not None for here in wanted.values())
    return True, (
        f"PASS {short.steps} steps, {killed}: {len(arrays or ())} arrays equal at each of {count} sealed steps, "
        f"{len(undisturbed.rows())} rows of metrics equal, digest {digest(arrays)}"
    )


def _whose_fault(runs: _Runs, wanted: Seen, line: str) -> str:
    """Of a resume that differs: whether a run without one does."""
    try:
        again = first_difference(wanted, seen(runs.whole(AGAIN)))
    except ChildFailed as error:
        return f"{line}; whether two undisturbed runs are equal is not known: {error}"
    if again is None:
        return f"{line}; two undisturbed runs are equal"
    return (
        f"FAIL this machine or config is not deterministic: two undisturbed runs differ first at "
        f"{again.words('one', 'the other')}; on a GPU set XLA_FLAGS=--xla_gpu_deterministic_ops=true"
    )


def _kill(runs: _Runs, short: Shortened, after: int, say: Say) -> tuple[int, int]:
    """(step that was sealed when the kill was sent, newest sealed step then). Tries again where the run was faster."""
    for left in reversed(range(TRIES)):
        say(f"training {short.steps} steps, to be killed after step {after}")
        newest = runs.killed(RESUMED, after)
        if newest is not None and newest < short.steps:
            return after, newest
        if left:
            shutil.rmtree(runs.folder(RESUMED).path)
            say(f"the run had ended before it was killed after step {after}; trying again")
            if short.kill_after is None:
                after = max(after // 2 // short.every, 1) * short.every
    raise UserError(
        f"the run ended before it could be killed after step {after} ({TRIES} tries): its steps are too short; "
        f"take more of them: --steps {4 * short.steps}"
    )


def _middle(undisturbed: RunFolder, short: Shortened) -> int:
    """The step to be killed after: the one asked for, or a saved one about the middle, if possible within an epoch."""
    if short.kill_after is not None:
        return short.kill_after
    per_epoch = next((round(row["step"] / row["epoch"]) for row in undisturbed.rows()), short.steps)
    saved = range(short.every, short.steps, short.every)
    return min(saved, key=lambda step: (step % per_epoch == 0, abs(2 * step - short.steps + 1), step))


def _check_space(run: RunFolder, short: Shortened, say: Say) -> None:
    """Once a step is sealed: raise NeedsPerson where those of both runs do not fit on the disk."""
    size = size_of(next(iter(seals(run).values())).parent)
    saves, free = -(-short.steps // short.every), shutil.disk_usage(run.path).free + size
    need = 2 * saves * size
    words = f"{saves} checkpoints of {in_words(size)} in each of two runs need {in_words(need)}, {in_words(free)} are"
    if need > free:
        fit = free // (2 * size)
        less = f"save less often: --every {-(-short.steps // fit)}, or " if fit > 1 else ""
        raise NeedsPerson(f"{words} free in {run.path.parent}; {less}name another folder: --keep PATH")
    if need >= LARGE:
        say(f"{words} free")


def _resumed_from(run: RunFolder) -> int | None:
    """The step that the journal names."""
    lines = run.journal.read_text(encoding="utf-8").splitlines() if run.journal.exists() else []
    steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "resume"]
    return steps[-1] if steps else None


class _Runs:
    """Runs of one command, each in a folder of its own below `place`; none outlives the call that started it."""

    def __init__(self, command: Sequence[str], place: Path) -> None:
        self._command, self._place = command, place

    def folder(self, name: str) -> RunFolder:
        """Of the run of this name."""
        return RunFolder(self._place / name)

    def whole(
        self, name: str, first_sealed: Callable[[RunFolder], None] = lambda run: None, more: Sequence[str] = ()
    ) -> RunFolder:
        """A run to its end. Raises ChildFailed where that is none of success."""
        run = self.folder(name)
        with self._started(name, more) as child:
            while child.poll() is None and run.newest_sealed() is None:
                time.sleep(POLL)
            if run.newest_sealed() is not None:
                first_sealed(run)
            child.wait()
        if child.returncode:
            raise ChildFailed(name, child.returncode, self._said(name))
        return run

    def killed(self, name: str, after: int) -> int | None:
        """A run that is killed as soon as a step is sealed: the newest sealed one, or None where it ended before."""
        run = self.folder(name)
        with self._started(name) as child:
            while child.poll() is None and (run.newest_sealed() or 0) < after:
                time.sleep(POLL)
            child.kill()
            child.wait()
        newest = run.newest_sealed() or 0
        if child.returncode == 0:
            return None
        if child.returncode != -9 or newest < after:  # of itself, or killed by another
            raise ChildFailed(name, child.returncode, self._said(name))
        return newest

    @contextlib.contextmanager
    def _started(self, name: str, more: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
        with self._log(name).open("ab") as log:
            child = subprocess.Popen(
                [*self._command, f"--run-dir={self.folder(name).path}", *more],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                process_group=0 if hasattr(os, "setpgid") else None,  # Ctrl-C is for this process
            )
            try:
                yield child
            finally:
                child.kill()
                child.wait()

    def _said(self, name: str) -> str:
        return self._log(name).read_text(encoding="utf-8", errors="replace").strip()

    def _log(self, name: str) -> Path:
        return self._place / f"{name}.log"


def _new_place(keep: Path | None) -> Path:
    """An empty folder. Raises ConfigError for one that is not."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="jaxtrain-verify-resume-"))
    try:
        keep.mkdir(parents=True, mode=0o700, exist_ok=True)
        used = any(keep.iterdir())
    except OSError as error:
        raise ConfigError(f"--keep: folder {str(keep)!r} cannot be made: {error.strerror}") from None
    if used:
        raise ConfigError(f"--keep: folder {str(keep)!r} is not empty; name another one")
    return keep


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM, and a terminal that is closed, are as Ctrl-C: no child stays, and no folder. For the main thread."""
    default = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in default:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in default:
            signal.signal(number, signal.SIG_DFL)
