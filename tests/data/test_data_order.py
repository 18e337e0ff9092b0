"""The order of rows: a permutation of (seed, epoch), the same under numpy and jnp, at any position."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from jaxtrain.data.order import batch_rows, permute, sequential_rows, steps_per_epoch

SIZES = [1, 2, 3, 23, 64, 1000]


def order(seed: int, epoch: int, rows: int) -> np.ndarray:
    return permute(seed, epoch, np.arange(rows, dtype=np.int32), rows)


@pytest.mark.parametrize("rows", [*SIZES, 4, 5, 7, 63, 65, 1024, 1025])
def test_every_row_comes_once(rows: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 0), (2**31 - 1, 5)):
        result = order(seed, epoch, rows)
        assert result.dtype == np.int32
        assert sorted(result.tolist()) == list(range(rows))


@pytest.mark.parametrize("rows", SIZES)
def test_numpy_and_jnp_give_the_same_order_bit_for_bit(rows: int) -> None:
    device = jax.jit(lambda seed, epoch: permute(seed, epoch, jnp.arange(rows, dtype=jnp.int32), rows, jnp))
    for seed, epoch in ((0, 0), (3, 0), (3, 1), (12345, 99)):
        result = np.asarray(device(seed, epoch))
        assert result.dtype == np.int32
        assert result.tobytes() == order(seed, epoch, rows).tobytes()


@pytest.mark.parametrize("seed", [2**31 - 1, 2**31, 2**32 - 1])
def test_every_seed_that_a_config_allows_has_an_order_on_the_device_too(seed: int) -> None:
    """train.seed may be anything below 2**32; inside jit it is a static number."""
    host = order(seed, 2, 23)
    device = jax.jit(lambda epoch: permute(seed, epoch, jnp.arange(23, dtype=jnp.int32), 23, jnp))(2)
    assert np.asarray(device).tobytes() == host.tobytes()
    assert host.tolist() != order(seed - 1, 2, 23).tolist()


def test_part_of_the_order_is_that_part_of_the_whole() -> None:
    """A batch is computed without the rest of the epoch."""
    whole = order(5, 2, 1000)
    some = np.array([999, 0, 17, 17, 500], np.int32)
    np.testing.assert_array_equal(permute(5, 2, some, 1000), whole[some])
    assert int(permute(5, 2, np.int32(17), 1000)) == whole[17]


def test_epochs_and_seeds_differ() -> None:
    orders = {(s, e): order(s, e, 64).tobytes() for s in range(6) for e in range(6)}
    assert len(set(orders.values())) == 36
    assert order(1, 1, 64).tobytes() == orders[1, 1]  # the control: the same pair is the same order


def test_the_order_never_changes() -> None:
    """A change here would silently give every resumed run other batches."""
    assert order(0, 0, 10).tolist() == [6, 2, 7, 0, 9, 1, 4, 8, 3, 5]
    assert order(1, 3, 10).tolist() == [5, 1, 4, 8, 9, 7, 3, 6, 0, 2]


def too_uneven(counts: np.ndarray, expected: float, free: int, factor: float = 1.0) -> bool:
    """Pearson's chi-squared beyond its 99.99 % quantile."""
    return factor * float(((counts - expected) ** 2 / expected).sum()) > chi2.ppf(0.9999, free)


def orders(seed: int, epochs: int, rows: int) -> np.ndarray:
    """[epochs, rows]."""
    return permute(seed, np.arange(epochs)[:, None], np.arange(rows, dtype=np.int32)[None], rows)


@pytest.mark.parametrize("rows", [2, 3, 5, 7, 23])
def test_every_row_is_as_likely_at_every_place(rows: int) -> None:
    """2,000 epochs. The cells of a permutation vary (n - 1) / n as much as free draws, in (n - 1)^2 directions."""

    def uneven(drawn: np.ndarray) -> bool:
        counts = np.zeros((rows, rows))
        np.add.at(counts, (np.arange(rows)[None], drawn), 1)
        return too_uneven(counts, 2000 / rows, (rows - 1) ** 2, (rows - 1) / rows)

    assert not uneven(orders(11, 2000, rows))
    turns = (np.arange(2000) % (rows + 1) % rows)[:, None]  # one turn is twice as likely as the others
    assert uneven((np.arange(rows)[None] + turns) % rows)  # the control


def test_orders_of_many_epochs_at_once_are_those_of_each() -> None:
    assert orders(11, 5, 23).tolist() == [order(11, epoch, 23).tolist() for epoch in range(5)]


def test_all_orders_of_four_rows_are_as_likely() -> None:
    number = {p: i for i, p in enumerate(permutations(range(4)))}
    counts = np.bincount([number[tuple(o)] for o in orders(3, 4800, 4).tolist()], minlength=24)
    assert not too_uneven(counts, 200.0, 23)
    assert too_uneven(counts * np.linspace(0.5, 1.5, 24), 200.0, 23)  # the control


def test_the_next_epoch_does_not_remember_the_last() -> None:
    """The number of rows at their old place is Poisson with mean 1."""
    drawn = orders(0, 501, 64)
    same = (drawn[1:] == drawn[:-1]).sum(1)
    assert np.mean(same) == pytest.approx(1.0, abs=0.15)
    assert np.var(same) == pytest.approx(1.0, abs=0.3)


def test_batches_of_an_epoch_show_each_row_once_and_the_mask_counts_them() -> None:
    for rows, batch in ((23, 4), (10, 64), (64, 64), (65, 64), (1, 3), (8, 4)):
        steps = steps_per_epoch(rows, batch)
        assert steps == -(-rows // batch)
        for epoch in range(2):
            seen: list[int] = []
            for k in range(steps):
                numbers, mask, at = batch_rows(9, epoch * steps + k, rows, batch)
                assert int(at) == epoch
                assert numbers.shape == mask.shape == (batch,)
                real = min(rows - k * batch, batch)
                assert mask.tolist() == [True] * real + [False] * (batch - real)
                seen += numbers[mask].tolist()
            assert seen == order(9, epoch, rows).tolist()


def test_padding_repeats_the_real_rows_of_its_own_batch() -> None:
    numbers, mask, _ = batch_rows(0, 5, 23, 4)
    real = numbers[mask]
    assert mask.tolist() == [True, True, True, False]
    assert numbers.tolist() == [*real.tolist(), real[0]]
    numbers, mask, _ = batch_rows(0, 0, 10, 64)
    assert numbers.tolist() == [numbers[i % 10] for i in range(64)]
    assert mask.sum() == 10


@pytest.mark.parametrize(("rows", "batch"), [(23, 4), (10, 64), (64, 16)])
def test_batch_rows_inside_jit_are_those_of_numpy(rows: int, batch: int) -> None:
    device = jax.jit(lambda position: batch_rows(3, position, rows, batch, jnp))
    for position in range(3 * steps_per_epoch(rows, batch)):
        for ours, theirs in zip(batch_rows(3, position, rows, batch), device(position), strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_sequential_rows_go_in_order_and_are_padded_with_row_0() -> None:
    assert [x.tolist() for x in sequential_rows(0, 7, 4)] == [[0, 1, 2, 3], [True] * 4]
    assert [x.tolist() for x in sequential_rows(1, 7, 4)] == [[4, 5, 6, 0], [True, True, True, False]]
    device = jax.jit(lambda p: sequential_rows(p, 7, 4, jnp))(1)
    assert [np.asarray(x).tolist() for x in device] == [[4, 5, 6, 0], [True, True, True, False]]


def test_fault_loop_resume_mid_epoch(shared: Path) -> None:
    """23 rows, batch 4, 3 epochs: from every k on, the same ids follow; each epoch shows each id once."""
    ids = np.loadtxt(shared / "faults/loop_resume_mid_epoch/ids.csv", delimiter=",", skiprows=1)[:, 0].astype(int)

    def shown(first: int) -> list[list[int]]:
        batches = []
        for position in range(first, 18):
            numbers, mask, _ = batch_rows(0, position, len(ids), 4)
            batches.append(ids[numbers[mask]].tolist())
        return batches

    whole = shown(0)
    assert [len(batch) for batch in whole] == [4, 4, 4, 4, 4, 3] * 3
    for k in range(1, 18):
        assert shown(k) == whole[k:]
    epochs = [[i for batch in whole[6 * e : 6 * e + 6] for i in batch] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [ids.tolist()] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    drawn_anew = shown(0)[: 18 - 7]  # the control: what a resume at 7 shows that begins its order again
    assert drawn_anew != whole[7:]
