"""Every figure against scikit-learn, over uneven batches whose padding is garbage."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from sklearn import metrics as sk

from jaxtrain.core.metrics import (
    METRICS,
    BinaryMetrics,
    ClassMetrics,
    RegressionMetrics,
    auroc,
    best_is,
    merge,
)

ROWS, BATCH = 522, 256  # 256 + 256 + 10 real rows
AVERAGES = ("macro", "micro", "weighted")


def batches(outputs: np.ndarray, targets: np.ndarray, size: int, garbage: Any, padding: str = "masked") -> Any:
    """(outputs, targets, mask) of `size` rows each. Padded rows hold NaN outputs and `garbage` targets."""
    for begin in range(0, len(outputs), size):
        o, t = outputs[begin : begin + size], targets[begin : begin + size]
        missing = size - len(o)
        mask = np.arange(size) < len(o)
        o = np.concatenate([o, np.full((missing, *o.shape[1:]), np.nan, o.dtype)])
        t = np.concatenate([t, np.full((missing, *t.shape[1:]), garbage, t.dtype)])
        yield o, t, np.ones(size, bool) if padding == "counted" else mask


def figures_of(
    metric: Any, outputs: np.ndarray, targets: np.ndarray, garbage: Any, size: int = BATCH, **how: Any
) -> Any:
    update = jax.jit(metric.update)
    total = None
    for batch in batches(outputs, targets, size, garbage, **how):
        total = merge(total, jax.device_get(update(*batch)))
    return metric.finalise(total)


def precision_recall_f1(truth: np.ndarray, predicted: np.ndarray, average: str | None) -> tuple[Any, Any, Any]:
    return sk.precision_recall_fscore_support(truth, predicted, average=average, zero_division=0)[:3]


# ---------------------------------------------------------------- classes


@pytest.fixture(scope="module")
def classes() -> Any:
    """7 classes, rounded logits so that scores tie; class 5 is never predicted."""
    rng = np.random.default_rng(0)
    targets = rng.choice(7, ROWS, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05]).astype(np.int32)
    outputs = (rng.normal(size=(ROWS, 7)) + 1.5 * np.eye(7)[targets]).astype(np.float32)
    outputs[:, 5] = outputs.min(1) - 1
    figures, details = figures_of(ClassMetrics(7, 3), outputs, targets, garbage=987_654)
    return outputs, targets, figures, details


def test_accuracy_and_confusion_equal_scikit_learn(classes: Any) -> None:
    outputs, targets, figures, details = classes
    predicted = outputs.argmax(1)
    assert figures["accuracy"] == sk.accuracy_score(targets, predicted)
    assert details["confusion"] == sk.confusion_matrix(targets, predicted, labels=range(7)).tolist()


def test_top_k_accuracy_equals_scikit_learn(classes: Any) -> None:
    outputs, targets, figures, _ = classes
    expected = sk.top_k_accuracy_score(targets, outputs, k=3, labels=range(7))
    assert figures["top3_accuracy"] == expected
    assert expected > figures["accuracy"]


def test_a_nan_output_is_no_hit_of_top_k() -> None:
    outputs = np.array([[3.0, 2.0, 1.0, 0.0], [np.nan] * 4, [3.0, 2.0, 1.0, 0.0]], np.float32)
    targets = np.array([1, 1, 3], np.int32)
    figures, _ = figures_of(ClassMetrics(4, 2), outputs, targets, garbage=0, size=3)
    assert figures["top2_accuracy"] == pytest.approx(1 / 3, abs=1e-15)


@pytest.mark.parametrize("average", AVERAGES)
def test_averaged_precision_recall_f1_equal_scikit_learn(classes: Any, average: str) -> None:
    outputs, targets, figures, _ = classes
    expected = precision_recall_f1(targets, outputs.argmax(1), average)
    for name, value in zip(("precision", "recall", "f1"), expected, strict=True):
        assert figures[f"{name}_{average}"] == pytest.approx(value, rel=1e-12)


def test_per_class_figures_equal_scikit_learn(classes: Any) -> None:
    outputs, targets, _, details = classes
    expected = precision_recall_f1(targets, outputs.argmax(1), None)
    for name, values in zip(("precision", "recall", "f1"), expected, strict=True):
        np.testing.assert_allclose(details["per_class"][name], values, rtol=1e-12)
    assert details["per_class"]["support"] == np.bincount(targets, minlength=7).tolist()


def test_a_class_that_never_occurs_is_left_out_of_macro_as_in_scikit_learn() -> None:
    targets = np.array([0, 0, 1, 1, 3], np.int32)
    outputs = np.eye(5, dtype=np.float32)[[0, 1, 1, 1, 3]]  # classes 2 and 4: neither truth nor prediction
    figures, details = figures_of(ClassMetrics(5, 1), outputs, targets, garbage=0, size=5)
    expected = sk.f1_score(targets, outputs.argmax(1), average="macro")
    assert figures["f1_macro"] == pytest.approx(expected, rel=1e-12)
    assert np.mean(details["per_class"]["f1"]) != pytest.approx(expected, rel=1e-2)


def test_one_versus_rest_auroc_equals_scikit_learn(classes: Any) -> None:
    outputs, targets, figures, details = classes
    scores = np.asarray(jax.nn.softmax(outputs))
    expected = sk.roc_auc_score(targets, scores / scores.sum(1, keepdims=True), multi_class="ovr", average="macro")
    assert figures["auroc"] == pytest.approx(expected, rel=1e-6)
    each = [sk.roc_auc_score(targets == c, scores[:, c]) for c in range(7)]
    np.testing.assert_allclose(details["per_class"]["auroc"], each, rtol=1e-12)


def test_auroc_gives_ties_half_a_win() -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 5, 300) / 4.0
    positive = rng.random(300) < 0.2 + 0.4 * scores
    assert auroc(scores, positive) == pytest.approx(sk.roc_auc_score(positive, scores), rel=1e-12)
    # Control: wins alone, ties counted for nothing, are another number.
    pairs = scores[positive][:, None] - scores[~positive][None, :]
    assert np.mean(pairs > 0) < auroc(scores, positive) - 0.05
    assert np.mean(pairs > 0) + np.mean(pairs == 0) / 2 == pytest.approx(auroc(scores, positive), rel=1e-12)


def test_auroc_of_one_sided_or_nan_scores_is_unknown() -> None:
    assert auroc(np.array([0.1, 0.2]), np.array([True, True])) is None
    assert auroc(np.array([0.1, 0.2]), np.array([False, False])) is None
    assert auroc(np.array([0.1, np.nan]), np.array([True, False])) is None


def test_token_targets_count_the_tokens_of_real_rows() -> None:
    rng = np.random.default_rng(2)
    outputs = rng.normal(size=(10, 6, 4)).astype(np.float32)
    targets = rng.integers(0, 4, (10, 6)).astype(np.int32)
    figures, details = figures_of(ClassMetrics(4, 2), outputs, targets, garbage=77, size=8)
    right = outputs.argmax(-1) == targets
    assert figures["accuracy"] == pytest.approx(right.mean(), rel=1e-12)
    assert np.sum(details["confusion"]) == 60


def test_class_train_sums_count_real_rows_only() -> None:
    outputs = np.array([[1, 0], [1, 0], [0, 1], [np.nan, np.nan]], np.float32)
    targets = np.array([0, 1, 1, 0], np.int32)
    mask = np.array([True, True, True, False])
    sums = ClassMetrics(2, 5).train_sums(outputs, targets, mask)
    assert {name: float(x) for name, x in sums.items()} == {"accuracy": 2.0, "count": 3.0}
    counted = ClassMetrics(2, 5).train_sums(outputs, targets, np.ones(4, bool))
    assert float(counted["count"]) == 4.0


@pytest.mark.parametrize("size", [1, 7, 128, 1000, 4096])
def test_uneven_batches_give_the_figures_of_all_rows(shared: Any, size: int) -> None:
    rows = np.loadtxt(shared / "faults/loop_metrics_uneven/predictions.csv", delimiter=",", skiprows=1, dtype=np.int32)
    targets, predicted = rows.T
    outputs = np.eye(4, dtype=np.float32)[predicted]
    figures, details = figures_of(ClassMetrics(4, 5), outputs, targets, garbage=-1, size=size)
    assert figures["accuracy"] == pytest.approx(0.776, abs=1e-12)
    assert figures["f1_macro"] == pytest.approx(0.775232, abs=5e-7)
    assert np.sum(details["confusion"]) == 1000


def test_the_wrong_ways_to_count_uneven_batches_differ(shared: Any) -> None:
    rows = np.loadtxt(shared / "faults/loop_metrics_uneven/predictions.csv", delimiter=",", skiprows=1, dtype=np.int32)
    targets, predicted = rows.T
    outputs = np.eye(4, dtype=np.float32)[predicted]
    metric = ClassMetrics(4, 5)
    means, right, real = [], 0.0, 0.0
    for o, t, mask in batches(outputs, targets, 128, garbage=-1):
        sums = metric.train_sums(o, t, mask)
        means.append(float(sums["accuracy"] / sums["count"]))
        right, real = right + float(sums["accuracy"]), real + float(sums["count"])
    assert np.mean(means) == pytest.approx(0.78125, abs=5e-7)
    assert np.mean(means[:-1]) == pytest.approx(0.75, abs=5e-7)
    assert right / 1024 == pytest.approx(0.757812, abs=5e-7)
    assert right / real == pytest.approx(0.776, abs=1e-12)
    counted, _ = figures_of(metric, outputs, targets, garbage=0, size=128, padding="counted")
    assert counted["accuracy"] != pytest.approx(0.776, abs=1e-3)


# ---------------------------------------------------------------- binary and multi-label


@pytest.fixture(scope="module")
def binary() -> Any:
    rng = np.random.default_rng(3)
    targets = (rng.random(ROWS) < 0.3).astype(np.int32)
    outputs = np.round(rng.normal(size=ROWS) + 1.2 * targets - 0.4, 1).astype(np.float32)  # one decimal: ties
    figures, details = figures_of(BinaryMetrics(1), outputs, targets, garbage=1)
    return outputs, targets, figures, details


def test_binary_figures_equal_scikit_learn(binary: Any) -> None:
    outputs, targets, figures, details = binary
    yes = (outputs > 0).astype(np.int32)
    assert figures["accuracy"] == sk.accuracy_score(targets, yes)
    expected = precision_recall_f1(targets, yes, "binary")
    for name, value in zip(("precision", "recall", "f1"), expected, strict=True):
        assert figures[name] == pytest.approx(value, rel=1e-12)
    assert details["confusion"] == sk.confusion_matrix(targets, yes).tolist()


def test_binary_auroc_with_ties_equals_scikit_learn(binary: Any) -> None:
    outputs, targets, figures, _ = binary
    assert len(np.unique(outputs)) < ROWS / 4
    assert figures["auroc"] == pytest.approx(sk.roc_auc_score(targets, outputs), rel=1e-12)


def test_binary_auroc_keeps_the_order_of_very_sure_outputs() -> None:
    outputs = np.linspace(18.0, 30.0, 40).astype(np.float32)  # sigmoid is 1.0 in fp32 for each of them
    targets = (np.arange(40) >= 20).astype(np.int32)
    figures, _ = figures_of(BinaryMetrics(1), outputs, targets, garbage=0, size=40)
    assert sk.roc_auc_score(targets, np.asarray(jax.nn.sigmoid(outputs))) == 0.5  # what saturated scores give
    assert figures["auroc"] == 1.0


def test_binary_padding_would_change_the_figures_if_it_counted(binary: Any) -> None:
    outputs, targets, figures, _ = binary
    counted, _ = figures_of(BinaryMetrics(1), outputs, targets, garbage=1, padding="counted")
    assert counted["recall"] != pytest.approx(figures["recall"], abs=1e-2)


@pytest.fixture(scope="module")
def multi_label() -> Any:
    rng = np.random.default_rng(4)
    targets = (rng.random((ROWS, 4)) < [0.5, 0.3, 0.1, 0.02]).astype(np.int32)
    outputs = np.round(rng.normal(size=(ROWS, 4)) + 1.5 * targets - 0.6, 1).astype(np.float32)
    figures, details = figures_of(BinaryMetrics(4), outputs, targets, garbage=1)
    return outputs, targets, figures, details


@pytest.mark.parametrize("average", AVERAGES)
def test_multi_label_averages_equal_scikit_learn(multi_label: Any, average: str) -> None:
    outputs, targets, figures, _ = multi_label
    expected = precision_recall_f1(targets, outputs > 0, average)
    for name, value in zip(("precision", "recall", "f1"), expected, strict=True):
        assert figures[f"{name}_{average}"] == pytest.approx(value, rel=1e-12)


def test_multi_label_accuracy_exact_match_and_auroc_equal_scikit_learn(multi_label: Any) -> None:
    outputs, targets, figures, details = multi_label
    yes = (outputs > 0).astype(np.int32)
    assert figures["exact_match"] == sk.accuracy_score(targets, yes)  # scikit-learn's subset accuracy
    assert figures["accuracy"] == pytest.approx(1 - sk.hamming_loss(targets, yes), rel=1e-12)
    assert figures["exact_match"] < figures["accuracy"]
    assert figures["auroc"] == pytest.approx(sk.roc_auc_score(targets, outputs, average="macro"), rel=1e-12)
    np.testing.assert_allclose(details["per_class"]["f1"], precision_recall_f1(targets, yes, None)[2], rtol=1e-12)


def test_binary_train_sums_count_real_elements() -> None:
    outputs = np.array([[1, -1], [1, 1], [np.nan, 1]], np.float32)
    targets = np.array([[1, 1], [1, 1], [1, 1]], np.int32)
    sums = BinaryMetrics(2).train_sums(outputs, targets, np.array([True, True, False]))
    assert {name: float(x) for name, x in sums.items()} == {"accuracy": 3.0, "count": 4.0}


# ---------------------------------------------------------------- regression


@pytest.mark.parametrize(("columns", "offset"), [(None, 0.0), (None, 1e4), (3, 1e4)])
def test_regression_figures_equal_scikit_learn(columns: int | None, offset: float) -> None:
    rng = np.random.default_rng(5)
    shape = (ROWS,) if columns is None else (ROWS, columns)
    targets = (rng.normal(size=shape) + offset).astype(np.float32)
    outputs = (targets + 0.3 * rng.normal(size=shape)).astype(np.float32)
    figures, _ = figures_of(RegressionMetrics(columns or 1), outputs, targets, garbage=np.nan)
    truth, predicted = targets.astype(np.float64), outputs.astype(np.float64)
    assert figures["mae"] == pytest.approx(sk.mean_absolute_error(truth, predicted), rel=1e-6)
    assert figures["rmse"] == pytest.approx(sk.mean_squared_error(truth, predicted) ** 0.5, rel=1e-6)
    # The mean of a batch is kept in fp32: at 1e4 it is known to 5e-4.
    assert figures["r2"] == pytest.approx(sk.r2_score(truth, predicted), abs=1e-5 if offset else 1e-6)


def test_a_naive_sum_of_squares_loses_r2_at_a_large_offset() -> None:
    rng = np.random.default_rng(5)
    targets = (rng.normal(size=ROWS) + 1e4).astype(np.float32)
    squares, total = np.float32(0), np.float32(0)
    for t in targets:
        squares, total = squares + t * t, total + t
    naive = float(squares - total * total / np.float32(ROWS))
    true = float(((targets.astype(np.float64) - targets.astype(np.float64).mean()) ** 2).sum())
    assert abs(naive - true) > true  # off by more than the whole


def test_regression_padding_would_poison_the_figures_if_it_counted() -> None:
    targets = np.arange(10, dtype=np.float32)
    counted, _ = figures_of(RegressionMetrics(1), targets + 1, targets, garbage=0, size=8, padding="counted")
    masked, _ = figures_of(RegressionMetrics(1), targets + 1, targets, garbage=np.nan, size=8)
    assert np.isnan(counted["mae"])
    assert masked == {"mae": 1.0, "rmse": 1.0, "r2": pytest.approx(1 - 10 / 82.5, rel=1e-6)}


def test_a_batch_of_padding_alone_changes_no_regression_figure() -> None:
    rng = np.random.default_rng(6)
    targets = rng.normal(size=12).astype(np.float32)
    metric, outputs = RegressionMetrics(1), targets + 0.5
    one = merge(None, jax.device_get(metric.update(outputs, targets, np.ones(12, bool))))
    two = merge(None, jax.device_get(metric.update(outputs, targets, np.ones(12, bool))))
    nothing = metric.update(np.full(12, np.nan, np.float32), np.full(12, np.nan, np.float32), np.zeros(12, bool))
    assert metric.finalise(merge(two, jax.device_get(nothing))) == metric.finalise(one)


def test_regression_train_sums_count_real_elements() -> None:
    outputs, targets = np.array([1.0, 2.0, np.nan], np.float32), np.array([0.0, 4.0, np.nan], np.float32)
    sums = RegressionMetrics(1).train_sums(outputs, targets, np.array([True, True, False]))
    assert {name: float(x) for name, x in sums.items()} == {"mae": 3.0, "count": 2.0}


# ---------------------------------------------------------------- all


@pytest.mark.parametrize(
    ("task", "outputs", "top_k"),
    [("classes", 7, 3), ("classes", 2, 5), ("classes", 4, 1), ("binary", 1, 5), ("binary", 4, 5), ("regression", 2, 5)],
)
def test_names_are_the_keys_of_finalise(task: str, outputs: int, top_k: int) -> None:
    rng = np.random.default_rng(7)
    metric = METRICS[task](outputs, top_k)
    if task == "classes":
        targets, shape = rng.integers(0, outputs, 40).astype(np.int32), (40, outputs)
    else:
        shape = (40, outputs)
        targets = rng.integers(0, 2, shape).astype(np.float32 if task == "regression" else np.int32)
    figures, _ = figures_of(metric, rng.normal(size=shape).astype(np.float32), targets, garbage=0, size=16)
    assert list(figures) == metric.names
    assert all(type(value) is float for value in figures.values())


def test_merge_adds_integers_and_floats_in_64_bits() -> None:
    total = merge(None, {"count": np.int32(2**31 - 1), "sum": np.float32(16_777_216.0)})
    total = merge(total, {"count": np.int32(2**31 - 1), "sum": np.float32(1.0)})
    assert (int(total["count"]), float(total["sum"])) == (2**32 - 2, 16_777_217.0)
    assert np.float32(16_777_216.0) + np.float32(1.0) == 16_777_216.0  # what fp32 would have kept


def test_only_losses_and_errors_are_better_when_lower() -> None:
    lower = {
        name for m in ("classes", "binary", "regression") for name in METRICS[m](4, 2).names if best_is(name) == "min"
    }
    assert lower == {"mae", "rmse"}
    assert best_is("loss") == "min"
