"""The peak that utilisation is a share of: by the card's name, or measured on the CPU once a day."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from jaxtrain.hardware import compile_cache, peak
from jaxtrain.hardware.devices import Devices, available


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 3060", 25.5),  # both forms multiply as fast
        ("NVIDIA GeForce RTX 3080", None),  # its two forms do not
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla P100-SXM2-16GB", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_of_a_card_is_looked_up_by_its_name(name: str, tflops: float | None) -> None:
    assert peak.card(name) == (tflops * 1e12 if tflops else None)
    eight = Devices((None,) * 8, "gpu", name, 0)
    for used in (8, 2):
        assert peak.peak(eight, used) == (used * 1e12 * tflops if tflops else None)


def test_the_cpu_is_measured_once_a_day_and_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []
    monkeypatch.setattr(compile_cache, "use", lambda: tmp_path)
    monkeypatch.setattr(peak, "measure", lambda: measured.append(1e11 + len(measured)) or measured[-1])
    now = 1_000_000.0
    monkeypatch.setattr("jaxtrain.hardware.peak.time.time", lambda: now)
    eight = Devices(tuple(jax.devices() * 8), "cpu", "cpu", 0)
    assert [peak.peak(eight, 8), peak.peak(eight, 8)] == [1e11, 1e11]
    now += peak.DAY
    assert peak.peak(eight, 8) == 1e11 + 1
    now -= 2 * peak.DAY  # a clock that went back
    assert peak.peak(eight, 8) == 1e11 + 2
    (tmp_path / "peak.json").write_text("{broken")
    assert peak.peak(eight, 8) == 1e11 + 3
    kept = json.loads((tmp_path / "peak.json").read_text())
    (tmp_path / "peak.json").write_text(json.dumps({**kept, "on": "another machine"}))
    assert peak.peak(eight, 8) == 1e11 + 4
    monkeypatch.setattr(compile_cache, "use", lambda: None)
    assert [peak.peak(eight, 8), peak.peak(eight, 8)] == [1e11 + 5, 1e11 + 6]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert peak.peak(eight, 8) is None


def test_what_is_measured_is_the_time_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr("jaxtrain.hardware.peak.time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr(peak, "TIMES", 3)
    assert peak.measure() == 2 * 1024**3 / 2.0  # the fastest took 2 s
    assert available().platform == "cpu"
