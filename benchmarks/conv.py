"""Convolutional steps on XLA:CPU: with and without each form of models/conv.py, and against PyTorch.

    python benchmarks/conv.py --torch-python PYTHON_WITH_TORCH

With and without: two arms in one process, stepped in turns. PyTorch: eager, channels_last, fused AdamW, all cores; each
in a process of its own, in turns with the product's step on the same shapes. No arm clips. A quiet machine is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROUNDS, STEPS, PROCESSES, BATCH = 15, 4, 5, 32
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet-18": {"kind": "resnet", "depth": 18, "width": 64},
    "tcn": {"kind": "tcn", "channels": [64] * 4, "kernel_size": 3, "norm": "layer", "dropout": 0.0},
    "cnn": {"kind": "cnn"},
}
SHAPES = {"resnet-18": (32, 32, 3), "tcn": (128, 8), "cnn": (32, 32, 3)}
DEPTHWISE = [((8, 112, 112, 96), 3, 1), ((8, 112, 112, 96), 3, 2), ((32, 32, 32, 64), 3, 1), ((32, 32, 32, 64), 5, 1)]
DEPTHWISE += [((32, 8, 8, 256), 3, 1), ((32, 128, 64), 3, 1), ((32, 128, 64), 7, 1), ((32, 1024, 64), 3, 1)]

# ---------------------------------------------------------------- with and without


def _flax_pool(x: Any, window: int, stride: int, padding: Any = 0) -> Any:
    from flax import nnx

    pairs = padding if isinstance(padding, str) else ((padding, padding),) * 2
    return nnx.max_pool(x, window_shape=(window, window), strides=(stride, stride), padding=pairs)


def as_they_come() -> contextlib.AbstractContextManager[Any]:
    return mock.patch("jaxtrain.models.conv.product_form", return_value=None)


@contextlib.contextmanager
def scattered() -> Iterator[None]:
    with (
        mock.patch("jaxtrain.models.cnn.max_pool", _flax_pool),
        mock.patch("jaxtrain.models.resnet.max_pool", _flax_pool),
    ):
        yield


def without_sums() -> contextlib.AbstractContextManager[Any]:
    option = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
    return mock.patch("jaxtrain.build.compiler_options", return_value=option)


@contextlib.contextmanager
def none_of_them() -> Iterator[None]:
    with as_they_come(), scattered(), without_sums():
        yield


SETTINGS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Any]], tuple[str, ...]]] = {
    "products": (as_they_come, ("resnet-18", "tcn")),
    "shifted maxima": (scattered, ("resnet-18", "cnn")),
    "sums by the library": (without_sums, ("resnet-18", "tcn", "cnn")),
    "all three": (none_of_them, ("resnet-18", "tcn", "cnn")),
}


def job(network: str, path: str, **sections: Any) -> Any:
    from jaxtrain.build import build
    from jaxtrain.config import load

    tree = {
        "name": network,
        "model": NETWORKS[network],
        "data": {"kind": "arrays", "path": path},
        "train": {"duration": 1000, "global_batch_size": BATCH},
        "optimizer": {"kind": "adamw", "clip_norm": 0},
        "log": {"every": 10**6},
    }
    return build(load(tree | sections))


@contextlib.contextmanager
def rows(network: str) -> Iterator[str]:
    """A file of random rows in 10 classes."""
    import numpy as np

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "rows.npz"
        inputs = rng.normal(size=(256, *SHAPES[network])).astype(np.float32)
        np.savez(path, inputs=inputs, targets=rng.integers(0, 10, 256))
        yield str(path)


def compare(without: Callable[[], contextlib.AbstractContextManager[Any]], network: str) -> dict[str, Any]:
    """Seconds a step with and without, and how far the first updates of plain descent are apart."""
    from cpu import Arm, apart

    plain = {"optimizer": {"kind": "sgd", "clip_norm": 0}, "schedule": {"kind": "constant", "warmup": 0}}
    with rows(network) as path:
        with without():
            updates = [Arm(job(network, path, **plain)).update]
            off = Arm(job(network, path))
        updates.append(Arm(job(network, path, **plain)).update)
        arms = {"on": Arm(job(network, path)), "off": off}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(ROUNDS):
            for name, arm in arms.items():
                times[name].append(arm.steps(STEPS))
    return {**times, "apart": apart(*updates)}


# ---------------------------------------------------------------- depthwise


def depthwise_times(shape: tuple[int, ...], size: int, stride: int) -> dict[str, list[float]]:
    """Seconds of one depthwise convolution, forward and with both gradients, ours and lax's."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxtrain.hardware.compiler import compiler_options
    from jaxtrain.models.conv import convolve

    space, rng = len(shape) - 2, np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(*(size,) * space, 1, shape[-1])), jnp.float32)

    def forward(x: Any, kernel: Any) -> Any:
        numbers = (f"N{'HW'[:space]}C", f"{'HW'[:space]}IO", f"N{'HW'[:space]}C")
        options = {"feature_group_count": shape[-1], "dimension_numbers": numbers}
        return convolve(x, kernel, (stride,) * space, "SAME", **options)

    def whole(x: Any, kernel: Any) -> Any:
        y, back = jax.vjp(forward, x, kernel)
        return y, back(y)

    options, arms = compiler_options("cpu", True), {}
    for name, place in (("on", contextlib.nullcontext), ("off", as_they_come)):
        for part, function in (("forward", forward), ("all", whole)):
            with place():
                # A function of its own for each arm: jax would find the trace of the other.
                step = jax.jit(lambda *of, f=function: f(*of), compiler_options=options)
                jax.block_until_ready(step(x, kernel))
            arms[f"{part} {name}"] = step
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(5):
        for name, step in arms.items():
            begun = time.perf_counter()
            jax.block_until_ready(step(x, kernel))
            times[name].append(time.perf_counter() - begun)
    return times


# ---------------------------------------------------------------- PyTorch


def product_arm(network: str) -> list[float]:
    from cpu import Arm

    with rows(network) as path:
        arm = Arm(job(network, path))
        arm.steps(10)
        return [arm.steps(1) for _ in range(_steps(network))]


def torch_arm(network: str) -> list[float]:
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)

    class ResidualBlock(nn.Module):
        def __init__(self, into: int, out: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
            self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
            project = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            self.project = project if stride != 1 else nn.Identity()

        def forward(self, x):
            y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
            return F.relu(y + self.project(x))

    class Resnet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
            blocks, into = [], 64
            for stage in range(4):
                for i in range(2):
                    out = 64 * 2**stage
                    blocks.append(ResidualBlock(into, out, 2 if stage and i == 0 else 1))
                    into = out
            self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(into, 10)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
            return self.head(self.blocks(x).mean((2, 3)))

    class CausalBlock(nn.Module):
        """[B, C, T]; a LayerNorm over the channels wants them last."""

        def __init__(self, into: int, out: int, dilation: int) -> None:
            super().__init__()
            self.reach = 2 * dilation
            widths = (into, out)
            self.convs = nn.ModuleList(nn.Conv1d(n, out, 3, dilation=dilation, bias=False) for n in widths)
            self.norms = nn.ModuleList(nn.LayerNorm(out, eps=1e-6) for _ in widths)
            self.project = nn.Conv1d(into, out, 1) if into != out else nn.Identity()

        def forward(self, x):
            y = x
            for conv, norm in zip(self.convs, self.norms, strict=True):
                y = conv(F.pad(y, (self.reach, 0)))
                y = F.relu(norm(y.transpose(1, 2)).transpose(1, 2))
            return F.relu(self.project(x) + y)

    class Tcn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (8, 64, 64, 64)
            self.blocks = nn.Sequential(*(CausalBlock(n, 64, 2**i) for i, n in enumerate(widths)))
            self.head = nn.Linear(64, 10)

        def forward(self, x):
            return self.head(self.blocks(x)[..., -1])

    images = network == "resnet-18"
    model = Resnet().to(memory_format=torch.channels_last) if images else Tcn()
    x = torch.randn(BATCH, 3, 32, 32).to(memory_format=torch.channels_last) if images else torch.randn(BATCH, 8, 128)
    y = torch.randint(0, 10, (BATCH,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    times = []
    for _ in range(10 + _steps(network)):
        begun = time.perf_counter()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - begun)
    return times[10:]


def _steps(network: str) -> int:
    return 30 if network == "resnet-18" else 100


ARMS = {"jaxtrain": product_arm, "torch": torch_arm}


def against_torch(network: str, torch_python: str) -> dict[str, list[float]]:
    """The median seconds a step of each process."""
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(PROCESSES):
        for arm in ARMS:
            python = torch_python if arm == "torch" else sys.executable
            command = [python, __file__, "--arm", arm, "--network", network]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found[arm].append(statistics.median(json.loads(out.splitlines()[-1])))
            print(network, arm, found[arm][-1], flush=True)
    return found


# ---------------------------------------------------------------- report


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def report(raw: dict[str, Any], torch: str) -> None:
    from record import record

    def ms(values: list[float]) -> str:
        return f"{1e3 * statistics.median(values):.1f}"

    lines = [
        f"Steps (forward, backward, AdamW) on {BATCH} rows. resnet-18: 32x32x3, width 64, BatchNorm; tcn: 4 blocks "
        "of 64 channels, kernel 3, LayerNorm, [128, 8]; cnn: the default on 32x32x3. One form at a time is off. "
        "`apart`: the largest distance of the two first updates over their largest element.\n",
        "| form | network | ms a step | without | without / with, median of rounds | n | apart |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, networks in raw["forms"].items():
        for network, own in networks.items():
            each = ratios(own["off"], own["on"])
            lines.append(
                f"| {name} | {network} | {ms(own['on'])} | {ms(own['off'])} | {spread(each)} | {len(each)} | "
                f"{own['apart']:.0e} |"
            )
    lines += [
        f"\nAgainst PyTorch {torch}, eager, fused AdamW, all cores; medians of processes in turns.\n",
        "| network | ms a step | PyTorch | jaxtrain / PyTorch, median of rounds | n |",
        "| --- | --- | --- | --- | --- |",
    ]
    for network, own in raw["torch"].items():
        each = ratios(own["jaxtrain"], own["torch"])
        lines.append(f"| {network} | {ms(own['jaxtrain'])} | {ms(own['torch'])} | {spread(each)} | {len(each)} |")
    lines += [
        "\nOne depthwise convolution, ms.\n",
        "| image | kernel | stride | forward | lax | with gradients | lax |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for own in raw["depthwise"]:
        cells = (ms(own["times"][f"{part} {arm}"]) for part in ("forward", "all") for arm in ("on", "off"))
        image = "x".join(map(str, own["shape"]))
        lines.append(f"| {image} | {own['size']} | {own['stride']} | {' | '.join(cells)} |")
    rooms = ["models/conv.py", "models/layers.py", "models/resnet.py", "models/tcn.py", "models/cnn.py"]
    rooms += ["hardware/compiler.py", "core/step.py"]
    record("conv", "Convolutional steps on XLA:CPU", lines, raw, rooms)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--network", choices=NETWORKS, default="tcn")
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(ARMS[options.arm](options.network)))
        return
    version = "import torch; print(torch.__version__)"
    torch = subprocess.run([options.torch_python, "-c", version], capture_output=True, text=True, check=True).stdout
    raw: dict[str, Any] = {"torch": {n: against_torch(n, options.torch_python) for n in ("resnet-18", "tcn")}}
    raw["forms"] = {name: {} for name in SETTINGS}
    for name, (without, networks) in SETTINGS.items():
        for network in networks:
            own = raw["forms"][name][network] = compare(without, network)
            print(name, network, spread(ratios(own["off"], own["on"])), own["apart"], flush=True)
    raw["depthwise"] = []
    for shape, size, stride in DEPTHWISE:
        times = depthwise_times(shape, size, stride)
        raw["depthwise"].append({"shape": shape, "size": size, "stride": stride, "times": times})
        print(shape, size, stride, {name: statistics.median(own) for name, own in times.items()}, flush=True)
    report(raw, torch.strip())


if __name__ == "__main__":
    main()
