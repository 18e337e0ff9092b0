"""The mirror of a run: a thread copies sealed steps and the run's small files to another place, and brings them back.

PATH/<name>/<id>/ is laid out as the run folder, so that it can be resumed as one. A step is copied to a name aside,
synced, compared with its seal, and then renamed: only whole steps are in a mirror. A mirror that is slow, full or gone
costs the run warnings, never a step: the thread is a daemon, and only `close` waits for it, and that not for long.

`.run-id` in the run folder and `.mirror-of` in the mirror hold the same word. A place where another run's mirror lies,
or one that was resumed and is a run now, stays as it is: the mirror then lies beside it, in <id>-2.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.checkpoint import files, seal
from jaxtrain.checkpoint.reading import SealedSteps
from jaxtrain.checkpoint.seal import CorruptStep, Sealed
from jaxtrain.config.errors import ConfigError

log = logging.getLogger("jaxtrain")

RESULT = "result.json"
FILES: tuple[str, ...] = (RESULT, "config.yaml", "resolved.yaml", "env.json", "metrics.jsonl", "journal.jsonl")
FILES += ("run.log", "status.json", "chosen.json", "report.html")
"""The small files of a run folder, which a mirror has too. A run itself removes RESULT alone: that of a shorter run."""

WAIT = 20.0
"""Seconds that the end of a run waits for its mirror, and a resume for a look into it: a signal often leaves 30."""

MIRROR_OF, RUN_ID, ASIDE = ".mirror-of", ".run-id", ".copy-"


def place_of(mirror: str, name: str, run: Path) -> Path:
    """PATH/<name>/<id>, where the mirror of a run folder lies. Raises ConfigError for one inside of it."""
    place, own = Path(os.path.abspath(mirror)), Path(os.path.abspath(run))
    if place.is_relative_to(own):
        raise ConfigError(
            f"checkpoint.mirror: {str(place)!r} lies in the run folder {str(own)!r} and would be lost with it; "
            "allowed: a folder outside, best on another disk"
        )
    return place / name / own.name


def check_apart(mirror: str | None, name: str, run: Path) -> None:
    """Raise ConfigError where the mirror of a new run would lie in its own folder, or be it."""
    if mirror is not None and place_of(mirror, name, run) == Path(os.path.abspath(run)):
        raise ConfigError(
            f"checkpoint.mirror: {mirror!r} is where the run itself goes ({str(run.parent)!r}); "
            "allowed: a folder outside, best on another disk"
        )


def copy_step(sealed: Sealed, into: Path) -> Sealed:
    """Copy a step into another folder of steps, where it is whole or not at all; the copy is compared with the seal.

    Raises OSError, and CorruptStep where the copy, or what was copied, is not what was sealed.
    """
    place, aside = into / sealed.path.name, into / f"{ASIDE}{sealed.path.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(mode=0o700)
        for path in sorted(sealed.path.rglob("*")):
            target = aside / path.relative_to(sealed.path)
            if path.is_dir():
                target.mkdir(mode=0o700)
            else:
                shutil.copyfile(path, target)
        files.make_private(aside)
        files.fsync_tree(aside)
        try:
            seal.verify(Sealed(sealed.step, aside, {}), threads=1)  # the end of Python waits for other threads' pools
        except CorruptStep as error:
            raise CorruptStep(f"the copy of {sealed.path} is not what was sealed") from error
        if place.exists():
            files.remove(place)
        aside.rename(place)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    files.fsync(into)
    return Sealed(sealed.step, place, seal.meta_of(place))


class Mirror:
    """The mirror of one run folder, kept by the one process that writes there.

    place: where it lies, as `place_of` says.
    """

    def __init__(self, place: Path, run: Path) -> None:
        self.place, self._run = place, run
        self._steps = run / "checkpoints"
        self._made: Path | None = None
        self._verified: set[str] = set()
        self._copied: dict[str, tuple[int, int]] = {}
        self._newest: int | None = None
        self._failing = False
        self._due, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ for the run

    def wake(self) -> None:
        """Something is new. Returns at once; what the thread is copying now it ends, and then takes the newest."""
        self._due.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="jaxtrain-mirror", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Copy what has changed, at most WAIT seconds long; then say what is missing."""
        if self._thread is None:
            return
        self._closing.set()
        self._due.set()
        self._thread.join(WAIT)
        late = f": it is not done after {WAIT:g} s" if self._thread.is_alive() else ""
        newest = next(reversed(_sealed(self._steps)), None)
        if newest is not None and newest.step != self._newest:
            log.warning("step %d is not in the mirror %s%s", newest.step, self.place, late)
        elif late:
            log.warning("the last files of the run are not in the mirror %s%s", self.place, late)

    def bring_back(self, wanted: Callable[[Sealed], bool]) -> Sealed | None:
        """The newest such step that verifies, copied into the run folder; None: there is none.

        A mirror that does not answer within WAIT seconds has none.
        """
        for sealed in self._look(wanted):
            try:
                self._steps.mkdir(mode=0o700, exist_ok=True)
                return copy_step(sealed, self._steps)
            except (OSError, CorruptStep) as error:
                log.warning("step %d of the mirror is not taken: %s", sealed.step, _reason(error))
        return None

    def _look(self, wanted: Callable[[Sealed], bool]) -> list[Sealed]:
        """Such steps of the mirror, newest first."""
        found: list[Sealed] = []

        def look() -> None:
            try:
                own = next(self._places(), None)
                steps = _sealed(own / "checkpoints") if own else []
                found.extend(sealed for sealed in reversed(steps) if wanted(sealed))
            except OSError as error:
                log.warning("the mirror %s cannot be read: %s", self.place, _reason(error))

        looking = threading.Thread(target=look, name="jaxtrain-mirror-look", daemon=True)
        looking.start()
        looking.join(WAIT)
        if looking.is_alive():
            log.warning("the mirror %s does not answer within %g s: resuming without it", self.place, WAIT)
            return []
        return found

    # ------------------------------------------------------------ in the thread

    def _work(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            last = self._closing.is_set()
            try:
                self._copy()
            except Exception as error:  # whatever it is, training goes on
                if not self._failing:
                    log.warning(
                        "the mirror %s fails: %s; training goes on, the next save tries again",
                        self.place,
                        _reason(error),
                    )
                self._failing = True
            else:
                if self._failing:
                    log.warning("the mirror %s works again", self.place)
                self._failing = False
            if last and not self._due.is_set():
                return

    def _copy(self) -> None:
        """The small files, the newest step; then others that the run still has, until a newer one is sealed."""
        steps = _sealed(self._steps)  # before the files: their rows reach at least to these steps
        place = self._own_place()
        (place / "checkpoints").mkdir(mode=0o700, exist_ok=True)
        for name in FILES:
            self._copy_file(name, place)
        for sealed in reversed(steps):
            if self._due.is_set() and sealed is not steps[-1]:
                return
            place = self._own_place()
            try:
                self._copy_step(sealed, place / "checkpoints")
            except (OSError, CorruptStep):
                if sealed.path.is_dir():
                    raise
                if sealed is steps[-1]:  # retention was faster
                    why = f"step {sealed.step} was removed before it was copied: save less often, or keep more steps"
                    raise TimeoutError(why) from None
                continue
            if sealed is steps[-1]:
                self._newest = sealed.step
                self._retain(place)

    def _copy_step(self, sealed: Sealed, into: Path) -> None:
        there = into / sealed.path.name
        name = there.name
        if _manifest(there) == _manifest(sealed.path) is not None:
            if name in self._verified:
                return
            with contextlib.suppress(CorruptStep):
                seal.verify(Sealed(sealed.step, there, {}), threads=1)
                self._verified.add(name)
                return
        copy_step(sealed, into)
        self._verified.add(name)

    def _copy_file(self, name: str, place: Path) -> None:
        source, target, aside = self._run / name, place / name, place / f"{ASIDE}{name}"
        try:
            stat = source.stat()
        except FileNotFoundError:
            if name == RESULT:
                target.unlink(missing_ok=True)
            return
        stamp = (stat.st_mtime_ns, stat.st_size)
        if self._copied.get(name) == stamp and target.exists():
            return
        shutil.copyfile(source, aside)
        aside.chmod(0o600)
        files.fsync(aside)
        os.replace(aside, target)
        files.fsync(place)
        self._copied[name] = stamp

    def _retain(self, place: Path) -> None:
        """Remove the steps that the run no longer has. The newest that it has is verified here."""
        kept = {sealed.path.name for sealed in _sealed(self._steps)}
        if not self._is_own(place):
            return
        for path in (place / "checkpoints").iterdir():
            if path.name.startswith((ASIDE, ".trash-")):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.isdigit() and path.name not in kept:
                files.remove(path)

    # ------------------------------------------------------------ where it lies

    def _own_place(self) -> Path:
        """The mirror's folder, made when it is first asked for. Raises OSError when it is gone since (unmounted)."""
        if self._made is not None and not self._made.is_dir():
            raise FileNotFoundError(errno.ENOENT, "it is gone", str(self._made))
        if self._made is None or not self._is_own(self._made):
            self._made = next(self._places(), None) or self._make()
        return self._made

    def _places(self) -> Iterator[Path]:
        """Folders that hold this run's mirror."""
        return (place for place in self._candidates() if self._is_own(place))

    def _candidates(self) -> Iterator[Path]:
        """The place and those beside it, up to the first free one."""
        for end in ("", *(f"-{n}" for n in range(2, 1000))):
            place = self.place.with_name(self.place.name + end)
            yield place
            if not place.is_dir() or not any(place.iterdir()):
                return

    def _make(self) -> Path:
        *_, place = self._candidates()
        for folder in (place.parent.parent, place.parent, place):
            folder.mkdir(mode=0o700, exist_ok=True)
        files.write_text(place / MIRROR_OF, self._id())
        return place

    def _is_own(self, place: Path) -> bool:
        of = place / MIRROR_OF
        return of.is_file() and of.read_text(encoding="utf-8") == self._id()

    def _id(self) -> str:
        """What tells this run from another of its name and id, such as one that it takes the place of."""
        path = self._run / RUN_ID
        if not path.is_file():
            files.write_text(path, uuid.uuid4().hex)
        return path.read_text(encoding="utf-8")


def _sealed(folder: Path) -> list[Sealed]:
    return SealedSteps(folder, metric="", mode="min").steps()


def _manifest(step: Path) -> bytes | None:
    path = step / seal.MANIFEST
    return path.read_bytes() if path.is_file() else None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
