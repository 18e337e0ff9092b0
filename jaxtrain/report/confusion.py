"""The confusion matrix as a picture for TensorBoard. matplotlib without pyplot: no global state, safe in threads."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

ANNOTATED = 20
"""Up to so many classes the counts fit into the cells."""
_LABELLED = 60


def confusion_image(confusion: list[list[int]], class_names: Sequence[str] | None) -> np.ndarray:
    """Bytes [H, W, 3]. Rows are the truth, columns the prediction; the colour is the share of the row (recall)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    counts = np.asarray(confusion, np.int64)
    classes = len(counts)
    # A dollar sign would begin matplotlib's formula mode.
    shown = [shorten(n, 18).replace("$", r"\$") for n in class_names or ()]
    names = shown or [str(i) for i in range(classes)]
    longest = max((len(n) for n in names), default=1)
    side = float(np.clip(2.2 + 0.42 * classes, 4.2, 11.0))
    figure = Figure(figsize=(side + 0.9, side), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    # The square root makes a share of a few per cent visible: the mistakes are what one looks for.
    part = shares(counts)
    drawn = axes.imshow(part, cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
    figure.colorbar(drawn, ax=axes, label="share of the true class", fraction=0.046, pad=0.03)
    places = np.arange(0, classes, -(-classes // _LABELLED)) if classes else np.arange(0)
    size = float(np.clip(150.0 / max(classes, 1), 5.5, 10.0))
    axes.set_xticks(
        places, [names[p] for p in places], fontsize=size, rotation=90 if longest > 3 or classes > 30 else 0
    )
    axes.set_yticks(places, [names[p] for p in places], fontsize=size)
    axes.set(xlabel="predicted", ylabel="true", title=f"{int(np.trace(counts)):,} of {int(counts.sum()):,} right")
    if classes <= ANNOTATED:
        for row, column in np.argwhere(counts):
            text, colour = f"{counts[row, column]:,}", "white" if part[row, column] > 0.3 else "#1b2733"
            size = float(np.clip(150.0 / classes / max(len(text) / 3, 1), 5.0, 11.0))
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name in a script that the font lacks shows as boxes
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def shares(counts: np.ndarray) -> np.ndarray:
    """Each row [C, C] divided by its sum; a class without rows stays 0."""
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def shorten(name: str, longest: int) -> str:
    """A long name without its middle: names of classes differ at their start or their end."""
    if len(name) <= longest:
        return name
    tail = (longest - 1) // 2
    return f"{name[: longest - 1 - tail]}…{name[-tail:]}"
