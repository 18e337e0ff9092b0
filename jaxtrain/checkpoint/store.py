"""The one writer of a folder of sealed steps: save in the background, seal, set aside what is corrupt, retain."""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import files, seal
from jaxtrain.checkpoint.mirror import ASIDE, MIRROR_OF, Mirror, place_of
from jaxtrain.checkpoint.reading import SealedSteps, alone
from jaxtrain.checkpoint.seal import CorruptStep, HostArray, Sealed
from jaxtrain.config import RunConfig
from jaxtrain.config.errors import NeedsPerson, UserError
from jaxtrain.core.metrics import best_is
from jaxtrain.parallel import processes

log = logging.getLogger("jaxtrain")

RETRIES = (1.0, 5.0)
"""Seconds to wait before a save that failed is tried again."""
SNAPSHOT = "snapshot"
"""In the meta of a step that stays for ever."""
MARGIN = 2**20
"""Bytes that a save takes beside its arrays, at most: Orbax compresses them, and its own files are small."""

Note = Callable[[str, str], None]
"""Told an event, "quarantine" or "mirror", and why."""

_ANEW = "bring a copy back, or begin anew with jaxtrain train --run-dir=... --resume=auto --allow-fresh"


class NothingIntact(NeedsPerson):
    """There were checkpoints, and none can be used."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; {_ANEW}")


class Checkpoints(SealedSteps):
    """As `SealedSteps`, and one process of a run that writes.

    keep_last, keep_best: how many of the newest and of the best stay. keep_every: so do all multiples of it; 0: none.
    name, mirror: of the run whose folder `folder` lies in, and where it is copied to; see mirror.py.
    """

    def __init__(
        self,
        folder: Path,
        *,
        metric: str,
        mode: str,
        keep_last: int = 2,
        keep_best: int = 1,
        keep_every: int = 0,
        name: str = "",
        mirror: str | None = None,
    ) -> None:
        super().__init__(folder, metric=metric, mode=mode)
        self._keep_last, self._keep_best = keep_last, keep_best
        self._keep_every, run = keep_every, folder.parent
        self._mirror = Mirror(place_of(mirror, name, run), run) if mirror is not None else None
        self._saving: threading.Thread | None = None
        self._closing = threading.Event()
        self._failed: tuple[int, int, Exception] | None = None
        self._left: Path | None = None
        self._verified: set[int] = set()
        self._orbax: Any = None

    @classmethod
    def of_run(
        cls,
        folder: Path,
        config: RunConfig,
        keep_every: int,
        *,
        keep_last: int | None = None,
        keep_best: int | None = None,
        copied: bool = True,
    ) -> Checkpoints:
        """As the config says. keep_every: in steps. keep_last, keep_best: in place of its own. copied: mirrored."""
        metric, mode, saving = config.evaluate.metric, config.evaluate.mode, config.checkpoint
        return cls(
            folder,
            metric=metric,
            mode=best_is(metric) if mode == "auto" else mode,
            keep_last=saving.keep_last if keep_last is None else keep_last,
            keep_best=saving.keep_best if keep_best is None else keep_best,
            keep_every=keep_every,
            name=config.name,
            mirror=saving.mirror if copied else None,
        )

    # ------------------------------------------------------------ what is there

    def restore_newest(
        self,
        abstract: Any,
        note: Note = lambda event, why: None,
        *,
        cast: bool = False,
        wanted: Callable[[Sealed], bool] = lambda sealed: True,
    ) -> tuple[Sealed, Any] | None:
        """The newest step that verifies, here or in the mirror; a corrupt one is set aside and the next older is taken.
        None without steps.

        note: told why a step is set aside, before it is, and of one from the mirror. cast: as in `restore`.
        wanted: which steps come into question.
        Raises NothingIntact when steps existed and none verifies: a run never starts silently from scratch.
        """
        found, lost = self._newest_intact(note, wanted) if processes.is_first() else (None, 0)
        step, lost = processes.agree([found.step if found else None, lost])
        if lost:
            nor = f", and there is none in the mirror {self._mirror.place}" if self._mirror else ""
            raise NothingIntact(f"{self.folder}: none of {lost} checkpoints is intact{nor}")
        if step is None:
            return None
        sealed = found or self.get(step)  # the first process has verified it
        return sealed, self._read(sealed, abstract, cast=cast)

    def _newest_intact(self, note: Note, wanted: Callable[[Sealed], bool]) -> tuple[Sealed | None, int]:
        """It, or how many there were and none is."""
        steps, found = [sealed for sealed in self.steps() if wanted(sealed)], None
        for sealed in reversed(steps):
            try:
                self.verify(sealed)
                found = sealed
                break
            except CorruptStep as error:
                note("quarantine", str(error))
                aside = self._set_aside(sealed, str(error))
                log.warning("%s; set aside as %s, taking the next older", error, aside.name)
        if self._mirror is not None:
            found = self._newer_in_mirror(self._mirror, found, note, wanted) or found
        if found is None:
            return None, len(steps)
        self._verified.add(found.step)
        return found, 0

    def _newer_in_mirror(
        self, mirror: Mirror, found: Sealed | None, note: Note, wanted: Callable[[Sealed], bool]
    ) -> Sealed | None:
        after = found.step if found else -1
        newer = mirror.bring_back(lambda sealed: sealed.step > after and wanted(sealed))
        if newer is not None:
            here = f"the newest intact one here is {found.step}" if found else "none here is intact"
            why = f"step {newer.step} is taken from the mirror {mirror.place}: {here}"
            note("mirror", why)
            log.warning("%s", why)
        return newer

    def _set_aside(self, sealed: Sealed, why: str) -> Path:
        names = (f".quarantine-{sealed.path.name}{end}" for end in ("", *(f"-{n}" for n in range(2, 1000))))
        aside = next(path for name in names if not (path := self.folder / name).exists())
        sealed.path.rename(aside)
        files.write_text(aside / "why.txt", why + "\n")
        return aside

    def sweep(self) -> None:
        """Remove what a killed process left: unsealed steps, half-removed ones. From here on the mirror follows."""
        if not processes.is_first():
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder.parent / MIRROR_OF).unlink(missing_ok=True)  # a mirror that goes on is a run of its own
        for path in self.folder.iterdir():
            unsealed = path.name.isdigit() and not (path / seal.MANIFEST).is_file()
            if unsealed:  # a step that a resume has passed over
                log.warning("removing %s: its save was not completed", path)
            if unsealed or path.name.startswith((".trash-", ASIDE)):
                shutil.rmtree(path, ignore_errors=True)
        if self._mirror is not None:
            self._mirror.wake()

    def leave(self, behind: Callable[[Sealed], bool]) -> None:
        """Remove the steps for which `behind` is true."""
        if processes.is_first():
            for sealed in filter(behind, self.steps()):
                files.remove(sealed.path)

    # ------------------------------------------------------------ saving

    def check_space(self, nbytes: int) -> None:
        """Raise NeedsPerson where a step of so many bytes of arrays does not fit on the disk."""
        if _free(self.folder) < nbytes + MARGIN:
            raise NeedsPerson(
                f"{self.folder}: no room for a checkpoint: {self._needs(nbytes)}; make room, or name another folder"
            )

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Start saving. Returns when the arrays are copied; an error of the save before surfaces here.

        meta: JSON values. Raises NeedsPerson where there is no room for it.
        """
        json.dumps(meta, allow_nan=False)  # what is wrong here would be so each time it is tried
        self.wait()
        path = self.folder / f"{step:09d}"
        arrays, _ = seal.flat(state)
        arrays = {name: processes.whole(x) for name, x in arrays.items()}
        if self._keep_every and step % self._keep_every == 0:
            meta = {**meta, SNAPSHOT: True}
        if not processes.is_first() or (path / seal.MANIFEST).is_file():
            return
        held = {name: HostArray(x) for name, x in arrays.items()}
        self.check_space(_nbytes(held))
        failed = self._begin(path, arrays)
        self._saving = threading.Thread(
            target=self._finish, args=(step, path, meta, held, failed), name="jaxtrain-seal", daemon=True
        )
        self._saving.start()

    def poll(self) -> None:
        """Raise the error of a save that failed, if one did."""
        if self._failed is not None:
            step, nbytes, error = self._failed
            self._failed = None
            raise NeedsPerson(
                f"saving step {step} into {self.folder} failed: {type(error).__name__}: {error}; {self._needs(nbytes)}"
            ) from error

    def wait(self) -> None:
        """Until the save in progress is sealed."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        self.poll()

    def close(self) -> None:
        """Wait, without trying again what fails now; then let Orbax's threads go, and the mirror end."""
        self._closing.set()
        try:
            self.wait()
        finally:
            self._let_orbax_go()
            if self._left is not None:
                _discard(self._left)
            if self._mirror is not None:
                self._mirror.close()

    def _begin(self, path: Path, arrays: dict[str, Any]) -> Exception | None:
        """Give the arrays to Orbax, which writes in the background; what went wrong at once."""
        try:
            if path.exists():
                shutil.rmtree(path)
            path.mkdir(parents=True, mode=0o700)
            self._checkpointer().save(path.absolute() / seal.STATE, arrays)
        except UserError:
            raise
        except Exception as error:
            return error
        return None

    def _finish(
        self, step: int, path: Path, meta: dict[str, Any], held: dict[str, HostArray], failed: Exception | None
    ) -> None:
        """In a thread: the arrays' digests while Orbax writes, the seal, retention. What fails is tried again."""
        for pause in (*RETRIES, None):
            try:
                if failed is not None:
                    raise failed
                leaves = {name: array.description() for name, array in held.items()}
                self._checkpointer().wait_until_finished()
                files.write_json(path / seal.META, meta)
                seal.close(path, step, leaves)
                break
            except Exception as error:
                self._let_orbax_go()
                _discard(path)
                if pause is None or self._closing.is_set() or isinstance(error, UserError):
                    self._left = path
                    self._failed = step, _nbytes(held), error  # surfaces in the caller's thread, at the next poll
                    return
                log.warning(
                    "saving step %d failed (%s: %s); trying again in %g s", step, type(error).__name__, error, pause
                )
                self._closing.wait(pause)
                failed = self._begin(path, {name: array.whole() for name, array in held.items()})
        held.clear()  # the step may have its buffers back
        self._verified.add(step)  # its digests were read from the files
        try:
            self._retain()
        except OSError as error:
            log.warning("old checkpoints in %s were not removed: %s", self.folder, error)
        if self._mirror is not None:
            self._mirror.wake()

    # ------------------------------------------------------------ retention

    def superfluous(self) -> list[Sealed]:
        """Steps that retention would remove, oldest first."""
        steps = self.steps()
        kept = {s.step for s in steps[-self._keep_last :]}
        kept |= {s.step for s in self.ranked(steps)[: self._keep_best] if math.isfinite(self.value(s))}
        kept |= {s.step for s in steps if self._is_snapshot(s)}
        return [s for s in steps if s.step not in kept]

    def _is_snapshot(self, sealed: Sealed) -> bool:
        """Whether it stays for ever. It says so itself: without the data nobody knows how many steps an epoch has."""
        return bool(sealed.meta.get(SNAPSHOT) or (self._keep_every and sealed.step % self._keep_every == 0))

    def prune(self) -> list[Sealed]:
        """Remove what retention would, once the newest step that stays is verified; what was removed.

        Raises CorruptStep, and removes nothing, where it is not intact.
        """
        gone = self.superfluous()
        if gone:
            newest = self.get("last")
            self.verify(newest)
            self._verified.add(newest.step)
            self._retain()
        return gone

    def _retain(self) -> None:
        """Remove what is superfluous; never while nothing that stays has been verified by this process."""
        gone = self.superfluous()
        kept = {s.step for s in self.steps()} - {s.step for s in gone}
        if kept & self._verified:
            for sealed in gone:
                files.remove(sealed.path)

    def _needs(self, nbytes: int) -> str:
        latest = self.latest()
        sealed = f"the newest sealed step is {latest.step}" if latest else "no step is sealed yet"
        return f"it needs {files.in_words(nbytes + MARGIN)}, {files.in_words(_free(self.folder))} are free; {sealed}"

    def _checkpointer(self) -> Any:
        if self._orbax is None:
            import orbax.checkpoint as ocp

            logging.getLogger("absl").addFilter(_told_by_us)
            self._orbax = ocp.StandardCheckpointer(multiprocessing_options=alone())
        return self._orbax

    def _let_orbax_go(self) -> None:
        orbax, self._orbax = self._orbax, None
        if orbax is not None:
            try:
                orbax.close()
            except Exception as error:  # it reports the failed save once more
                log.debug("closing Orbax: %s", error)


def _discard(path: Path) -> None:
    """Remove what a failed save has written; threads of Orbax may be at it for a moment yet."""
    for pause in (0.0, 0.05, 0.2, 1.0, 3.0):
        time.sleep(pause)
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
    log.warning("%s could not be removed; the next start of the run does", path)


def _told_by_us(record: logging.LogRecord) -> bool:
    """Orbax logs a failed save once a thread, with tracebacks of hundreds of lines; `poll` tells it in one."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _nbytes(held: dict[str, HostArray]) -> int:
    return sum(array.nbytes for array in held.values())


def _free(folder: Path) -> int:
    """Bytes that are free on the disk where `folder` is, or will be."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
