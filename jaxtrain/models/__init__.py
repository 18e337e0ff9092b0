"""Models: a table of kinds. Each is a plain `nnx.Module`: `__call__(x)` or `__call__(x, mask=None)` gives the outputs,
[B, outputs] or for each token or step [B, T, ...]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flax import nnx

from jaxtrain.models.cnn import Cnn
from jaxtrain.models.gpt import Gpt
from jaxtrain.models.mlp import Mlp
from jaxtrain.models.resnet import Resnet
from jaxtrain.models.tcn import Tcn


@dataclass(frozen=True)
class ModelKind:
    """make(config, input shape [without the batch], outputs, rngs=) -> module.

    takes: "rows" of any shape, "images" [H, W, C], "sequences" [T] or [T, C], or "tokens" [T].
    convolutional: loops are written out on CPU, where XLA runs convolutions in them slowly.
    lanes: of a step on CPU when `train.lanes` leaves it open; benchmarks/cpu.py has the times.
    """

    make: Callable[..., nnx.Module]
    takes: str = "rows"
    convolutional: bool = False
    lanes: int = 1


MODELS: dict[str, ModelKind] = {
    "mlp": ModelKind(Mlp),
    "cnn": ModelKind(Cnn, "images", convolutional=True),
    "resnet": ModelKind(Resnet, "images", convolutional=True),
    "gpt": ModelKind(Gpt, "tokens", lanes=2),
    "tcn": ModelKind(Tcn, "sequences", convolutional=True),
}
