"""Compiled programs are kept in the user's folder, where the user has not said otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.hardware import compile_cache

SCRIPT = """
import json, jax, jax.monitoring
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if "cache_hits" in name else None)
import jaxtrain as jt
config = {"name": "c", "model": {"kind": "mlp", "hidden": [8]}, "train": {"duration": 2}, "log": {"tensorboard": False}}
with jt.train(config, run_dir="run", quiet=True) as run:
    print("RESULT", json.dumps([len(hits), jax.config.jax_compilation_cache_dir, run.test["loss"]]))
    print((run.path / "run.log").read_text())
"""


def run(place: Path, **environment: str) -> tuple[list[Any], str]:
    """[programs read from the cache, its folder, the loss] of a small run in a new process, and its log."""
    clean = {k: v for k, v in os.environ.items() if "CACHE" not in k}
    folder = Path(os.path.join(place, f"run-{len(list(place.iterdir()))}"))
    folder.mkdir()
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    line, _, rest = done.stdout.partition("\n")
    return json.loads(line.removeprefix("RESULT ")), rest + done.stderr


def test_the_second_process_reads_what_the_first_compiled(tmp_path: Path) -> None:
    home = tmp_path / "cache"
    (first, folder, loss), _ = run(tmp_path, XDG_CACHE_HOME=str(home))
    assert Path(folder) == home / "jaxtrain"
    assert oct((home / "jaxtrain").stat().st_mode)[-3:] == "700"
    (second, _, again), _ = run(tmp_path, XDG_CACHE_HOME=str(home))
    assert first == 0
    assert second >= 3  # the initial state, the step, the evaluation
    assert again == loss  # a program that was read computes the same bits
    times = json.loads((home / "jaxtrain" / "times.json").read_text())
    assert len(times) == 1
    assert 0 < next(iter(times.values())) < 300


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"JAX_COMPILATION_CACHE_DIR": "{}/own"}, "{}/own"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, None),
        ({"XDG_CACHE_HOME": "/proc/nothing"}, None),
    ],
    ids=["own", "off", "unwritable"],
)
def test_the_user_decides(environment: dict[str, str], expected: str | None, tmp_path: Path) -> None:
    home = tmp_path / "home"
    given = {"HOME": str(home)} | {k: v.format(tmp_path) for k, v in environment.items()}
    (_, folder, _), _ = run(tmp_path, **given)
    assert folder == (expected and expected.format(tmp_path))
    assert not (home / ".cache" / "jaxtrain").exists()


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    for number, name in enumerate(("c", "a", "b")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 + number, 1000 + number))
    (tmp_path / "times.json").write_text("{}")
    os.utime(tmp_path / "times.json", (1, 1))
    compile_cache.trim(tmp_path, 300)
    assert len(list(tmp_path.iterdir())) == 4
    compile_cache.trim(tmp_path, 299)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "times.json"]
    compile_cache.trim(tmp_path, 100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "times.json"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compile_cache, "use", lambda: tmp_path)
    return tmp_path


def test_the_time_of_compiling_is_kept_and_not_that_of_reading(here: Path) -> None:
    assert compile_cache.last_time("a") is None
    compile_cache.remember("a", 41.0)
    compile_cache.remember("a", 0.5)
    compile_cache.remember("b", 2.0)
    assert (compile_cache.last_time("a"), compile_cache.last_time("b")) == (41.0, 2.0)
    assert [p.name for p in here.iterdir()] == ["times.json"]


@pytest.mark.parametrize("text", ["", "[1]", '{"a": "x"}', "\x00"])
def test_a_spoilt_file_of_times_is_as_none(text: str, here: Path) -> None:
    (here / "times.json").write_text(text)
    assert compile_cache.last_time("a") is None
    compile_cache.remember("a", 1.5)
    assert compile_cache.last_time("a") == 1.5
