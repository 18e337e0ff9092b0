"""Look at sealed steps: what each is, whether it is intact, in which arrays two of them differ. Changes nothing.

The folder may be that of a run that goes on: a step that it removes meanwhile is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from jaxtrain.checkpoint import files, seal
from jaxtrain.checkpoint.reading import SealedSteps
from jaxtrain.checkpoint.seal import CorruptStep, Sealed
from jaxtrain.checkpoint.store import Checkpoints

_READ_AT_ONCE = 2**28
"""Bytes of arrays of one step that are read together: two steps of any size are compared in little memory."""


@dataclass(frozen=True)
class Overview:
    """A sealed step. time: when it was sealed. size: bytes. value: the figure that ranks it, or not-a-number.

    marks: of "last", "best", "would be pruned".
    """

    step: int
    time: datetime
    size: int
    value: float
    marks: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """Whether a step is intact, and that in words."""

    step: int
    intact: bool
    words: str


@dataclass(frozen=True)
class Difference:
    """How an array of step A differs from that of step B. Bits are compared: a NaN equals itself.

    largest: the largest |a - b|. relative: the norm of a - b, divided by that of the finite values of a.
    Of `size` values `nans` have a difference that is not a number; these are in neither.
    """

    name: str
    kind: Literal["equal", "differs", "only in A", "only in B", "other shape or dtype"]
    largest: float = 0.0
    relative: float = 0.0
    nans: int = 0
    size: int = 0


def overview(store: Checkpoints) -> list[Overview]:
    """All sealed steps, oldest first."""
    superfluous = {sealed.step for sealed in store.superfluous()}
    best, last = store.best(), store.latest()
    found = []
    for sealed in store.steps():
        marks = {
            "last": last is not None and sealed.step == last.step,
            "best": best is not None and sealed.step == best.step,
            "would be pruned": sealed.step in superfluous,
        }
        try:
            time = datetime.fromtimestamp((sealed.path / seal.MANIFEST).stat().st_mtime, UTC)
            size = files.size_of(sealed.path)
        except FileNotFoundError:
            continue
        held = tuple(mark for mark, holds in marks.items() if holds)
        found.append(Overview(sealed.step, time, size, store.value(sealed), held))
    return found


def quarantined(store: SealedSteps) -> dict[str, str]:
    """{name of a folder that was set aside: why it was}."""
    found = {}
    for path in sorted(store.folder.glob(".quarantine-*")):
        why = path / "why.txt"
        text = why.read_text(encoding="utf-8", errors="replace") if why.is_file() else "it does not say why"
        found[path.name] = " ".join(text.split())
    return found


def check(store: SealedSteps) -> Iterator[Checked]:
    """Verify the files and arrays of every step, oldest first; what is corrupt stays where it is."""
    for sealed in store.steps():
        try:
            arrays = store.verify_arrays(sealed)
            manifest = seal.read(sealed)
        except Exception as error:  # a disk that fails, or what Orbax raises, is as bad as a digest that differs
            if sealed.path.is_dir():
                first = str(error).splitlines()[0] if str(error) else "no message"
                unread = f"checkpoint {sealed.step}: {sealed.path} cannot be read: {type(error).__name__}: {first}"
                yield Checked(sealed.step, False, str(error) if isinstance(error, CorruptStep) else unread)
            continue
        only_read = sum("sha256" not in leaf for leaf in manifest["leaves"].values())
        more = f", {only_read} of them sealed without a digest" if only_read else ""
        yield Checked(
            sealed.step, True, f"step {sealed.step}: intact, {len(manifest['files'])} files, {arrays} arrays{more}"
        )


def differences(store: SealedSteps, a: Sealed, b: Sealed) -> list[Difference]:
    """Each array of two steps, by name. Values are read where the digests in the seals do not tell.

    Raises CorruptStep where a step whose values are needed is not intact.
    """
    ours, theirs = seal.read(a)["leaves"], seal.read(b)["leaves"]
    found: dict[str, Difference] = {}
    unknown = []
    for name in sorted(ours.keys() | theirs.keys()):
        x, y = ours.get(name), theirs.get(name)
        if x is None or y is None:
            found[name] = Difference(name, "only in B" if x is None else "only in A")
        elif (x["shape"], x["dtype"]) != (y["shape"], y["dtype"]):
            found[name] = Difference(name, "other shape or dtype")
        elif "sha256" in x and x["sha256"] == y.get("sha256"):
            found[name] = Difference(name, "equal")
        else:
            unknown.append(name)
    for sealed in (a, b) if unknown else ():
        store.verify(sealed)
    for names in _groups(unknown, ours):
        one, two = store.arrays(a, names), store.arrays(b, names)
        found |= {name: difference(name, one[name], two[name]) for name in names}
    return [found[name] for name in sorted(found)]


def difference(name: str, a: np.ndarray, b: np.ndarray) -> Difference:
    """How two arrays of one shape and dtype differ."""
    changed = np.any(_bits(a) != _bits(b), axis=1)
    if not changed.any():
        return Difference(name, "equal")
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    x, y = a.reshape(-1).astype(wide), b.reshape(-1).astype(wide)
    with np.errstate(all="ignore"):
        off = np.abs(np.where(changed, x - y, 0))
        numbers = ~np.isnan(off)
        norm = float(np.linalg.norm(off[numbers]))
        scale = float(np.linalg.norm(x[numbers & np.isfinite(x)]))
    relative = norm / scale if scale else math.inf if norm else 0.0
    nans = int(x.size - numbers.sum())
    return Difference(name, "differs", float(off[numbers].max(initial=0.0)), relative, nans, x.size)


def _bits(array: np.ndarray) -> np.ndarray:
    """[values, bytes of a value]."""
    return np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)


def _groups(names: list[str], leaves: dict[str, Any]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name in names:
        nbytes = math.prod(leaves[name]["shape"]) * np.dtype(leaves[name]["dtype"]).itemsize
        if group and size + nbytes > _READ_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    if group:
        yield group
