"""Processes that Slurm or Open MPI started: found by their environment; two train what `jaxtrain launch` trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from launch_helpers import ONE_DEVICE, rows

from jaxtrain.launch.local import free_port
from jaxtrain.parallel import processes

FLAGS = ["digits", "--model.kind=mlp", "--log.every=10", "--train.duration=20", "--evaluate.every=0", "--quiet"]


def slurm(number: int, port: int) -> dict[str, str]:
    """What srun sets, and the port: jax would take it from the number of the job."""
    sizes = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    job = {"SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": str(port)}
    return {**sizes, **job, "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}


def ranks(number: int) -> dict[str, str]:
    """What every mpirun of Open MPI sets."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    return {"OMPI_COMM_WORLD_SIZE": "2", **dict.fromkeys(names, str(number))}


def open_mpi_4(number: int, port: int) -> dict[str, str]:
    uri = f"{port * 4096}.0;tcp://127.0.0.1:{port}"
    return {**ranks(number), "OMPI_MCA_orte_hnp_uri": uri, "JAX_COORDINATOR_PORT": str(port)}


def open_mpi_5(number: int, port: int) -> dict[str, str]:
    return {**ranks(number), "JAXTRAIN_COORDINATOR": f"127.0.0.1:{port}"}


def train(environments: list[dict[str, str]], folder: Path) -> list[subprocess.CompletedProcess[str]]:
    command = [sys.executable, "-m", "jaxtrain", "train", *FLAGS, f"--run-dir={folder}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, env={**ONE_DEVICE, **own}, **pipes) for own in environments]  # type: ignore[call-overload]
    said = [child.communicate(timeout=300) for child in children]
    return [
        subprocess.CompletedProcess(command, child.returncode, *texts)
        for child, texts in zip(children, said, strict=True)
    ]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows that two processes of `jaxtrain launch` write."""
    folder = tmp_path_factory.mktemp("runs") / "launched"
    command = [sys.executable, "-m", "jaxtrain", "launch", *FLAGS, "--processes=2", f"--run-dir={folder}"]
    subprocess.run(command, env=ONE_DEVICE, check=True, capture_output=True, timeout=300)
    return rows(folder)


@pytest.mark.parametrize("launcher", [slurm, open_mpi_4, open_mpi_5])
def test_two_processes_of_a_launcher_train_together(
    launcher: Any, launched: list[dict[str, Any]], tmp_path: Path
) -> None:
    port = free_port()
    first, second = train([launcher(number, port) for number in range(2)], tmp_path / "run")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr[-2000:] + second.stderr[-2000:]
    assert rows(tmp_path / "run") == launched
    # One speaks, and nothing of the libraries is among its results.
    *results, last = first.stdout.splitlines()
    assert last == str(tmp_path / "run")
    assert {line.split("/")[0] for line in results} == {"test"}
    assert second.stdout == ""


@pytest.mark.parametrize(
    ("own", "joined"),
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
        (slurm(1, 5), ((), None)),  # jax reads all of it
        (open_mpi_5(1, 5), (("127.0.0.1:5", 2, 1, [1]), "127.0.0.1:5")),
        # `jaxtrain launch` as a step of Slurm: its own processes count, each with all devices it sees.
        (
            slurm(0, 5) | {"JAXTRAIN_COORDINATOR": "h:1", "JAXTRAIN_PROCESSES": "3", "JAXTRAIN_PROCESS": "2"},
            (("h:1", 3, 2, None), "h:1"),
        ),
    ],
)
def test_who_is_joined(own: dict[str, str], joined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(processes, "_own_stdout", lambda: called.append("stdout"))
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **more: called.append((args, more)))
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "JAXTRAIN_"))]:
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    processes.start.__wrapped__()
    if joined:
        args, address = joined
        here = {"coordinator_bind_address": address, "cluster_detection_method": "deactivate"} if address else {}
        joined = (args, {**here, "heartbeat_timeout_seconds": 60})
    assert called == (["stdout", joined] if joined else [])


def test_an_address_alone_is_one_line(tmp_path: Path) -> None:
    (done,) = train([{"JAXTRAIN_COORDINATOR": "127.0.0.1:5"}], tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.startswith("jaxtrain: JAXTRAIN_COORDINATOR: '127.0.0.1:5' is set, and nothing says how many ")
    assert not (tmp_path / "run").exists()


def test_a_launcher_that_does_not_say_where_its_first_process_is_gets_one_line(tmp_path: Path) -> None:
    (done,) = train([ranks(0)], tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "jaxtrain: Open MPI has started 2 processes and does not say where the first of them runs; set "
        "JAXTRAIN_COORDINATOR=HOST:PORT, an address of that machine which all of them reach and a free port"
    ]
    assert not (tmp_path / "run").exists()
