"""Checkpoints: sealed Orbax steps. Save, seal, list, verify, restore, retain."""

from jaxtrain.checkpoint.reading import SealedSteps
from jaxtrain.checkpoint.seal import CorruptStep, Sealed
from jaxtrain.checkpoint.store import Checkpoints

__all__ = ["Checkpoints", "CorruptStep", "Sealed", "SealedSteps"]
