"""SIGKILL before the k-th call that changes a file, for every k of one save and the deletion that follows it.

python benchmarks/proofs/call_sweep.py          (needs gcc; a few minutes)

A process that has imported everything, with shim.c preloaded, forks for each k: no backend has been started there.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOMS = ["checkpoint"]
HERE = Path(__file__).resolve().parent


def state_of(step: int) -> dict[str, Any]:
    """Two arrays whose values tell the step."""
    return {"step": np.int32(step), "params": {"kernel": np.full((64, 32), step / 8, np.float32)}}


def build_shim(place: Path) -> Path:
    """The library, built by gcc."""
    library = place / "shim.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(HERE / "shim.c"), "-ldl"]
    subprocess.run(command, check=True)
    return library


def store_of(folder: Path) -> Any:
    from jaxtrain.checkpoint import Checkpoints

    return Checkpoints(folder, metric="loss", mode="min", keep_last=2, keep_best=0)


def sweep(place: Path, every: int) -> dict[str, Any]:
    """Kill before every `every`-th call; what a restart finds then.

    lost: k for which the newest intact step was not 2 or 3 with its own values, or for which step 3 could not be saved
    again. unsealed: k for which the newest folder, taken as a step without looking at its seal, is not a whole step.
    """
    library = build_shim(place)
    before = place / "before"
    store = store_of(before)
    for step in (1, 2):
        store.save(step, state_of(step), {})
    store.close()
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(library)],
        env={**os.environ, "LD_PRELOAD": str(library), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def run(k: int) -> tuple[Path, dict[str, Any]]:
        folder = place / f"killed-{k}"
        shutil.copytree(before, folder)
        print(json.dumps([k, str(folder)]), file=server.stdin, flush=True)
        return folder, json.loads(server.stdout.readline())  # type: ignore[union-attr]

    folder, whole = run(0)
    assert whole["status"] == 0, whole
    assert [sealed.step for sealed in store_of(folder).steps()] == [2, 3]
    calls, tried = whole["calls"], range(1, whole["calls"] + 1, every)
    found: dict[str, Any] = {"calls": calls, "every": every, "killed": 0, "lost": [], "unsealed": [], "steps": {}}
    for k in tried:
        folder, ended = run(k)
        found["killed"] += ended["status"] != 0
        if not _whole(max(folder.glob("[0-9]*"))):
            found["unsealed"].append(k)
        try:
            step = _restart(folder)
            found["steps"][step] = found["steps"].get(step, 0) + 1
        except Exception as error:
            found["lost"].append([k, f"{type(error).__name__}: {error}"])
        shutil.rmtree(folder)
    server.stdin.close()
    server.stdout.close()
    server.wait()
    return found


def _restart(folder: Path) -> int:
    """As a new process does: sweep, take the newest intact step, save step 3 anew; the step that was taken."""
    store = store_of(folder)
    store.sweep()
    sealed, state = store.restore_newest(_abstract())
    assert sealed.step in (2, 3)
    assert _same(state, state_of(sealed.step))
    store.save(3, state_of(3), {})
    store.close()
    again, state = store_of(folder).restore_newest(_abstract())
    assert again.step == 3
    assert _same(state, state_of(3))
    return int(sealed.step)


def _whole(step: Path) -> bool:
    """Whether a folder holds all values of its step; its seal is not looked at."""
    import orbax.checkpoint as ocp

    try:
        with ocp.StandardCheckpointer() as reader:
            found = reader.restore(step.absolute() / "state")
        return bool(int(found["step"]) == int(step.name) and (found["params.kernel"] == int(step.name) / 8).all())
    except Exception:
        return False


def _abstract() -> Any:
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), state_of(0))


def _same(a: Any, b: Any) -> bool:
    import jax

    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)))


def serve(library: str, requests: Iterable[str]) -> None:
    """Fork for each request [k, folder]: save step 3 there; answer with its status and the calls it made."""
    import orbax.checkpoint  # noqa: F401

    import jaxtrain.checkpoint.store  # noqa: F401

    shim = ctypes.CDLL(library)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for request in requests:
        k, folder = json.loads(request)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            store = store_of(Path(folder))
            store._checkpointer()
            shim.arm(k)
            store.save(3, state_of(3), {})
            store.close()
            os.write(writing, str(shim.disarm()).encode())
            os._exit(0)
        os.close(writing)
        status = os.waitpid(child, 0)[1]
        calls = os.read(reading, 20)
        os.close(reading)
        print(json.dumps({"status": status, "calls": int(calls or 0)}), file=answers, flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2], sys.stdin)
    sys.path.insert(0, str(HERE.parent))
    from record import record

    with tempfile.TemporaryDirectory() as place:
        found = sweep(Path(place), 1)
    lines = [
        f"Saving step 3 beside two sealed steps, and the deletion of the oldest that follows, make {found['calls']} "
        f"calls that change a file (Orbax's own among them). Killed before each of them in turn ({found['killed']} "
        f"kills), a restart took step 2 in {found['steps'].get(2, 0)} cases and step 3 in {found['steps'].get(3, 0)}, "
        f"with exactly its values, and saved step 3 again; it failed in {len(found['lost'])}. Without seals, the "
        f"newest folder would have been taken though it is not a whole step in {len(found['unsealed'])} cases."
    ]
    record("proof_call_sweep", "Proof: killed before each file-system call of a save", lines, found, ROOMS)
    print("\n".join(lines))
    sys.exit(bool(found["lost"]))


if __name__ == "__main__":
    main()
