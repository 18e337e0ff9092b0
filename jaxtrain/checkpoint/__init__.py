"""Checkpoints: sealed Orbax steps. Save, seal, list, verify, restore, retain."""

from jaxtrain.checkpoint.store import Checkpoints, CorruptStep, Sealed

__all__ = ["Checkpoints", "CorruptStep", "Sealed"]
