"""Runs pytest in forks of one process that has imported the large modules: a fork takes milliseconds, they seconds.

A request is a JSON line on stdin, [place, test, ...]: run these tests in the folder `place`, which holds a copy of the
package, and write what they say to said.txt there. The answer is a line on stdout: the exit code, or minus a signal.

Forking is safe here because there is one thread, which `main` checks before each fork: no lock can be held by another.
OpenBLAS is told to start no threads, and no JAX backend is there before a test makes one, in its own fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

SETTINGS = ["-c", str(Path(__file__).parents[1] / "pyproject.toml"), "-p", "no:cacheprovider", "-x", "-n", "0"]
LARGE = ["numpy", "jax.numpy", "flax.nnx", "optax", "orbax.checkpoint", "pydantic.main", "typer", "rich.console"]
LARGE += ["tensorboardX", "sklearn.datasets", "matplotlib.figure", "PIL.Image", "yaml", "psutil", "pytest"]
LIMIT, COULD_NOT_RUN = 300, 3  # seconds; pytest's exit code for "internal error"


def _run(place: str, *tests: str) -> None:
    """In the fork: be `python -m pytest` in `place`. Never returns, for the exit handlers are the server's."""
    code = COULD_NOT_RUN
    try:
        os.setsid()
        signal.alarm(LIMIT)  # ends the process; nothing here handles the signal
        os.chdir(place)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open("said.txt", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        os.environ["PYTHONPATH"] = place  # for processes that a test starts
        os.environ.pop("OPENBLAS_NUM_THREADS")
        assert "jaxtrain" not in sys.modules
        sys.path.insert(0, place)
        found = importlib.import_module("jaxtrain").__file__
        assert found == f"{place}/jaxtrain/__init__.py", found
        done = importlib.import_module("pytest").main([*SETTINGS, f"--basetemp={place}/tests", *tests])
        sys.stdout.flush()
        code = int(done)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    for name in LARGE:
        importlib.import_module(name)
    gc.freeze()  # no fork looks through the server's objects again
    for line in sys.stdin:
        assert len(os.listdir("/proc/self/task")) == 1, "there are threads: a fork may hang"
        child = os.fork()
        if child == 0:
            _run(*json.loads(line))
        status = os.waitpid(child, 0)[1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests left running
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
