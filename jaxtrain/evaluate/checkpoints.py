"""The sealed steps of a run in words: what is there, whether it is intact, how two differ; and remove the superfluous.

Only `prune` writes, and only as the one writer of the run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator
from typing import Any

from jaxtrain.checkpoint import Checkpoints, files, inspect
from jaxtrain.checkpoint.inspect import Difference
from jaxtrain.config import load
from jaxtrain.evaluate.compare import columns
from jaxtrain.evaluate.loaded import open_store
from jaxtrain.hooks.folder import RunFolder


def table(run: RunFolder) -> str:
    """A line a sealed step, then a line a folder that was set aside."""
    config = load(run.resolved)
    store = open_store(run, config)
    rows = [["step", "sealed (UTC)", "size", f"eval/{config.evaluate.metric}", "marks"]]
    for seen in inspect.overview(store):
        value = f"{seen.value:.6g}" if math.isfinite(seen.value) else "-"
        time = seen.time.strftime("%Y-%m-%d %H:%M:%S")
        rows.append([str(seen.step), time, files.in_words(seen.size), value, ", ".join(seen.marks)])
    lines = [columns(rows) if len(rows) > 1 else _without_steps(store)]
    lines += [f"set aside: {name}: {why}" for name, why in inspect.quarantined(store).items()]
    return "\n".join(lines)


def verify(run: RunFolder) -> Iterator[tuple[str, bool]]:
    """Verify every file and array of every step: a line, and whether it is intact. Nothing is set aside."""
    store = open_store(run, load(run.resolved))
    if not store.steps():
        yield _without_steps(store), True
    yield from ((checked.words, checked.intact) for checked in inspect.check(store))


def diff(run: RunFolder, a: str | int, b: str | int) -> tuple[str, bool]:
    """Each array of two steps, each `best`, `last` or a number, and a summary; whether all of them are equal.

    Raises ConfigError for a step that is not there, CorruptStep for one whose values are needed and not intact.
    """
    store = open_store(run, load(run.resolved))
    one, two = store.get(a), store.get(b)
    found = inspect.differences(store, one, two)
    lines = [f"A: step {one.step}, B: step {two.step}"]
    lines += [columns([[each.name, _words(each)] for each in found])] if found else []
    return "\n".join([*lines, _summary(found)]), all(each.kind == "equal" for each in found)


def prune(
    run: RunFolder, *, keep_last: int | None = None, keep_best: int | None = None, dry_run: bool = False
) -> list[str]:
    """Remove the steps that retention would, with the config's figures or others; what was done, in lines.

    dry_run: only say what would go; writes nothing.
    Raises ConfigError while another process writes in the run; CorruptStep, and removes nothing, where the newest step
    is not intact.
    """
    store = open_store(run, load(run.resolved), keep_last=keep_last, keep_best=keep_best)
    with contextlib.nullcontext() if dry_run else run.writing():
        steps = store.steps()
        sizes = {sealed.step: files.size_of(sealed.path) for sealed in store.superfluous()}
        if not dry_run:
            store.prune()
        elif sizes:
            store.verify(steps[-1])
    if not sizes:
        return [f"nothing to remove: {_count(steps, 'step')}, all kept" if steps else _without_steps(store)]
    done, freed = ("would be removed", "would be freed") if dry_run else ("removed", "freed")
    lines = [f"step {step}: {done}, {files.in_words(size)}" for step, size in sizes.items()]
    stay = len(steps) - len(sizes)
    return [*lines, f"{_count(sizes, 'step')} {done}, {files.in_words(sum(sizes.values()))} {freed}; {stay} kept"]


def _words(each: Difference) -> str:
    if each.kind != "differs":
        return each.kind
    nans = f"{each.nans} of {each.size} differences are not a number"
    if each.nans == each.size:
        return f"differs: {nans}"
    figures = f"differs: largest absolute difference {each.largest:.6g}, relative norm {each.relative:.6g}"
    return f"{figures}; {nans}" if each.nans else figures


def _summary(found: list[Difference]) -> str:
    kinds = [each.kind for each in found]
    parts = [f"{kinds.count('equal')} equal", f"{kinds.count('differs')} differ"]
    parts += [f"{kinds.count(k)} {k}" for k in ("only in A", "only in B") if k in kinds]
    parts += [f"{kinds.count(k)} of another shape or dtype" for k in ("other shape or dtype",) if k in kinds]
    return f"{_count(found, 'array')}: {', '.join(parts)}"


def _count(things: Collection[Any], name: str) -> str:
    number = len(things)
    return f"{number} {name}{'' if number == 1 else 's'}"


def _without_steps(store: Checkpoints) -> str:
    return f"no sealed steps in {store.folder}"
