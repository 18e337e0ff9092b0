"""The picture of a learning-rate range test: the seeds, their smoothed mean, the rules, the suggestion or the refusal.

matplotlib without pyplot: no global state, and no window is ever opened.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.tune.lr_rules import Suggestion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOOKS = {"valley": ("#b35c00", (0, (5, 2))), "steepest": ("#7a3e9d", (0, (1, 1.2))), "minimum/10": ("#555555", "-.")}
"""Colour and dashes of each of lr_rules.RULES: lines that lie on each other can still be told apart."""
_HUGE = 1e30
"""Where arithmetic on an axis would overflow."""
_SEED, _MEAN, _CHOSEN = "#7aa6cf", "#0b3d70", "#2e9e5b"


def figure(lrs: np.ndarray, losses: np.ndarray, suggestion: Suggestion) -> Figure:
    """lrs [N], losses [S, N] and what `suggest` made of them. `.savefig(path)` of what is returned writes it."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.0, 5.0), dpi=110, layout="constrained")
    axes = drawn.subplots()
    bounded = np.where(np.isfinite(losses), np.clip(losses, -_HUGE, _HUGE), np.nan)
    low, high = _limits(bounded, suggestion.smoothed)
    seeds = "1 seed" if len(bounded) == 1 else f"{len(bounded)} seeds"
    for place, seed in enumerate(bounded):
        axes.plot(lrs, seed, color=_SEED, linewidth=0.8, alpha=0.8, label=None if place else seeds)
    axes.plot(lrs, suggestion.smoothed, color=_MEAN, linewidth=2.4, label="smoothed mean")
    if suggestion.lr is not None:
        axes.axvline(suggestion.lr, color=_CHOSEN, linewidth=7, alpha=0.4, label=f"suggestion {suggestion.lr:.1e}")
    for name, lr in suggestion.rules.items():
        if lr is not None:
            colour, dashes = _LOOKS[name]
            axes.axvline(lr, color=colour, linestyle=dashes, linewidth=1.6, label=f"{name} {lr:.1e}")
    axes.set(xscale="log", xlim=(lrs[0], lrs[-1]), ylim=(low, high), xlabel="learning rate", ylabel="training loss")
    title = suggestion.why if suggestion.lr is None else f"suggestion: {suggestion.lr:.1e}, {suggestion.why}"
    axes.set_title(textwrap.fill(title, 95), fontsize=10)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    # Below the axes, where no curve can be under it.
    drawn.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return drawn


def _limits(losses: np.ndarray, smoothed: np.ndarray) -> tuple[float, float]:
    """Of the loss axis: all that the seeds show at small lr and below, and a little of the divergence."""
    count = int(np.isfinite(smoothed).sum()) or len(smoothed)
    kept, early = (losses[:, :end][np.isfinite(losses[:, :end])] for end in (count, max(count // 4, 1)))
    if not len(early):
        return 0.0, 1.0
    low, top = float(kept.min()), float(early.max())
    room = 0.06 * (top - low) or 0.1 * abs(top) or 1.0
    return low - room, top + 4 * room
