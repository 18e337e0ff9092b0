"""Residual networks have the shapes and the numbers of parameters of the papers, without one array being made."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from models_helpers import SMALL, convolutions_as_they_come, count, inputs_of, module_of, primitives, resnet

from jaxtrain.core.module import ModuleDef
from jaxtrain.models import MODELS, summary


@functools.cache
def imagenet(depth: int) -> ModuleDef:
    return module_of(resnet(depth=depth, width=64), shape=(224, 224, 3), outputs=1000)


@functools.cache
def cifar(depth: int) -> ModuleDef:
    return module_of(resnet(depth=depth, width=16), shape=(32, 32, 3), outputs=10)


def resnet_20_by_hand() -> int:
    """Kernels, and two numbers a channel for each norm; projections where a stage begins."""
    norm = lambda c: 2 * c  # noqa: E731
    conv = lambda i, o, k: i * o * k * k  # noqa: E731
    total = conv(3, 16, 3) + norm(16)
    for features, width in ((16, 16), (16, 32), (32, 64)):
        total += conv(features, width, 3) + norm(width) + conv(width, width, 3) + norm(width)
        total += 2 * 2 * (conv(width, width, 3) + norm(width))
        if features != width:
            total += conv(features, width, 1) + norm(width)
    return total + 64 * 10 + 10


def test_by_hand_is_the_figure_of_the_paper_with_projections() -> None:
    assert resnet_20_by_hand() == 272_474  # 269,722 without projections (He et al. 2015 say 0.27M)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (lambda: cifar(8), 78_042),
        (lambda: cifar(20), 272_474),
        (lambda: imagenet(18), 11_689_512),
        (lambda: imagenet(34), 21_797_672),
        (lambda: imagenet(50), 25_557_032),
    ],
    ids=["8", "20", "18", "34", "50"],
)
def test_number_of_parameters(module: object, expected: int) -> None:
    assert count(module().params) == expected  # type: ignore[operator]


def test_running_statistics_are_two_for_each_normalised_channel() -> None:
    module = cifar(20)
    scales = {name for name in module.params if name.endswith("scale")}
    assert count(module.model_state) == 2 * count({name: module.params[name] for name in scales})


@pytest.mark.parametrize(("depth", "blocks", "last"), [(18, 8, 512), (34, 16, 512), (50, 16, 2048)])
def test_imagenet_form_has_the_stem_the_stages_and_the_head_of_the_paper(depth: int, blocks: int, last: int) -> None:
    module = imagenet(depth)
    shapes = {name: tuple(p.shape) for name, p in module.params.items()}
    assert shapes["stem.kernel"] == (7, 7, 3, 64)
    assert shapes["head.kernel"] == (last, 1000)
    assert len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}) == blocks
    projections = sum(name.endswith("project.kernel") for name in shapes)
    assert projections == (4 if depth == 50 else 3)


@pytest.mark.parametrize(
    ("depth", "sizes"),
    [
        (20, [(32, 16), (16, 32), (8, 64)]),
        (18, [(16, 64), (8, 128), (4, 256), (2, 512)]),
        (50, [(16, 256), (8, 512), (4, 1024), (2, 2048)]),
    ],
)
def test_stages_halve_the_image_and_double_the_channels(
    depth: int, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64x64 images for the ImageNet form: a stride of 2 in the stem, another in the pooling."""
    convolutions_as_they_come(monkeypatch)
    form, size = (cifar, 32) if depth == 20 else (imagenet, 64)
    module = form(depth)
    x = jax.ShapeDtypeStruct((2, size, size, 3), np.float32)
    jaxpr = jax.make_jaxpr(lambda p, s, x: module.bind(p, s, None)(x))(module.params, module.model_state, x)
    shapes = [tuple(e.outvars[0].aval.shape) for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert jaxpr.out_avals[0].shape == (2, 10 if depth == 20 else 1000)
    widest: dict[int, int] = {}
    for _, height, _, channels in shapes[1:]:
        widest[height] = max(widest.get(height, 0), channels)
    assert list(widest.items()) == sizes


def test_depths_of_the_cifar_form_are_six_n_plus_two() -> None:
    for depth, blocks in ((8, 3), (20, 9), (32, 15), (56, 27)):
        module = cifar(depth)
        kernels = [n for n in module.params if ".convs." in n and n.endswith("kernel")]
        assert len(kernels) == 2 * blocks == depth - 2  # with the stem and the head: depth


def test_summary_counts_numbers_and_bytes() -> None:
    params = {
        "a.kernel": jax.ShapeDtypeStruct((3, 5), np.float32),
        "a.bias": jax.ShapeDtypeStruct((5,), jax.numpy.bfloat16),
        "scalar": jax.ShapeDtypeStruct((), np.float32),
    }
    assert summary.rows(params) == [
        ("a.kernel", (3, 5), 15, 60),
        ("a.bias", (5,), 5, 10),
        ("scalar", (), 1, 4),
    ]


def test_summary_table_is_aligned_and_ends_with_the_total() -> None:
    lines = summary.table(imagenet(50).params).splitlines()
    assert lines[0].split() == ["path", "shape", "parameters", "bytes"]
    assert len({len(line) for line in lines}) == 1
    assert lines[-1].split() == ["total", "25,557,032", "102,228,128"]
    assert len(lines) == len(imagenet(50).params) + 4
    stem = next(line for line in lines if line.startswith("stem.kernel"))
    assert stem.split("  ")[-1].strip() == "37,632"
    assert "[7, 7, 3, 64]" in stem


def test_the_table_of_kinds_says_what_each_takes_and_whether_it_convolves() -> None:
    assert {name: (kind.takes, kind.convolutional) for name, kind in MODELS.items()} == {
        "mlp": ("rows", False),
        "cnn": ("images", True),
        "resnet": ("images", True),
        "gpt": ("tokens", False),
        "tcn": ("sequences", True),
    }


@pytest.mark.parametrize("kind", MODELS)
def test_convolutional_is_what_the_program_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    convolutions_as_they_come(monkeypatch)
    module = module_of(SMALL[kind]())
    jaxpr = jax.make_jaxpr(lambda p, s, x: module.bind(p, s, None)(x))(
        module.params, module.model_state, inputs_of(kind)
    )
    assert ("conv_general_dilated" in primitives(jaxpr.jaxpr)) is MODELS[kind].convolutional
