"""crash/: what an unexpected end leaves behind: traceback, stacks of all threads, the last rows, the environment."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.files import write_json, write_text
from jaxtrain.hooks.folder import strict
from jaxtrain.loop import Hook

log = logging.getLogger("jaxtrain")


class Reached(Hook):
    """The last step that was fed."""

    step = 0

    def start(self, step: int) -> None:
        self.step = step

    def after_step(self, step: int) -> None:
        self.step = step


class CrashFolder:
    """`folder`/<UTC time>, made when it is needed. number: of this process.

    about: called then for more to write down (step, ids of the last rows).
    """

    def __init__(self, folder: Path, number: int, about: Callable[[], dict[str, Any]]) -> None:
        self._folder, self._number, self._about = folder, number, about
        self._fatal: Any = None
        self._was_on = False

    def open(self) -> None:
        """From here on a fault in native code (a segmentation fault, an abort) leaves its stacks too."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path = self._folder / f"fatal.{self._number}.txt"
            self._fatal = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a")
        except OSError as error:
            log.warning("%s cannot be written (%s): a crash will leave nothing", self._folder, error.strerror)
            return
        self._was_on = faulthandler.is_enabled()
        faulthandler.enable(self._fatal)

    def close(self) -> None:
        """Remove what has stayed empty."""
        if self._fatal is None:
            return
        faulthandler.disable()
        if self._was_on and sys.__stderr__ is not None:
            with contextlib.suppress(ValueError, OSError):
                faulthandler.enable(sys.__stderr__)
        self._fatal.close()
        for path in [*self._folder.glob("fatal.*.txt"), self._folder]:
            with contextlib.suppress(OSError):
                if path.is_dir():
                    path.rmdir()  # only when it is empty
                elif path.stat().st_size == 0 and path.name == f"fatal.{self._number}.txt":
                    path.unlink()
        self._fatal = None

    def place(self) -> Path:
        """A new folder for this moment."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        end = f".{self._number}" if self._number else ""
        names = (f"{stamp}{end}{more}" for more in ("", *(f"-{n}" for n in range(2, 1000))))
        place = next(path for name in names if not (path := self._folder / name).exists())
        place.mkdir(parents=True, mode=0o700)
        return place

    def write(self, why: str, error: BaseException | None = None) -> str:
        """The stacks, and the traceback of `error`; where they are, or why they are not there. Never raises."""
        try:
            place = self.place()
            descriptor = os.open(place / "stacks.txt", os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                faulthandler.dump_traceback(descriptor, all_threads=True)
            finally:
                os.close(descriptor)
            if error is not None:
                write_text(place / "traceback.txt", "".join(traceback.format_exception(error)))
            try:
                about = self._about()
            except Exception as failed:
                about = {"about": f"{type(failed).__name__}: {failed}"}
            write_json(place / "about.json", strict({"why": why, **about}))
        except Exception as failed:
            return f"not written ({type(failed).__name__}: {failed})"
        return str(place)
