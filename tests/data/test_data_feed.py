"""Three feeders, one order: the same rows, ids, masks and epochs at every position."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from data_helpers import config_of, dataset_of

from jaxtrain.build import build
from jaxtrain.config import load
from jaxtrain.data import feed
from jaxtrain.data.dataset import Dataset
from jaxtrain.data.make import make_dataset
from jaxtrain.data.order import permute
from jaxtrain.data.sources import ArraySource

ROWS, BATCH, SEED = 23, 4, 3


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """23 training rows among 30, with weights."""
    split = np.array([0] * 10 + [1] * 4 + [0] * 13 + [2] * 3)
    return dataset_of(np.arange(30) % 2, split=split, weights=np.arange(30) / 8)


def host_batches(dataset: Dataset) -> feed.HostBatches:
    return feed.HostBatches(dataset, "train", SEED, BATCH)


def threads(but: tuple[threading.Thread, ...] | None = None) -> list[threading.Thread]:
    """The reading threads that this test started: runs of other tests may still be open in this process."""
    others = OTHERS if but is None else but
    return [t for t in threading.enumerate() if t.name == "jaxtrain-prefetch" and t not in others]


OTHERS: tuple[threading.Thread, ...] = ()


@pytest.fixture(autouse=True)
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "OTHERS", tuple(threads(but=())))


def test_resident_direct_and_prefetch_give_the_same_batches_over_three_epochs(dataset: Dataset) -> None:
    resident = feed.Resident(jax.device_put(dataset.resident("train")))
    on_device = jax.jit(lambda rows, position: feed.gather(dataset, rows, position, SEED, BATCH))
    direct = feed.Direct(host_batches(dataset), jax.device_put)
    prefetch = feed.Prefetch(host_batches(dataset), jax.device_put)
    seen: list[list[int]] = [[], [], []]
    for position in range(18):
        batches = [on_device(resident(position), np.int32(position)), direct(position), prefetch(position)]
        first = batches[0]
        assert first.keys() == {"inputs", "targets", "weights", "ids", "mask", "epoch"}
        for other in batches[1:]:
            assert other.keys() == first.keys()
            for name, value in first.items():
                assert value.dtype == other[name].dtype, name
                np.testing.assert_array_equal(value, other[name], err_msg=f"{name} at {position}")
        np.testing.assert_array_equal(first["inputs"][:, 0], first["ids"])
        np.testing.assert_array_equal(first["weights"], np.asarray(first["ids"]) / 8)
        assert int(first["epoch"]) == position // 6
        assert np.asarray(first["mask"]).sum() == (3 if position % 6 == 5 else 4)
        seen[position // 6] += np.asarray(first["ids"])[np.asarray(first["mask"])].tolist()
    prefetch.close()
    for epoch, ids in enumerate(seen):
        order = permute(SEED, epoch, np.arange(ROWS, dtype=np.int32), ROWS)
        assert ids == dataset.splits.train[order].tolist()


@pytest.mark.parametrize("part", [(0, 2), (2, 4), (1, 3)])
def test_a_part_of_each_batch_is_all_that_is_read(dataset: Dataset, part: tuple[int, int]) -> None:
    asked: list[int] = []

    class Counting:
        def rows(self, split: str) -> int:
            return dataset.rows(split)

        def read(self, split: str, rows: np.ndarray, epoch: int) -> dict[str, np.ndarray]:
            asked.append(len(rows))
            return dataset.read(split, rows, epoch)

    mine: Any = feed.HostBatches(Counting(), "train", SEED, BATCH, part)  # type: ignore[arg-type]
    for position in range(12):
        whole = host_batches(dataset)(position)
        for name, value in mine(position).items():
            np.testing.assert_array_equal(value, whole[name][slice(*part)] if value.ndim else whole[name])
    assert asked == [2] * 12


def test_the_time_that_the_caller_waits_is_counted(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0

    def slow(batch: feed.Batch) -> feed.Batch:
        nonlocal now
        now += 0.25
        return batch

    monkeypatch.setattr("jaxtrain.data.feed.time.perf_counter", lambda: now)
    timed = feed.Timed(feed.Direct(host_batches(dataset), slow))
    for position in range(3):
        assert timed(position)["ids"].tolist() == host_batches(dataset)(position)["ids"].tolist()
        now += 8.0  # not the feeder's
    assert timed.waited == 0.75
    timed.close()


def test_another_seed_is_another_order(dataset: Dataset) -> None:
    a, b = (feed.HostBatches(dataset, "train", seed, BATCH)(0)["ids"].tolist() for seed in (SEED, SEED + 1))
    assert a != b


def test_a_jump_back_and_forth_gives_the_batch_of_that_position(dataset: Dataset) -> None:
    direct, prefetch = host_batches(dataset), feed.Prefetch(host_batches(dataset), lambda batch: batch)
    for position in (0, 1, 9, 2, 3, 17, 0, 0, 1):
        assert prefetch(position)["ids"].tolist() == direct(position)["ids"].tolist()
        assert len(threads()) == 1  # the thread of before is gone
    prefetch.close()
    assert threads() == []


def test_prefetch_goes_on_in_one_thread_while_positions_follow(dataset: Dataset) -> None:
    prefetch = feed.Prefetch(host_batches(dataset), lambda batch: batch)
    prefetch(0)
    thread = threads()[0]
    for position in range(1, 6):
        prefetch(position)
    assert threads() == [thread]
    prefetch(3)
    assert threads() != [thread]  # the control: a jump starts another
    prefetch.close()


def test_prefetch_reads_ahead_and_not_without_end(dataset: Dataset) -> None:
    read: list[int] = []
    batches, enough = host_batches(dataset), threading.Event()

    def reader(position: int) -> dict[str, Any]:
        read.append(position)
        if len(read) == 5:
            enough.set()
        return batches(position)

    prefetch = feed.Prefetch(reader, lambda batch: batch)  # type: ignore[arg-type]
    prefetch(0)
    assert enough.wait(20)  # one taken, three in the queue, one in the hand of the thread
    prefetch.close()
    assert len(read) <= 6


class Breaks:
    """A reader that fails at one position."""

    def __init__(self, batches: feed.HostBatches, at: int) -> None:
        self.batches, self.at = batches, at

    def __call__(self, position: int) -> dict[str, Any]:
        if position == self.at:
            raise OSError(f"row {position} cannot be read")
        return self.batches(position)


def test_an_error_of_the_reader_is_raised_at_its_position_in_the_caller(dataset: Dataset) -> None:
    prefetch = feed.Prefetch(Breaks(host_batches(dataset), 2), lambda batch: batch)  # type: ignore[arg-type]
    assert prefetch(0)["mask"].all()
    assert prefetch(1)["mask"].all()
    with pytest.raises(OSError, match="row 2 cannot be read"):
        prefetch(2)
    prefetch.close()
    assert threads() == []


def test_after_an_error_the_next_call_answers_too(dataset: Dataset) -> None:
    """Asked again for the position that failed, it reads again; it does not wait for a thread that has ended."""
    breaks = Breaks(host_batches(dataset), 1)
    prefetch = feed.Prefetch(breaks, lambda batch: batch)  # type: ignore[arg-type]
    prefetch(0)
    with pytest.raises(OSError):
        prefetch(1)
    breaks.at = -1  # the disk is back
    answer: list[Any] = []
    asking = threading.Thread(target=lambda: answer.append(prefetch(1)["ids"].tolist()), daemon=True)
    asking.start()
    asking.join(5)
    assert answer == [host_batches(dataset)(1)["ids"].tolist()]
    prefetch.close()


def test_an_error_of_putting_is_raised_in_the_caller(dataset: Dataset) -> None:
    def put(batch: dict[str, Any]) -> dict[str, Any]:
        raise MemoryError("no room on the device")

    prefetch = feed.Prefetch(host_batches(dataset), put)
    with pytest.raises(MemoryError, match="no room on the device"):
        prefetch(0)
    prefetch.close()
    assert threads() == []


def test_close_joins_the_thread_and_may_be_called_twice(dataset: Dataset) -> None:
    prefetch = feed.Prefetch(host_batches(dataset), lambda batch: batch)
    prefetch.close()
    prefetch(0)
    thread = threads()[0]
    prefetch.close()
    assert not thread.is_alive()
    prefetch.close()
    assert prefetch(0)["ids"].tolist() == host_batches(dataset)(0)["ids"].tolist()  # and begins anew
    prefetch.close()


@pytest.mark.parametrize(
    ("asked", "nbytes", "expected"),
    [
        ("auto", 250, "resident"),
        ("auto", 251, "prefetch"),
        ("direct", 1, "direct"),
        ("prefetch", 1, "prefetch"),
        ("resident", 10**6, "resident"),
    ],
)
def test_auto_keeps_rows_on_the_device_up_to_a_quarter_of_its_memory(asked: str, nbytes: int, expected: str) -> None:
    assert feed.choose(asked, nbytes, 1000) == expected


def test_rows_that_are_decoded_again_and_again_are_prefetched() -> None:
    assert feed.choose("auto", 1, 1000, in_memory=False) == "prefetch"
    assert feed.choose("auto", 1, 1000, in_memory=True) == "resident"  # the control
    for asked in ("resident", "direct", "prefetch"):
        assert feed.choose(asked, 1, 1000, in_memory=False) == asked


def test_fault_loop_small_dataset_10_rows_batch_64(shared: Path) -> None:
    """Each epoch is one step on 10 rows, the weights change, and the note names both numbers."""
    table = np.loadtxt(shared / "faults/loop_small_dataset/ten_rows.csv", delimiter=",", skiprows=1)
    source = ArraySource("ten", table[:, :2], table[:, 2].astype(np.int64), split=np.zeros(10, np.int8))
    config = load(
        {"model": {"hidden": [4]}, "train": {"duration": "2ep", "global_batch_size": 64}, "log": {"every": 1}}
    )
    job = build(config, source=source)
    assert job.steps.per_epoch == 1
    assert job.steps.total == 2
    (note,) = job.dataset.notes
    assert note == ("10 training rows are fewer than train.global_batch_size 64: each epoch is one step on 10 rows")
    assert note in job.notes
    state, feeder = job.init(), job.feeder()
    before = np.array(state["params"]["head.kernel"])
    state, metrics = job.advance(state, feeder(0))
    assert float(metrics["window/count"]) == 10
    assert float(metrics["loss"]) > 0.1
    assert int(state["updates"]) == 1
    assert not np.array_equal(before, state["params"]["head.kernel"])
    batch = job.host_batches()(0)
    assert sorted(batch["ids"][batch["mask"]].tolist()) == list(range(10))
    enough = ArraySource("many", np.zeros((64, 2)), np.arange(64) % 2, split=np.zeros(64, np.int8))
    assert make_dataset(config, enough).notes == ()  # the control


def test_a_seed_above_two_billion_trains_as_any_other() -> None:
    job = build(config_of(train__seed=2**32 - 1, model__hidden=[4], train__duration=1))
    assert job.feed_kind == "resident"
    job.lower()


def test_a_feeder_that_is_dropped_without_close_ends_its_thread(dataset: Dataset) -> None:
    prefetch = feed.Prefetch(host_batches(dataset), lambda batch: batch)
    prefetch(0)
    assert len(threads()) == 1
    del prefetch
    gc.collect()
    assert threads() == []
