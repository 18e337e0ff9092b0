"""Every file of a step, every kind of damage: found, named, set aside, and the step before is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_helpers import abstract, files_of, same, saved, state_of, store_of


def flip_first(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def flip_last(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 128]))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def add(path: Path) -> None:
    path.with_name("added").write_bytes(b"")


CHANGED, GONE, MORE = "was changed", "is missing", "is not part of it"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flip_first": (flip_first, CHANGED),
    "flip_last": (flip_last, CHANGED),
    "truncate": (truncate, CHANGED),
    "zero": (zero, CHANGED),
    "append": (append, CHANGED),
    "delete": (Path.unlink, GONE),
    "add": (add, MORE),
}
NEED_CONTENT = ("flip_first", "flip_last", "truncate", "zero")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "checkpoints"
    saved(folder, {1: 1.0, 2: 2.0}).close()
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_found_named_and_the_step_before_is_used(
    damage: str, two_steps: Path, tmp_path: Path
) -> None:
    do, word = DAMAGE[damage]
    names = [n for n in files_of(two_steps / "000000002") if (two_steps / "000000002" / n).stat().st_size]
    if damage not in NEED_CONTENT:
        names = files_of(two_steps / "000000002")
    found = 0
    for number, name in enumerate(names):
        folder = Path(shutil.copytree(two_steps, tmp_path / str(number)))
        store = store_of(folder)
        store.verify(store.get(2))  # the control
        victim = folder / "000000002" / name
        do(victim)
        told: list[str] = []
        restored = store.restore_newest(abstract(state_of()), lambda _, why, told=told: told.append(why))
        assert restored is not None
        assert (restored[0].step, same(restored[1], state_of(1 / 8))) == (1, True), name
        assert [s.step for s in store.steps()] == [1]
        if (name, damage) == ("manifest.json", "delete"):
            continue  # without its seal a step is not there: nothing to set aside, and a sweep removes it
        named = victim.with_name("added") if damage == "add" else victim
        expected = f"checkpoint 2: {named} {word} since it was sealed"
        assert told == [expected]
        assert (folder / ".quarantine-000000002/why.txt").read_text() == expected + "\n"
        found += 1
    assert found == len(names) - (damage == "delete")
    assert len(names) > 10


def test_files_of_another_step_are_found_too(two_steps: Path, tmp_path: Path) -> None:
    """Whole and valid, but of step 1: one after the other takes the place of its namesake in step 2."""
    other = two_steps / "000000001"
    names = [n for n in files_of(other) if (two_steps / "000000002" / n).exists()]
    differing = [n for n in names if (other / n).read_bytes() != (two_steps / "000000002" / n).read_bytes()]
    assert {"manifest.json", "meta.json"} < set(differing)
    for name in differing:
        folder = Path(shutil.copytree(two_steps, tmp_path / name.replace("/", "-")))
        shutil.copy(other / name, folder / "000000002" / name)
        found = store_of(folder).restore_newest(abstract(state_of()))
        assert found is not None
        assert found[0].step == 1
