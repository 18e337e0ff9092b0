"""Moments in the host's memory: where it is refused, what is asked for, and the whole path on the CPU's own kinds.

jax gives a CPU the same names of memory as a GPU, so that all but the GPU itself is run here.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.build import build
from jaxtrain.config import ConfigError, load
from jaxtrain.eager import run_eagerly
from jaxtrain.hardware.devices import Devices
from jaxtrain.hooks.control import Signals
from jaxtrain.loop import Stop
from jaxtrain.parallel import offload, rules

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "mlp", "hidden": [128]},
    "train": {"duration": 12, "global_batch_size": 64},
    "log": {"every": 5, "tensorboard": False},
    "evaluate": {"every": 6},
}
HOST = {"optimizer.offload": "host"}


def tiny(**keys: Any) -> Any:
    return load(TINY, keys.items())


def device(*kinds: str) -> Devices:
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    return Devices((SimpleNamespace(addressable_memories=lambda: memories),), "gpu", "NVIDIA X", 1)


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a device with a memory of its own."""
    real = offload.placed

    def placed(optimizer: Any, devices: Devices, *rest: Any) -> Any:
        return real(optimizer, dataclasses.replace(devices, platform="gpu"), *rest)

    monkeypatch.setattr(offload, "placed", placed)


# ---------------------------------------------------------------- refused


def test_a_cpu_refuses_with_the_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        build(tiny(**HOST))
    assert str(caught.value) == (
        "optimizer.offload: host: this run computes on the CPU, so its moments are in the host's memory already; "
        "allowed: none, or host on a GPU"
    )
    assert caught.value.exit_code == 2
    build(tiny())  # the control


def test_a_backend_without_that_memory_refuses_and_names_what_it_has() -> None:
    job = build(tiny())
    shardings = jax.tree.map(lambda x: x.sharding, job.abstract_state)
    optimizer = tiny(**HOST).optimizer
    with pytest.raises(ConfigError) as caught:
        offload.placed(optimizer, device("device", "unpinned_host"), job.abstract_state, shardings)
    assert str(caught.value) == (
        "optimizer.offload: host needs memory of kind pinned_host, and NVIDIA X has device, unpinned_host; "
        "allowed: none"
    )
    offload.placed(optimizer, device("device", "pinned_host"), job.abstract_state, shardings)


@pytest.mark.usefixtures("as_gpu")
def test_an_optimizer_without_moments_refuses() -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.offload: host: optimizer\.kind=sgd keeps no moments; allowed"):
        build(tiny(**{"optimizer.kind": "sgd"}, **HOST))
    build(tiny(**{"optimizer.kind": "momentum"}, **HOST))


# ---------------------------------------------------------------- asked for


def kinds(state: Any) -> dict[str, set[str]]:
    """{part of the state: kinds of memory of its arrays that have axes}."""
    return {name: {x.sharding.memory_kind for x in jax.tree.leaves(part) if x.ndim} for name, part in state.items()}


@pytest.mark.usefixtures("as_gpu")
def test_moments_and_nothing_else_are_asked_for_in_the_hosts_memory() -> None:
    state = build(tiny(**HOST)).abstract_state
    assert kinds(state)["opt_state"] == {"pinned_host"}
    assert kinds(state)["params"] == {"device"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state) if not x.ndim} == {"device"}
    assert kinds(build(tiny()).abstract_state)["opt_state"] == {"device"}  # the control
    one, whole = rules.state_bytes(state)
    moments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state["opt_state"]) if x.ndim)
    assert one == whole - moments


PLACED = re.compile(r'annotate_device_placement.*_xla_buffer_placement = "(\w+)"')


def placements(job: Any) -> list[str]:
    """Where the step, lowered for a GPU, says that arrays are to be put."""
    traced = job.advance.trace(job.abstract_state, job._abstract_fed())
    return PLACED.findall(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.usefixtures("as_gpu")
def test_the_program_of_a_gpu_fetches_every_moment_and_puts_it_back() -> None:
    job = build(tiny(**HOST))
    found, moments = placements(job), 8  # mu and nu of two kernels and two biases
    results = len(jax.tree.leaves(jax.eval_shape(job.advance, job.abstract_state, job._abstract_fed())))
    # Each moment is fetched, and Adam's counter named with them both ways; all results have their place named again.
    assert found.count("device") == (moments + 1) + 1 + (results - moments)
    assert found.count("pinned_host") == 2 * moments
    assert placements(build(tiny())) == []  # the control


# ---------------------------------------------------------------- run, on the CPU's own kinds of memory


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_run_is_the_same_bit_for_bit_and_goes_on(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"optimizer.moment_dtype": dtype}
    near = jt.train(TINY, run_dir=tmp_path / "near", quiet=True, **keys)
    far = jt.train(TINY, run_dir=tmp_path / "far", quiet=True, **keys, **HOST)
    assert bits(far.state) == bits(near.state)
    assert far.test == near.test
    assert kinds(far.state)["opt_state"] == {"pinned_host"}
    assert kinds(near.state)["opt_state"] == {"device"}
    monkeypatch.setattr(Signals, "after_step", lambda self, now: Stop("interrupted", "test", 130) if now == 7 else None)
    jt.train(TINY, run_dir=tmp_path / "half", quiet=True, **keys, **HOST).close()
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        real = offload.placed
        patch.setattr(offload, "placed", lambda o, d, *a: real(o, dataclasses.replace(d, platform="gpu"), *a))
        resumed = jt.resume(tmp_path / "half", quiet=True)
    assert kinds(resumed.state)["opt_state"] == {"pinned_host"}
    assert bits(resumed.state) == bits(near.state)


@pytest.mark.usefixtures("as_gpu")
def test_a_loop_of_steps_and_steps_without_jit_take_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"train.steps_per_dispatch": 3}
    near = jt.train(TINY, run_dir=tmp_path / "near", quiet=True, **keys)
    far = jt.train(TINY, run_dir=tmp_path / "far", quiet=True, **keys, **HOST)
    assert bits(far.state) == bits(near.state)
    assert run_eagerly(tiny(**HOST), 2) == 0
    assert "step 2: loss" in capsys.readouterr().out


@pytest.mark.usefixtures("as_gpu")
def test_a_step_gives_its_state_away() -> None:
    job = build(tiny(**HOST))
    state, fed = job.init(), job.feeder()(0)
    after, _ = job.advance(state, fed)
    assert all(x.is_deleted() for x in jax.tree.leaves(state["opt_state"]))
    job.advance(after, fed)
    assert job.advance._cache_size() == 1
