"""Which pictures a folder holds: class folders, or train/ validation/ test/ of such. Decodes nothing.

In: a path. Out: `Scan`: files, labels, split, and what was left out and why. What counts as a picture is told by the
first bytes of a file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.config.errors import ConfigError, choices
from jaxtrain.data.images import KINDS, is_picture
from jaxtrain.data.threads import each

_HEAD = 32  # bytes that tell a picture from anything else
_SPLIT_FOLDERS = {"train": 0, "validation": 1, "val": 1, "valid": 1, "test": 2}
_IGNORED = {"__MACOSX", "@eaDir", "Thumbs.db", "desktop.ini"}


@dataclass(frozen=True)
class Scan:
    """The pictures of a folder, ordered by split, class and path.

    paths: relative to root, with "/". labels [n] int64: places in class_names. split [n] int8: 0 train, 1 validation,
    2 test, or None where the folder says nothing. skipped: (path, reason). notes: sentences for the user.
    """

    root: Path
    paths: tuple[str, ...]
    labels: np.ndarray
    class_names: tuple[str, ...]
    split: np.ndarray | None
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def scan(root: Path) -> Scan:
    """Find class folders in root, or in its train/, validation/ (val/, valid/) and test/. Decodes nothing."""
    where, needed = f"data.path: {str(root)!r}", "one folder of pictures a class is needed"
    if not root.is_dir():
        raise ConfigError(f"{where} is no folder; {needed}")
    tops, loose = _listed(root)
    numbers = [_SPLIT_FOLDERS.get(top.lower(), -1) for top in tops]
    divided = 0 in numbers and -1 not in numbers
    folders = [(0, top, top) for top in tops]  # split, class, path
    if divided:
        if len(set(numbers)) < len(numbers):
            raise ConfigError(f"{where} has two folders of one split: {', '.join(tops)}; keep one of each")
        folders = []
        for number, top in sorted(zip(numbers, tops, strict=True)):
            names, files = _listed(root / top)
            folders += [(number, name, f"{top}/{name}") for name in names]
            loose += [f"{top}/{name}" for name in files]
    found = [(*folder, path) for folder in folders for path in _below(root, folder[2])]
    reasons = each(_why_not, [root / path for *_, path in found], 256)
    judged = list(zip(found, reasons, strict=True))
    rows = [row for row, reason in judged if reason is None]
    skipped = [(path, reason) for (*_, path), reason in judged if reason is not None]
    outside = [path for path in loose if is_picture_file(root / path)]
    if not rows:
        what = "folders but no picture in them" if tops else "no folders"
        raise ConfigError(f"{where} has {'pictures, but none in a class folder' if outside else what}; {needed}")
    place = {name: k for k, name in enumerate(sorted({name for number, name, *_ in rows if number == 0}))}
    for _, name, folder, _ in rows:
        if name not in place:
            raise ConfigError(f"{where}: class {name!r} of {folder} is not in train; {choices(name, place)}")
    if len(place) < 2:
        inner = os.path.commonpath([os.path.dirname(path) for *_, path in rows])
        deeper = len({os.path.dirname(path) for *_, path in rows}) > 1
        hint = f"; its folders are in {str(root / inner)!r}: is that the data.path?" if deeper else ""
        raise ConfigError(
            f"{where} has pictures of one class only, {min(place)!r}; at least two classes are needed{hint}"
        )
    used = {folder for _, _, folder, _ in rows}
    empty = [folder for *_, folder in folders if folder not in used]
    notes = (
        *_note("file is no image and is", "files are no images and are", [path for path, _ in skipped]),
        *_note("image lies in no class folder and is", "images lie in no class folder and are", outside),
        *_note("class folder has no images and is", "class folders have no images and are", empty),
    )
    labels = np.array([place[name] for _, name, *_ in rows], np.int64)
    split = np.array([number for number, *_ in rows], np.int8) if divided else None
    skipped += [(path, "it lies in no class folder") for path in outside]
    return Scan(root, tuple(path for *_, path in rows), labels, tuple(place), split, tuple(skipped), notes)


def _note(one: str, many: str, names: list[str]) -> list[str]:
    if len(names) > 1:
        return [f"{len(names)} {many} left out, the first: {names[0]}"]
    return [f"1 {one} left out: {names[0]}"] if names else []


def _listed(folder: Path) -> tuple[list[str], list[str]]:
    """The visible (folders, files) in a folder, sorted."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError(f"data.path: {str(folder)!r} cannot be listed: {error.strerror}") from None
    visible = [entry for entry in entries if not is_hidden(Path(entry.name))]
    return [e.name for e in visible if e.is_dir()], [e.name for e in visible if not e.is_dir()]


def _below(root: Path, folder: str) -> list[str]:
    """The visible files at any depth below a folder, sorted paths relative to root."""
    paths: list[str] = []
    waiting, seen = [folder], set()
    while waiting:
        here = waiting.pop()
        if (real := os.path.realpath(root / here)) in seen:
            continue  # a link to a folder above would lead round for ever
        seen.add(real)
        folders, files = _listed(root / here)
        paths += [f"{here}/{name}" for name in files]
        waiting += [f"{here}/{name}" for name in folders]
    return sorted(paths)


def is_hidden(path: Path) -> bool:
    """Whether a relative path has a part that systems and tools put there, not people."""
    return any(part.startswith(".") or part in _IGNORED for part in path.parts)


def is_picture_file(path: Path) -> bool:
    """Whether a file begins as a picture does; whether it is whole, only `decode` can tell."""
    return _why_not(path) is None


def _why_not(path: Path) -> str | None:
    """Why a file is no picture, by its first bytes; None for a picture."""
    if not path.is_file():  # a link to nothing; a pipe, which would be waited for
        return "it is no file"
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise ConfigError(f"data.path: {str(path)!r} cannot be read: {error.strerror}") from None
    return None if is_picture(head) else f"it is no {KINDS}" if head else "it is empty"
