"""Errors that a user can mend: one clear line, an exit code, no traceback (contract 15)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

OK, UNEXPECTED, USAGE, PEER_FAILED, PREEMPTED, NEEDS_PERSON, INTERRUPTED = 0, 1, 2, 70, 75, 78, 130


class UserError(Exception):
    """Something a user can mend. `str(error)` is the one line that is shown."""

    exit_code = UNEXPECTED


class ConfigError(UserError):
    """A wrong key, value, file or combination in the configuration or on the command line."""

    exit_code = USAGE


class NeedsPerson(UserError):
    """The run cannot go on by itself: corrupt checkpoints, a full disk, nothing but NaN."""

    exit_code = NEEDS_PERSON


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that looks most like `name`, or None when nothing comes near."""
    found = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.55)
    return found[0] if found else None


def choices(name: str, allowed: Iterable[str]) -> str:
    """The tail of an error line: the nearest name, then all that is allowed."""
    allowed = list(allowed)
    close = nearest(name, allowed)
    hint = f"did you mean {close}? " if close else ""
    return f"{hint}allowed: {', '.join(allowed)}"
