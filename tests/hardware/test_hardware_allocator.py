"""The allocator is told to keep large buffers, unless the user has settled that; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.hardware import allocator
from jaxtrain.hardware.devices import available


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What mallopt is called with, in an environment without settings."""
    calls: list[tuple[int, int]] = []

    class Library:
        def __init__(self, name: Any) -> None:
            pass

        def mallopt(self, name: int, value: int) -> int:
            calls.append((name, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))]:
        monkeypatch.delenv(name)
    allocator.keep_buffers.cache_clear()
    yield calls
    allocator.keep_buffers.cache_clear()


def test_large_buffers_are_asked_for_once_a_process(asked: list[tuple[int, int]]) -> None:
    assert allocator.keep_buffers() is True
    assert asked == [(-4, 0), (-1, 2**31 - 1), (-2, 64 << 20)]  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
    allocator.keep_buffers()
    assert len(asked) == 3


def test_a_cpu_backend_asks_for_it(asked: list[tuple[int, int]]) -> None:
    assert available().platform == "cpu"
    assert len(asked) == 3


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_what_the_user_has_set_is_left_alone(
    name: str, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert allocator.keep_buffers() is False
    assert asked == []


def test_another_c_library_is_left_alone(asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert allocator.keep_buffers() is False


def test_a_freed_buffer_stays_with_the_process(tmp_path: Path) -> None:
    """For real: 256 MB are freed; with the setting the process still has them, without it they went back."""
    code = (
        "import sys, psutil\n"
        "from jaxtrain.hardware.allocator import keep_buffers\n"
        "kept = keep_buffers() if sys.argv[1] == 'on' else None\n"
        "held = bytearray(256 << 20); held[::4096] = bytes(len(held) // 4096)\n"
        "del held\n"
        "print(kept, psutil.Process().memory_info().rss >> 20)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC", "LD_PRELOAD"))}

    def rss(switch: str) -> tuple[str, int]:
        done = subprocess.run(
            [sys.executable, "-c", code, switch], env=environment, capture_output=True, text=True, check=True
        )
        kept, size = done.stdout.split()
        return kept, int(size)

    kept, size = rss("on")
    if kept != "True":
        pytest.skip("this C library has no mallopt")
    assert size > 256
    assert rss("off")[1] < 200
