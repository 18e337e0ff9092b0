"""Two processes of this machine: one run, the same as one process with two devices; stopped and broken together."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_helpers import ONE_DEVICE, arrays, rows

import jaxtrain as jt
from jaxtrain.config import ConfigError
from jaxtrain.launch.local import gpu_shares

FLAGS = ["digits", "--model.kind=mlp", "--augment.shift=0", "--log.every=10", "--train.steps_per_dispatch=1"]
PARTS = [
    *FLAGS,
    "--mesh.data=1",
    "--mesh.fsdp=2",
    "--schedule.kind=constant",
    "--schedule.warmup=5",
    "--data.feed=prefetch",
]
TWO_DEVICES = {**ONE_DEVICE, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


def jaxtrain(*arguments: str, environment: dict[str, str] = ONE_DEVICE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxtrain", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four epochs: two processes, and one process with two devices; fully sharded, and interrupted after two epochs."""
    place = tmp_path_factory.mktemp("runs")
    whole = [*FLAGS, "--train.duration=68"]
    done = jaxtrain("launch", *whole, "--processes=2", f"--run-dir={place / 'two'}")
    assert done.returncode == 0, done.stderr[-3000:]
    (place / "stdout").write_text(done.stdout)
    assert jaxtrain("train", *whole, f"--run-dir={place / 'one'}", environment=TWO_DEVICES).returncode == 0
    for duration in (34, 68):
        sharded = [*PARTS, f"--train.duration={duration}"]
        more = ["--resume"] if duration == 68 else []
        done = jaxtrain("launch", *sharded, "--processes=2", f"--run-dir={place / 'parts'}", *more)
        assert done.returncode == 0, done.stderr[-3000:]
    straight = [*PARTS, "--train.duration=68"]
    done = jaxtrain("train", *straight, f"--run-dir={place / 'straight'}", environment=TWO_DEVICES)
    assert done.returncode == 0, done.stderr[-3000:]
    return place


@pytest.mark.parametrize(("two", "one"), [("two", "one"), ("parts", "straight")])
def test_two_processes_train_what_one_with_two_devices_trains(place: Path, two: str, one: str) -> None:
    assert rows(place / two) == rows(place / one)
    left, right = arrays(place / two, 68), arrays(place / one, 68)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []
    # The control: the two kinds of run are not the same, so equal bits say something.
    assert rows(place / "two") != rows(place / "parts")


def test_one_of_them_writes(place: Path) -> None:
    folder = place / "two"
    steps = [row["step"] for row in rows(folder) if "train/loss" in row]
    assert steps == [1, 10, 20, 30, 40, 50, 60, 68]
    assert len(list(folder.glob("events.*"))) == 1
    said = (place / "stdout").read_text().splitlines()
    assert said[-1] == str(folder)
    assert [line.split()[0] for line in said[:-1]] == sorted({line.split()[0] for line in said[:-1]})
    assert (folder / "run.1.log").exists()
    assert "done (68 steps)" not in (folder / "run.1.log").read_text()
    assert jt.load_run(folder).test["accuracy"] == rows(folder)[-1]["test/accuracy"]


def running(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxtrain", "launch", *FLAGS, "--processes=2", "--train.duration=1000000"]
    command += ["--evaluate.every=0", f"--run-dir={folder}", *more]
    child = subprocess.Popen(command, env=ONE_DEVICE, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until = time.monotonic() + 300
    while time.monotonic() < until and child.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(rows(folder)) > 3:
            return child
        time.sleep(0.2)
    child.kill()
    raise AssertionError(child.communicate()[1][-3000:])


def test_a_signal_to_one_stops_and_saves_all_at_the_same_step(tmp_path: Path) -> None:
    child = running(tmp_path / "run")
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=120)
    status = jt.load_run(tmp_path / "run").folder.read_status()
    assert child.returncode == 75
    assert status["state"] == "preempted"
    assert status["step"] == status["last_sealed"]
    assert status["step"] % 10 == 0  # where they agree: at rows of metrics


def test_a_process_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    import psutil

    child = running(tmp_path / "run")
    second = max(psutil.Process(child.pid).children(), key=lambda process: process.pid)
    second.kill()
    _, err = child.communicate(timeout=60)
    assert child.returncode == 70
    assert "process 1 ended with -9" in err
    assert not second.is_running()


def test_a_wrong_key_is_told_once_before_anything_starts(tmp_path: Path) -> None:
    done = jaxtrain("launch", *FLAGS, "--processes=2", "--train.sed=3", f"--run-dir={tmp_path / 'run'}")
    assert done.returncode == 2
    assert done.stderr.count("train.sed") == 1
    assert not (tmp_path / "run").exists()


def test_a_number_that_cannot_share_the_gpus_leaves_nothing_behind(tmp_path: Path) -> None:
    three = {k: v for k, v in ONE_DEVICE.items() if k != "JAX_PLATFORMS"} | {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    done = jaxtrain("launch", *FLAGS, "--processes=2", f"--run-dir={tmp_path / 'run'}", environment=three)
    assert done.returncode == 2
    assert done.stderr == "jaxtrain: --processes: 2 cannot share 3 GPUs equally; allowed: 1, 3\n"
    assert not (tmp_path / "run").exists()


def test_what_only_the_build_can_refuse_ends_all(tmp_path: Path) -> None:
    odd = ["--train.global_batch_size=33"]
    done = jaxtrain("launch", *FLAGS, "--processes=2", *odd, f"--run-dir={tmp_path / 'run'}")
    assert done.returncode == 2
    assert "33 rows cannot be split over 2 devices" in done.stderr


def test_gpus_are_shared_out_equally() -> None:
    four = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert gpu_shares(2, four) == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    assert gpu_shares(2, {"CUDA_VISIBLE_DEVICES": ""}) == [{}, {}]
    assert gpu_shares(2, {**four, "JAX_PLATFORMS": "cpu"}) == [{}, {}]
    with pytest.raises(ConfigError, match="--processes: 3 cannot share 4 GPUs equally; allowed: 1, 2, 4"):
        gpu_shares(3, four)
