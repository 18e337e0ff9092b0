"""Seconds a step of nanoGPT's CPU network: jaxtrain, a hand-written jit loop, PyTorch; interleaved, each in a process.

    python benchmarks/gpt_speed.py ../shared/data/tinyshakespeare/input.txt --torch-python PYTHON_WITH_TORCH

All three train the same network (4 layers, 4 heads, 128 wide, learned positions, LayerNorm, GELU, tied) on rows drawn
from the same text, with AdamW, clipping and the cosine schedule, and print the loss every 100 steps. `hand` is what
one writes without a trainer, with the same tricks (allocator, 2-D products, attention with heads first, two halves of
the batch side by side, donated state, rows gathered on the device): the model of jaxtrain.models in a plain jax.jit.
It has no guard, no accuracy, no window of metrics. PyTorch runs eagerly with fused AdamW and
scaled_dot_product_attention on all cores. A quiet machine is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM, STEPS, EVERY = 100, 200, 100
NETWORK = {"positions": "learned", "norm": "layer", "activation": "gelu"}
LAYERS, HEADS, WIDTH, BLOCK, BATCH, RATE = 4, 4, 128, 64, 12, 1e-3


def rate_at(step: int) -> float:
    """Warm-up over 100 steps, then a cosine to a tenth."""
    if step < 100:
        return RATE * step / 100
    share = (step - 100) / (WARM + STEPS - 100)
    return RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


def jaxtrain_arm(text: str) -> dict[str, float]:
    """The product as a user runs it: metrics, console (quiet), run folder; without evaluations inside the time."""
    import jaxtrain as jt

    keys = {f"model.{name}": value for name, value in NETWORK.items()}
    keys |= {"data.path": text, "train.duration": WARM + STEPS, "log.every": EVERY, "evaluate.every": 10**6}
    with (
        tempfile.TemporaryDirectory() as place,
        jt.train("shakespeare", run_dir=Path(place) / "run", quiet=True, **keys) as run,
    ):
        rows = [row for row in run.metrics() if "time/step" in row and row["step"] > WARM]
        timed = sum(row["time/step"] * EVERY for row in rows)
        return {"step": timed / (EVERY * len(rows)), "loss": rows[-1]["train/loss"]}


def hand_arm(text: str) -> dict[str, float]:
    """A plain loop around one jitted function."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from jaxtrain.config import load
    from jaxtrain.hardware.allocator import keep_buffers
    from jaxtrain.models import Gpt

    keep_buffers()
    characters = sorted(set(Path(text).read_text()))
    index = {c: i for i, c in enumerate(characters)}
    tokens = jnp.asarray(np.array([index[c] for c in Path(text).read_text()], np.uint8))
    config = load("shakespeare", [(f"model.{name}", value) for name, value in NETWORK.items()]).model
    model = Gpt(config, (BLOCK,), len(characters), rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    decays = jax.tree_util.tree_map_with_path(lambda path, x: x.ndim >= 2 and "embed" not in str(path), params)
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, 100, WARM + STEPS, RATE / 10)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.1, mask=decays)
    )

    @jax.jit
    def begin(params):
        return optimizer.init(params)

    def train_step(params, opt_state, step, tokens):
        start = jax.random.randint(jax.random.fold_in(jax.random.key(0), step), (BATCH,), 0, len(tokens) - BLOCK - 1)
        window = tokens[start[:, None] + jnp.arange(BLOCK + 1)].astype(jnp.int32)

        def loss(params, window):
            logits = nnx.merge(graph, params, rest)(window[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()

        halves = [jax.value_and_grad(loss)(params, half) for half in jnp.split(window, 2)]
        value, grads = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, step + 1, value

    step_function = jax.jit(train_step, donate_argnums=(0, 1, 2))
    opt_state, step = begin(params), jnp.zeros((), jnp.int32)
    value = None
    begun = 0.0
    for i in range(WARM + STEPS):
        if i == WARM:
            jax.block_until_ready(params)
            begun = time.perf_counter()
        params, opt_state, step, value = step_function(params, opt_state, step, tokens)
        if (i + 1) % EVERY == 0:
            print(i + 1, float(value), file=sys.stderr)
    jax.block_until_ready(params)
    return {"step": (time.perf_counter() - begun) / STEPS, "loss": float(value)}


def torch_arm(text: str) -> dict[str, float]:
    """The same network in PyTorch."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    letters = Path(text).read_text()
    index = {c: i for i, c in enumerate(sorted(set(letters)))}
    tokens = torch.tensor([index[c] for c in letters])

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x):
            rows, steps, _ = x.shape
            parts = self.qkv(self.norm1(x)).view(rows, steps, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(rows, steps, WIDTH))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.places = nn.Embedding(len(index), WIDTH), nn.Embedding(BLOCK, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(WIDTH, bias=False)
            for name, p in self.named_parameters():
                if p.dim() > 1:
                    sd = 0.02 / math.sqrt(2 * LAYERS) if name.endswith(("out.weight", "down.weight")) else 0.02
                    nn.init.normal_(p, std=sd)

        def forward(self, x):
            x = self.embed(x) + self.places(torch.arange(x.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.embed.weight.T

    model = Gpt()
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n and "places" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 or "embed" in n or "places" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), fused=True)
    begun, loss = 0.0, None
    for i in range(WARM + STEPS):
        if i == WARM:
            begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate_at(i)
        start = torch.randint(len(tokens) - BLOCK - 1, (BATCH,))
        window = tokens[start[:, None] + torch.arange(BLOCK + 1)]
        loss = F.cross_entropy(model(window[:, :-1]).reshape(-1, len(index)), window[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (i + 1) % EVERY == 0:
            print(i + 1, loss.item(), file=sys.stderr)
    return {"step": (time.perf_counter() - begun) / STEPS, "loss": loss.item()}


ARMS = {"jaxtrain": jaxtrain_arm, "hand": hand_arm, "torch": torch_arm}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch-python", default=sys.executable)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(ARMS[options.arm](options.text)))
        return
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(options.rounds):
        for arm in list(ARMS)[number % 3 :] + list(ARMS)[: number % 3]:
            python = options.torch_python if arm == "torch" else sys.executable
            command = [python, __file__, options.text, "--arm", arm]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            runs[arm].append(json.loads(out.splitlines()[-1]))
            print(number, arm, runs[arm][-1], flush=True)
    report(runs, options.torch_python)


def report(runs: dict[str, list[dict[str, float]]], torch_python: str) -> None:
    """Ratios are of one round's neighbours; medians over rounds."""
    from record import record

    version = "import torch; print(torch.__version__)"
    torch = subprocess.run([torch_python, "-c", version], capture_output=True, text=True, check=True).stdout.strip()
    steps = {arm: [run["step"] for run in own] for arm, own in runs.items()}

    def ratio(arm: str) -> str:
        each = [a / b for a, b in zip(steps["jaxtrain"], steps[arm], strict=True)]
        return f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})"

    n = len(steps["jaxtrain"])
    lines = [
        f"nanoGPT's CPU network (4 layers, 128 wide), {BATCH} rows of {BLOCK} tokens; {STEPS} steps after {WARM}, "
        f"each arm in its own process, {n} rounds interleaved. `hand`: a plain jit loop with the same tricks. "
        f"PyTorch {torch}, eager, fused AdamW, all cores.\n",
        "| arm | ms a step (median) | least | greatest | jaxtrain / arm, median of rounds |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {arm} | {1e3 * statistics.median(t):.1f} | {1e3 * min(t):.1f} | {1e3 * max(t):.1f} | {ratio(arm)} |"
            for arm, t in steps.items()
        ),
    ]
    rooms = ["core", "loop.py", "models/gpt.py", "models/layers.py", "hardware/allocator.py", "data/feed.py"]
    rooms += [
        "models/__init__.py",
        "data/order.py",
        "data/text.py",
        "hooks/writers.py",
        "hooks/control.py",
        "hooks/console.py",
    ]
    record("gpt_speed", "A step of a small gpt: jaxtrain, hand-written, PyTorch", lines, {"runs": runs}, rooms)


if __name__ == "__main__":
    main()
