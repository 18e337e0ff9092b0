"""Rows of text: windows whose targets are the next tokens; moved in each epoch, without overlap for figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_helpers import text_of

from jaxtrain.build import build
from jaxtrain.config import load
from jaxtrain.data import feed
from jaxtrain.data.order import sequential_rows, steps_per_epoch
from jaxtrain.data.schema import Schema
from jaxtrain.data.text import TextDataset

# (tokens, block): one window, one more, just under and over two, a long rest, many.
SIZES = [(65, 64), (66, 64), (127, 64), (128, 64), (129, 64), (191, 64), (1000, 64), (1023, 8), (9, 1), (2, 1)]


def counted(n: int, block: int, seed: int = 0) -> TextDataset:
    """A text whose tokens are their own places, in all splits."""
    tokens = np.arange(n, dtype=np.uint16)
    schema = Schema("tokens", (block,), "int32", n, (block,))
    return TextDataset("counted", dict.fromkeys(("train", "validation", "test"), tokens), block, seed, schema)


def epoch_of(dataset: TextDataset, epoch: int) -> dict[str, np.ndarray]:
    return dataset.read("train", np.arange(dataset.rows("train"), dtype=np.int32), epoch)


# ---------------------------------------------------------------- training


@pytest.mark.parametrize(("n", "block"), SIZES)
def test_targets_are_the_inputs_moved_by_one(n: int, block: int) -> None:
    dataset = counted(n, block)
    for epoch in range(3):
        batch = epoch_of(dataset, epoch)
        assert batch["inputs"].shape == batch["targets"].shape == (dataset.rows("train"), block)
        np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)
        np.testing.assert_array_equal(batch["inputs"], batch["inputs"][:, :1] + np.arange(block))
        np.testing.assert_array_equal(batch["ids"], batch["inputs"][:, 0])
        assert {value.dtype for value in batch.values()} == {np.dtype(np.int32)}


@pytest.mark.parametrize(("n", "block"), SIZES)
def test_in_an_epoch_no_target_comes_twice_and_nearly_all_come(n: int, block: int) -> None:
    """Fewer than two blocks are left out: what lies before the shift, and behind the last window."""
    dataset = counted(n, block)
    for epoch in range(8):
        targets = epoch_of(dataset, epoch)["targets"].reshape(-1)
        assert len(set(targets.tolist())) == len(targets) == dataset.rows("train") * block
        assert n - 1 - len(targets) < max(2 * block - 1, 1)
        assert targets.min() >= 1
        assert targets.max() <= n - 1


def test_rows_are_numbered_from_the_beginning_of_the_text() -> None:
    dataset = counted(1024, 64)
    assert dataset.rows("train") == 15
    batch = dataset.read("train", np.array([3, 0, 14], np.int32), 0)
    shift = batch["ids"][1]
    assert 0 <= shift < 64
    assert batch["ids"].tolist() == [3 * 64 + shift, shift, 14 * 64 + shift]
    assert dataset.unit == "rows of 64 tokens"


@pytest.mark.parametrize(("n", "rows"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (23, 1), (24, 2), (25, 2), (32, 3)])
def test_there_is_one_window_fewer_than_fit_and_at_least_one(n: int, rows: int) -> None:
    assert counted(n, 8).rows("train") == rows


def shifts(dataset: TextDataset, epochs: int = 200) -> list[int]:
    return [int(dataset.read("train", np.zeros(1, np.int32), epoch)["ids"][0]) for epoch in range(epochs)]


def test_each_epoch_has_its_own_shift_and_all_shifts_come() -> None:
    found = shifts(counted(1000, 8))
    assert set(found) == set(range(8))
    assert max(np.bincount(found)) < 60  # of 200; 25 are expected
    assert np.mean(np.diff(found) != 0) > 0.75
    assert shifts(counted(1000, 8)) == found
    assert set(shifts(counted(9, 8))) == {0}  # the control: no room


def test_the_shifts_never_change() -> None:
    """A change here would silently give every resumed run other batches."""
    assert shifts(counted(1024, 64), 8) == [25, 49, 7, 49, 2, 45, 60, 20]


def test_the_seed_of_training_moves_the_shifts() -> None:
    assert shifts(counted(1000, 64, seed=1)) != shifts(counted(1000, 64))
    assert shifts(counted(1000, 64, seed=2**32 - 1))[:3] == shifts(counted(1000, 64, seed=2**32 - 1))[:3]


def test_the_seed_of_the_config_is_that_of_the_shifts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh" * 100)
    one, two, again = (text_of(tmp_path / "a.txt", 64, train__seed=seed) for seed in (0, 1, 0))
    assert shifts(one) == shifts(again) == shifts(counted(640, 64))
    assert shifts(two) == shifts(counted(640, 64, seed=1)) != shifts(one)


def test_every_token_stands_at_every_place_of_a_window() -> None:
    dataset = counted(160, 8)
    seen = np.zeros((160, 8), bool)
    for epoch in range(100):
        inputs = epoch_of(dataset, epoch)["inputs"]
        seen[inputs, np.arange(8)] = True
    assert seen[8:-17].all()
    fixed = np.zeros((160, 8), bool)  # the control: without a shift, each has one place
    fixed[epoch_of(dataset, 0)["inputs"], np.arange(8)] = True
    assert (fixed.sum(1) <= 1).all()


@pytest.mark.parametrize(("n", "block"), [(191, 64), (127, 8), (1000, 64)])
def test_every_target_comes_in_some_epoch(n: int, block: int) -> None:
    dataset = counted(n, block)
    seen = {int(t) for epoch in range(20 * block) for t in epoch_of(dataset, epoch)["targets"].reshape(-1)[[0, -1]]}
    assert max(seen) == n - 1
    assert min(seen) == 1


# ---------------------------------------------------------------- host, device, thread


@pytest.mark.parametrize(("n", "block"), [(65, 64), (191, 64), (1000, 8), (9, 1)])
def test_take_inside_jit_is_read(n: int, block: int) -> None:
    dataset = counted(n, block, seed=2**32 - 5)
    rows = np.arange(dataset.rows("train"), dtype=np.int32)[::-1]
    take = jax.jit(dataset.take)
    resident = jax.device_put(dataset.resident("train"))
    for epoch in (0, 1, 2, 7, 1000):
        host, device = dataset.read("train", rows, epoch), take(resident, rows, np.int32(epoch))
        assert host.keys() == device.keys() == {"inputs", "targets", "ids"}
        for name, value in host.items():
            assert value.dtype == device[name].dtype
            np.testing.assert_array_equal(value, device[name], err_msg=f"{name} in epoch {epoch}")


def test_resident_direct_and_prefetch_give_the_same_windows_over_three_epochs() -> None:
    dataset, seed, batch = counted(200, 8, seed=3), 3, 5
    assert dataset.rows("train") == 24
    steps = steps_per_epoch(24, batch)
    resident = feed.Resident(jax.device_put(dataset.resident("train")))
    on_device = jax.jit(lambda rows, position: feed.gather(dataset, rows, position, seed, batch))
    direct, prefetch = (
        kind(feed.HostBatches(dataset, "train", seed, batch), jax.device_put) for kind in (feed.Direct, feed.Prefetch)
    )
    targets: list[list[int]] = [[], [], []]
    for position in range(3 * steps):
        first = on_device(resident(position), np.int32(position))
        assert first.keys() == {"inputs", "targets", "ids", "mask", "epoch"}
        for other in (direct(position), prefetch(position)):
            assert other.keys() == first.keys()
            for name, value in first.items():
                assert value.dtype == other[name].dtype, name
                np.testing.assert_array_equal(value, other[name], err_msg=f"{name} at {position}")
        assert int(first["epoch"]) == position // steps
        mask = np.asarray(first["mask"])
        assert mask.tolist() == [True] * (4 if position % steps == steps - 1 else 5) + [False] * (5 - mask.sum())
        targets[position // steps] += np.asarray(first["targets"])[mask].reshape(-1).tolist()
    prefetch.close()
    for epoch, found in enumerate(targets):
        assert sorted(found) == sorted(epoch_of(dataset, epoch)["targets"].reshape(-1).tolist())
        assert len(set(found)) == 24 * 8
    assert len({min(found) for found in targets}) == 3  # the control: three shifts


@pytest.mark.parametrize("kind", ["resident", "direct"])
def test_a_language_model_is_fed_from_a_config(kind: str, tmp_path: Path) -> None:
    """The batches of a built job are the dataset's, whichever way they come."""
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    job = build(
        load(
            {
                "data": {"kind": "text", "path": str(tmp_path / "a.txt"), "block_size": 16, "feed": kind},
                "model": {"kind": "gpt", "layers": 1, "heads": 1, "width": 8},
                "train": {"global_batch_size": 8, "duration": "2ep"},
            }
        )
    )
    assert job.feed_kind == kind
    assert job.dataset.rows("train") == 87
    assert (job.steps.per_epoch, job.steps.total) == (11, 22)
    batch = job.host_batches()(12)
    given = job.feeder()(12)
    if kind == "resident":
        assert given.keys() == {"tokens"}
        given = feed.gather(job.dataset, given, np.int32(12), 0, 8)
    for name, value in batch.items():
        np.testing.assert_array_equal(value, given[name], err_msg=name)
    start = batch["ids"][0]
    assert batch["inputs"][0].tolist() == job.dataset.resident("train")["tokens"][start : start + 16].tolist()


# ---------------------------------------------------------------- figures


def evaluated(dataset: TextDataset, batch: int, split: str = "validation") -> list[dict[str, Any]]:
    rows = dataset.eval_rows(split)
    return [dataset.evaluation(split, *sequential_rows(k, rows, batch)) for k in range(steps_per_epoch(rows, batch))]


@pytest.mark.parametrize(("n", "block"), [*SIZES, (5, 64)])
def test_every_target_counts_exactly_once_in_the_figures(n: int, block: int) -> None:
    dataset = counted(n, block)
    found: list[int] = []
    for batch in evaluated(dataset, 3):
        mask = batch["mask"]
        assert mask.shape == batch["inputs"].shape == batch["targets"].shape == (3, block)
        assert mask.dtype == bool
        np.testing.assert_array_equal(batch["targets"][mask], batch["inputs"][mask] + 1)
        assert (batch["targets"] < n).all()  # what is filled up is a token too
        found += batch["targets"][mask].tolist()
    assert found == list(range(1, n))
    if n > 2 * block and block > 1:
        trained = epoch_of(dataset, 0)["targets"].size
        assert trained < n - 1  # the control: training windows leave some out


def test_the_last_window_counts_in_part_and_a_padded_row_not_at_all() -> None:
    dataset = counted(30, 8)
    assert dataset.eval_rows("validation") == 4
    first, second = evaluated(dataset, 3)
    assert first["mask"].all()
    assert second["mask"].tolist() == [[True] * 5 + [False] * 3, [False] * 8, [False] * 8]
    assert second["ids"].tolist() == [24, 0, 0]
    assert second["targets"][0].tolist() == [25, 26, 27, 28, 29, 29, 29, 29]
    assert int(second["epoch"]) == 0
    assert sum(int(batch["mask"].sum()) for batch in (first, second)) == 29


@pytest.mark.parametrize(("n", "rows"), [(0, 0), (1, 0), (2, 1), (9, 1), (10, 2), (17, 2), (18, 3)])
def test_windows_for_figures_cover_every_target(n: int, rows: int) -> None:
    assert counted(n, 8).eval_rows("test") == rows


def test_figures_do_not_depend_on_seed_or_epoch() -> None:
    """Evaluation windows are not shifted."""
    one, two = (evaluated(counted(100, 8, seed), 4) for seed in (0, 1))
    for a, b in zip(one, two, strict=True):
        for name, value in a.items():
            np.testing.assert_array_equal(value, b[name])
    assert one[0]["ids"].tolist() == [0, 8, 16, 24]


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("size", [3, 300, 70_000])
def test_tokens_are_kept_in_the_smallest_type_and_batches_are_int32(size: int) -> None:
    from jaxtrain.data.text import _narrow

    tokens = _narrow(np.array([0, size - 1]), size)
    assert tokens.dtype == {3: np.uint8, 300: np.uint16, 70_000: np.int32}[size]
    assert tokens.tolist() == [0, size - 1]
    dataset = TextDataset("made", {"train": tokens}, 1, 0, Schema("tokens", (1,), "int32", size, (1,)))
    assert dataset.read("train", np.zeros(1, np.int32))["targets"].tolist() == [[size - 1]]
    shapes = dataset.shapes(1)
    read = dataset.read("train", np.zeros(1, np.int32))
    assert {k: (v.shape, v.dtype) for k, v in shapes.items()} == {k: (v.shape, v.dtype) for k, v in read.items()}
    taken = dataset.take({"tokens": jnp.asarray(tokens)}, jnp.zeros(1, jnp.int32), jnp.int32(0))
    assert taken["targets"].tolist() == [[size - 1]]
