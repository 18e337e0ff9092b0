"""Going back: to which step, past which batches, how often; that a kill in between changes nothing; what is told."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import differing, host, rows_without_time

import jaxtrain as jt
from jaxtrain import rollback
from jaxtrain.core.state import State

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(200, 6)).astype(np.float32)
DATA = {"inputs": INPUTS, "targets": (INPUTS.sum(1) > 0).astype(np.int32)}
KEYS: dict[str, Any] = {
    "model.kind": "mlp",
    "model.hidden": [8],
    "augment.shift": 0,
    "data.validation_fraction": 0.1,
    "data.test_fraction": 0.1,
    "train.global_batch_size": 20,
    "log.every": 2,
    "log.tensorboard": False,
    "checkpoint.every": 4,
    "checkpoint.keep_last": 20,
    "evaluate.every": 0,
    "guard.max_skips": 2,
}
"""160 training rows: 8 steps an epoch."""


def cross_entropy(model: Any, batch: Any) -> tuple[Any, Any]:
    logs = jax.nn.log_softmax(model(batch["inputs"]))
    return -jnp.take_along_axis(logs, batch["targets"][:, None], 1)[:, 0], batch["mask"]


def total(losses: Any, mask: Any) -> Any:
    return jnp.where(mask, losses, 0).sum(), mask.sum(), {}


def in_second_epoch(model: Any, batch: Any) -> Any:
    """Not a number in the whole of the second epoch."""
    losses, mask = cross_entropy(model, batch)
    return total(jnp.where(batch["epoch"] == 1, jnp.nan, losses), mask)


def from_second_epoch(model: Any, batch: Any) -> Any:
    losses, mask = cross_entropy(model, batch)
    return total(jnp.where(batch["epoch"] >= 1, jnp.nan, losses), mask)


def one_row(model: Any, batch: Any) -> Any:
    losses, mask = cross_entropy(model, batch)
    return total(jnp.where(batch["ids"] == 37, jnp.nan, losses), mask)


def trained(loss: Any, place: Path, **more: Any) -> jt.Run:
    keys = {**KEYS, "train.duration": 30, **more}
    return jt.train("digits", data=DATA, loss=loss, run_dir=place, quiet=True, **keys)


def journal(run: jt.Run, event: str = rollback.EVENT) -> list[dict[str, Any]]:
    return [line for line in run.folder.events() if line["event"] == event]


def by_hand(run: jt.Run, jumps: dict[int, int], steps: int) -> State:
    """`steps` steps without a runner; after so many, the offset of the data is set. A skipped step is no part of it."""
    assert run.job is not None
    job, feeder = run.job, run.job.feeder()
    state, offset = job.init(), 0
    for step in range(steps):
        if step in jumps:
            offset = jumps[step]
            state = {**state, "data_offset": jax.device_put(np.int32(offset))}
        state, _ = job.advance(state, feeder(step + offset))
    feeder.close()
    return state  # type: ignore[no-any-return]


@pytest.mark.parametrize("feed", ["resident", "direct", "prefetch"])
def test_a_run_goes_back_and_on_past_the_batches_that_did_harm(feed: str, tmp_path: Path) -> None:
    with trained(in_second_epoch, tmp_path / "run", **{"data.feed": feed, "guard.max_rollbacks": 4}) as run:
        assert (run.stop.state, run.exit_code) == ("done", 0)
        # Steps 9 and 10 are not finite; back to 8, on with batch 11: the same, until the third epoch comes.
        events = [(e["step"], e["first"], e["last"], e["data_offset"]) for e in journal(run)]
        assert events == [(8, 9, 10, 2), (8, 9, 10, 4), (8, 9, 10, 6), (8, 9, 10, 8)]
        assert Counter(row["step"] for row in rows_without_time(run) if "train/loss" in row).most_common(1)[0][1] == 1


def test_the_state_after_is_that_of_training_without_those_batches(tmp_path: Path) -> None:
    with trained(in_second_epoch, tmp_path / "run", **{"guard.max_skips": 4, "log.every": 4}) as run:
        events = [(e["step"], e["last"], e["data_offset"]) for e in journal(run)]
        assert events == [(8, 12, 4), (8, 12, 8)]
        assert run.state is not None
        assert differing(run.state, by_hand(run, {8: 8}, 30)) == []
        assert differing(run.state, by_hand(run, {8: 4}, 30)) != []  # control
        assert run.folder.read_status()["time"]["lost"] > 0
        assert int(run.state["guard"]["skipped"]) == 0
        sealed = sorted(int(p.name) for p in run.folder.checkpoints.glob("[0-9]*"))
        assert sealed == [4, 8, 12, 16, 20, 24, 28, 30]
        offsets = {
            s: json.loads((run.folder.checkpoints / f"{s:09d}/meta.json").read_text())["data_offset"] for s in sealed
        }
        assert offsets == {4: 0, 8: 0, **dict.fromkeys((12, 16, 20, 24, 28, 30), 8)}


def test_a_step_that_was_sealed_amid_the_trouble_is_left_and_sealed_anew(tmp_path: Path) -> None:
    more = {"checkpoint.every": 1, "checkpoint.keep_last": 99, "guard.max_rollbacks": 4}
    with trained(in_second_epoch, tmp_path / "run", **more) as run:
        # Step 9, of a skipped batch, was sealed before 10 was skipped too.
        assert [(e["step"], e["first"], e["last"]) for e in journal(run)] == [(8, 9, 10)] * 4
        offsets = [sealed.meta["data_offset"] for sealed in run._session.store.steps()]  # type: ignore[union-attr]
        assert offsets == [0] * 8 + [8] * 22


def test_a_kill_after_the_journal_changes_nothing(tmp_path: Path) -> None:
    """As if killed between the line in the journal and the removal of what was left behind, or any time after."""
    with trained(in_second_epoch, tmp_path / "run", **{"guard.max_skips": 4, "log.every": 4}) as run:
        whole, rows, state = run.path, rows_without_time(run), host(run.state)
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    for path in killed.glob("checkpoints/[0-9]*"):
        if int(path.name) > 8:
            shutil.rmtree(path)
    (killed / "result.json").unlink()
    # A step of the branch that is left behind: another state, sealed under a number beyond.
    left = killed / "checkpoints/000000012"
    shutil.copytree(killed / "checkpoints/000000004", left)
    again = jt.resume(killed, data=DATA, loss=in_second_epoch, quiet=True)
    with again:
        assert again.stop.state == "done"
        assert rows_without_time(again) == rows
        assert {name: a.tobytes() for name, a in host(again.state).items()} == {
            n: a.tobytes() for n, a in state.items()
        }
    # Control: without the journal's line the same batches come again.
    forgotten = tmp_path / "forgotten"
    shutil.copytree(killed, forgotten)
    for path in forgotten.glob("checkpoints/[0-9]*"):
        if int(path.name) > 8:
            shutil.rmtree(path)
    (forgotten / "result.json").unlink()
    (forgotten / "journal.jsonl").unlink()
    with jt.resume(forgotten, data=DATA, loss=in_second_epoch, quiet=True) as run:
        assert [e["data_offset"] for e in journal(run)] == [4, 8]


def test_after_so_many_rollbacks_a_person_is_asked_and_told_why(tmp_path: Path) -> None:
    with trained(from_second_epoch, tmp_path / "run", **{"guard.max_rollbacks": 3}) as run:
        assert (run.stop.state, run.exit_code) == ("failed", 78)
        assert [e["data_offset"] for e in journal(run)] == [2, 4, 6]
        (gave_up,) = journal(run, rollback.GAVE_UP)
        assert (gave_up["first"], gave_up["last"]) == (9, 10)
        reason = run.stop.reason
        assert reason.startswith("2 updates in a row were not finite (guard.max_skips 2); the loss of rows ")
        assert "after 3 rollbacks; look at the data, lower optimizer.peak_lr" in reason
        place = Path(reason.split("the batch is in ")[1].split(";")[0])
        assert place.parent.parent == run.folder.crash
        batch = np.load(place)
        assert run.job is not None
        for name, array in run.job.host_batches()(8 + 6).items():
            np.testing.assert_array_equal(batch[name], array)
        named = reason.split("the loss of rows ")[1].split(" and ")[0].split(", ")
        assert {int(i) for i in named} <= set(batch["ids"].tolist())
        assert run.folder.newest_sealed() == 8
        assert reason.split("; ")[0] in (run.folder.report).read_text()


def test_no_rollback_is_allowed_where_none_is_wanted(tmp_path: Path) -> None:
    with trained(from_second_epoch, tmp_path / "run", **{"guard.max_rollbacks": 0}) as run:
        assert run.exit_code == 78
        assert journal(run) == []
        assert "guard.max_rollbacks is 0" in run.stop.reason


def test_without_a_sealed_step_it_goes_back_to_the_beginning(tmp_path: Path) -> None:
    def first_epoch(model: Any, batch: Any) -> Any:
        losses, mask = cross_entropy(model, batch)
        return total(jnp.where(batch["epoch"] < 1, jnp.nan, losses), mask)

    keys = {"checkpoint.every": "5m", "log.every": 4, "guard.max_skips": 4}
    keys |= {"data.validation_fraction": 0.0, "data.test_fraction": 0.0}  # they count as the first epoch
    with trained(first_epoch, tmp_path / "run", **keys) as run:
        assert run.stop.state == "done", run.stop
        assert [(e["step"], e["data_offset"]) for e in journal(run)] == [(0, 4), (0, 8)]
        assert differing(run.state, by_hand(run, {0: 8}, 30)) == []


def test_a_row_that_is_not_finite_is_skipped_and_named_and_changes_nothing(tmp_path: Path) -> None:
    with trained(
        one_row, tmp_path / "run", **{"checkpoint.every": 1, "train.duration": 8, "guard.max_skips": 20}
    ) as run:
        assert run.stop.state == "done"
        assert run.job is not None
        (step,) = [s for s in range(8) if 37 in run.job.host_batches()(s)["ids"]]
        text = run.folder.log.read_text()
        assert "the loss of row 37 is not finite" in text
        leaves = [
            json.loads((run.folder.checkpoints / f"{s:09d}/manifest.json").read_text())["leaves"] for s in range(1, 9)
        ]
        same = [
            {n for n in a if n.split(".")[0] in ("params", "opt_state") and a[n]["sha256"] != b[n]["sha256"]} == set()
            for a, b in itertools.pairwise(leaves)
        ]
        assert same == [s == step for s in range(1, 8)]


def test_a_loss_that_jumps_is_left_behind(tmp_path: Path) -> None:
    def spike(model: Any, batch: Any) -> Any:
        losses, mask = cross_entropy(model, batch)
        return total(losses * jnp.where(batch["epoch"] == 3, 1000.0, 1.0), mask)

    keys = {"log.every": 2, "guard.loss_spike": 20.0, "train.duration": 40, "guard.max_rollbacks": 9}
    with trained(spike, tmp_path / "run", **keys) as run:
        assert run.stop.state == "done"
        # Epoch 4 is steps 25..32; each time two of its batches are seen, until all eight are behind.
        assert [(e["step"], e["last"], e["data_offset"]) for e in journal(run)] == [
            (24, 26, 2),
            (24, 26, 4),
            (24, 26, 6),
            (24, 26, 8),
        ]
        assert differing(run.state, by_hand(run, {24: 8}, 40)) == []
    with trained(spike, tmp_path / "off", **{**keys, "guard.loss_spike": 0.0}) as off:
        assert journal(off) == []  # control: off by default
