"""Which precision a device wants, which options its compiler takes, which GPU is there but not used."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import psutil
import pytest

from jaxtrain.core.precision import PRECISIONS
from jaxtrain.hardware import compiler
from jaxtrain.hardware.compiler import CONVOLUTION, compiler_options
from jaxtrain.hardware.devices import Devices, available, resolve_precision, unused_gpu


def devices(platform: str, capability: Any = None) -> Devices:
    one = SimpleNamespace(platform=platform)
    if capability is not None:
        one.compute_capability = capability
    return Devices((one,), platform, "made", 2**30)


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("cpu", None, "fp32"),
        ("gpu", "6.1", "fp32"),
        ("gpu", "7.0", "fp16"),
        ("gpu", "7.5", "fp16"),
        ("gpu", "8.0", "bf16"),
        ("gpu", "8.9", "bf16"),
        ("gpu", "9.0", "bf16"),
        ("gpu", "10.0", "bf16"),
        ("gpu", 9.0, "bf16"),
        ("cuda", "8.0", "bf16"),
        ("gpu", None, "fp32"),
        ("tpu", None, "bf16"),
        ("metal", None, "fp32"),
    ],
)
def test_auto_precision_is_what_the_device_computes_fast(platform: str, capability: Any, expected: str) -> None:
    assert resolve_precision("auto", devices(platform, capability)) is PRECISIONS[expected]


def test_a_capability_that_is_no_number_is_no_reason_to_fail() -> None:
    """ROCm devices name theirs `gfx90a`."""
    assert resolve_precision("auto", devices("gpu", "gfx90a")) is PRECISIONS["fp32"]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_named_precision_wins_on_every_device(name: str, platform: str) -> None:
    assert resolve_precision(name, devices(platform, "9.0")) is PRECISIONS[name]


def test_available_describes_the_cpu_with_the_memory_of_the_machine() -> None:
    found = available()
    assert found.platform == "cpu"
    assert found.devices == tuple(jax.devices())
    assert found.memory == psutil.virtual_memory().total
    assert str(Devices((1, 2), "gpu", "H200", 139 * 2**30)) == "2 x H200 (gpu, 139 GiB)"


def test_available_takes_the_limit_that_jax_has_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(platform="gpu", device_kind="H200", memory_stats=lambda: {"bytes_limit": 123})
    monkeypatch.setattr(jax, "devices", lambda: [one])
    assert available().memory == 123


# ---------------------------------------------------------------- compiler options


def test_convolutions_on_cpu_get_their_option_and_nothing_else_does() -> None:
    wanted = CONVOLUTION["cpu"]
    assert compiler_options("cpu", True) == wanted
    assert compiler_options("cpu", False) == {}
    assert compiler_options("gpu", True) == {}
    assert compiler_options("tpu", True) == {}


def test_an_unknown_option_is_left_out_and_the_known_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"cpu": {"xla_of_another_century": "yes", **CONVOLUTION["cpu"]}}
    monkeypatch.setattr(compiler, "CONVOLUTION", made)
    assert compiler_options("cpu", True) == {k: v for k, v in made["cpu"].items() if k != "xla_of_another_century"}
    with pytest.raises(Exception, match="xla_of_another_century"):  # the control: jax itself refuses it
        jax.jit(lambda x: x, compiler_options={"xla_of_another_century": "yes"})(1.0)


def test_a_wrong_value_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = CONVOLUTION["cpu"]
    monkeypatch.setattr(compiler, "CONVOLUTION", {"cpu": {name: "NO_SUCH_LIBRARY"}})
    assert compiler_options("cpu", True) == {}


def test_a_program_with_the_options_computes_the_same() -> None:
    def f(x: jax.Array) -> jax.Array:
        kernel = jnp.arange(9.0).reshape(3, 3, 1, 1)
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)

    x = jnp.arange(32.0).reshape(2, 4, 4, 1)
    with_options = jax.jit(f, compiler_options=compiler_options("cpu", True))(x)
    assert (with_options == jax.jit(f)(x)).all()


# ---------------------------------------------------------------- unused GPUs


class NVMLError(Exception):
    pass


class Stub(ModuleType):
    """A pynvml in which `failing` raises; `shut` counts the shutdowns."""

    NVMLError = NVMLError

    def __init__(self, failing: str = "", name: Any = "NVIDIA H200") -> None:
        super().__init__("pynvml")
        self.shut = 0
        self.called = False

        def call(which: str, value: Any = None) -> Any:
            self.called = True
            if which == failing:
                raise NVMLError(f"{which} failed")
            return value

        self.nvmlInit = lambda: call("init")
        self.nvmlDeviceGetHandleByIndex = lambda i: call("handle", i)
        self.nvmlDeviceGetName = lambda handle: call("name", name)

        def shutdown() -> None:
            self.shut += 1
            call("shutdown")

        self.nvmlShutdown = shutdown


@pytest.mark.parametrize("name", ["NVIDIA H200", b"NVIDIA H200"])
def test_a_gpu_that_jax_does_not_use_is_named(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(name=name)
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    assert unused_gpu(devices("cpu")) == "NVIDIA H200"
    assert stub.shut == 1


@pytest.mark.parametrize(("failing", "shut"), [("init", 0), ("handle", 1), ("name", 1)])
def test_no_driver_and_no_card_are_no_gpu(failing: str, shut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(failing)
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    assert unused_gpu(devices("cpu")) is None
    assert stub.shut == shut


def test_a_failing_shutdown_hides_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Stub("shutdown"))
    assert unused_gpu(devices("cpu")) == "NVIDIA H200"


def test_without_the_module_there_is_no_gpu_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import raises ImportError
    assert unused_gpu(devices("cpu")) is None


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_device_that_jax_uses_is_not_unused_and_nvml_is_not_asked(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Stub()
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    assert unused_gpu(devices(platform)) is None
    assert not stub.called


def test_a_backend_that_does_not_start_is_one_line_with_its_reason() -> None:
    """In a process of its own: a backend starts once."""
    command = [sys.executable, "-m", "jaxtrain", "train", "digits", "--quiet", "--summary"]
    done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "nowhere"}, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()[-1:]
    assert line.startswith("jaxtrain: jax cannot start its backend: ")
    assert "JAX_PLATFORMS=nowhere asks for it: unset it" in line
    assert done.stdout == ""
    works = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert works.returncode == 0  # the control
