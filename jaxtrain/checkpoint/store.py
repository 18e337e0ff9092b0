"""A folder of sealed steps.

Orbax writes the arrays of one step; listing, sealing, verifying, best and retention are ours. A step exists when its
`manifest.json` does: it is written last, after everything it lists is synced. Layout of checkpoints/000000680/:
  state/          Orbax, one flat item {"params.layers.0.kernel": array}
  meta.json       evaluation, hook states, data schema: plain values
  manifest.json   the seal: size and sha256 of every other file, shape and dtype of every array
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint import files
from jaxtrain.config.errors import ConfigError, NeedsPerson, UserError
from jaxtrain.parallel import processes

log = logging.getLogger("jaxtrain")

_MANIFEST, _META, _STATE = "manifest.json", "meta.json", "state"
_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


class CorruptStep(UserError):
    """A sealed step whose files are not what was sealed."""

    exit_code = NeedsPerson.exit_code


@dataclass(frozen=True)
class Sealed:
    """A step that exists. meta: what was saved beside the arrays."""

    step: int
    path: Path
    meta: dict[str, Any]


class Checkpoints:
    """Save in the background, seal, list, restore, retain. One writer at a time.

    metric, mode: which figure of `meta["evaluation"]` ranks steps, and whether "min" or "max" is better.
    """

    def __init__(self, folder: Path, *, metric: str, mode: str, keep_last: int = 2, keep_best: int = 1) -> None:
        self.folder = folder
        self._metric, self._sign = metric, 1.0 if mode == "min" else -1.0
        self._keep_last, self._keep_best = keep_last, keep_best
        self._saving: threading.Thread | None = None
        self._error: BaseException | None = None
        self._orbax: Any = None

    # ------------------------------------------------------------ reading

    def steps(self) -> list[Sealed]:
        """All sealed steps, oldest first."""
        found = []
        for path in sorted(self.folder.glob("[0-9]*")):
            if (path / _MANIFEST).is_file():
                found.append(Sealed(int(path.name), path, _meta(path)))
        return found

    def latest(self) -> Sealed | None:
        """The newest sealed step."""
        return next(reversed(self.steps()), None)

    def best(self) -> Sealed | None:
        """The sealed step with the best figure; among equals the newest; None when none has a finite one."""
        ranked = [s for s in self._ranked(self.steps()) if math.isfinite(self._value(s))]
        return ranked[0] if ranked else None

    def get(self, which: str | int) -> Sealed:
        """`best`, `last` or a step number. Raises UserError naming what is there."""
        steps = self.steps()
        if not steps:
            raise UserError(f"{self.folder}: no sealed checkpoint; the run ended before its first save")
        if which == "last":
            return steps[-1]
        if which == "best":
            return self.best() or steps[-1]
        for sealed in steps:
            if str(sealed.step) == str(which):
                return sealed
        there = ", ".join(str(s.step) for s in steps)
        raise ConfigError(f"checkpoint {which!r} is not there; allowed: best, last, {there}")

    def verify(self, sealed: Sealed) -> None:
        """Compare every file with the seal. Raises CorruptStep naming the first that differs."""
        wanted = _seal(sealed)["files"]
        there = files.digests(sealed.path, frozenset({_MANIFEST}))
        for name in sorted(wanted.keys() | there.keys()):
            if wanted.get(name) != there.get(name):
                kind = (
                    "is missing" if name not in there else "is not part of it" if name not in wanted else "was changed"
                )
                raise CorruptStep(f"checkpoint {sealed.step}: {sealed.path / name} {kind} since it was sealed")

    def restore(self, sealed: Sealed, abstract: Any) -> Any:
        """The state of a verified step, on the devices and in the shardings of `abstract`, of its types.

        Raises UserError in plain words when arrays are missing, left over, or of another shape or dtype.
        """
        self.verify(sealed)
        return self._read(sealed, abstract, partial=False)

    def restore_part(self, sealed: Sealed, abstract: Any) -> Any:
        """As `restore`, of the arrays in `abstract` alone; what else the step holds is not read."""
        self.verify(sealed)
        return self._read(sealed, abstract, partial=True)

    def _read(self, sealed: Sealed, abstract: Any, *, partial: bool) -> Any:
        import orbax.checkpoint as ocp

        target, tree = _flat(abstract)
        _compare(_seal(sealed)["leaves"], target, sealed, partial)
        if processes.several():  # each reads for itself and keeps its part
            restore_args = jax.tree.map(lambda x: ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype), target)
        else:
            restore_args = jax.tree.map(
                lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding or _one_device(), dtype=x.dtype), target
            )
        alone = _alone()
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
            arrays = reader.restore(
                sealed.path.absolute() / _STATE,
                args=ocp.args.PyTreeRestore(item=target, restore_args=restore_args, partial_restore=partial),
            )
        if processes.several():
            arrays = {name: processes.put(arrays[name], x.sharding) for name, x in target.items()}
        return jax.tree.unflatten(tree, [arrays[name] for name in target])

    def restore_newest(
        self, abstract: Any, note: Callable[[str], None] = lambda why: None
    ) -> tuple[Sealed, Any] | None:
        """The newest step that verifies; a corrupt one is set aside and the next older is taken. None without steps.

        note: told why a step is set aside, before it is.
        Raises NeedsPerson when steps existed and none verifies: a run never starts silently from scratch.
        """
        found = self._newest_intact(note) if processes.is_first() else None
        step = processes.agree(found.step if found else None)
        if step is None:
            return None
        sealed = found or self.get(step)  # the first process has verified it
        return sealed, self._read(sealed, abstract, partial=False)

    def _newest_intact(self, note: Callable[[str], None]) -> Sealed | None:
        steps = self.steps()
        for sealed in reversed(steps):
            try:
                self.verify(sealed)
                return sealed
            except CorruptStep as error:
                aside = self.folder / f".quarantine-{sealed.path.name}"
                note(str(error))
                log.warning("%s; set aside as %s, taking the next older", error, aside.name)
                shutil.rmtree(aside, ignore_errors=True)
                sealed.path.rename(aside)
        if steps:
            raise NeedsPerson(f"{self.folder}: none of {len(steps)} checkpoints is intact; train again or bring a copy")
        return None

    # ------------------------------------------------------------ writing

    def sweep(self) -> None:
        """Remove what a killed process left: unsealed steps, half-removed ones."""
        if not processes.is_first():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            unsealed = path.name.isdigit() and not (path / _MANIFEST).is_file()
            if unsealed or path.name.startswith(".trash-"):
                log.info("removing %s, left over by a killed process", path)
                shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Start saving. Returns when the arrays are copied; an error of the save before surfaces here."""
        self.wait()
        path = self.folder / f"{step:09d}"
        arrays, _ = _flat(state)
        leaves = {name: {"shape": list(x.shape), "dtype": str(x.dtype)} for name, x in arrays.items()}
        arrays = {name: processes.whole(x) for name, x in arrays.items()}
        if not processes.is_first():
            return
        try:
            if (path / _MANIFEST).is_file():
                return
            if path.exists():
                shutil.rmtree(path)
            path.mkdir(parents=True)
            self._checkpointer().save(path.absolute() / _STATE, arrays)
        except OSError as error:
            self._error = error
            self.poll()
        self._saving = threading.Thread(
            target=self._finish, args=(step, path, meta, leaves), name="jaxtrain-seal", daemon=True
        )
        self._saving.start()

    def poll(self) -> None:
        """Raise the error of a save that failed, if one did."""
        if self._error is not None:
            error, self._error = self._error, None
            raise NeedsPerson(f"saving into {self.folder} failed: {type(error).__name__}: {error}") from error

    def wait(self) -> None:
        """Until the save in progress is sealed."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        self.poll()

    def close(self) -> None:
        """Wait, then let Orbax's threads go."""
        try:
            self.wait()
        finally:
            if self._orbax is not None:
                self._orbax.close()
                self._orbax = None

    def _finish(self, step: int, path: Path, meta: dict[str, Any], leaves: dict[str, Any]) -> None:
        try:
            self._checkpointer().wait_until_finished()
            files.write_json(path / _META, meta)
            files.fsync_tree(path)
            seal = {"step": step, "files": files.digests(path), "leaves": leaves}
            files.write_json(path / _MANIFEST, {**seal, "digest": _digest(seal)})
            self._retain()
        except BaseException as error:  # surfaces in the caller's thread, at the next poll
            self._error = error

    def _retain(self) -> None:
        steps = self.steps()
        kept = {s.step for s in steps[-self._keep_last :]}
        kept |= {s.step for s in self._ranked(steps)[: self._keep_best] if math.isfinite(self._value(s))}
        for sealed in steps:
            if sealed.step not in kept:
                trash = self.folder / f".trash-{sealed.path.name}"
                sealed.path.rename(trash)  # one rename: a step is there whole or not at all
                shutil.rmtree(trash, ignore_errors=True)

    def _ranked(self, steps: list[Sealed]) -> list[Sealed]:
        """Best first; not-a-number and infinity last; among equals the newest first."""

        def key(sealed: Sealed) -> tuple[bool, float, int]:
            value = self._value(sealed)
            return (not math.isfinite(value), self._sign * value if math.isfinite(value) else 0.0, -sealed.step)

        return sorted(steps, key=key)

    def _value(self, sealed: Sealed) -> float:
        return float((sealed.meta.get("evaluation") or {}).get(self._metric, "nan"))

    def _checkpointer(self) -> Any:
        if self._orbax is None:
            import orbax.checkpoint as ocp

            self._orbax = ocp.StandardCheckpointer(multiprocessing_options=_alone())
        return self._orbax


def _alone() -> Any:
    """For Orbax: this process needs no other to read or write."""
    import orbax.checkpoint as ocp

    number = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=number, active_processes={number}, barrier_sync_key_prefix=f"process-{number}"
    )


def _flat(state: Any) -> tuple[dict[str, Any], Any]:
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    flat = {}
    for path, leaf in paths:
        name = ".".join(str(getattr(p, "key", getattr(p, "idx", getattr(p, "name", p)))) for p in path)
        if not _NAME.fullmatch(name):
            raise UserError(f"an array is named {name!r}; allowed in names: letters, digits, _ . -")
        if name in flat:
            raise UserError(f"two arrays are named {name!r}; names of parts must not contain dots")
        flat[name] = leaf
    return flat, tree


def _meta(path: Path) -> dict[str, Any]:
    """What was saved beside the arrays; {} when it cannot be read: `verify` says so when the step is wanted."""
    try:
        meta: dict[str, Any] = files.read_json(path / _META)
    except (OSError, ValueError):
        return {}
    return meta


def _seal(sealed: Sealed) -> dict[str, Any]:
    """The manifest of a step. Raises CorruptStep when it is not what was written."""
    path = sealed.path / _MANIFEST
    try:
        seal: dict[str, Any] = files.read_json(path)
        digest = seal.pop("digest")
    except (OSError, ValueError, KeyError, AttributeError):
        raise CorruptStep(f"checkpoint {sealed.step}: {path} was changed since it was sealed") from None
    if digest != _digest(seal) or seal["step"] != sealed.step:
        raise CorruptStep(f"checkpoint {sealed.step}: {path} was changed since it was sealed")
    return seal


def _digest(seal: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(seal, sort_keys=True).encode()).hexdigest()


def _one_device() -> Any:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _compare(saved: dict[str, Any], target: dict[str, Any], sealed: Sealed, partial: bool) -> None:
    problems = [f"{name} is new" for name in target if name not in saved]
    problems += [] if partial else [f"{name} is no longer wanted" for name in saved if name not in target]
    for name, x in target.items():
        if name in saved:
            was = (tuple(saved[name]["shape"]), saved[name]["dtype"])
            now = (tuple(x.shape), str(x.dtype))
            if was != now:
                problems.append(f"{name} was {was[1]}{list(was[0])} and is now {now[1]}{list(now[0])}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"checkpoint {sealed.step} does not fit this model and optimizer: {problems[0]}{more}")
