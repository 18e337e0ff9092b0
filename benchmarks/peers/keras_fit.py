"""The arms `Keras fit`: Keras 3 on jax, jitted, without a progress bar; with and without steps_per_execution.

Layers have jaxtrain's names of parts, so that its weights fit.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import work
from keras import layers, ops


def mlp(model: dict[str, Any], x: Any, outputs: int) -> Any:
    """[B, features] -> [B, outputs]."""
    for i, width in enumerate(model["hidden"]):
        x = layers.Dense(width, "relu", name=f"layers.{i}")(x)
    return layers.Dense(outputs, name="head")(x)


class Places(layers.Embedding):
    """A learned vector for each place of a row, whatever stands there."""

    def call(self, x: Any) -> Any:
        return super().call(ops.arange(x.shape[1]))


def gpt(model: dict[str, Any], x: Any, outputs: int) -> Any:
    """Tokens [B, T] -> [B, T, vocabulary]; the output layer is the embedding."""
    steps, width, heads = x.shape[1], model["width"], model["heads"]
    embed = layers.ReversibleEmbedding(outputs, width, name="token_embed")
    x = embed(x) + Places(steps, width, name="position_embed")(x)

    def dense(size: int, name: str, activation: Any = None) -> layers.Layer:
        return layers.Dense(size, activation, use_bias=False, name=name)

    def norm(name: str) -> layers.Layer:
        return layers.LayerNormalization(epsilon=1e-6, center=False, name=name)

    for i in range(model["layers"]):
        name = f"blocks.{i}"
        qkv = dense(3 * width, f"{name}.attention.qkv")(norm(f"{name}.attention_norm")(x))
        qkv = ops.reshape(qkv, (-1, steps, heads, 3, width // heads))
        y = ops.dot_product_attention(qkv[:, :, :, 0], qkv[:, :, :, 1], qkv[:, :, :, 2], is_causal=True)
        x = x + dense(width, f"{name}.attention.out")(ops.reshape(y, (-1, steps, width)))
        up = dense(4 * width, f"{name}.hidden.up", _gelu)(norm(f"{name}.hidden_norm")(x))
        x = x + dense(width, f"{name}.hidden.down")(up)
    return embed(norm("norm")(x), reverse=True)


def _gelu(x: Any) -> Any:
    return ops.gelu(x, approximate=True)


def resnet(model: dict[str, Any], x: Any, outputs: int) -> Any:
    """[B, H, W, C] -> [B, outputs]: the ImageNet form of 18 layers."""

    def conv(x: Any, out: int, size: int, stride: int, name: str) -> Any:
        x = layers.ZeroPadding2D(size // 2)(x) if stride > 1 and size > 1 else x  # `same` pads one side only
        padding = "same" if stride == 1 else "valid"
        return layers.Conv2D(out, size, stride, padding, use_bias=False, name=name)(x)

    def norm(x: Any, name: str) -> Any:
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)(x)

    x = ops.relu(norm(conv(x, model["width"], 7, 2, "stem"), "stem_norm"))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for i in range(8):
        name, stage = f"blocks.{i}", i // 2
        width, stride = model["width"] * 2**stage, 2 if stage and i % 2 == 0 else 1
        shortcut = x
        if stride > 1:
            shortcut = norm(conv(x, width, 1, stride, f"{name}.project"), f"{name}.project_norm")
        x = ops.relu(norm(conv(x, width, 3, stride, f"{name}.convs.0"), f"{name}.norms.0"))
        x = norm(conv(x, width, 3, 1, f"{name}.convs.1"), f"{name}.norms.1")
        x = ops.relu(shortcut + x)
    return layers.Dense(outputs, name="head")(layers.GlobalAveragePooling2D()(x))


def tcn(model: dict[str, Any], x: Any, outputs: int) -> Any:
    """[B, T, C] -> [B, outputs], from the last step."""
    for i, out in enumerate(model["channels"]):
        shortcut = x if x.shape[-1] == out else layers.Dense(out, name=f"blocks.{i}.project")(x)
        for part in range(2):
            conv = {"padding": "causal", "dilation_rate": 2**i, "use_bias": False}
            x = layers.Conv1D(out, model["kernel_size"], name=f"blocks.{i}.convs.{part}", **conv)(x)
            x = ops.relu(layers.LayerNormalization(epsilon=1e-6, name=f"blocks.{i}.norms.{part}")(x))
        x = ops.relu(shortcut + x)
    return layers.Dense(outputs, name="head")(x[:, -1])


NETS = {"mlp": mlp, "gpt": gpt, "resnet": resnet, "tcn": tcn}
_NAMES = {"gamma": "scale", "beta": "bias", "embeddings": "embedding"}


def make(own: work.Workload, weights: dict[str, np.ndarray]) -> keras.Model:
    """The network with given weights."""
    tokens = own.model["kind"] == "gpt"
    inputs = keras.Input(own.shape, own.batch, "int32" if tokens else "float32")
    model = keras.Model(inputs, NETS[own.model["kind"]](own.model, inputs, own.outputs))
    left = dict(weights)
    for variable in model.trainable_variables:
        layer, name = variable.path.split("/")[-2:]
        value = left.pop(f"{layer}.{_NAMES.get(name, name)}")
        assert variable.shape == value.shape, variable.path
        variable.assign(value)
    assert not left, left.keys()
    return model


class Rows(keras.utils.PyDataset):
    """The rows of each epoch in its order, gathered a batch at a time: as fast as arrays given to `fit` (tiny mlp:
    medians of 0.24 and 0.24 ms a step, with steps_per_execution 0.22 and 0.21)."""

    def __init__(self, own: work.Workload, orders: np.ndarray) -> None:
        super().__init__()
        self._own, self._orders, self.epoch = own, orders, 0
        self._data = work.arrays(own)

    def __len__(self) -> int:
        return self._own.steps

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._orders[self.epoch][step * self._own.batch : (step + 1) * self._own.batch]
        return work.take(self._data, rows)


class Clock(keras.callbacks.Callback):
    """Reads the time where the timed epochs begin and end; Keras has then fetched the loss.

    It also tells the rows which epoch it is: Keras ends one before the first step.
    """

    def __init__(self, warm: int, rows: Rows) -> None:
        super().__init__()
        self.warm, self.rows, self.begun, self.ended = warm, rows, 0.0, 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.rows.epoch = epoch
        if epoch == self.warm:
            self.begun = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ended = time.perf_counter()


def main() -> None:
    options = work.parse()
    own = work.WORKLOADS[options.workload]
    start = work.load(options.folder, options.workload)
    model = make(own, start.weights)
    rows = Rows(own, start.orders)
    clock = Clock(own.warm, rows)
    model.compile(
        optimizer=keras.optimizers.Adam(work.RATE, work.B1, work.B2, work.EPS),  # AdamW without decay
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=True,
        steps_per_execution=own.steps_per_execution if options.steps_per_execution else 1,
    )
    inputs, targets = rows[0]
    weights = [[v.value for v in own] for own in (model.trainable_variables, model.non_trainable_variables)]
    outputs, _ = jax.jit(lambda *state: model.stateless_call(*state, training=True))(*weights, inputs)
    first = model.loss(targets, outputs)
    history = model.fit(rows, epochs=own.epochs, verbose=0, callbacks=[clock], shuffle=False)
    work.report(own, clock.ended - clock.begun, first, history.history["loss"][-1])


if __name__ == "__main__":
    main()
