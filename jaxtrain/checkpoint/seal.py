"""The seal of a step: what its manifest says, how that is made, and how it is compared with what is there.

manifest.json is written last, after everything it lists is on the disk. It holds size and sha256 of every other file,
shape, dtype and sha256 of every array, and a digest of itself. The digests of the files find what a disk or a person
has changed; those of the arrays do not depend on files, devices or mesh, so that two states can be compared by them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint import files
from jaxtrain.config.errors import NeedsPerson, UserError

MANIFEST, META, STATE = "manifest.json", "meta.json", "state"
_NAME = re.compile(r"[A-Za-z0-9_.\-]+")

Pieces = list[tuple[tuple[slice, ...], np.ndarray]]
"""Where each part of an array belongs, and the part."""


class CorruptStep(UserError):
    """A sealed step whose files are not what was sealed."""

    exit_code = NeedsPerson.exit_code


@dataclass(frozen=True)
class Sealed:
    """A step that exists. meta: what was saved beside the arrays."""

    step: int
    path: Path
    meta: dict[str, Any]


class HostArray:
    """An array as the host sees it at one moment, on the devices or not; on a CPU without a copy.

    It stays as it is when the devices' buffers are given to the next step.
    """

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self._pieces: Pieces = [((), array)]
        if isinstance(array, jax.Array):
            own = [shard for shard in array.addressable_shards if shard.replica_id == 0]
            whole = len(own) == 1 and own[0].data.shape == array.shape
            self._pieces = [(() if whole else shard.index, np.asarray(shard.data)) for shard in own]

    def whole(self) -> np.ndarray:
        """All of it."""
        if len(self._pieces) == 1 and self._pieces[0][0] == ():
            return np.asarray(self._pieces[0][1])
        out = np.empty(self.shape, self.dtype)
        for index, part in self._pieces:
            out[index] = part
        return out

    def description(self) -> dict[str, Any]:
        """{"shape", "dtype", "sha256"}: the digest is of its bytes in C order."""
        return {"shape": list(self.shape), "dtype": str(self.dtype), "sha256": array_digest(self.whole())}


def array_digest(array: np.ndarray) -> str:
    """sha256 of the bytes of an array in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def flat(state: Any) -> tuple[dict[str, Any], Any]:
    """({"params.layers.0.kernel": leaf}, tree). Raises UserError for a name that could leave the folder."""
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    found = {}
    for path, leaf in paths:
        name = ".".join(str(getattr(p, "key", getattr(p, "idx", getattr(p, "name", p)))) for p in path)
        if not _NAME.fullmatch(name):
            raise UserError(f"an array is named {name!r}; allowed in names: letters, digits, _ . -")
        if name in found:
            raise UserError(f"two arrays are named {name!r}; names of parts must not contain dots")
        found[name] = leaf
    return found, tree


def close(path: Path, step: int, leaves: Mapping[str, Any]) -> None:
    """Seal a step: everything below `path` goes to the disk, then the manifest does."""
    files.make_private(path)
    files.fsync_tree(path)
    seal = {"step": step, "files": files.digests(path), "leaves": dict(leaves)}
    files.write_json(path / MANIFEST, {**seal, "digest": _digest(seal)})


def read(sealed: Sealed) -> dict[str, Any]:
    """The manifest of a step. Raises CorruptStep when it is not what was written."""
    path = sealed.path / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        seal: dict[str, Any] = json.loads(text)
        as_written = files.json_text(seal)
        digest = seal.pop("digest")
    except (OSError, ValueError, KeyError, AttributeError):
        raise CorruptStep(f"checkpoint {sealed.step}: {path} was changed since it was sealed") from None
    if text != as_written or digest != _digest(seal) or seal["step"] != sealed.step:
        raise CorruptStep(f"checkpoint {sealed.step}: {path} was changed since it was sealed")
    return seal


def verify(sealed: Sealed, threads: int = files.THREADS) -> None:
    """Compare every file with the seal. Raises CorruptStep naming the first that differs. threads: as of `digests`."""
    wanted = read(sealed)["files"]
    there = files.digests(sealed.path, frozenset({MANIFEST}), threads)
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            kind = "is missing" if name not in there else "is not part of it" if name not in wanted else "was changed"
            raise CorruptStep(f"checkpoint {sealed.step}: {sealed.path / name} {kind} since it was sealed")


def meta_of(path: Path) -> dict[str, Any]:
    """What was saved beside the arrays; {} when it cannot be read: `verify` says so when the step is wanted."""
    try:
        meta: dict[str, Any] = files.read_json(path / META)
    except (OSError, ValueError):
        return {}
    return meta


def compare(saved: dict[str, Any], target: dict[str, Any], sealed: Sealed, *, partial: bool, cast: bool) -> None:
    """Raise UserError in plain words where the arrays of a step are not those that are asked for.

    partial: others may be there. cast: they may be of another type of numbers.
    """
    problems = [f"{name} is new" for name in target if name not in saved]
    problems += [] if partial else [f"{name} is no longer wanted" for name in saved if name not in target]
    retyped = 0
    for name, x in target.items():
        if name in saved:
            was, now = (tuple(saved[name]["shape"]), saved[name]["dtype"]), (tuple(x.shape), str(x.dtype))
            if was != now and not (cast and was[0] == now[0] and castable(was[1], now[1])):
                retyped += was[0] == now[0] and castable(was[1], now[1])
                problems.append(f"{name} was {was[1]}{list(was[0])} and is now {now[1]}{list(now[0])}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        hint = "; --cast converts them" if retyped == len(problems) else ""
        raise UserError(f"checkpoint {sealed.step} does not fit this model and optimizer: {problems[0]}{more}{hint}")


def castable(old: str, new: str) -> bool:
    """Both are types of floats; a count or a code in another type would be another number."""
    return all(jax.numpy.issubdtype(np.dtype(kind), np.floating) or kind == "bfloat16" for kind in (old, new))


def _digest(seal: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(seal, sort_keys=True).encode()).hexdigest()
