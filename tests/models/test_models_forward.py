"""What each kind computes: against numpy, and against numbers written down once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from models_helpers import (
    OUTPUTS,
    SMALL,
    arrays_by_formula,
    cnn,
    gpt,
    images,
    inputs_of,
    mlp,
    module_of,
    resnet,
    run_eval,
    tcn,
)
from models_numpy import gpt_in_numpy, tcn_in_numpy

from jaxtrain.models import MODELS


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


def conv(x: np.ndarray, kernel: np.ndarray, stride: int, pad: int) -> np.ndarray:
    """Cross-correlation with `pad` zeros on every side, as PyTorch pads."""
    size = kernel.shape[0]
    x = np.pad(x.astype(np.float64), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))[:, ::stride, ::stride]
    return np.einsum("bhwcij,ijco->bhwo", windows, kernel.astype(np.float64))


def norm(x: np.ndarray, arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    """BatchNorm by its running statistics."""
    scaled = (x - arrays[f"{name}.mean"]) / np.sqrt(arrays[f"{name}.var"] + 1e-5)
    return scaled * arrays[f"{name}.scale"] + arrays[f"{name}.bias"]


def pool(x: np.ndarray) -> np.ndarray:
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4))


def dense(x: np.ndarray, arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ arrays[f"{name}.kernel"].astype(np.float64) + arrays[f"{name}.bias"]


def mlp_in_numpy(x: np.ndarray, a: dict[str, np.ndarray]) -> np.ndarray:
    return dense(relu(dense(x.reshape(len(x), -1), a, "layers.0")), a, "head")


def cnn_in_numpy(x: np.ndarray, a: dict[str, np.ndarray]) -> np.ndarray:
    for i in range(2):
        x = pool(relu(norm(conv(x, a[f"blocks.{i}.conv.kernel"], 1, 1), a, f"blocks.{i}.norm")))
    return dense(relu(dense(x.reshape(len(x), -1), a, "dense.0")), a, "head")


def resnet_in_numpy(x: np.ndarray, a: dict[str, np.ndarray]) -> np.ndarray:
    x = relu(norm(conv(x, a["stem.kernel"], 1, 1), a, "stem_norm"))
    for i, stride in enumerate((1, 2, 2)):
        name = f"blocks.{i}"
        y = relu(norm(conv(x, a[f"{name}.convs.0.kernel"], stride, 1), a, f"{name}.norms.0"))
        y = norm(conv(y, a[f"{name}.convs.1.kernel"], 1, 1), a, f"{name}.norms.1")
        if f"{name}.project.kernel" in a:
            x = norm(conv(x, a[f"{name}.project.kernel"], stride, 0), a, f"{name}.project_norm")
        x = relu(x + y)
    return dense(x.mean((1, 2)), a, "head")


IN_NUMPY = {
    "mlp": mlp_in_numpy,
    "cnn": cnn_in_numpy,
    "resnet": resnet_in_numpy,
    "gpt": lambda x, a: gpt_in_numpy(x, a, gpt()),
    "tcn": lambda x, a: tcn_in_numpy(x, a, tcn()),
}
GOLDEN = {
    "mlp": [0.146706, -0.476201, 0.137418],
    "cnn": [-0.154979, -0.378725, 0.323413],
    "resnet": [0.24865, -0.467914, 0.103446],
    "gpt": [1.302947, 1.244265, -0.519243, -1.481500, -0.830283],  # for the token after the last one
    "tcn": [0.097435, 0.320792, 0.188117],
}


def test_every_kind_is_tried() -> None:
    assert MODELS.keys() == SMALL.keys() == IN_NUMPY.keys()


@pytest.mark.parametrize("kind", MODELS)
def test_a_kind_computes_what_numpy_computes_and_what_was_written_down(kind: str) -> None:
    module = module_of(SMALL[kind]())
    params, state = arrays_by_formula(module)
    x = np.asarray(inputs_of(kind, 2))
    y = run_eval(module, params, state, x)
    assert y.shape == (2, *OUTPUTS[kind])
    np.testing.assert_allclose(y, IN_NUMPY[kind](x, params | state), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(last(y), GOLDEN[kind], rtol=2e-5, atol=2e-5)
    name = "norm.scale" if kind == "gpt" else "head.bias"
    other = params[name].copy()
    other[0] += 1e-3
    moved = run_eval(module, params | {name: other}, state, x)
    assert not np.allclose(last(moved), GOLDEN[kind], rtol=2e-5, atol=2e-5)  # the control


def last(y: np.ndarray) -> np.ndarray:
    """Of the first row: its outputs, or those of its last token."""
    return y[0].reshape(-1, y.shape[-1])[-1]


def test_resnet_in_numpy_has_projections_where_the_shape_changes_only() -> None:
    names = sorted(name for name in module_of(resnet()).params if "project.kernel" in name)
    assert names == ["blocks.1.project.kernel", "blocks.2.project.kernel"]


def test_strided_convolutions_look_at_the_pixels_that_pytorch_looks_at() -> None:
    """XLA's SAME padding begins a stride of 2 one pixel later: published weights would be half a pixel off."""
    module = module_of(resnet())
    params, state = arrays_by_formula(module)
    kernel = np.zeros((3, 3, 4, 8), np.float32)
    kernel[0, 0] = 1.0  # sees the pixel up and left, which the border has not
    params["blocks.1.convs.0.kernel"] = kernel
    x = np.asarray(images(1))
    np.testing.assert_allclose(
        run_eval(module, params, state, x), resnet_in_numpy(x, params | state), rtol=2e-5, atol=2e-5
    )
    dims = ("NHWC", "HWIO", "NHWC")
    same = jax.lax.conv_general_dilated(x, kernel[:, :, :1, :1], (2, 2), "SAME", dimension_numbers=dims)
    assert not np.allclose(same, conv(x, kernel[:, :, :1, :1], 2, 1), atol=1e-3)  # the control: the two differ


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (mlp(hidden=(5, 7)), {"layers.0.kernel": (64, 5), "layers.1.kernel": (5, 7), "head.kernel": (7, 3)}),
        (mlp(hidden=128), {"layers.0.kernel": (64, 128)}),
        (
            cnn(),
            {"blocks.0.conv.kernel": (3, 3, 1, 4), "blocks.1.conv.kernel": (3, 3, 4, 6), "dense.0.kernel": (24, 5)},
        ),
        (cnn(dense=()), {"head.kernel": (24, 3)}),
        (resnet(), {"stem.kernel": (3, 3, 1, 4), "head.kernel": (16, 3)}),
        (
            gpt(width=12, heads=6, kv_heads=2, mlp_width=20, tie_embeddings=False),
            {
                "token_embed.embedding": (5, 12),
                "blocks.1.attention.qkv.kernel": (12, 12 + 2 * 2 * 2),
                "blocks.1.attention.out.kernel": (12, 12),
                "blocks.1.hidden.gate.kernel": (12, 20),
                "blocks.1.hidden.up.kernel": (12, 20),
                "blocks.1.hidden.down.kernel": (20, 12),
                "head.kernel": (12, 5),
            },
        ),
        (
            tcn(channels=(4, 7), kernel_size=5),
            {
                "blocks.0.convs.0.kernel": (5, 2, 4),
                "blocks.0.convs.1.kernel": (5, 4, 4),
                "blocks.1.convs.0.kernel": (5, 4, 7),
                "blocks.1.project.kernel": (4, 7),
                "head.kernel": (7, 3),
            },
        ),
    ],
    ids=["mlp-5-7", "mlp-128", "cnn", "cnn-no-dense", "resnet-8", "gpt", "tcn"],
)
def test_widths_are_those_of_the_config(config: Any, expected: dict[str, tuple[int, ...]]) -> None:
    shapes = {name: tuple(p.shape) for name, p in module_of(config).params.items()}
    assert {name: shapes[name] for name in expected} == expected


def test_an_odd_image_is_pooled_with_its_border() -> None:
    """7 -> 4 -> 2: the last column is seen, not cut off."""
    module = module_of(cnn(dense=()), shape=(7, 7, 1))
    assert tuple(module.params["head.kernel"].shape) == (2 * 2 * 6, 3)
    params, state = arrays_by_formula(module)
    x = np.asarray(images(1, 7)).copy()
    before = run_eval(module, params, state, x)
    x[0, 6, 6, 0] += 5.0
    assert not np.allclose(before, run_eval(module, params, state, x))


@pytest.mark.parametrize(("norm", "bias"), [("batch", False), ("group", False), ("layer", False), ("none", True)])
@pytest.mark.parametrize("kind", ["cnn", "resnet", "tcn"])
def test_convolutions_have_a_bias_only_where_no_norm_brings_one(kind: str, norm: str, bias: bool) -> None:
    names = module_of(SMALL[kind](norm=norm)).params
    assert any(name.endswith(("conv.bias", "convs.0.bias", "stem.bias")) for name in names) is bias
