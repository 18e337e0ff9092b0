"""One run: Job -> fit -> sealed checkpoints -> test of the best step -> report. Small: it joins the rooms.

    train(config, **overrides)   resume(run, **overrides)   load_run(run)   Trainer(config, model=, loss=, data=)
Overrides are dotted: `train("digits", **{"optimizer.peak_lr": 1e-3})`.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain import initial, rollback
from jaxtrain.build import Job, build
from jaxtrain.checkpoint import Sealed
from jaxtrain.checkpoint.files import write_json, write_text
from jaxtrain.checkpoint.mirror import check_apart
from jaxtrain.checkpoint.store import NothingIntact
from jaxtrain.config import ConfigError, NeedsPerson, RunConfig, UserError, dump, load
from jaxtrain.config.errors import choices
from jaxtrain.core.state import State
from jaxtrain.data.dataset import other_parts
from jaxtrain.data.sources import ArraySource
from jaxtrain.hooks.console import waiting
from jaxtrain.hooks.folder import ROOT, RunFolder, find_run, new_folder
from jaxtrain.hooks.ledger import Ledger
from jaxtrain.loop import Stop
from jaxtrain.parallel import processes
from jaxtrain.plan import fitting
from jaxtrain.resuming import ENDED, absolute_paths, changes, check_resumable, tell_changes, unfinished
from jaxtrain.session import Session, open_store
from jaxtrain.targets import GIVEN
from jaxtrain.words import environment

log = logging.getLogger("jaxtrain")

Data = ArraySource | Mapping[str, Any] | tuple[Any, Any]


class Run:
    """A run that has ended, or was read from its folder. `close()` (or `with`) gives the device memory back.

    state: the last State (None for a run that was only read). result: best step and test figures.
    """

    def __init__(self, folder: RunFolder, stop: Stop, result: dict[str, Any], session: Session | None = None) -> None:
        self.folder, self.stop, self.result = folder, stop, result
        self._session = session

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def exit_code(self) -> int:
        """0 done, 75 preempted, 78 needs a person, 130 interrupted."""
        return self.stop.code

    @property
    def state(self) -> State | None:
        """The state after the last step."""
        return self._session.state if self._session else None

    @property
    def job(self) -> Job | None:
        """What was run."""
        return self._session.job if self._session else None

    @property
    def test(self) -> dict[str, float]:
        """The figures on the test split, read once, on the best sealed step."""
        return dict(self.result.get("test", {}))

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return self.folder.rows()

    def close(self) -> None:
        """Give the device memory back; the files stay."""
        if self._session is not None:
            self._session.release()
            self._session = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def train(
    config: str | Path | Mapping[str, Any] | RunConfig = "digits",
    *,
    model: Any = None,
    loss: Callable[..., Any] | None = None,
    data: Data | None = None,
    run_dir: str | Path | None = None,
    overwrite: bool = False,
    auto_resume: bool = False,
    allow_fresh: bool = False,
    quiet: bool = False,
    **overrides: Any,
) -> Run:
    """Train what `config` says (a path, a shipped name, a dict), from the first step to the test of the best one.

    run_dir: the run folder; else runs/<name>/<UTC id>. A used one is refused, unless `overwrite` (its content goes)
    or `auto_resume` (it is continued; without run_dir the newest unfinished run of this very config is).
    allow_fresh: of a run whose checkpoints are all corrupt or gone, `auto_resume` begins anew.
    Raises ConfigError (bad input) and NeedsPerson (nothing finite, nothing intact).
    """
    ledger = Ledger()
    processes.start()
    asked = load(config, overrides.items())
    parsed = absolute_paths(_named(asked, model, loss))
    plan = _plan(parsed, run_dir, overwrite, auto_resume, allow_fresh) if processes.is_first() else None
    what, where, changed = processes.agree(plan)
    if what == "ended":
        return load_run(where)
    if what == "resume":
        try:
            return resume(where, model=model, loss=loss, data=data, quiet=quiet, **changed)
        except NothingIntact as error:
            if not allow_fresh:
                raise
            log.warning("%s: beginning anew", error)
    check_apart(parsed.checkpoint.mirror, parsed.name, Path(where) if where else ROOT / parsed.name / "id")
    with ledger.phase("init"), waiting("building", quiet):
        job, parsed = fitting.fitted(build(parsed, model=model, loss=loss, source=_source(data)))
        initial.look(job)
    if processes.is_first():
        where = str((RunFolder(Path(where)) if where else new_folder(parsed.name)).path)
        RunFolder(Path(where)).create()
    folder = RunFolder(Path(processes.agree(where)))
    with _writing(folder):
        if processes.is_first():
            if folder.is_used():
                folder.clear(all_of_it=overwrite)
            write_text(folder.config, dump(asked))
            write_text(folder.resolved, dump(parsed))
            write_json(folder.env, environment(job))
        return _run(Session(job, folder, quiet, ledger))


def resume(
    run: str | Path,
    *,
    model: Any = None,
    loss: Callable[..., Any] | None = None,
    data: Data | None = None,
    cast: bool = False,
    quiet: bool = False,
    **overrides: Any,
) -> Run:
    """Continue a run from its newest intact checkpoint, as if it had never stopped; a finished one can be extended.

    cast: saved arrays of floats may be converted to another type, as a change of optimizer.moment_dtype asks for.
    Raises ConfigError for a change that would make it another run (data, seed, batch, model), saying why.
    """
    processes.start()
    folder = RunFolder(Path(processes.agree(str(find_run(run).path) if processes.is_first() else None)))
    with _writing(folder):
        return _resume(folder, {"model": model, "loss": loss, "source": _source(data)}, cast, quiet, overrides)


def _resume(folder: RunFolder, given: dict[str, Any], cast: bool, quiet: bool, overrides: dict[str, Any]) -> Run:
    ledger, before = Ledger(), load(folder.resolved)
    after = absolute_paths(load(before, overrides.items()))
    changed = changes(before, after)
    check_resumable(changed, cast=cast)
    if "checkpoint.mirror" in changed:  # one that was resumed has its old place in its config
        check_apart(after.checkpoint.mirror, after.name, folder.path)
    with ledger.phase("init"), waiting("building", quiet):
        job = build(after, **given)
    session = Session(job, folder, quiet, ledger)
    left = rollback.left_behind(folder)
    session.store.leave(left)
    with ledger.phase("init"), waiting("restoring", quiet):
        restored = session.store.restore_newest(
            job.abstract_state, folder.told, cast=cast, wanted=lambda s: not left(s)
        )
    if restored is None:
        if processes.agree(folder.had_steps()):
            raise NothingIntact(f"{folder.path}: its checkpoints are gone")
        raise NeedsPerson(f"{folder.path}: no checkpoint to resume from; start anew with jaxtrain train --overwrite")
    sealed, state = restored
    other = other_parts(sealed.meta["data"], job.dataset.fingerprint())
    if other:
        raise ConfigError(
            f"the data of {folder.path} has changed since step {sealed.step} was saved ({other}); bring it back "
            "(arrays given in Python: jt.Trainer(config, data=...).resume(run)), or train anew"
        )
    # Killed after the last save: what is missing is the test of the best step, and the report.
    untested = sealed.step == job.steps.total and "train.duration" not in changed
    untested = processes.agree(untested and not folder.result.exists())
    if sealed.step >= job.steps.total and not untested:
        stop = Stop("done", f"step {sealed.step} of {job.steps.total} is reached; extend it: --train.duration=...")
        return Run(folder, stop, folder.read_result())
    status = folder.read_status()
    ended = status.get("state") in ("done", *ENDED)
    ledger.go_on(status.get("time", {}), sealed.meta.get("time", {}), ended=ended)
    tell_changes(changed, session.console)
    if processes.is_first():
        folder.result.unlink(missing_ok=True)  # it spoke of the shorter run
        folder.truncate(sealed.step + untested, job.steps.log_every, job.steps.evaluate_every)
        folder.note("resume", step=sealed.step, changes={k: list(v) for k, v in changed.items()})
        write_text(folder.resolved, dump(after))
    return _run(session, sealed, state)


def load_run(run: str | Path) -> Run:
    """A run as its folder tells it: `path`, `result`, `metrics()`, `test`."""
    folder = find_run(run)
    status = folder.read_status()
    stop = Stop(status.get("state", "unknown"), status.get("reason", ""))
    return Run(folder, stop, folder.read_result())


class Trainer:
    """Your own model, loss or arrays through the same steps as the command.

    model: an nnx.Module, or a function rngs -> nnx.Module (then train.seed initialises it).
    loss: loss(model, batch) -> scalar, or (sum, count, {name: sum}) for exact means over `batch["mask"]`.
    data: (inputs, targets), or {"inputs", "targets", "weights", "split"}; else the config's.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | RunConfig | None = None,
        *,
        model: Any = None,
        loss: Callable[..., Any] | None = None,
        data: Data | None = None,
        **overrides: Any,
    ) -> None:
        self.config = load({} if config is None else config, overrides.items())
        self._given = {"model": model, "loss": loss, "data": data}

    def fit(self, **options: Any) -> Run:
        """Train; options as in `train`: run_dir, overwrite, auto_resume, quiet."""
        return train(self.config, **self._given, **options)

    def resume(self, run: str | Path, **overrides: Any) -> Run:
        """Continue a run that this trainer began."""
        return resume(run, **self._given, **overrides)


def dry_run(config: Any, **options: Any) -> str:
    """Two steps through training, evaluation, saving, restoring and report, in a folder that is then removed."""
    with tempfile.TemporaryDirectory(prefix="jaxtrain-dry-run-") as place:
        short = load(config, [("train.duration", 2), ("early_stopping.patience", 0), ("checkpoint.mirror", None)])
        with train(short, run_dir=Path(place) / "run", **options) as run:
            job, state = run.job, run.state
            assert job is not None
            assert state is not None
            store = open_store(job, run.folder)
            _, restored = store.restore_newest(job.abstract_state) or (None, None)
            store.close()
            same = jax.tree.map(
                lambda a, b: np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True), state, restored
            )
            if not all(jax.tree.leaves(same)):
                raise UserError("the restored state differs from the saved one")
            if not run.folder.report.exists():
                raise UserError("the report was not written")
            count = len(jax.tree.leaves(state))
    return f"dry run passed: 2 steps, evaluation, save, restore ({count} arrays equal), report; nothing is left behind"


def _plan(
    parsed: RunConfig, run_dir: str | Path | None, overwrite: bool, auto_resume: bool, allow_fresh: bool
) -> tuple[str, str | None, dict[str, Any]]:
    """What a call of `train` does: ("ended" | "resume" | "train", the run folder, changes of a resumed run).

    A used folder that is to be trained in is emptied. Raises ConfigError where that was not asked for, NothingIntact
    where checkpoints are gone.
    """
    folder = RunFolder(Path(run_dir)) if run_dir else None
    if auto_resume:
        there = folder if folder and folder.is_used() else None if folder else unfinished(parsed)
        in_mirror = there and parsed.checkpoint.mirror is not None and there.had_steps()
        if there and (in_mirror or there.newest_sealed() is not None):
            # What is asked for now and differs from then is a change like any other: told, or refused.
            asked_now = {key: now for key, (_, now) in changes(load(there.resolved), parsed).items()}
            if not asked_now and there.read_status().get("state") in ENDED:
                return "ended", str(there.path), {}  # going on after an early stop would be another run
            return "resume", str(there.path), asked_now
        if there and there.had_steps() and not allow_fresh:
            raise NothingIntact(f"{there.path}: its checkpoints are gone")
        if there:  # it was stopped before its first save: nothing is lost when it begins anew in its place
            return "train", str(there.path), {}
    if folder and folder.is_used() and not overwrite:
        raise ConfigError(
            f"run folder {str(folder.path)!r} is used (state {folder.read_status().get('state', 'unknown')}); continue "
            f"with: jaxtrain resume {folder.path}, or --resume=auto; start anew with --overwrite"
        )
    return "train", str(folder.path) if folder else None, {}


@contextlib.contextmanager
def _writing(folder: RunFolder) -> Iterator[None]:
    """The first process alone writes, and alone holds the lock."""
    with folder.writing() if processes.is_first() else contextlib.nullcontext():
        yield


def _run(session: Session, sealed: Sealed | None = None, state: State | None = None) -> Run:
    if processes.is_first():  # before the first step, not at the first save
        session.store.check_space(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(session.job.abstract_state)))
    stop, result = session.run(sealed, state)
    return Run(session.folder, stop, result, session)


def _source(data: Data | None) -> ArraySource | None:
    if data is None or isinstance(data, ArraySource):
        return data
    parts: Any = data if isinstance(data, Mapping) else dict(zip(("inputs", "targets"), data, strict=True))
    known = ("inputs", "targets", "weights", "split")
    for name in parts:
        if name not in known:
            raise ConfigError(f"data: {name!r} is no array of rows; {choices(name, known)}; keys are dotted")
    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in parts.items()}
    return ArraySource("data", **arrays)


def _named(config: RunConfig, model: Any, loss: Any) -> RunConfig:
    """The config of a run whose model or loss was given in Python says so, by name."""
    if isinstance(model, Mapping):
        raise ConfigError("model: an nnx.Module or a function rngs -> module is taken; keys are dotted: 'model.kind'")
    changed: list[tuple[str, Any]] = []
    for section, given in (("model", model), ("objective", loss)):
        if given is not None:
            name = getattr(given, "__qualname__", type(given).__name__)
            changed += [(f"{section}.kind", "custom"), (f"{section}.target", f"{GIVEN}:{name}")]
    return load(config, changed) if changed else config
