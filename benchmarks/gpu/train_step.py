"""A bf16 step on one NVIDIA GPU, of gpt-124M and resnet-50: time, share of the card's peak, memory.

    python benchmarks/gpu/train_step.py [--torch-python PYTHON] [--only gpt] [--batch 8] [--rounds 5]
    python benchmarks/gpu/train_step.py --tiny --rounds 1     # small networks on a CPU: does this script work?

jaxtrain   `jt.train` as a user runs it
flax loop  one jitted step by hand (`../peers/jit_loop.py`), layers in bf16, parameters in fp32
compile    PyTorch: torch.compile, autocast to bf16, fused AdamW; a Python with a CUDA build of torch is needed

Each arm is a process of its own; rounds are interleaved and rotate. Rows are synthetic and live on the device. What is
timed are whole epochs after the first. MFU: operations of a step (jaxtrain's `Job.cost`: products and convolutions,
2 for a multiply-add, attention in full) by its time, as a share of the card's peak; the same count for all arms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "peers")]
from work import Workload  # noqa: E402

from jaxtrain.hardware.peak import card as peak_of  # noqa: E402

GPT = {"kind": "gpt", "positions": "learned", "norm": "layer", "activation": "gelu"}
CASES = {
    "gpt": Workload(GPT | {"layers": 12, "heads": 12, "width": 768}, (1024,), 16, 10, outputs=50304, timed=5),
    "resnet50": Workload({"kind": "resnet", "depth": 50, "width": 64}, (224, 224, 3), 128, 8, outputs=1000, timed=5),
}
TINY = {
    "gpt": Workload(GPT | {"layers": 2, "heads": 2, "width": 32}, (32,), 4, 5, outputs=300, timed=2),
    "resnet50": Workload({"kind": "resnet", "depth": 50, "width": 8}, (32, 32, 3), 4, 5, timed=2),
}
TITLES = {"gpt": "gpt-124M, {} rows of 1,024 tokens", "resnet50": "resnet-50, {} pictures of 224x224x3"}
ROOMS = ["core", "loop.py", "dispatch.py", "session.py", "models", "hardware", "data/feed.py", "data/order.py"]
ROOMS += ["hooks/writers.py", "hooks/control.py", "hooks/console.py"]

Run = dict[str, float | None]


def arrays(own: Workload) -> dict[str, np.ndarray]:
    """Noise in which every class, or every token, is there."""
    rng = np.random.default_rng(0)
    if own.model["kind"] == "gpt":
        block = own.shape[0]
        count = max((own.rows + 2) * block - 1, own.outputs)
        tokens = rng.integers(0, own.outputs, count)
        tokens[: own.outputs] = rng.permutation(own.outputs)
        return {"tokens": tokens.astype(np.int32), "span": np.arange(block + 1)}
    inputs = rng.standard_normal((own.rows, *own.shape), np.float32)
    return {"inputs": inputs, "targets": (np.arange(own.rows) % own.outputs).astype(np.int32)}


def orders(own: Workload) -> np.ndarray:
    """[epochs, rows]: which rows an epoch takes; of tokens, the places of the first."""
    rng = np.random.default_rng(1)
    distance = own.shape[0] if own.model["kind"] == "gpt" else 1
    return np.array([rng.permutation(own.rows) for _ in range(own.epochs)]) * distance


def jaxtrain_arm(name: str, own: Workload) -> Run:
    """The product; time from its metrics.jsonl."""
    import jaxtrain_train

    import jaxtrain as jt

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        jaxtrain_train.write(name, arrays(own), folder)
        tree = jaxtrain_train.tree(name, own, folder, own.epochs) | {"precision": "bf16"}
        with jt.train(tree, run_dir=folder / "run", quiet=True) as run:
            rows = [row for row in run.metrics() if row.get("step", 0) > own.warm * own.steps and "time/step" in row]
            assert run.job is not None
            return {
                "step": statistics.fmean(row["time/step"] for row in rows),
                "loss": rows[-1]["train/loss"],
                "memory": jax_memory(),
                "flops": run.job.cost.step_flops,
            }


def flax_arm(name: str, own: Workload) -> Run:
    """A loop by hand."""
    import flax_nets
    import jax.numpy as jnp
    import jit_loop

    net = flax_nets.make(own.model, own.shape, own.outputs, dtype=jnp.bfloat16)
    seconds, losses = jit_loop.train(own, net, arrays(own), orders(own))
    return {"step": seconds / (own.timed * own.steps), "loss": float(losses[-1]), "memory": jax_memory()}


def jax_memory() -> float | None:
    """Bytes of the device at most in use; not known on a CPU."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def torch_arm(name: str, own: Workload) -> Run:
    """torch.compile under autocast."""
    import time

    import torch
    import torch_nets

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    learner = torch_nets.Learner(torch_nets.make(own.model, own.shape, own.outputs).to(device))
    optimizer = torch_nets.optimizer_of(learner)
    learner.net.compile()
    batches = torch_nets.Batches(own, arrays(own), orders(own), device)
    begun = 0.0
    for epoch in range(own.epochs):
        if epoch == own.warm:
            torch.cuda.synchronize() if cuda else None
            begun = time.perf_counter()
        for batch in batches:
            with torch.autocast(device, torch.bfloat16):
                loss = learner(**batch)["loss"]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    torch.cuda.synchronize() if cuda else None
    seconds = time.perf_counter() - begun
    memory = torch.cuda.max_memory_allocated() if cuda else None
    return {"step": seconds / (own.timed * own.steps), "loss": loss.item(), "memory": memory}


ARMS = {"jaxtrain": jaxtrain_arm, "flax loop": flax_arm, "compile": torch_arm}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch-python")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--batch", type=int, help="rows of a step, where the usual ones do not fit (with --only)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--arm", choices=ARMS)
    options = parser.parse_args()
    cases = {name: case for name, case in (TINY if options.tiny else CASES).items() if options.only in (None, name)}
    if options.batch:
        cases = {name: resized(case, options.batch) for name, case in cases.items()}
    if options.arm:
        print(json.dumps(ARMS[options.arm](options.only, cases[options.only])))
        return
    card = "a CPU" if options.tiny else cuda_card()
    if card is None:
        print("no CUDA GPU that jax can use was found; --tiny checks this script on a CPU", file=sys.stderr)
        sys.exit(2)
    pythons = {"jaxtrain": sys.executable, "flax loop": sys.executable}
    if options.torch_python:
        pythons["compile"] = options.torch_python
    runs: dict[str, dict[str, list[Run]]] = {name: {arm: [] for arm in pythons} for name in cases}
    for number in range(options.rounds):
        for name in cases:
            for arm in list(pythons)[number % len(pythons) :] + list(pythons)[: number % len(pythons)]:
                runs[name][arm].append(run(pythons[arm], name, arm, options))
                print(number, name, arm, runs[name][arm][-1], flush=True)
    lines = report(runs, cases, card, options)
    print("\n".join(lines))
    if not (options.tiny or options.only):
        from record import record

        record("gpu_train_step", "A step on a GPU", lines, {"card": card, "runs": runs}, ROOMS)


def resized(own: Workload, batch: int) -> Workload:
    """With other batches; of pictures still one of each class."""
    steps = max(own.steps, -(-own.outputs // batch)) if own.model["kind"] == "resnet" else own.steps
    return replace(own, batch=batch, steps=steps)


def cuda_card() -> str | None:
    """The name of the GPU, asked in a process of its own: jax takes most of its memory."""
    script = (
        "import jax; d = jax.devices()[0]; print('cuda' in d.client.platform_version.lower()); print(d.device_kind)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    answer = done.stdout.splitlines()
    return answer[-1] if done.returncode == 0 and answer[-2] == "True" else None


def run(python: str, name: str, arm: str, options: argparse.Namespace) -> Run:
    """An arm in a process of its own."""
    command = [python, __file__, "--only", name, "--arm", arm, *(["--tiny"] if options.tiny else [])]
    command += ["--batch", str(options.batch)] if options.batch else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(
    runs: dict[str, dict[str, list[Run]]], cases: dict[str, Workload], card: str, options: argparse.Namespace
) -> list[str]:
    """A table for each network."""
    peak = peak_of(card)
    told = f"peak {peak / 1e12:.0f} TFLOP/s" if peak else "its peak is not in jaxtrain's table, so MFU is not given"
    lines = [f"On {card} ({told}), bf16, {options.rounds} rounds interleaved, each arm in its own process."]
    for name, arms in runs.items():
        own = cases[name]
        flops = arms["jaxtrain"][0]["flops"]
        lines += [
            "",
            f"{name} of --tiny:"
            if options.tiny
            else f"{TITLES[name].format(own.batch)}, {flops / 1e12:.2f} TFLOP a step:",
            "",
            "| arm | ms a step, median | least to greatest | MFU | GiB at most | arm / jaxtrain, median of rounds |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for arm, each in arms.items():
            times = [one["step"] for one in each]
            ratios = [a["step"] / b["step"] for a, b in zip(each, arms["jaxtrain"], strict=True)]
            memory = [one["memory"] / 2**30 for one in each if one["memory"]]
            mfu = f"{flops / statistics.median(times) / peak:.1%}" if peak else "-"
            lines.append(
                f"| {arm} | {1e3 * statistics.median(times):.1f} | {1e3 * min(times):.1f} to {1e3 * max(times):.1f} | "
                f"{mfu} | {f'{max(memory):.2f}' if memory else '-'} | "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
            )
    return lines


if __name__ == "__main__":
    main()
