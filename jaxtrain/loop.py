"""The loop: fit(), evaluate(), and what a hook is. It knows no files, no console, no config.

Metrics come one step late: a step is fed before the row of the step before is read. Hooks read device values through
`fetch` only and get copies. At a border (evaluation, save, stop) the state of that very step is at hand: nothing has
been dispatched after it, so nothing has donated it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from jaxtrain.core.metrics import Metrics, merge
from jaxtrain.core.objectives import RESERVED
from jaxtrain.core.state import State

RUN_AHEAD, SHORT_STEP = 32, 1 / 64
"""Steps that may be in flight before the loop waits for the oldest; 2, where a step takes longer than SHORT_STEP
seconds, so that a signal, a stop and the console are at most half a second of work, or two steps, behind."""


@dataclass(frozen=True)
class Stop:
    """End the run after saving. state: done, early_stop, time_budget, preempted, interrupted, failed."""

    state: str
    reason: str
    code: int = 0


class EvaluateNow:
    """Evaluate at this step."""


class SaveNow:
    """Save at this step, after an evaluation that is due."""


@dataclass(frozen=True)
class Rollback:
    """Leave the steps `first`..`last`: go back to a sealed step before them, and on past their batches."""

    first: int
    last: int
    reason: str


@dataclass(frozen=True)
class Look:
    """Call `at` with the state, which must be left as it is."""

    at: Callable[[State], None]


Action = Stop | Rollback | Look | type[EvaluateNow] | type[SaveNow]


@dataclass(frozen=True)
class Evaluation:
    """figures: {name: value}. details: confusion matrix, per-class lists.

    rows: ids, targets and scores (probabilities) of the real rows, when they were asked for.
    """

    figures: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, np.ndarray] = field(default_factory=dict)


class Hook:
    """What happens between steps. Override what is needed; every method may return an Action (or None)."""

    def start(self, step: int) -> None:
        """Before the first step of this process; `step` batches are consumed already."""

    def border(self, step: int) -> int | None:
        """The next step after `step` for which `after_step` must be called; None: any time will do."""

    def after_step(self, step: int) -> Action | None:
        """After `step` was dispatched; must be cheap: its values are not there yet. Several steps may have been
        dispatched at once, but never over a border."""

    def on_metrics(self, step: int, figures: dict[str, float]) -> Action | None:
        """A row of training metrics, one step late (or at a border, on time)."""

    def on_evaluation(self, step: int, evaluation: Evaluation) -> Action | None:
        """An evaluation of the validation split."""

    def on_save(self, step: int) -> None:
        """A save of `step` has been started."""

    def close(self, stop: Stop) -> None:
        """After the last step, also after an error (state "failed")."""

    def state_dict(self) -> dict[str, Any]:
        """What a resume must know; JSON values."""
        return {}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


class Many(Protocol):
    """Up to `steps` steps in one dispatch: (state, fed, count) -> (state, metrics of the last of them)."""

    steps: int

    def __call__(self, state: State, fed: Any, count: int) -> tuple[State, dict[str, Any]]: ...


def fetch(tree: Any) -> Any:
    """Device values as numpy copies. The only place where the loop and its hooks wait for the device."""
    return jax.tree.map(lambda x: np.array(x), jax.device_get(tree))


def fit(
    state: State,
    advance: Callable[[State, Any], tuple[State, dict[str, Any]]],
    feed: Callable[[int], Any],
    hooks: Sequence[Hook],
    *,
    start: int,
    stop: int,
    log_every: int,
    data_offset: int = 0,
    evaluate: Callable[[State], Evaluation],
    save: Callable[[int, State], None],
    many: Many | None = None,
) -> tuple[State, Stop | Rollback]:
    """Run steps `start`..`stop`. At a border: look, go back, evaluate, save, early stop, control, in this order.

    many: runs several steps in one dispatch, up to the next border.
    """
    step, late, ending, ahead = start, None, Stop("done", f"{stop} steps"), 2
    flight: deque[Any] = deque()
    for hook in hooks:
        hook.start(start)
    with jax.transfer_guard_host_to_device("disallow"):
        while step < stop:
            count = 1 if many is None else min(many.steps, _border(hooks, step, stop, log_every) - step)
            if many is None or count == 1:
                state, metrics = advance(state, feed(step + data_offset))
            else:
                state, metrics = many(state, feed(step + data_offset), count)
            step += count
            actions = _deliver(hooks, late)
            late = (step, metrics) if step % log_every == 0 or step in (1, stop) else None
            flight.append(metrics["loss"])
            while len(flight) > ahead:
                since = time.perf_counter()
                flight.popleft().block_until_ready()
                ahead = min(2 * ahead, RUN_AHEAD) if time.perf_counter() - since < SHORT_STEP else 2
            actions += [a for hook in hooks if (a := hook.after_step(step)) is not None]
            if not actions:
                continue
            logged, row, late = late is not None, (step, metrics), None
            actions += _deliver(hooks, row if logged else None)
            _look(actions, state)
            if (back := _rollback(actions)) is not None:
                return state, back
            if EvaluateNow in actions:
                evaluation = evaluate(state)
                actions += [a for hook in hooks if (a := hook.on_evaluation(step, evaluation)) is not None]
            stops = [a for a in actions if isinstance(a, Stop)]
            if stops and not logged:
                _deliver(hooks, row)  # the last step has a row, wherever it is
            if SaveNow in actions or stops:
                save(step, state)
                for hook in hooks:
                    hook.on_save(step)
            if stops:
                ending = max(stops, key=lambda s: s.code)
                break
        _deliver(hooks, late)
    return state, ending


def evaluate(
    eval_step: Callable[..., dict[str, Any]],
    weights: tuple[Any, Any],
    batches: Iterator[tuple[dict[str, Any], dict[str, Any]]],
    metrics: Metrics | None,
    *,
    keep_rows: bool = False,
) -> Evaluation:
    """Figures over all real rows. `batches` gives (on the host, on the devices); sums are merged one batch late."""
    total: dict[str, Any] | None = None
    ids: list[np.ndarray] = []
    late: Any = None
    for host, batch in batches:
        current = eval_step(*weights, batch)
        real = np.asarray(host["mask"])  # [B], or [B, T] for tokens
        ids.append(np.asarray(host["ids"])[real.reshape(len(real), -1).any(1)])
        if late is not None:
            total = merge(total, fetch(late))
        late = current
    if late is not None:
        total = merge(total, fetch(late))
    if total is None:
        return Evaluation({})
    count = max(float(total["loss_count"]), 1.0)
    figures = {"loss": float(total["loss_sum"]) / count}
    figures |= {name[4:]: float(v) / count for name, v in total.items() if name.startswith("sum_")}
    details: dict[str, Any] = {}
    if metrics is not None:
        own, details = metrics.finalise(total)
        figures = {**own, **figures}
    return Evaluation(figures, details, _kept_rows(total, ids, metrics) if keep_rows else {})


def _border(hooks: Sequence[Hook], step: int, stop: int, log_every: int) -> int:
    """The next step after which something is due: a row of metrics, what a hook says, the end."""
    borders = [b for hook in hooks if (b := hook.border(step)) is not None]
    return min(1 if step == 0 else stop, stop, step - step % log_every + log_every, *borders)


def _look(actions: Sequence[Action], state: State) -> None:
    for look in actions:
        if isinstance(look, Look):
            look.at(state)


def _rollback(actions: Sequence[Action]) -> Rollback | None:
    """The one that reaches back furthest; none where a hook wants to stop."""
    if any(isinstance(a, Stop) for a in actions):
        return None
    return min((a for a in actions if isinstance(a, Rollback)), key=lambda back: back.first, default=None)


def _deliver(hooks: Sequence[Hook], late: tuple[int, dict[str, Any]] | None) -> list[Action]:
    if late is None:
        return []
    step, metrics = late
    figures = window_figures(fetch(metrics))
    return [a for hook in hooks if (a := hook.on_metrics(step, figures)) is not None]


def window_figures(metrics: dict[str, Any]) -> dict[str, float]:
    """A row of training metrics from the step's scalars: window sums divided once, the rest as it is."""
    sums = {name[7:]: float(v) for name, v in metrics.items() if name.startswith("window/")}
    row = {name: float(v) for name, v in metrics.items() if not name.startswith("window/") and name != "loss"}
    row["loss"] = sums["loss"] / sums["weight"] if sums["weight"] else float("nan")
    for name, value in sums.items():
        if name not in RESERVED:
            row[name] = value / sums["count"] if sums["count"] else float("nan")
    row["skipped"] = sums["skipped"]
    if sums["overflow"]:
        row["overflow"] = sums["overflow"]
    return row


def _kept_rows(total: dict[str, Any], ids: list[np.ndarray], metrics: Metrics | None) -> dict[str, np.ndarray]:
    rows = {"ids": np.concatenate(ids)}
    if metrics is not None and "rows_scores" in total:
        real = np.concatenate(total["rows_mask"])
        rows["scores"] = metrics.probabilities(np.concatenate(total["rows_scores"])[real])
        rows["targets"] = np.concatenate(total["rows_targets"])[real]
    return rows
