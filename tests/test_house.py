"""The house rules that a program can check: import order, lengths, hops, what an import costs, what a wheel holds."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import jaxtrain

PACKAGE = Path(jaxtrain.__file__).parent
ORDER = ["config", "core", "hardware", "models", "parallel", "data", "checkpoint", "loop", "hooks", "targets"]
ORDER += ["resolve", "build", "plan", "dispatch", "sentinel", "report", "words", "resuming", "rollback", "initial"]
ORDER += ["eager", "diagnose", "session", "runner", "evaluate", "tune", "launch", "cli"]
"""DESIGN.md's order. targets and resolve are parts of the build, eager debugs it; sentinel, words, resuming, rollback,
initial, diagnose and session belong to the runner."""


def _imports(path: Path) -> set[str]:
    """Rooms that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("jaxtrain.") and n.split(".")[1] in ORDER}
    return found


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(p for p in PACKAGE.rglob("*.py") if _room(p) not in ("__init__", "__main__"))


def test_every_room_has_its_place_in_the_order() -> None:
    assert {_room(path) for path in FILES} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_a_room_imports_only_rooms_above_it(path: Path) -> None:
    place = ORDER.index(_room(path))
    assert {room for room in _imports(path) if ORDER.index(room) > place} == set()


def test_the_import_check_sees_an_import_that_points_up(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from jaxtrain.runner import train\n")
    assert _imports(bad) == {"runner"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_no_file_is_longer_than_400_lines_but_the_schema(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (430 if path.name == "schema.py" else 400)


def test_the_runner_and_its_parts_do_not_branch_on_kinds() -> None:
    for name in ("runner", "session", "loop", "resuming"):
        assert ".kind ==" not in (PACKAGE / f"{name}.py").read_text()


def test_fit_is_at_most_60_lines() -> None:
    from jaxtrain.loop import fit

    assert len(inspect.getsource(fit).splitlines()) <= 60


def test_peak_lr_travels_to_optax_in_at_most_four_hops(monkeypatch: pytest.MonkeyPatch) -> None:
    import optax

    from jaxtrain.build import build
    from jaxtrain.cli.flags import normalise, overlays
    from jaxtrain.config import load

    seen: list[tuple[float, int]] = []
    real = optax.cosine_decay_schedule

    def spy(init_value: float, *args: object, **kwargs: object) -> object:
        frames = [f for f in traceback.extract_stack() if str(PACKAGE) in f.filename]
        seen.append((init_value, len(frames)))
        return real(init_value, *args, **kwargs)

    monkeypatch.setattr(optax, "cosine_decay_schedule", spy)
    flags = normalise(["train", "digits", "--optimizer.peak_lr", "0.0123"])
    build(load("digits", overlays([flags[flags.index("--set") + 1]]).items()))
    assert seen[0][0] == 0.0123
    assert seen[0][1] <= 4


def _modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys, json; print(json.dumps([m.split('.')[0] for m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_jaxtrain_imports_no_backend() -> None:
    assert not _modules_after("import jaxtrain") & {"jax", "flax", "numpy", "optax", "orbax"}
    assert "jax" in _modules_after("import jaxtrain; jaxtrain.train")  # the control


def test_importing_everything_starts_no_backend() -> None:
    code = (
        "import jaxtrain as jt; jt.train, jt.load_model, jt.Trainer\n"
        "from jax._src import xla_bridge; assert not xla_bridge._backends, xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    started = code.replace("jt.Trainer\n", "jt.Trainer; import jax; jax.devices()\n")
    assert subprocess.run([sys.executable, "-c", started], capture_output=True).returncode != 0  # the control


def test_public_names_are_all_there() -> None:
    for name in jaxtrain.__all__:
        assert getattr(jaxtrain, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = jaxtrain.trian
