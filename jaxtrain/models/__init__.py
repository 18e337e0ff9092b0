"""Models: a table of kinds. Each is a plain `nnx.Module` with `__call__(x, mask=None) -> outputs [B, outputs]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flax import nnx

from jaxtrain.models.cnn import Cnn
from jaxtrain.models.mlp import Mlp
from jaxtrain.models.resnet import Resnet


@dataclass(frozen=True)
class ModelKind:
    """make(config, input shape [without the batch], outputs, rngs=) -> module.

    images: inputs must be [H, W, C]. convolutional: loops are written out on CPU, where XLA runs them slowly.
    """

    make: Callable[..., nnx.Module]
    images: bool = False
    convolutional: bool = False


MODELS: dict[str, ModelKind] = {
    "mlp": ModelKind(Mlp),
    "cnn": ModelKind(Cnn, images=True, convolutional=True),
    "resnet": ModelKind(Resnet, images=True, convolutional=True),
}
