"""A server of forks: all is imported once, and each request of a line on stdin runs in a child of its own.

    LD_PRELOAD=shim.so python crash_worker.py shim.so
Requests are JSON: {"do": "prepare" | "save" | "check", "folder", "kill_at", "arm"}; the answer says how the child ended
and what it returned. The server itself starts no backend, so that its children may.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint  # once, for all children  # noqa: F401

from jaxtrain.checkpoint import Checkpoints, files, seal
from jaxtrain.checkpoint.reading import SealedSteps
from jaxtrain.checkpoint.seal import Sealed

PATIENCE = 30.0
"""Seconds after which a child hangs."""


def values(step: int) -> dict[str, Any]:
    """What step n holds, as numpy."""
    rng = np.random.default_rng(step)
    return {"step": np.int32(step), "params": {"w": rng.normal(size=(8, 4)), "b": np.zeros(3, np.float32)}}


def state_of(step: int) -> Any:
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x, np.float32 if np.ndim(x) else None)), values(step))


def same(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def store_of(folder: str) -> Checkpoints:
    return Checkpoints(Path(folder), metric="loss", mode="min", keep_last=2, keep_best=0)


def save(store: Checkpoints, step: int) -> None:
    store.save(step, state_of(step), {"evaluation": {"loss": 1.0}})
    store.wait()


def prepare(request: dict[str, Any], shim: Any) -> Any:
    """Steps 1 and 2."""
    store = store_of(request["folder"])
    for step in (1, 2):
        save(store, step)
    store.close()


def save_third(request: dict[str, Any], shim: Any) -> Any:
    """Step 3, after which step 1 is superfluous; killed before the call of number `kill_at`. How many there were."""
    store, state = store_of(request["folder"]), state_of(3)
    shim.crash_arm(str(request["folder"]).encode(), int(request["kill_at"]))
    store.save(3, state, {"evaluation": {"loss": 1.0}})
    store.wait()
    count = int(shim.crash_count())
    store.close()
    assert [s.step for s in store.steps()] == [2, 3]
    return count


def check(request: dict[str, Any], shim: Any) -> Any:
    """What a restart finds, and whether it goes on; {} where all is well but the step, which is told."""
    store = store_of(request["folder"])
    aside: list[str] = []
    store.sweep()
    left = [path.name for path in Path(request["folder"]).iterdir() if not path.name.isdigit()]
    assert left == [], left
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state_of(3))
    found = store.restore_newest(abstract, lambda _, why: aside.append(why))
    assert found is not None
    assert aside == [], aside
    step = found[0].step
    assert step in (2, 3), step
    assert same(found[1], state_of(step)), "other values"
    save(store, 3)
    save(store, 4)
    assert same(store.restore(store.get(3), abstract), state_of(3)), "other values after the next save"
    assert [s.step for s in store.steps()] == [3, 4]
    store.close()
    return step


def manifest_first(monkey: Callable[[Any, str, Any], None]) -> None:
    """A control arm: the seal is written before what it speaks of."""
    begin = Checkpoints._begin

    def sealed_at_once(self: Checkpoints, path: Path, arrays: dict[str, Any]) -> Any:
        failed = begin(self, path, arrays)
        wrong = {"step": int(path.name), "files": files.digests(path), "leaves": {}}
        files.write_json(path / seal.MANIFEST, {**wrong, "digest": seal._digest(wrong)})
        return failed

    monkey(Checkpoints, "_begin", sealed_at_once)


def unsealed(monkey: Callable[[Any, str, Any], None]) -> None:
    """A control arm: every folder of a step counts as a step, and nothing is verified."""

    def steps(self: SealedSteps) -> list[Sealed]:
        return [Sealed(int(p.name), p, seal.meta_of(p)) for p in sorted(self.folder.glob("[0-9]*"))]

    monkey(SealedSteps, "steps", steps)
    monkey(SealedSteps, "verify", lambda self, sealed: None)
    monkey(Checkpoints, "sweep", lambda self: None)


DO = {"prepare": prepare, "save": save_third, "check": check}
ARMS: dict[str, Callable[[Callable[[Any, str, Any], None]], None]] = {
    "": lambda monkey: None,
    "manifest_first": manifest_first,
    "unsealed": unsealed,
}


def in_a_child(request: dict[str, Any], shim: Any) -> dict[str, Any]:
    """{"signal", "result" | "error"} of a request."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            ARMS[request.get("arm", "")](setattr)
            answer = {"result": DO[request["do"]](request, shim)}
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            answer = {"error": f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    hangs = not select.select([reading], [], [], PATIENCE)[0]
    if hangs:
        os.kill(child, signal.SIGKILL)
    said = b"".join(iter(lambda: os.read(reading, 65536), b""))
    os.close(reading)
    _, status = os.waitpid(child, 0)
    answer = {"error": "it hangs"} if hangs else json.loads(said or "{}")
    return {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, **answer}


def main() -> None:
    logging.disable(logging.WARNING)  # each step passed over
    shim = ctypes.CDLL(sys.argv[1])
    shim.crash_count.restype = ctypes.c_long
    shim.crash_arm.argtypes = (ctypes.c_char_p, ctypes.c_long)
    for line in sys.stdin:
        print(json.dumps(in_a_child(json.loads(line), shim)), flush=True)


if __name__ == "__main__":
    main()
