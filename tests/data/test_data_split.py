"""Three splits: stratified, disjoint, complete, and the same for ever."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from data_helpers import config_of, dataset_of

from jaxtrain.config import ConfigError
from jaxtrain.data.make import make_dataset
from jaxtrain.data.split import Splits, given, stratified

NAMES = ("train", "validation", "test")


def sizes(splits: Splits) -> tuple[int, ...]:
    return tuple(len(splits[name]) for name in NAMES)


def per_class(splits: Splits, labels: np.ndarray) -> dict[int, tuple[int, ...]]:
    return {c: tuple(int((labels[splits[n]] == c).sum()) for n in NAMES) for c in np.unique(labels).tolist()}


def assert_divides(splits: Splits, rows: int) -> None:
    together = np.concatenate([splits[name] for name in NAMES])
    assert sorted(together.tolist()) == list(range(rows))
    for name in NAMES:
        assert (np.diff(splits[name]) > 0).all()


@pytest.mark.parametrize("fractions", [(0.2, 0.2), (0.1, 0.3), (0.0, 0.2), (0.25, 0.0), (0.0, 0.0), (0.45, 0.5)])
def test_each_class_is_divided_in_proportion(fractions: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat([0, 1, 2], [500, 97, 13]))
    splits = stratified(labels, len(labels), fractions, 0)
    assert_divides(splits, len(labels))
    shares = np.array([1 - sum(fractions), *fractions])
    for c, counts in per_class(splits, labels).items():
        assert np.abs(counts - shares * (labels == c).sum()).max() < 1.0
    assert np.abs(np.array(sizes(splits)) - shares * len(labels)).max() <= 3


def test_a_sorted_file_does_not_give_a_sorted_tail() -> None:
    labels = np.repeat(np.arange(10), 20)
    assert per_class(stratified(labels, 200, (0.2, 0.2), 0), labels) == dict.fromkeys(range(10), (12, 4, 4))
    tail = Splits(np.arange(120), np.arange(120, 160), np.arange(160, 200))
    assert per_class(tail, labels)[9] == (0, 0, 20)  # the control


@pytest.mark.parametrize(("rows", "expected"), [(1, (1, 0, 0)), (2, (1, 1, 0)), (3, (2, 1, 0)), (4, (2, 1, 1))])
def test_a_rare_class_is_always_in_training(rows: int, expected: tuple[int, ...]) -> None:
    labels = np.repeat([0, 1], [50, rows])
    splits = stratified(labels, len(labels), (0.2, 0.2), 0)
    assert per_class(splits, labels) == {0: (30, 10, 10), 1: expected}


def test_a_single_row_goes_to_training_even_when_others_get_more() -> None:
    labels = np.repeat([0, 1], [50, 1])
    splits = stratified(labels, 51, (0.45, 0.5), 0)
    assert per_class(splits, labels)[1] == (1, 0, 0)


def test_without_labels_all_rows_are_one_group() -> None:
    splits = stratified(None, 101, (0.2, 0.1), 0)
    assert_divides(splits, 101)
    assert sizes(splits) == (71, 20, 10)
    assert splits.train.tolist() != list(range(71))  # shuffled


def test_seeds_give_other_splits_of_the_same_sizes() -> None:
    labels = np.repeat(np.arange(3), 30)
    a, b, again = (stratified(labels, 90, (0.2, 0.2), seed) for seed in (0, 1, 0))
    assert sizes(a) == sizes(b) == (54, 18, 18)
    assert not np.array_equal(a.train, b.train)
    np.testing.assert_array_equal(a.train, again.train)


def test_classes_of_equal_size_are_shuffled_apart() -> None:
    labels = np.repeat(np.arange(3), 30)
    splits = stratified(labels, 90, (0.2, 0.2), 0)
    taken = {tuple((splits.test[labels[splits.test] == c] - 30 * c).tolist()) for c in range(3)}
    assert len(taken) == 3


def test_the_split_is_no_epoch_order_of_the_same_seed() -> None:
    from jaxtrain.data.order import permute

    order = permute(0, 0, np.arange(100, dtype=np.int32), 100)
    splits = stratified(None, 100, (0.2, 0.2), 0)
    assert sorted(order[:60].tolist()) != splits.train.tolist()


def test_a_given_split_is_taken_as_it_is() -> None:
    splits = given(np.array([2, 0, 1, 0, 2, 0], np.int8))
    assert [splits[name].tolist() for name in NAMES] == [[1, 3, 5], [2], [0, 4]]
    dataset = dataset_of([0, 1, 0, 1, 0, 0], split=[2, 0, 1, 0, 2, 0])
    assert [dataset.splits[name].tolist() for name in NAMES] == [[1, 3, 5], [2], [0, 4]]


def test_a_given_split_without_training_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="made: no row is left to train on of 3"):
        dataset_of([0, 1, 0], split=[1, 2, 1])


def test_rows_left_open_are_divided_into_training_and_validation() -> None:
    """-1: of data that carries a test split but no validation. What has a split keeps it."""
    split = np.repeat(np.array([-1, 0, 1, 2], np.int8), [100, 5, 6, 7])
    splits = given(split, None, 0.3, 0)
    assert_divides(splits, 118)
    assert sizes(splits) == (75, 36, 7)
    assert set(range(100, 105)) <= set(splits.train.tolist())
    assert set(range(105, 111)) <= set(splits.validation.tolist())
    assert splits.test.tolist() == list(range(111, 118))
    assert splits.validation[:30].tolist() != list(range(30))  # drawn, not cut off
    closed = given(np.maximum(split, 0), None, 0.3, 0)  # the control: where nothing is open, nothing is drawn
    assert sizes(closed) == (105, 6, 7)


def test_open_rows_are_divided_class_by_class_and_by_the_seed() -> None:
    labels = np.repeat([0, 1, 2], [50, 20, 10])
    split = np.tile(np.array([-1, -1, -1, -1, 2], np.int8), 16)
    first, other, again = (given(split, labels, 0.25, seed) for seed in (0, 1, 0))
    for splits in (first, other):
        assert per_class(splits, labels) == {0: (30, 10, 10), 1: (12, 4, 4), 2: (6, 2, 2)}
        assert splits.test.tolist() == list(range(4, 80, 5))
    assert first.validation.tolist() != other.validation.tolist()
    assert first.validation.tolist() == again.validation.tolist()
    as_one = given(split, None, 0.25, 0)  # the control
    assert per_class(as_one, labels) != per_class(first, labels)


def test_open_rows_of_a_dataset_follow_its_fraction_and_its_seed() -> None:
    def rows(**options: float) -> tuple[list[int], ...]:
        split = [-1] * 20 + [2] * 5
        dataset = dataset_of(np.arange(25) % 2, split=split, **{f"data__{k}": v for k, v in options.items()})
        return tuple(dataset.splits[name].tolist() for name in NAMES)

    before = rows(validation_fraction=0.2)
    assert [len(part) for part in before] == [16, 4, 5]
    assert sorted(i % 2 for i in before[1]) == [0, 0, 1, 1]
    assert [len(part) for part in rows(validation_fraction=0.5)] == [10, 10, 5]
    assert [len(part) for part in rows(validation_fraction=0.0)] == [20, 0, 5]
    assert rows(validation_fraction=0.2, test_fraction=0.4) == before  # the test split is there already
    assert rows(validation_fraction=0.2, split_seed=1) != before


def test_values_have_no_classes_to_divide_by() -> None:
    dataset = dataset_of(np.arange(25) / 2, split=[-1] * 20 + [2] * 5, objective__kind="mse")
    assert [dataset.rows(name) for name in NAMES] == [16, 4, 5]


def test_the_split_of_digits_never_changes() -> None:
    """A model's test figure means something only while its test rows stay out of training."""
    splits = make_dataset(config_of()).splits
    assert sizes(splits) == (1078, 362, 357)
    digest = hashlib.sha256()
    for name in NAMES:
        digest.update(splits[name].astype("<i8").tobytes())
    assert digest.hexdigest() == "60a656c5793a336c3b85a8ca78f1dac7f672bae37854c3cf7c6597980ce00d30"
    assert splits.test[:5].tolist() == [1, 2, 18, 19, 22]


def test_the_training_seed_moves_no_row_between_splits() -> None:
    a, b = (make_dataset(config_of(train__seed=seed)).splits for seed in (0, 1))
    c = make_dataset(config_of(data__split_seed=1)).splits
    np.testing.assert_array_equal(a.test, b.test)
    assert not np.array_equal(a.test, c.test)  # the control
