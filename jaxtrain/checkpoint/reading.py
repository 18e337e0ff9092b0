"""What is in a folder of sealed steps, and how a state comes back from it. Changes nothing there.

Orbax reads the arrays of one step; listing, best and verifying are ours. A step exists when its `manifest.json` does.
Layout of checkpoints/000000680/:
  state/          Orbax, one flat item {"params.layers.0.kernel": array}
  meta.json       evaluation, hook states, data schema: plain values
  manifest.json   the seal (see seal.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint import seal
from jaxtrain.checkpoint.seal import CorruptStep, Sealed
from jaxtrain.config.errors import ConfigError, UserError
from jaxtrain.parallel import processes


class SealedSteps:
    """List, verify and restore the steps in `folder`.

    metric, mode: which figure of `meta["evaluation"]` ranks steps, and whether "min" or "max" is better.
    """

    def __init__(self, folder: Path, *, metric: str, mode: str) -> None:
        self.folder = folder
        self._metric, self._sign = metric, 1.0 if mode == "min" else -1.0

    def steps(self) -> list[Sealed]:
        """All sealed steps, oldest first."""
        found = []
        for path in sorted(self.folder.glob("[0-9]*")):
            if (path / seal.MANIFEST).is_file():
                found.append(Sealed(int(path.name), path, seal.meta_of(path)))
        return found

    def latest(self) -> Sealed | None:
        """The newest sealed step."""
        return next(reversed(self.steps()), None)

    def best(self) -> Sealed | None:
        """The sealed step with the best figure; among equals the newest; None when none has a finite one."""
        ranked = [s for s in self.ranked(self.steps()) if math.isfinite(self.value(s))]
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

    def ranked(self, steps: list[Sealed]) -> list[Sealed]:
        """Best first; not-a-number and infinity last; among equals the newest first."""

        def key(sealed: Sealed) -> tuple[bool, float, int]:
            value = self.value(sealed)
            return (not math.isfinite(value), self._sign * value if math.isfinite(value) else 0.0, -sealed.step)

        return sorted(steps, key=key)

    def value(self, sealed: Sealed) -> float:
        """The figure that ranks a step; not-a-number where it has none."""
        return float((sealed.meta.get("evaluation") or {}).get(self._metric, "nan"))

    def verify(self, sealed: Sealed) -> None:
        """Compare every file with the seal. Raises CorruptStep naming the first that differs."""
        seal.verify(sealed)

    def verify_arrays(self, sealed: Sealed) -> int:
        """Verify the files, then read every array and compare it with the seal; how many there are.

        Raises CorruptStep naming the first array that is not what the devices held when it was saved.
        """
        self.verify(sealed)
        leaves = seal.read(sealed)["leaves"]
        for name, array in self.arrays(sealed, list(leaves)).items():
            wanted = leaves[name].get("sha256")
            if wanted is not None and wanted != seal.array_digest(array):
                raise CorruptStep(f"checkpoint {sealed.step}: {name} is not what was saved: it was written wrongly")
        return len(leaves)

    def arrays(self, sealed: Sealed, names: list[str]) -> dict[str, np.ndarray]:
        """Some arrays of a step as numpy, by name; the files are not verified."""
        leaves = seal.read(sealed)["leaves"]
        return _read_numpy(sealed, {n: _abstract(leaves[n]["shape"], leaves[n]["dtype"]) for n in names})

    def restore(self, sealed: Sealed, abstract: Any, *, cast: bool = False) -> Any:
        """The state of a verified step, on the devices and in the shardings of `abstract`, of its types.

        cast: arrays of another type of floats are converted.
        Raises UserError in plain words when arrays are missing, left over, or of another shape or dtype.
        """
        self.verify(sealed)
        return self._read(sealed, abstract, cast=cast)

    def restore_part(self, sealed: Sealed, abstract: Any, *, cast: bool = False) -> Any:
        """As `restore`, of the arrays in `abstract` alone; what else the step holds is not read."""
        self.verify(sealed)
        return self._read(sealed, abstract, partial=True, cast=cast)

    def _read(self, sealed: Sealed, abstract: Any, *, partial: bool = False, cast: bool = False) -> Any:
        target, tree = seal.flat(abstract)
        leaves = seal.read(sealed)["leaves"]
        seal.compare(leaves, target, sealed, partial=partial, cast=cast)
        if cast and any(leaves[name]["dtype"] != str(x.dtype) for name, x in target.items()):
            found = _read_numpy(sealed, {n: _abstract(x.shape, leaves[n]["dtype"]) for n, x in target.items()}, partial)
            cast_to = {name: found[name].astype(x.dtype) for name, x in target.items()}
            arrays = {name: processes.put(cast_to[name], x.sharding or _one_device()) for name, x in target.items()}
        elif processes.several():  # each reads for itself and keeps its part
            found = _read_numpy(sealed, target, partial)
            arrays = {name: processes.put(found[name], x.sharding) for name, x in target.items()}
        else:
            arrays = _read_placed(sealed, target, partial)
        return jax.tree.unflatten(tree, [arrays[name] for name in target])


def _read_numpy(sealed: Sealed, target: dict[str, Any], partial: bool = True) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    return _orbax(sealed, target, partial, lambda x: ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype))


def _read_placed(sealed: Sealed, target: dict[str, Any], partial: bool) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    return _orbax(
        sealed, target, partial, lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding or _one_device(), dtype=x.dtype)
    )


def _orbax(sealed: Sealed, target: dict[str, Any], partial: bool, how: Callable[[Any], Any]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone())
    with ocp.Checkpointer(handler, multiprocessing_options=alone()) as reader:
        found: dict[str, Any] = reader.restore(
            sealed.path.absolute() / seal.STATE,
            args=ocp.args.PyTreeRestore(item=target, restore_args=jax.tree.map(how, target), partial_restore=partial),
        )
    return found


def _abstract(shape: Any, dtype: str) -> Any:
    return jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))  # type: ignore[no-untyped-call]


def alone() -> Any:
    """For Orbax: this process needs no other to read or write."""
    import orbax.checkpoint as ocp

    number = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=number, active_processes={number}, barrier_sync_key_prefix=f"process-{number}"
    )


def _one_device() -> Any:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])
