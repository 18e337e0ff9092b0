"""The state a run begins with: initialised, then with weights of another run where `train.init_from` names one.

Only params and model_state are taken, those that were evaluated (the averaged ones of a run that has them); optimizer,
counters and schedule begin anew. What has the same name and shape is taken, floats of another type are converted; the
rest stays initialised and is told. Nothing that fits is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.build import Job
from jaxtrain.checkpoint import Sealed, SealedSteps, seal
from jaxtrain.config import ConfigError, load
from jaxtrain.core.metrics import best_is
from jaxtrain.core.state import State
from jaxtrain.hooks.folder import RunFolder

PARTS = ("params", "model_state")
SHOWN = 6
"""Names in a line; the others are counted."""


@dataclass(frozen=True)
class Found:
    """What a sealed step has for a model. Names begin with params. or model_state.

    taken: {part: {name: abstract array}}. shaped: "name here there" of another shape. missing: not there. unused: not
    here.
    """

    sealed: Sealed
    prefix: str
    taken: dict[str, dict[str, Any]]
    shaped: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many arrays are taken."""
        return sum(map(len, self.taken.values()))


def state(job: Job) -> State:
    """The state before the first step, on the devices. Raises ConfigError as `look` does, CorruptStep."""
    found = look(job)
    if found is None:
        return job.init()
    store, wanted = _store(found.sealed.path.parent), {part: arrays for part, arrays in found.taken.items() if arrays}
    if found.prefix:
        return job.init(store.restore_part(found.sealed, {"ema": wanted}, cast=True)["ema"])
    return job.init(store.restore_part(found.sealed, wanted, cast=True))


def lines(job: Job) -> list[str]:
    """What was taken, and what was not."""
    found = look(job)
    if found is None:
        return []
    wanted = sum(len(job.abstract_state[part]) for part in PARTS)
    text = [f"weights of {job.config.train.init_from}, step {found.sealed.step:,}: {found.count} of {wanted} arrays"]
    for title, names in (("of another shape", found.shaped), ("not there", found.missing), ("unused", found.unused)):
        if names:
            text.append(f"  {title}: {_few(names)}")
    return text


def look(job: Job) -> Found | None:
    """What `train.init_from` has for the job; None without it. Reads the manifest alone.

    Raises ConfigError when there is no sealed step, or when nothing of it fits.
    """
    path = job.config.train.init_from
    if path is None:
        return None
    sealed = _sealed(Path(path))
    there = seal.read(sealed)["leaves"]
    prefix = "ema." if any(name.startswith("ema.") for name in there) else ""
    ours = tuple(f"{prefix}{part}." for part in PARTS)
    saved = {name.removeprefix(prefix): x for name, x in there.items() if name.startswith(ours)}
    here, _ = seal.flat({part: job.abstract_state[part] for part in PARTS})
    taken: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    shaped, missing = [], []
    for name, x in here.items():
        was = saved.get(name)
        if was is None:
            missing.append(name)
        elif tuple(was["shape"]) != x.shape or not _same_kind(was["dtype"], str(x.dtype)):
            shaped.append(f"{name} {x.dtype}{list(x.shape)} (there {was['dtype']}{was['shape']})")
        else:
            part, _, key = name.partition(".")
            taken[part][key] = x
    unused = tuple(name for name in saved if name not in here)
    found = Found(sealed, prefix, taken, tuple(shaped), tuple(missing), unused)
    if not taken["params"]:
        why = f"of another shape: {_few(found.shaped)}" if shaped else f"it has {_few(tuple(saved))}"
        raise ConfigError(f"train.init_from: no array of {path!r} fits this model: {why}")
    return found


def _sealed(path: Path) -> Sealed:
    """The best step of a run folder, or the step whose own folder it is."""
    if (path / "resolved.yaml").is_file():
        evaluate = load(path / "resolved.yaml").evaluate
        mode = best_is(evaluate.metric) if evaluate.mode == "auto" else evaluate.mode
        return _store(RunFolder(path).checkpoints, evaluate.metric, mode).get("best")
    if (path / seal.MANIFEST).is_file() and path.name.isdigit():
        return _store(path.parent).get(int(path.name))
    what = "is neither a run folder nor a sealed step (RUN/checkpoints/N)" if path.exists() else "does not exist"
    raise ConfigError(f"train.init_from: {str(path)!r} {what}; `jaxtrain checkpoints RUN` lists the steps of a run")


def _store(folder: Path, metric: str = "loss", mode: str = "min") -> SealedSteps:
    return SealedSteps(folder, metric=metric, mode=mode)


def _same_kind(was: str, now: str) -> bool:
    return was == now or seal.castable(was, now)


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
