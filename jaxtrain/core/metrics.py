"""Metrics as mergeable states: sums inside jit, merged on the host in float64 / int64, turned into figures once.

Never a mean of batch means; padding never counts. A task has four functions:
  train_sums(outputs, targets, mask) -> cheap sums for the training window, inside jit
  update(outputs, targets, mask)     -> the state of one batch, inside jit
  merge(total, batch)                -> on the host; `total` may be None
  finalise(total)                    -> ({name: float}, details for the report)
AUROC keeps scores, up to `SCORES_LIMIT` numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.core.objectives import over_elements

HostState = dict[str, Any]
SCORES_LIMIT = 20_000_000
_LOWER_IS_BETTER = {"loss", "mae", "rmse", "perplexity"}


def best_is(name: str) -> str:
    """ "min" or "max": which way a built-in metric is better."""
    return "min" if name in _LOWER_IS_BETTER else "max"


def merge(total: HostState | None, batch: dict[str, Any]) -> HostState:
    """Add the state of one batch. Integers in int64, floats in float64; lists of rows are kept as they are."""
    total = {} if total is None else total
    for name, value in batch.items():
        array = np.asarray(value)
        if name.startswith("rows_"):
            total.setdefault(name, []).append(array)
            continue
        wide = array.astype(np.float64 if np.issubdtype(array.dtype, np.floating) else np.int64)
        total[name] = total[name] + wide if name in total else wide
    return total


@dataclass(frozen=True)
class ClassMetrics:
    """Single-label classification: outputs [..., C], integer targets [...], mask [B]."""

    num_classes: int
    top_k: int

    @property
    def names(self) -> list[str]:
        """All scalar metrics that `finalise` gives."""
        averages = [f"{m}_{a}" for m in ("precision", "recall", "f1") for a in ("macro", "micro", "weighted")]
        top = [f"top{self.top_k}_accuracy"] if self._has_top_k else []
        return ["accuracy", *top, *averages, "auroc"]

    @property
    def _has_top_k(self) -> bool:
        return 1 < self.top_k < self.num_classes

    def train_sums(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """{"accuracy": right ones, "count": real elements}."""
        real = over_elements(mask, targets)
        right = (jnp.argmax(outputs, -1) == targets) & real
        return {"accuracy": jnp.sum(right.astype(jnp.float32)), "count": jnp.sum(real.astype(jnp.float32))}

    def update(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Confusion counts [C, C] (row: truth, column: prediction), hits of top-k, scores for AUROC."""
        real = over_elements(mask, targets).reshape(-1)
        outputs, targets = outputs.reshape(-1, self.num_classes), targets.reshape(-1)
        predicted = jnp.argmax(outputs, -1)
        counts = jnp.zeros((self.num_classes, self.num_classes), jnp.int32)
        state = {
            "confusion": counts.at[targets, predicted].add(real.astype(jnp.int32)),
            "rows_scores": jax.nn.softmax(outputs),
            "rows_targets": targets,
            "rows_mask": real,
        }
        if self._has_top_k:
            own = jnp.take_along_axis(outputs, targets[:, None], -1)
            ahead = jnp.sum(~(outputs <= own), -1)  # NaN is ahead of everything
            state["top_k"] = jnp.sum((ahead < self.top_k) & real)
        return state

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Kept scores as probabilities, [n, C]."""
        return scores

    def finalise(self, total: HostState) -> tuple[dict[str, float], dict[str, Any]]:
        """Figures from the whole confusion matrix; a class with no truth and no prediction is left out of macro."""
        confusion = total["confusion"]
        count = max(int(confusion.sum()), 1)
        right, truth, predicted = np.diag(confusion), confusion.sum(1), confusion.sum(0)
        figures = {"accuracy": float(right.sum() / count)}
        if "top_k" in total:
            figures[f"top{self.top_k}_accuracy"] = float(total["top_k"] / count)
        averages, per_class = _precision_recall_f1(right, truth, predicted)
        figures |= averages
        details: dict[str, Any] = {"confusion": confusion.tolist(), "per_class": per_class}
        scores, targets = _rows(total)
        if scores is not None:
            truths = targets[:, None] == np.arange(self.num_classes)
            areas = [auroc(scores[:, c], truths[:, c]) for c in range(self.num_classes)]
            per_class["auroc"] = areas
            known = [a for a in areas if a is not None]
            figures["auroc"] = float(np.mean(known)) if known else float("nan")
        return figures, details


@dataclass(frozen=True)
class BinaryMetrics:
    """Binary or multi-label: outputs (logits) and targets (0 or 1) of one shape, [B] or [B, K]."""

    labels: int

    @property
    def names(self) -> list[str]:
        """All scalar metrics that `finalise` gives."""
        if self.labels == 1:
            return ["accuracy", "precision", "recall", "f1", "auroc"]
        averages = [f"{m}_{a}" for m in ("precision", "recall", "f1") for a in ("macro", "micro", "weighted")]
        return ["accuracy", "exact_match", *averages, "auroc"]

    def train_sums(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """{"accuracy": right elements, "count": real elements}."""
        real = over_elements(mask, targets)
        right = ((outputs > 0) == (targets > 0.5)) & real
        return {"accuracy": jnp.sum(right.astype(jnp.float32)), "count": jnp.sum(real.astype(jnp.float32))}

    def update(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Counts per label, [K]; rows with all labels right; scores for AUROC."""
        outputs, targets = outputs.reshape(-1, self.labels), targets.reshape(-1, self.labels)
        yes, true = outputs > 0, targets > 0.5
        real = mask[:, None]

        def total(x: jax.Array) -> jax.Array:
            return jnp.sum((x & real).astype(jnp.int32), 0)

        return {
            "tp": total(yes & true),
            "fp": total(yes & ~true),
            "fn": total(~yes & true),
            "tn": total(~yes & ~true),
            "exact": jnp.sum(jnp.all(yes == true, -1) & mask),
            "rows_scores": outputs,  # logits: probabilities near 1 would tie in fp32
            "rows_targets": true,
            "rows_mask": mask,
        }

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Kept scores as probabilities, [n, K]."""
        return np.asarray(1.0 / (1.0 + np.exp(-scores.astype(np.float64))))

    def finalise(self, total: HostState) -> tuple[dict[str, float], dict[str, Any]]:
        """Figures over all rows; micro pools the labels."""
        tp, fp, fn, tn = (total[k] for k in ("tp", "fp", "fn", "tn"))
        count = max(int((tp + fp + fn + tn)[0]), 1)
        figures = {"accuracy": float((tp + tn).sum() / (count * self.labels))}
        averages, per_class = _precision_recall_f1(tp, tp + fn, tp + fp, every=True)
        if self.labels == 1:
            figures |= {m: averages[f"{m}_macro"] for m in ("precision", "recall", "f1")}
        else:
            figures["exact_match"] = float(total["exact"] / count)
            figures |= averages
        details: dict[str, Any] = {"per_class": per_class}
        if self.labels == 1:
            details["confusion"] = [[int(tn[0]), int(fp[0])], [int(fn[0]), int(tp[0])]]
        scores, truths = _rows(total)
        if scores is not None:
            areas = [auroc(scores[:, k], truths[:, k]) for k in range(self.labels)]
            per_class["auroc"] = areas
            known = [a for a in areas if a is not None]
            figures["auroc"] = float(np.mean(known)) if known else float("nan")
        return figures, details


@dataclass(frozen=True)
class RegressionMetrics:
    """Outputs and targets of one shape, [B] or [B, K]; R² is the mean over the K outputs."""

    outputs: int

    @property
    def names(self) -> list[str]:
        """All scalar metrics that `finalise` gives."""
        return ["mae", "rmse", "r2"]

    def train_sums(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """{"mae": sum of absolute errors, "count": real elements}."""
        real = over_elements(mask, targets)
        error = jnp.where(real, jnp.abs(outputs - targets), 0.0)
        return {"mae": jnp.sum(error), "count": jnp.sum(real.astype(jnp.float32))}

    def update(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Sums per output, [K]; the spread of the targets is about this batch's own mean, so that fp32 is enough."""
        outputs, targets = outputs.reshape(-1, self.outputs), targets.reshape(-1, self.outputs)
        real = mask[:, None]
        count = jnp.sum(mask.astype(jnp.int32))
        mean = jnp.sum(jnp.where(real, targets, 0.0), 0) / jnp.maximum(count, 1)
        error = jnp.where(real, outputs - targets, 0.0)
        return {
            "rows_count": count[None],
            "rows_mean": mean[None],
            "rows_spread": jnp.sum(jnp.where(real, jnp.square(targets - mean), 0.0), 0)[None],
            "absolute": jnp.sum(jnp.abs(error), 0),
            "squared": jnp.sum(jnp.square(error), 0),
            "count": count,
        }

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """There are none."""
        return scores

    def finalise(self, total: HostState) -> tuple[dict[str, float], dict[str, Any]]:
        """MAE, RMSE over all elements; batch spreads are joined by the rule of Chan, Golub and LeVeque (1983)."""
        count = max(int(total["count"]), 1)
        counts = np.concatenate(total["rows_count"]).astype(np.float64)[:, None]
        means = np.concatenate(total["rows_mean"]).astype(np.float64)
        within = np.concatenate(total["rows_spread"]).astype(np.float64).sum(0)
        grand = (counts * means).sum(0) / count
        spread = within + (counts * (means - grand) ** 2).sum(0)
        constant = spread <= 0  # then, as in scikit-learn: 1 for a perfect prediction, else 0
        ratio = total["squared"] / np.where(constant, 1.0, spread)
        r2 = np.where(constant, (total["squared"] == 0).astype(float), 1.0 - ratio)
        elements = count * self.outputs
        return {
            "mae": float(total["absolute"].sum() / elements),
            "rmse": float(np.sqrt(total["squared"].sum() / elements)),
            "r2": float(np.mean(r2)),
        }, {}


@dataclass(frozen=True)
class TokenMetrics:
    """Language models: outputs [B, T, V], targets [B, T], mask [B] or [B, T]. Sums only: no score is kept."""

    @property
    def names(self) -> list[str]:
        """All scalar metrics that `finalise` gives."""
        return ["perplexity", "accuracy"]

    def train_sums(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """{"accuracy": right tokens, "count": real tokens}."""
        real = over_elements(mask, targets)
        right = (jnp.argmax(outputs, -1) == targets) & real
        return {"accuracy": jnp.sum(right.astype(jnp.float32)), "count": jnp.sum(real.astype(jnp.float32))}

    def update(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Sums over real tokens: negative log-likelihood (nats), right ones, how many."""
        real = over_elements(mask, targets)
        nll = optax.softmax_cross_entropy_with_integer_labels(outputs, targets)
        return {
            "nll": jnp.sum(jnp.where(real, nll, 0.0)),
            "right": jnp.sum(((jnp.argmax(outputs, -1) == targets) & real).astype(jnp.int32)),
            "tokens": jnp.sum(real.astype(jnp.int32)),
        }

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """None are kept."""
        return scores

    def finalise(self, total: HostState) -> tuple[dict[str, float], dict[str, Any]]:
        """perplexity: exp of the mean negative log-likelihood of a token; accuracy of the likeliest token."""
        count = max(int(total["tokens"]), 1)
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(total["nll"] / count))
        return {"perplexity": perplexity, "accuracy": float(total["right"] / count)}, {}


Metrics = ClassMetrics | BinaryMetrics | RegressionMetrics | TokenMetrics

METRICS: dict[str, Callable[[int, int], Metrics]] = {
    "classes": lambda outputs, top_k: ClassMetrics(outputs, top_k),
    "binary": lambda outputs, top_k: BinaryMetrics(outputs),
    "regression": lambda outputs, top_k: RegressionMetrics(outputs),
    "tokens": lambda outputs, top_k: TokenMetrics(),
}


def auroc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Area under the ROC curve by ranks, ties at their mean rank; None when one side is empty or a score is NaN."""
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives or np.isnan(scores).any():
        return None
    _, place, ties = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(ties)
    rank = (last - (ties - 1) / 2.0)[place]
    return float((rank[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def _precision_recall_f1(
    right: np.ndarray, truth: np.ndarray, predicted: np.ndarray, every: bool = False
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.nan_to_num(right / predicted)
        recall = np.nan_to_num(right / truth)
        f1 = np.nan_to_num(2 * right / (truth + predicted))
    seen = np.ones(len(truth), bool) if every else (truth + predicted) > 0
    micro_p, micro_r = right.sum() / max(predicted.sum(), 1), right.sum() / max(truth.sum(), 1)
    micro_f1 = 2 * right.sum() / max(truth.sum() + predicted.sum(), 1)
    averages: dict[str, float] = {}
    for name, values, micro in (
        ("precision", precision, micro_p),
        ("recall", recall, micro_r),
        ("f1", f1, micro_f1),
    ):
        averages[f"{name}_macro"] = float(values[seen].mean()) if seen.any() else 0.0
        averages[f"{name}_micro"] = float(micro)
        averages[f"{name}_weighted"] = float((values * truth).sum() / max(truth.sum(), 1))
    per_class = {
        "precision": precision.tolist(),
        "recall": recall.tolist(),
        "f1": f1.tolist(),
        "support": truth.tolist(),
    }
    return averages, per_class


def _rows(total: HostState) -> tuple[Any, Any]:
    """(scores, targets) of the real rows, or (None, None) when they are too many to keep."""
    scores = total.get("rows_scores")
    if scores is None or sum(s.size for s in scores) > SCORES_LIMIT:
        return None, None
    real = np.concatenate(total["rows_mask"])
    return np.concatenate(scores)[real], np.concatenate(total["rows_targets"])[real]
