"""A save of step 3 that also removes step 1, killed before its k-th call that changes files, for many k.

Calls of Orbax's C++ threads are counted too. Also used by benchmarks/proofs/syscall_sweep.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent


class Forks:
    """crash_worker.py, with the shim built and loaded."""

    def __init__(self, place: Path) -> None:
        shim = place / "crash_shim.so"
        source = str(HERE / "crash_shim.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", str(shim), source, "-ldl"], check=True)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "crash_worker.py"), str(shim)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_PRELOAD": str(shim), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        )

    def ask(self, do: str, folder: Path, **options: Any) -> dict[str, Any]:
        """{"signal", "result" | "error"}."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, "folder": str(folder), **options}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the server of forks has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._process.communicate()


def prepared(forks: Forks, place: Path) -> tuple[Path, int]:
    """A store of steps 1 and 2, and how many calls the save of step 3 makes."""
    store = place / "prepared"
    assert forks.ask("prepare", store) == {"signal": 0, "result": None}
    copy = Path(shutil.copytree(store, place / "counted"))
    counted = forks.ask("save", copy, kill_at=0)
    assert counted["signal"] == 0, counted
    assert forks.ask("check", copy)["result"] == 3
    return store, int(counted["result"])


def sweep(
    forks: Forks, place: Path, store: Path, ks: range, arm: str = "", tell: Callable[[str], None] = lambda line: None
) -> tuple[Counter[str], list[str]]:
    """({"killed", "ended", "step 2", "step 3": times}, what was not as it must be)."""
    found: Counter[str] = Counter()
    wrong = []
    for k in ks:
        copy = Path(shutil.copytree(store, place / f"at-{arm}-{k}"))
        killed = forks.ask("save", copy, kill_at=k, arm=arm)
        found["killed" if killed["signal"] == 9 else "ended"] += 1  # threads: a later time has a few calls fewer
        if "error" in killed:
            wrong.append(f"call {k}, save: {killed['error']}")
        answer = forks.ask("check", copy, arm=arm if arm == "unsealed" else "")
        if "error" in answer or answer["signal"]:
            wrong.append(f"call {k}, check: {answer}")
        else:
            found[f"step {answer['result']}"] += 1
        tell(f"call {k}: {killed} {answer}")
        shutil.rmtree(copy)
    return found, wrong
