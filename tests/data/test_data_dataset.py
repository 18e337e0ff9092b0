"""A dataset: classes, normalisation and shapes are learnt from the training rows alone."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from data_helpers import config_of, dataset_of, source_of

from jaxtrain.config import ConfigError, load, schema
from jaxtrain.data.dataset import class_weights, other_parts
from jaxtrain.data.make import make_dataset
from jaxtrain.data.schema import Schema

# ---------------------------------------------------------------- classes


@pytest.mark.parametrize(
    ("targets", "names", "encoded"),
    [
        (["cat", "ant", "cat", "bee"], ("ant", "bee", "cat"), [2, 0, 2, 1]),
        ([7, 3, 7, 900], ("3", "7", "900"), [1, 0, 1, 2]),
        ([-1, 1, -1, 1], ("-1", "1"), [0, 1, 0, 1]),
        ([0.0, 1.0, 1.0, 0.0], ("0", "1"), [0, 1, 1, 0]),
        ([True, False, True, True], ("False", "True"), [1, 0, 1, 1]),
        (np.array(["x", "y", "x", "y"], object), ("x", "y"), [0, 1, 0, 1]),
    ],
    ids=["words", "gaps", "minus-one", "floats", "bools", "objects"],
)
def test_classes_are_numbered_in_the_order_of_their_names(targets: Any, names: tuple[str, ...], encoded: Any) -> None:
    dataset = dataset_of(targets, split=[0, 0, 0, 0])
    assert dataset.schema.class_names == names
    assert dataset.schema.outputs == len(names)
    assert dataset.schema.task == "classes"
    assert dataset.targets.dtype == np.int32
    assert dataset.targets.tolist() == encoded


def test_a_source_may_have_words_for_its_numbers() -> None:
    source = source_of([2, 0, 2, 0], names=("zero", "one", "two"), split=np.zeros(4, np.int8))
    dataset = make_dataset(config_of(), source)
    assert dataset.schema.class_names == ("zero", "two")
    assert dataset.targets.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("kind", ["numbers", "words", "objects"])
def test_a_class_without_a_training_row_is_refused_with_its_row(kind: str) -> None:
    targets: Any = [0, 1, 0, 5] if kind == "numbers" else ["a", "b", "a", "z"]
    named = "'5'" if kind == "numbers" else "'z'"
    array = np.array(targets, object) if kind == "objects" else np.array(targets)
    with pytest.raises(ConfigError) as caught:
        dataset_of(array, split=[0, 0, 1, 1])
    assert str(caught.value) == f"made: class {named} (row 3) has no training row"
    dataset_of(array, split=[0, 0, 1, 0])  # the control


def test_numbers_with_fractions_are_no_classes() -> None:
    with pytest.raises(ConfigError) as caught:
        dataset_of([0.5, 1.0, 2.0])
    assert str(caught.value) == (
        "objective.kind=cross_entropy: the targets of made are numbers with fractions (first: 0.5), not classes; "
        "allowed for them: mse, mae, huber"
    )
    assert dataset_of([0.5, 1.0, 2.0], objective__kind="mse").schema.task == "regression"


def test_the_number_that_has_a_fraction_is_the_one_that_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\(first: 1\.5\)"):
        dataset_of([0.0, 1.0, 1.5])


def test_a_target_that_is_not_a_number_is_named_with_its_row() -> None:
    with pytest.raises(ConfigError, match="row 2"):
        dataset_of([0.0, 1.0, np.nan, 1.0])


def test_targets_of_two_axes_are_no_classes() -> None:
    with pytest.raises(ConfigError, match=r"shape \(4, 2\); one class for each row is needed"):
        dataset_of(np.zeros((4, 2), int))


# ---------------------------------------------------------------- binary and values


def test_binary_takes_zeros_and_ones() -> None:
    dataset = dataset_of([[0, 1, 1], [1, 0, 0]], split=[0, 0], objective__kind="binary")
    assert dataset.schema.task == "binary"
    assert dataset.schema.outputs == 3
    assert dataset.schema.target_shape == (3,)
    assert dataset.schema.class_names is None
    assert dataset.targets.dtype == np.float32
    assert dataset.targets.tolist() == [[0, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(("targets", "wrong"), [([0, 1, 2], "2"), ([0.0, 0.5, 1.0], "0.5"), ([-1, 1, 1], "-1")])
def test_binary_refuses_other_numbers(targets: list[float], wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataset_of(targets, objective__kind="binary")
    assert str(caught.value) == f"objective.kind=binary: a target of made is {wrong}; allowed: 0 and 1"


def test_binary_refuses_words() -> None:
    with pytest.raises(ConfigError, match=r"a target of made is 'no'; allowed: 0 and 1"):
        dataset_of(["yes", "no"], split=[0, 0], objective__kind="binary")


@pytest.mark.parametrize("kind", ["mse", "mae", "huber"])
def test_regression_keeps_the_values(kind: str) -> None:
    dataset = dataset_of([[1, 2.5], [3, -4]], split=[0, 0], objective__kind=kind)
    assert dataset.targets.tolist() == [[1, 2.5], [3, -4]]
    assert dataset.targets.dtype == np.float32
    assert (dataset.schema.task, dataset.schema.outputs, dataset.schema.target_shape) == ("regression", 2, (2,))


def test_regression_refuses_words_and_what_is_not_finite() -> None:
    with pytest.raises(ConfigError, match=r"made: a target is .*'a'.*; numbers are needed \(cross_entropy takes words"):
        dataset_of(["a", "b"], objective__kind="mse")
    with pytest.raises(ConfigError, match="made: the target of row 2 is not finite"):
        dataset_of([0.5, 1.0, np.inf], objective__kind="mse")


# ---------------------------------------------------------------- inputs


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused_by_number(bad: float) -> None:
    inputs = np.zeros((6, 2, 2), np.float32)
    inputs[3, 1, 0] = inputs[5, 0, 0] = bad
    with pytest.raises(ConfigError) as caught:
        source_of(np.arange(6), inputs)
    assert str(caught.value) == "made: 2 rows have NaN or infinite inputs, the first is row 3"


def test_inputs_that_the_device_cannot_hold_are_refused_not_wrapped() -> None:
    """2**40 would become 0 as an int32, and 1e300 infinity as a float32."""
    with pytest.raises(ConfigError, match="row 1"):
        dataset_of([0, 1, 0], np.array([[1], [2**40], [3]]), split=[0, 0, 0])
    with pytest.raises(ConfigError, match="row 2"):
        dataset_of([0, 1, 0], np.array([[1.0], [2.0], [1e300]]), split=[0, 0, 0])
    dataset_of([0, 1, 0], np.array([[1], [2**31 - 1], [3]]), split=[0, 0, 0])  # the control


@pytest.mark.parametrize(("weights", "row"), [([1, np.nan, 1], 1), ([1, 1, -0.5], 2), ([np.inf, 1, 1], 0)])
def test_weights_are_finite_and_not_negative(weights: list[float], row: int) -> None:
    """One NaN weight makes the loss of every batch it is in NaN; a negative one turns the loss round."""
    with pytest.raises(ConfigError, match=rf"weight.*row {row}"):
        dataset_of([0, 1, 0], weights=np.array(weights), split=[0, 0, 0])
    dataset_of([0, 1, 0], weights=np.array([0.0, 1.0, 2.5]), split=[0, 0, 0])  # the control


def test_words_as_inputs_and_no_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="made: inputs are of type <U1; numbers are needed"):
        source_of([0, 1], np.array([["a"], ["b"]]))
    with pytest.raises(ConfigError, match="made: no rows"):
        source_of(np.zeros(0, int), np.zeros((0, 2)))


@pytest.mark.parametrize("label", ["targets", "weights", "split"])
def test_every_array_has_one_entry_for_each_row(label: str) -> None:
    parts: dict[str, Any] = {"targets": np.zeros(4, int), "weights": np.ones(4), "split": np.zeros(4, np.int8)}
    parts[label] = parts[label][:3]
    with pytest.raises(ConfigError) as caught:
        source_of(inputs=np.zeros((4, 2)), **parts)
    assert str(caught.value) == f"made: 4 inputs but 3 {label}; one for each row is needed"


@pytest.mark.parametrize(
    ("stored", "read"),
    [("float64", "float32"), ("float16", "float32"), ("int64", "int32"), ("uint8", "uint8"), ("bool", "bool")],
)
def test_inputs_are_narrowed_to_what_the_device_takes(stored: str, read: str) -> None:
    dataset = dataset_of([0, 1, 0], np.array([[0], [1], [1]]).astype(stored), split=[0, 0, 0])
    assert dataset.schema.input_dtype == read
    batch = dataset.read("train", np.array([2, 0]))
    assert batch["inputs"].dtype == read
    assert batch["inputs"].tolist() == [[1], [0]]


def test_read_gives_rows_of_a_split_with_the_ids_of_the_source() -> None:
    dataset = dataset_of([0, 1, 0, 1, 0], split=[1, 0, 2, 0, 0], weights=np.arange(5) / 2)
    batch = dataset.read("train", np.array([2, 0, 1]))
    assert batch["ids"].tolist() == [4, 1, 3]
    assert batch["ids"].dtype == np.int32
    assert batch["inputs"][:, 0].tolist() == [4, 1, 3]
    assert batch["targets"].tolist() == [0, 1, 1]
    assert batch["weights"].tolist() == [2.0, 0.5, 1.5]
    assert batch["weights"].dtype == np.float32
    assert dataset.read("validation", np.array([0]))["ids"].tolist() == [0]
    assert dataset.rows("train") == 3
    shapes = dataset.resident_shapes("train").values()
    assert sum(x.size * x.dtype.itemsize for x in shapes) == 3 * (2 * 4 + 4 + 4 + 4)
    assert "weights" not in dataset_of([0, 1], split=[0, 0]).read("train", np.array([0]))


# ---------------------------------------------------------------- normalisation


def images(rows: int = 6) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, 3, 4, 2)) * [1.0, 5.0] + [10.0, -3.0]


@pytest.mark.parametrize(("how", "axes"), [("channel", (0, 1, 2)), ("feature", (0,)), ("none", None)])
def test_normalisation_is_over_channels_or_features_of_the_training_rows(how: str, axes: Any) -> None:
    x = images()
    dataset = dataset_of([0, 1, 0, 1, 0, 1], x, split=[0, 0, 0, 0, 1, 2], data__normalize=how)
    if axes is None:
        assert dataset.schema.mean is None is dataset.schema.sd
        expected = x
    else:
        mean, sd = x[:4].astype(np.float32).mean(axes, dtype=np.float64), x[:4].std(axes)
        np.testing.assert_allclose(dataset.schema.mean, mean, rtol=1e-6)
        np.testing.assert_allclose(dataset.schema.sd, sd, rtol=1e-6)
        expected = (x - mean) / sd
    y = jax.jit(dataset.schema.preprocess())(x.astype(np.float32))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert y.dtype == np.float32


def test_channel_and_feature_differ_on_images_and_agree_on_vectors() -> None:
    def means(x: np.ndarray, how: str) -> Any:
        return np.shape(dataset_of([0, 1, 0, 1, 0, 1], x, split=[0] * 6, data__normalize=how).schema.mean)

    assert (means(images(), "channel"), means(images(), "feature")) == ((2,), (3, 4, 2))
    vectors = images()[:, 0, 0]
    assert (means(vectors, "channel"), means(vectors, "feature")) == ((2,), (2,))


def test_validation_and_test_rows_do_not_reach_the_statistics() -> None:
    split = [0, 0, 0, 0, 1, 2]

    def schema_of(x: np.ndarray) -> Schema:
        return dataset_of([0, 1, 0, 1, 0, 1], x, split=split).schema

    x = images()
    before = schema_of(x)
    x[4:] += 100.0
    assert schema_of(x) == before
    x[0] += 100.0
    assert schema_of(x) != before  # the control


def test_training_rows_have_mean_0_and_deviation_1_after_it() -> None:
    dataset = dataset_of([0, 1, 0, 1, 0, 1], images(), split=[0] * 6)
    y = np.asarray(dataset.schema.preprocess()(images().astype(np.float32)))
    np.testing.assert_allclose(y.mean((0, 1, 2)), 0.0, atol=1e-5)
    np.testing.assert_allclose(y.std((0, 1, 2)), 1.0, rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, 7.0, 0.1, 1e6 + 0.1])
def test_a_constant_feature_is_moved_to_zero_and_not_divided(value: float) -> None:
    x = np.stack([np.full(7, value), np.arange(7)], 1)
    dataset = dataset_of([0, 1, 0, 1, 0, 1, 0], x, split=[0] * 7)
    assert dataset.schema.sd[0] == 1.0
    y = np.asarray(dataset.schema.preprocess()(x.astype(np.float32)))
    np.testing.assert_allclose(y[:, 0], 0.0, atol=1e-6)
    assert np.abs(y[:, 1]).max() > 1


def test_bytes_are_normalised_as_numbers() -> None:
    x = np.array([[0], [128], [255]], np.uint8)
    y = dataset_of([0, 1, 0], x, split=[0, 0, 0]).schema.preprocess()(x)
    np.testing.assert_allclose(y, (x - x.mean()) / x.std(), rtol=1e-5)


# ---------------------------------------------------------------- the schema as JSON


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (["b", "a", "b"], {}),
        ([0, 1, 1], {"data__normalize": "none"}),
        ([[0, 1], [1, 1], [0, 0]], {"objective__kind": "binary", "data__normalize": "feature"}),
        ([0.5, 1.5, 2.5], {"objective__kind": "mse"}),
    ],
    ids=["words", "none", "binary", "values"],
)
def test_a_schema_survives_json(targets: Any, options: dict[str, Any]) -> None:
    before = dataset_of(targets, images(3), split=[0, 0, 0], **options).schema
    after = Schema.from_json(json.loads(json.dumps(before.to_json())))
    assert after == before
    x = images(3).astype(np.float32)
    assert np.asarray(after.preprocess()(x)).tobytes() == np.asarray(before.preprocess()(x)).tobytes()


# ---------------------------------------------------------------- class weights


def test_balanced_weights_are_inverse_to_the_share_of_the_training_rows() -> None:
    dataset = dataset_of([0, 0, 0, 1, 1, 1, 1, 1], split=[0, 0, 0, 0, 1, 1, 1, 2])
    weights = class_weights(schema.CrossEntropy(class_weights="balanced"), dataset)
    assert weights == pytest.approx((4 / (2 * 3), 4 / (2 * 1)))  # of 3 and 1 rows; all rows would be 3 and 5
    counts = np.array([3, 1])
    assert (counts * weights).sum() == pytest.approx(counts.sum())


def test_none_and_given_weights() -> None:
    dataset = dataset_of([0, 1, 0], split=[0, 0, 0])
    assert class_weights(schema.CrossEntropy(), dataset) is None
    assert class_weights(schema.CrossEntropy(class_weights=(1.0, 4.0)), dataset) == (1.0, 4.0)
    with pytest.raises(ConfigError) as caught:
        class_weights(schema.CrossEntropy(class_weights=(1.0, 4.0, 2.0)), dataset)
    assert str(caught.value) == "objective.class_weights: 3 weights for 2 classes; one each is needed"


# ---------------------------------------------------------------- overfitting, small data, fingerprint


def test_overfit_batches_trains_and_evaluates_the_same_few_rows() -> None:
    dataset = dataset_of(np.arange(100) % 4, train__overfit_batches=2, train__global_batch_size=8)
    assert dataset.rows("train") == dataset.rows("validation") == 16
    assert dataset.rows("test") == 0
    np.testing.assert_array_equal(dataset.splits.train, dataset.splits.validation)
    assert dataset.notes == ("overfitting 16 rows: they are trained on and evaluated",)
    assert dataset_of(np.arange(100) % 4).rows("train") == 60  # the control


def fingerprint(changes: dict[str, Any] | None = None, *, inputs: Any = None, **parts: Any) -> tuple[str, ...]:
    x = np.arange(40, dtype=np.float32).reshape(20, 2) if inputs is None else inputs
    targets = parts.pop("targets", np.arange(20) % 2)
    source = source_of(targets, x, **parts)
    return tuple(make_dataset(load({}, (changes or {}).items()), source).fingerprint().values())


def test_the_fingerprint_changes_with_rows_split_and_normalisation() -> None:
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    touched = x.copy()
    touched[7, 1] = np.nextafter(touched[7, 1], np.float32(np.inf))
    other = np.arange(20) % 2
    other[3] = 0
    prints = [
        fingerprint(),
        fingerprint(inputs=touched),
        fingerprint(inputs=x.astype(np.float64)),
        fingerprint(inputs=x.reshape(20, 2, 1)),
        fingerprint(targets=other),
        fingerprint(targets=(np.arange(20) % 2).astype(str)),
        fingerprint(weights=np.ones(20)),
        fingerprint(split=(np.arange(20) % 3).astype(np.int8)),
        fingerprint(names=("no", "yes")),
        fingerprint({"data.split_seed": 1}),
        fingerprint({"data.validation_fraction": 0.3}),
        fingerprint({"data.normalize": "none"}),
        fingerprint({"train.overfit_batches": 1, "train.global_batch_size": 4}),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint() == prints[0]


def test_a_fingerprint_says_which_part_has_changed() -> None:
    source = source_of(np.arange(20) % 2, np.arange(40, dtype=np.float32).reshape(20, 2))
    before = make_dataset(load({}), source).fingerprint()

    def changed(changes: dict[str, Any], source: Any = source) -> list[str]:
        now = make_dataset(load({}, changes.items()), source).fingerprint()
        assert (other_parts(before, now) == "") == (before == now)
        return [
            part for part in before if f"{part} {before[part][:12]} is now {now[part][:12]}" in other_parts(before, now)
        ]

    assert changed({}) == []
    # Mean and sd are of the training rows.
    assert changed({"data.split_seed": 1}) == ["split", "encoding"]
    assert changed({"data.normalize": "none"}) == ["encoding"]
    shorter = source_of(np.arange(18) % 2, np.arange(36, dtype=np.float32).reshape(18, 2))
    assert changed({}, shorter) == ["rows", "content", "split", "encoding"]
    assert other_parts(before, {**before, "rows": "18"}) == "rows 20 is now 18"
    assert other_parts({}, {"rows": "18"}) == "rows unknown is now 18"


def test_the_fingerprint_changes_with_nothing_else() -> None:
    changes = {
        "train.seed": 5,
        "train.global_batch_size": 7,
        "train.duration": 3,
        "model.hidden": [5],
        "optimizer.peak_lr": 0.5,
        "data.feed": "direct",
        "augment.shift": 0,
        "objective.label_smoothing": 0.1,
        "name": "other",
    }
    assert {fingerprint({key: value}) for key, value in changes.items()} == {fingerprint()}


def test_the_fingerprint_sees_every_word_of_a_long_column() -> None:
    """`repr` of an object array of more than 1,000 words leaves its middle out."""

    def printed(middle: str) -> str:
        words = np.array(["a", "b"] * 1000, object)
        words[1000:1002] = [middle, {"a": "b", "b": "a"}[middle]]
        split = np.zeros(2000, np.int8)
        return fingerprint(inputs=np.zeros((2000, 1), np.float32), targets=words, split=split)

    assert printed("a") != printed("b")
