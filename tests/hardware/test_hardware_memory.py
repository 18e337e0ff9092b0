"""How much memory is free: the machine's, or what its container leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxtrain.hardware import memory
from jaxtrain.hardware.devices import Devices, available

MIB = 2**20


@pytest.fixture
def control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=900 * MIB, total=999 * MIB))
    return tmp_path


def test_without_a_container_it_is_the_machines(control_group: Path) -> None:
    assert memory.free() == 900 * MIB


def test_a_container_has_what_its_limit_leaves_and_files_count_as_free(control_group: Path) -> None:
    (control_group / "memory.max").write_text(f"{500 * MIB}\n")
    (control_group / "memory.current").write_text(f"{300 * MIB}\n")
    assert memory.free() == 200 * MIB
    (control_group / "memory.stat").write_text(f"anon 5\ninactive_file {50 * MIB}\n")
    assert memory.free() == 250 * MIB


def test_a_container_that_has_used_it_all_has_nothing(control_group: Path) -> None:
    (control_group / "memory.max").write_text("100")
    (control_group / "memory.current").write_text("101")
    assert memory.free() == 0


def test_a_container_without_a_limit_or_with_a_larger_one_has_what_the_machine_has(control_group: Path) -> None:
    (control_group / "memory.current").write_text("5")
    for most in ("max", str(10**15)):
        (control_group / "memory.max").write_text(most)
        assert memory.free() == 900 * MIB


def test_the_first_version_of_control_groups_is_read_too(control_group: Path) -> None:
    (control_group / "memory").mkdir()
    (control_group / "memory/memory.limit_in_bytes").write_text(str(70 * MIB))
    (control_group / "memory/memory.usage_in_bytes").write_text(str(30 * MIB))
    assert memory.free() == 40 * MIB


def test_a_gpu_has_for_itself_what_jax_may_take_and_the_devices_of_a_cpu_share(control_group: Path) -> None:
    gpu = Devices(tuple(jax.devices()[:1]), "gpu", "NVIDIA H100", 60 * MIB)
    assert memory.limit(gpu) == memory.Limit(60 * MIB, "what jax may use on a NVIDIA H100", shared=False)
    if jax.default_backend() == "cpu":
        assert memory.limit(available()) == memory.Limit(900 * MIB, "free in this machine now", shared=True)


def test_this_cpu_moves_bytes() -> None:
    assert 1e8 < memory.bandwidth() < 1e13
