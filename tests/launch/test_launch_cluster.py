"""Processes that Slurm or Open MPI started: found by their environment; two train what `jaxtrain launch` trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.launch.local import free_port

FLAGS = ["digits", "--model.kind=mlp", "--log.every=10", "--train.duration=20", "--evaluate.every=0", "--quiet"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "JAXTRAIN_"))}
HERE = {**CLEAN, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def slurm(number: int, port: int) -> dict[str, str]:
    """What srun sets; jax takes the port from the job's number."""
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
    children = [subprocess.Popen(command, env={**HERE, **own}, **pipes) for own in environments]  # type: ignore[call-overload]
    said = [child.communicate(timeout=300) for child in children]
    return [
        subprocess.CompletedProcess(command, child.returncode, *texts)
        for child, texts in zip(children, said, strict=True)
    ]


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows that two processes of `jaxtrain launch` write."""
    folder = tmp_path_factory.mktemp("runs") / "launched"
    command = [sys.executable, "-m", "jaxtrain", "launch", *FLAGS, "--processes=2", f"--run-dir={folder}"]
    subprocess.run(command, env=HERE, check=True, capture_output=True, timeout=300)
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


def test_a_launcher_that_does_not_say_where_its_first_process_is_gets_one_line(tmp_path: Path) -> None:
    (done,) = train([ranks(0)], tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "jaxtrain: Open MPI has started 2 processes and does not say where the first of them runs; set "
        "JAXTRAIN_COORDINATOR=HOST:PORT, an address of that machine which all of them reach and a free port"
    ]
    assert not (tmp_path / "run").exists()
