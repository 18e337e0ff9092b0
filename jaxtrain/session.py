"""One process's part of a run: compile, fit, seal, test the best step once, report; and give everything back."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import jax

from jaxtrain import diagnose, dispatch, initial, rollback
from jaxtrain.build import Job, config_digest
from jaxtrain.checkpoint import Checkpoints, Sealed
from jaxtrain.checkpoint.files import write_json
from jaxtrain.config import NeedsPerson, UserError
from jaxtrain.config.durations import to_seconds
from jaxtrain.core.state import State, weights_for_evaluation
from jaxtrain.data import feed
from jaxtrain.data.order import sequential_rows
from jaxtrain.hardware import compile_cache, peak
from jaxtrain.hooks.console import Console
from jaxtrain.hooks.control import (
    Agreed,
    CheckSaves,
    EarlyStopping,
    Evaluator,
    SaveClock,
    Saver,
    Signals,
    TimeBudget,
)
from jaxtrain.hooks.crash import CrashFolder, Reached
from jaxtrain.hooks.folder import RunFolder, strict
from jaxtrain.hooks.guarding import LossSpike, NameSkipped, SkipLimit
from jaxtrain.hooks.ledger import Ledger
from jaxtrain.hooks.watchdog import Watchdog
from jaxtrain.hooks.writers import Clock, Jsonl, RunLog, Status, TensorBoard
from jaxtrain.loop import Evaluation, Hook, Rollback, Stop, evaluate, fit
from jaxtrain.models import summary
from jaxtrain.parallel import processes
from jaxtrain.plan import fitting
from jaxtrain.report import confusion_image, save_wrong_samples, training_samples, write_report
from jaxtrain.sentinel import Sentinel
from jaxtrain.words import closing_lines, flat_config, opening_lines, versions

log = logging.getLogger("jaxtrain")


class Session:
    """One process's part of a run."""

    def __init__(self, job: Job, folder: RunFolder, quiet: bool, ledger: Ledger) -> None:
        self.job, self.folder, self.ledger = job, folder, ledger
        self.store = open_store(job, folder)
        metric, mode = job.config.evaluate.metric, job.mode
        self.console = Console(metric, mode, quiet=quiet or not processes.is_first())
        ledger.waited = self._waited
        self._clock = Clock(job.config.train.global_batch_size, self._waited)
        self._rows = Jsonl(folder, job.steps.per_epoch, self._clock)
        self.state: State | None = None
        self._offset = 0
        self._reached = Reached()
        self._crash = CrashFolder(folder.crash, jax.process_index(), self._about)
        stall = to_seconds(job.config.guard.stall_limit)
        self._watchdog = Watchdog(stall, self._stalled) if stall else None
        self._feeder: feed.Timed | None = None
        self._many: dispatch.Many | None = None
        self._eval_batches: dict[str, list[Any]] = {}

    def run(self, sealed: Sealed | None = None, state: State | None = None) -> tuple[Stop, dict[str, Any]]:
        """Fit from the first step, or from `sealed`; then test the best step and report."""
        job, folder, console = self.job, self.folder, self.console
        begun = time.monotonic()
        first = sealed.step if sealed else 0
        signals = Signals(console.notice)
        periods = (job.steps.save_every, job.steps.keep_every)
        saver = Saver(periods, job.steps.total, job.config.evaluate.metric, job.mode)
        hooks, board = self._hooks(saver, signals)
        self._untouched = {type(hook).__name__: hook.state_dict() for hook in hooks}
        self._give_back(hooks, sealed)
        log_file = RunLog(folder) if processes.is_first() else None
        stop = Stop("failed", "an error")
        result: dict[str, Any] = {}
        self._crash.open()
        signals.install()
        console.open()
        try:
            self.store.sweep()
            for text in [*opening_lines(job, first), *([] if state else initial.lines(job))]:
                console.line(text)
            console.plan(job.steps.total, job.steps.per_epoch, job.config.train.global_batch_size)
            if log_file:
                log_file.text(summary.table(job.module.params))
            with self._phase("compiling", "compile", told=True, hint=self._first_time()):
                begun_compiling = time.monotonic()
                job.compile()
                fitting.check(job, console.line)
                compile_cache.remember(self._program, time.monotonic() - begun_compiling)
                with self.ledger.phase("init"):
                    self._take(initial.state(job) if state is None else state)
                    self._feeder = feed.Timed(job.feeder())
            with self._phase("choosing the steps a dispatch", "init"):
                self._many = dispatch.kept(job, folder, self.state or {}, self._feeder, job.steps.total - first)
            with self._phase("measuring what the device can do", "init"):
                self._clock.knows(job.model_flops, peak.peak(job.devices, job.mesh.size))
            stop = (None if processes.several() else signals.pending()) or self._train(hooks, saver, first)
            with self._phase("sealing the last checkpoint", "save"):
                self.store.wait()
                processes.agree("sealed")
            if stop.code == 0:
                stop, result = self._finish(stop, saver, board, begun)
            return stop, result
        except BaseException as error:
            stop = Stop("failed", f"{type(error).__name__}: {error}".splitlines()[0])
            lost = processes.peer_failed(error)
            if lost is not None:
                stop = Stop("failed", str(lost), lost.exit_code)
            elif isinstance(error, Exception) and not isinstance(error, UserError):
                error.add_note(f"crash report: {self._crash.write(stop.reason, error)}")
            self.release()
            if lost is not None:
                raise lost from error
            raise
        finally:
            board.finish()
            for hook in hooks:
                hook.close(stop)
            self._report()
            self.store.close()
            signals.restore()
            self._crash.close()
            if log_file:
                log_file.close()
            console.shut()

    @property
    def _program(self) -> str:
        """What decides how long compiling takes."""
        return f"{config_digest(self.job.config)} {self.job.devices.kind} {self.job.mesh.size} jax {jax.__version__}"

    def _first_time(self) -> str:
        seconds = compile_cache.last_time(self._program)
        return "" if seconds is None else f" (first time {seconds:.1f} s)"

    @contextlib.contextmanager
    def _phase(self, name: str, share: str, *, told: bool = False, hint: str = "") -> Iterator[None]:
        """A phase of the console and of the ledger."""
        with self.ledger.phase(share), self.console.phase(name, told, hint):
            yield

    def _waited(self) -> float:
        return self._feeder.waited if self._feeder else 0.0

    def release(self) -> None:
        """Delete what this session holds on the devices."""
        for tree in (self.state, self._eval_batches):
            for leaf in jax.tree.leaves(tree):
                if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                    leaf.delete()
        if self._feeder is not None:
            self._feeder.close()
        self.state, self._feeder, self._eval_batches = None, None, {}

    def _take(self, state: State) -> None:
        """The state to go on from; where the journal says so, past batches that did harm."""
        self.state = rollback.continued(state, self.folder)
        self._offset = int(self.state["data_offset"])

    def _give_back(self, hooks: list[Hook], sealed: Sealed | None) -> None:
        """The hooks as they were at a sealed step, or before the first."""
        known = sealed.meta["hooks"] if sealed else self._untouched
        for hook in hooks:
            if type(hook).__name__ in known:
                hook.load_state_dict(known[type(hook).__name__])

    def _train(self, hooks: list[Hook], saver: Saver, first: int) -> Stop:
        """Fit to a stop, going back as often as `guard.max_rollbacks` allows."""
        while isinstance(end := self._fit(hooks, saver, first), Rollback):
            with self.ledger.phase("save"):
                self.store.wait()
            upto = rollback.before(self.store, end.first)
            count, most = rollback.in_a_row(self.folder, upto or 0), self.job.config.guard.max_rollbacks
            why = end.reason
            if processes.is_first():
                place = self._crash.place()
                assert self.state is not None
                why += f"; {diagnose.cause(self.job, self.state, end.first - 1 + self._offset, place)}"
            if count > most:
                if processes.is_first():
                    self.folder.note(rollback.GAVE_UP, first=end.first, last=end.last, why=why)
                tried = f"after {most} rollback{'s' if most != 1 else ''}" if most else "guard.max_rollbacks is 0"
                hint = "look at the data, lower optimizer.peak_lr, or see where it starts with --eager 3"
                return Stop("failed", f"{why}; {tried}; {hint}", NeedsPerson.exit_code)
            first = self._go_back(end, upto, why, hooks)
        return end

    def _go_back(self, back: Rollback, upto: int | None, why: str, hooks: list[Hook]) -> int:
        """To the newest intact sealed step up to `upto`, or before the first one; the step it is now."""
        job, folder, seen = self.job, self.folder, self._offset + back.last
        for leaf in jax.tree.leaves(self.state):  # the devices need not hold two states
            leaf.delete()
        with self.ledger.phase("init"):
            found = None if upto is None else self._restore(upto)
            sealed, state = found or (None, initial.state(job))
        self.ledger.back_to(sealed.meta.get("time", {}) if sealed else {})
        step = sealed.step if sealed else 0
        if processes.is_first():
            rollback.note(folder, back, step, seen - step, why)
            self.store.leave(rollback.left_behind(folder))
            folder.truncate(step, job.steps.log_every, job.steps.evaluate_every)
        self._take(state)
        self._give_back(hooks, sealed)
        log.warning("step %d: %s; back to step %d, and on past the batches up to there", back.last, why, step)
        return step

    def _restore(self, upto: int) -> Any:
        """The newest intact step up to this one."""
        return self.store.restore_newest(self.job.abstract_state, self.folder.told, wanted=lambda s: s.step <= upto)

    def _name_rows(self, state: State, first: int, last: int) -> str:
        """The rows of the batches of these steps that are not finite, in words."""
        return diagnose.named(self.job, state, range(first - 1 + self._offset, last + self._offset))

    def _about(self) -> dict[str, Any]:
        """What a crash report says of the run."""
        step = self._reached.step
        ids = self.job.host_batches()(max(step - 1, 0) + self._offset)["ids"]
        return {"step": step, "ids": ids.tolist(), "config": config_digest(self.job.config), "versions": versions()}

    def _stalled(self, why: str) -> str:
        if processes.is_first():
            self.folder.write_status(state="failed", reason=why)
        return self._crash.write(why)

    def _fit(self, hooks: list[Hook], saver: Saver, first: int) -> Stop | Rollback:
        job, state = self.job, self.state
        assert state is not None
        assert self._feeder is not None

        def save(step: int, state: State) -> None:
            meta = {
                "evaluation": strict(saver.evaluation_at(step)),
                "hooks": {type(h).__name__: h.state_dict() for h in hooks if h.state_dict()},
                "schema": job.dataset.schema.to_json(),
                "data": job.dataset.fingerprint(),
                "config": config_digest(job.config),
                "data_offset": self._offset,
                "versions": versions(),
                "time": self.ledger.account(),
            }
            with self._phase("saving", "save"):
                self.store.save(step, state, meta)

        def evaluate_now(state: State) -> Evaluation:
            with self._phase("evaluating", "evaluate"):
                return self.evaluate(weights_for_evaluation(state), "validation")

        with self.ledger.phase("train"):
            self.state, stop = fit(
                state,
                Sentinel(job.advance, *job.expected),
                self._feeder,
                hooks,
                start=first,
                stop=job.steps.total,
                log_every=job.steps.log_every,
                data_offset=self._offset,
                evaluate=evaluate_now,
                save=save,
                many=self._many,
            )
        return stop

    def evaluate(self, weights: tuple[Any, Any], split: str, keep_rows: bool = False) -> Evaluation:
        """Figures of a split."""
        job = self.job
        return evaluate(job.eval_step, weights, self._batches(split), job.metrics, keep_rows=keep_rows)

    def _batches(self, split: str) -> Iterator[Any]:
        """Batches of a split in order; where training rows live on the device, these stay there too."""
        if split in self._eval_batches:
            yield from self._eval_batches[split]
            return
        kept = []
        for pair in eval_batches(self.job, split):
            if self._watchdog:
                self._watchdog.beat()
            kept.append(pair)
            yield pair
        if self.job.feed_kind == "resident":
            self._eval_batches[split] = kept

    def _finish(self, stop: Stop, saver: Saver, board: TensorBoard, begun: float) -> tuple[Stop, dict[str, Any]]:
        """The test split, read once, on the best sealed step; result.json; the report."""
        job, folder, config = self.job, self.folder, self.job.config
        step = int(self.state["step"])  # type: ignore[index]
        if saver.evaluations and saver.best.value is None:
            reason = f"eval/{config.evaluate.metric} was never finite; no step can be called the best"
            return Stop("failed", reason, NeedsPerson.exit_code), {}
        best = self.store.best() or self.store.latest()
        assert best is not None
        best = self.store.get(processes.agree(best.step))
        result: dict[str, Any] = {
            "best": {"step": best.step, "metric": config.evaluate.metric, "evaluation": best.meta["evaluation"]},
            "steps": {"done": step, "planned": job.steps.total},
            "data": job.dataset.name,
            "class_names": job.dataset.schema.class_names,
            "rows": {
                "train": job.dataset.rows("train"),
                **{name: job.dataset.eval_rows(name) for name in ("validation", "test")},
            },
            "unit": job.dataset.unit,
            "parameters": sum(row[2] for row in summary.rows(job.module.params)),
        }
        split = "test" if job.dataset.eval_rows("test") else "validation"
        if job.dataset.eval_rows(split):
            state = self.state if best.step == step else self.store.restore(best, job.abstract_state)
            assert state is not None
            with self._phase(f"evaluating the best step on the {split} split", "evaluate"):
                evaluation = self.evaluate(weights_for_evaluation(state), split, keep_rows=True)
            result |= {"split": split, "details": evaluation.details}
            if split == "test":
                result["test"] = evaluation.figures
            if processes.is_first():
                self._show(evaluation, result, step, board)
        result["seconds"] = time.monotonic() - begun
        if processes.is_first():
            write_json(folder.result, strict(result))
        for text in closing_lines(stop, result, folder):
            self.console.line(text)
        return stop, result

    def _show(self, evaluation: Evaluation, result: dict[str, Any], step: int, board: TensorBoard) -> None:
        """Wrong predictions, the row of the test, TensorBoard's table and picture."""
        job, config = self.job, self.job.config
        result["wrong"] = save_wrong_samples(self.folder, job.dataset, evaluation, config.log.wrong_samples)
        if "test" in result:
            named = {f"test/{name}": value for name, value in evaluation.figures.items()}
            self._rows.write(step, {**named, "test/best_step": result["best"]["step"]})
            board.scalars(step, named)
            board.hparams(flat_config(config), named)
        if board.enabled and "confusion" in evaluation.details:
            names = job.dataset.schema.class_names
            board.image("confusion", confusion_image(evaluation.details["confusion"], names), step)

    def _report(self) -> None:
        """The report of what there is, also after a stop; like every writer, it never takes a run down."""
        if not processes.is_first():
            return
        try:
            write_report(self.folder)
        except Exception as error:
            log.warning("the report was not written: %s: %s", type(error).__name__, error)

    def _hooks(self, saver: Saver, signals: Signals) -> tuple[list[Hook], TensorBoard]:
        job, config, steps = self.job, self.job.config, self.job.steps
        samples = training_samples(job.dataset)
        board = TensorBoard(self.folder, self._clock, samples, enabled=config.log.tensorboard)
        writers: list[Hook] = [self._clock, self._rows, board] if processes.is_first() else []
        hooks: list[Hook] = [self._reached, CheckSaves(self.store.poll), *writers, self.console, saver]
        if job.dataset.eval_rows("validation"):
            hooks.append(Evaluator(steps.evaluate_every, steps.total))
            if config.early_stopping.patience:
                stopping = config.early_stopping
                hooks.append(EarlyStopping(config.evaluate.metric, job.mode, stopping.patience, stopping.min_delta))
        if not processes.several():
            hooks.append(NameSkipped(self._name_rows, steps.log_every))
        hooks.append(SkipLimit(config.guard.max_skips))
        if config.guard.loss_spike:
            hooks.append(LossSpike(config.guard.loss_spike, steps.log_every))
        if self._watchdog:
            hooks.append(self._watchdog)
        clocks: list[Hook] = [signals]
        if steps.save_seconds is not None:
            clocks.append(SaveClock(steps.save_seconds))
        budget = to_seconds(config.train.time_budget)
        if budget:
            clocks.append(TimeBudget(budget))
        hooks += [Agreed(clocks, steps.log_every)] if processes.several() else clocks
        status = [Status(self.folder, self._sealed_steps, self.ledger)] if processes.is_first() else []
        return [*hooks, *status], board

    def _sealed_steps(self) -> tuple[int | None, int | None]:
        latest, best = self.store.latest(), self.store.best()
        return latest.step if latest else None, best.step if best else None


def eval_batches(job: Job, split: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(host, devices) batches of a split in order, each row once, the last one padded."""
    rows = job.dataset.eval_rows(split)
    for position in range(-(-rows // job.eval_batch)):
        numbers, mask = sequential_rows(position, rows, job.eval_batch)
        host = job.dataset.evaluation(split, numbers, mask)
        yield host, job.put(host)


def open_store(job: Job, folder: RunFolder) -> Checkpoints:
    return Checkpoints.of_run(folder.checkpoints, job.config, job.steps.keep_every)
