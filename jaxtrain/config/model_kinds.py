"""Models by name: what `model.kind` allows, and the fields of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxtrain.config.fields import (
    Activation,
    Fraction,
    Initialiser,
    Norm,
    Positive,
    Section,
    Size,
    Sizes,
    Yaml,
)
from jaxtrain.config.fields import described as _field

_REMAT = "what is computed again in the backward pass: none, each block (full), all but products (dots)"
_Remat = Literal["none", "full", "dots"]


class _Network(Section):
    activation: Activation = _field("relu", "the non-linearity")
    dropout: Fraction = _field(0.0, "share of the last hidden features that is dropped in training")
    init: Initialiser = _field("he_normal", "initialiser of kernels; biases start at zero")


class Mlp(_Network):
    kind: Literal["mlp"] = "mlp"
    hidden: Sizes = _field((128, 128), "width of each hidden layer")
    norm: Norm = _field("none", "normalisation after each hidden layer")


class Cnn(_Network):
    kind: Literal["cnn"] = "cnn"
    channels: Sizes = _field((32, 64), "channels of each 3x3 convolution; each is followed by 2x2 pooling")
    dense: Sizes = _field((128,), "width of each dense layer after the convolutions")
    norm: Norm = _field("batch", "normalisation after each convolution")
    remat: _Remat = _field("none", _REMAT)


class Resnet(_Network):
    kind: Literal["resnet"] = "resnet"
    depth: Literal[8, 20, 32, 56, 18, 34, 50] = _field(
        20, "layers: 8 20 32 56 are the CIFAR form (3x3 stem), 18 34 50 the ImageNet form (7x7 stem, pooling)"
    )
    width: Size = _field(16, "channels of the first stage (16 in the CIFAR papers, 64 for ImageNet)")
    norm: Norm = _field("batch", "normalisation in each block")
    stochastic_depth: Fraction = _field(0.0, "probability of skipping the last block; earlier ones less, linearly")
    remat: _Remat = _field("none", _REMAT)


class Gpt(Section):
    kind: Literal["gpt"] = "gpt"
    layers: Size = _field(4, "transformer blocks")
    heads: Size = _field(4, "attention heads; they divide the width")
    kv_heads: Size | None = _field(None, "heads of keys and values, shared by groups of heads; none = heads")
    width: Size = _field(128, "features of a token")
    mlp_width: Size | None = _field(None, "hidden features; none = 4 x width (gelu), 8/3 x width in whole 8s (swiglu)")
    positions: Literal["learned", "rotary"] = _field("rotary", "how a token knows its place (rotary: Su et al. 2021)")
    norm: Literal["layer", "rms"] = _field("rms", "normalisation before attention, before the hidden layer, at the end")
    activation: Literal["gelu", "swiglu"] = _field("swiglu", "the hidden layer (swiglu: Shazeer 2020)")
    bias: bool = _field(False, "dense layers and LayerNorm have biases")
    tie_embeddings: bool = _field(True, "the output layer is the embedding, transposed (Press & Wolf 2017)")
    dropout: Fraction = _field(0.0, "share of embeddings and of each branch's output that is dropped in training")
    init_sd: Positive = _field(0.02, "sd of the initial weights; of the last layer of a branch / sqrt(2 x layers)")
    remat: _Remat = _field("none", _REMAT)
    scan_layers: bool = _field(
        False, "blocks share one array for each parameter and run in a loop: compiles in the same time at any depth"
    )


class Tcn(_Network):
    kind: Literal["tcn"] = "tcn"
    channels: Sizes = _field((32, 32, 32, 32), "channels of each residual block; block i looks 2^i steps apart")
    kernel_size: Size = _field(3, "taps of each causal convolution")
    dropout: Fraction = _field(0.0, "share of each block's hidden channels that is dropped in training")
    norm: Norm = _field("layer", "normalisation after each convolution")
    output: Literal["row", "step"] = _field("row", "one output for each row (by its last step), or for each step")
    remat: _Remat = _field("none", _REMAT)


class CustomModel(Section):
    kind: Literal["custom"] = "custom"
    target: str = _field(..., "your nnx.Module: file.py:Class or package.module:Class")
    args: Annotated[dict[str, Any], Yaml] = _field({}, "keyword arguments of the class, beside `rngs`")


Model = Annotated[Mlp | Cnn | Resnet | Gpt | Tcn | CustomModel, Field(discriminator="kind")]
