"""The products of matrices in a step of a small gpt, by XLA:CPU and by PyTorch: where their distance comes from.

    python benchmarks/products.py --torch-python PYTHON_WITH_TORCH

XLA as jaxtrain has it: two halves of the batch side by side in one program. PyTorch: all rows at once, on all cores.
Each arm is a process of its own, rounds are interleaved. A quiet machine is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, REPEATS, TIMES = 12 * 64, 10, 20
PRODUCTS = {
    "queries, keys, values": (128, 384, 4),
    "out of the attention": (128, 128, 4),
    "up": (128, 512, 4),
    "down": (512, 128, 4),
    "head": (128, 65, 1),
}
"""{name: (inputs, outputs, how many in a step)}"""
FORMS = ("forward", "inputs", "weights")
"""x w; for the gradient of the inputs dy w'; for that of the weights x' dy."""
ROOMS = ["models/gpt.py", "models/layers.py", "core/step.py", "hardware/compiler.py"]


def seconds(run: Callable[[], Any]) -> float:
    """Median seconds of one of the REPEATS products that `run` computes."""
    run()
    times = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        run()
        times.append((time.perf_counter() - begun) / REPEATS)
    return statistics.median(times)


def xla_arm() -> dict[str, float]:
    """{"name form": seconds}."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxtrain.hardware.devices import available

    available()  # with the allocator as a run has it
    rng, found = np.random.default_rng(0), {}
    forms: dict[str, Callable[..., Any]] = {
        "forward": lambda x, w, dy: x @ w,
        "inputs": lambda x, w, dy: dy @ w.T,
        "weights": lambda x, w, dy: x.T @ dy,
    }

    def program(form: Callable[..., Any], w: Any) -> Callable[[], Any]:
        def halves(x: Any, dy: Any) -> Any:
            left, right = (form(x[i], w, dy[i]) for i in range(2))
            return left + right if left.shape == w.shape else (left, right)

        several = jax.jit(lambda xs, dys: [halves(x, dy) for x, dy in zip(xs, dys, strict=True)])
        xs, dys = (
            [jnp.asarray(rng.normal(size=(2, ROWS // 2, size)), jnp.float32) for _ in range(REPEATS)]
            for size in w.shape
        )
        return lambda: jax.block_until_ready(several(xs, dys))

    for name, (inputs, outputs, _) in PRODUCTS.items():
        w = jnp.asarray(rng.normal(size=(inputs, outputs)), jnp.float32)
        found |= {f"{name} {form}": seconds(program(function, w)) for form, function in forms.items()}
    return found


def torch_arm() -> dict[str, float]:
    """{"name form": seconds}."""
    import torch

    found = {}
    for name, (inputs, outputs, _) in PRODUCTS.items():
        w = torch.randn(inputs, outputs)
        xs, dys = ([torch.randn(ROWS, size) for _ in range(REPEATS)] for size in (inputs, outputs))
        forms: dict[str, Callable[..., Any]] = {
            "forward": lambda x, dy, w=w: x @ w,
            "inputs": lambda x, dy, w=w: dy @ w.T,
            "weights": lambda x, dy: x.T @ dy,
        }
        for form, function in forms.items():
            found[f"{name} {form}"] = seconds(
                lambda function=function, xs=xs, dys=dys: [function(x, dy) for x, dy in zip(xs, dys, strict=True)]
            )
    return found


ARMS = {"xla": xla_arm, "torch": torch_arm}


def main() -> None:
    """Interleave the arms, print and record what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arm", choices=ARMS)
    given = parser.parse_args()
    if given.arm:
        print(json.dumps(ARMS[given.arm]()))
        return
    from record import record  # it reads versions of jaxtrain, which torch's environment lacks

    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(given.rounds):
        for arm in (list(ARMS), list(reversed(ARMS)))[number % 2]:
            python = given.torch_python if arm == "torch" else sys.executable
            command = [python, str(Path(__file__)), "--arm", arm]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{arm} failed: {done.stderr.strip().splitlines()[-1]}")
            rounds[arm].append(json.loads(done.stdout.splitlines()[-1]))
    lines, whole = [], dict.fromkeys(ARMS, 0.0)
    for name, (inputs, outputs, count) in PRODUCTS.items():
        for form in FORMS:
            took = {arm: statistics.median(r[f"{name} {form}"] for r in rounds[arm]) for arm in ARMS}
            ratio = statistics.median(
                a[f"{name} {form}"] / b[f"{name} {form}"] for a, b in zip(rounds["xla"], rounds["torch"], strict=True)
            )
            for arm in ARMS:
                whole[arm] += count * took[arm]
            rate = 2e-9 * ROWS * inputs * outputs
            lines.append(
                f"| {name} | {inputs} x {outputs} | {form} | {1e6 * took['xla']:.0f} | {1e6 * took['torch']:.0f} | "
                f"{ratio:.2f} | {rate / took['xla']:.0f} | {rate / took['torch']:.0f} |"
            )
    head = [
        f"{ROWS} rows, fp32, medians of {given.rounds} rounds. `forward` x w, `inputs` dy w', `weights` x' dy. "
        f"All products of a step: XLA {1e3 * whole['xla']:.1f} ms, PyTorch {1e3 * whole['torch']:.1f} ms.\n",
        "| product | w | form | XLA µs | PyTorch µs | XLA / PyTorch | XLA GFLOP/s | PyTorch GFLOP/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(head + lines))
    record("products", "Products of a small gpt's step, XLA:CPU and PyTorch", head + lines, {"rounds": rounds}, ROOMS)


if __name__ == "__main__":
    main()
