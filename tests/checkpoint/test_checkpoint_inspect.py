"""Looking at sealed steps: what is listed, what is found corrupt, in which arrays two differ. Nothing is written."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import META, files_of, saved, store_of

from jaxtrain.checkpoint import Checkpoints, CorruptStep, files, inspect, seal
from jaxtrain.checkpoint.inspect import Checked, Difference, difference

NAN, INF = np.nan, np.inf


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1, 2, 3 with losses 1, none, 3; tests copy the folder before they touch it."""
    folder = tmp_path_factory.mktemp("store") / "checkpoints"
    saved(folder, {1: 1.0, 2: None, 3: 3.0}).close()
    return folder


@pytest.fixture
def copied(three_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three_steps, tmp_path / "checkpoints"))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))


def data_file(step: Path) -> Path:
    return max((p for p in (step / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def without_digests(step: Path) -> None:
    """As it was sealed before digests of arrays were kept."""
    manifest = files.read_json(step / "manifest.json")
    del manifest["digest"]
    for leaf in manifest["leaves"].values():
        del leaf["sha256"]
    files.write_json(step / "manifest.json", {**manifest, "digest": seal._digest(manifest)})


# ---------------------------------------------------------------- what is there


def test_each_step_is_listed_with_time_size_figure_and_marks(copied: Path) -> None:
    for step in (1, 2, 3):
        os.utime(copied / f"00000000{step}" / "manifest.json", (step, step))
    sizes = [
        sum((copied / f"00000000{s}" / n).stat().st_size for n in files_of(copied / f"00000000{s}")) for s in "123"
    ]
    one, two, three = inspect.overview(store_of(copied, keep_last=1))
    assert (one.step, one.value, one.marks) == (1, 1.0, ("best",))
    assert (two.step, two.marks, np.isnan(two.value)) == (2, ("would be pruned",), True)
    assert (three.step, three.value, three.marks) == (3, 3.0, ("last",))
    assert [s.size for s in (one, two, three)] == sizes
    assert [s.time for s in (one, two, three)] == [datetime.fromtimestamp(s, UTC) for s in (1, 2, 3)]
    assert [s.marks for s in inspect.overview(store_of(copied))] == [("best",), (), ("last",)]  # the control


def test_a_step_that_a_run_removes_meanwhile_is_left_out(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(copied)
    steps = store.steps()
    shutil.rmtree(steps[1].path)
    monkeypatch.setattr(Checkpoints, "steps", lambda self: steps)
    assert [s.step for s in inspect.overview(store)] == [1, 3]
    assert [(c.step, c.intact) for c in inspect.check(store)] == [(1, True), (3, True)]


def test_what_was_set_aside_is_told_with_its_reason(copied: Path) -> None:
    store = store_of(copied)
    assert inspect.quarantined(store) == {}
    flip(data_file(store.get(3).path))
    with pytest.raises(CorruptStep) as caught:
        store.verify(store.get(3))
    store._set_aside(store.get(3), str(caught.value))
    (copied / ".quarantine-000000009").mkdir()
    assert inspect.quarantined(store) == {
        ".quarantine-000000003": str(caught.value),
        ".quarantine-000000009": "it does not say why",
    }


# ---------------------------------------------------------------- is it intact


def test_every_step_is_checked_after_a_corrupt_one_too(copied: Path) -> None:
    store = store_of(copied)
    counts = [len(files_of(s.path)) - 1 for s in store.steps()]
    arrays = len(seal.read(store.get(1))["leaves"])
    victim = data_file(store.get(2).path)
    flip(victim)
    before = files_of(copied)
    assert list(inspect.check(store)) == [
        Checked(1, True, f"step 1: intact, {counts[0]} files, {arrays} arrays"),
        Checked(2, False, f"checkpoint 2: {victim} was changed since it was sealed"),
        Checked(3, True, f"step 3: intact, {counts[2]} files, {arrays} arrays"),
    ]
    assert files_of(copied) == before


def test_a_disk_that_fails_is_a_finding_and_the_next_step_is_checked(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.digests

    def failing(folder: Path, *args: Any) -> Any:
        if folder.name.endswith("1"):
            raise OSError(5, "Input/output error")
        return real(folder, *args)

    monkeypatch.setattr(files, "digests", failing)
    found = list(inspect.check(store_of(copied)))
    assert [c.intact for c in found] == [False, True, True]
    where = copied / "000000001"
    assert found[0].words == f"checkpoint 1: {where} cannot be read: OSError: [Errno 5] Input/output error"


def test_arrays_without_a_digest_are_said_to_be_so(copied: Path) -> None:
    without_digests(copied / "000000001")
    one, two, _ = inspect.check(store_of(copied))
    arrays = len(seal.read(store_of(copied).get(1))["leaves"])
    assert one.intact
    assert one.words.endswith(f" arrays, {arrays} of them sealed without a digest")
    assert two.words.endswith(" arrays")


# ---------------------------------------------------------------- in what two differ


def test_differences_are_those_of_numpy(three_steps: Path) -> None:
    store = store_of(three_steps)
    a, b = store.get(1), store.get(3)
    found = {d.name: d for d in inspect.differences(store, a, b)}
    names = sorted(seal.read(a)["leaves"])
    assert list(found) == names
    ours, theirs = store.arrays(a, names), store.arrays(b, names)
    for name, each in found.items():
        x, y = ours[name].astype(np.float64), theirs[name].astype(np.float64)
        assert each.kind == ("equal" if np.array_equal(x, y) else "differs")
        if each.kind == "differs":
            assert each.largest == np.abs(x - y).max()
            assert each.relative == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-12)
    assert found["params.layers.0.kernel"].largest == 0.25  # the states hold 1/8 and 3/8
    assert found["params.layers.0.kernel"].relative == pytest.approx(2.0)
    assert found["step"] == Difference("step", "equal")


def test_values_are_read_only_where_digests_differ(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = Checkpoints.arrays

    def spy(self: Checkpoints, sealed: Any, names: list[str]) -> Any:
        read.extend(names)
        return real(self, sealed, names)

    monkeypatch.setattr(Checkpoints, "arrays", spy)
    store = store_of(copied)
    found = inspect.differences(store, store.get(1), store.get(3))
    assert sorted(read) == sorted(2 * [d.name for d in found if d.kind == "differs"])
    read.clear()
    assert {d.kind for d in inspect.differences(store, store.get(1), store.get(1))} == {"equal"}
    assert read == []
    without_digests(copied / "000000001")  # as these were saved once: all are read
    assert inspect.differences(store, store.get(1), store.get(3)) == found
    assert sorted(read) == sorted(2 * [d.name for d in found])


def test_large_steps_are_read_part_by_part(three_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(three_steps)
    whole = inspect.differences(store, store.get(1), store.get(3))
    monkeypatch.setattr(inspect, "_READ_AT_ONCE", 16)
    leaves = seal.read(store.get(1))["leaves"]
    groups = list(inspect._groups(sorted(leaves), leaves))
    assert len(groups) > 3
    assert [name for group in groups for name in group] == sorted(leaves)
    assert inspect.differences(store, store.get(1), store.get(3)) == whole


def test_no_difference_is_made_of_a_corrupt_step(copied: Path) -> None:
    store = store_of(copied)
    victim = data_file(store.get(3).path)
    flip(victim)
    with pytest.raises(CorruptStep, match="was changed since it was sealed") as caught:
        inspect.differences(store, store.get(1), store.get(3))
    assert str(victim) in str(caught.value)


def test_arrays_of_one_step_only_and_of_another_form_are_told(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    for step, state in enumerate(({"x": jnp.ones(3), "old": jnp.ones(2)}, {"x": jnp.ones(4), "new": jnp.ones(2)}), 1):
        store.save(step, state, META)
        store.wait()
    store.close()
    found = inspect.differences(store, store.get(1), store.get(2))
    assert [(d.name, d.kind) for d in found] == [
        ("new", "only in B"),
        ("old", "only in A"),
        ("x", "other shape or dtype"),
    ]


PAIRS = [  # a, b, largest, relative, nans; None: equal
    ([1, 2], [1, 2], None),
    ([NAN, INF, -INF, 1], [NAN, INF, -INF, 1], None),
    ([3, 4], [3, 5], (1.0, 0.2, 0)),
    ([NAN, 3, 4], [NAN, 3, 5], (1.0, 0.2, 0)),
    ([NAN, 3, 4], [1, 3, 5], (1.0, 0.2, 1)),
    ([1, 2], [NAN, NAN], (0.0, 0.0, 2)),
    ([INF, 1], [1, 1], (INF, INF, 0)),
    ([INF, 3, 4], [INF, 3, 5], (1.0, 0.2, 0)),
    ([0, 0], [0, 2], (2.0, INF, 0)),
    ([0.0], [-0.0], (0.0, 0.0, 0)),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("a", "b", "wanted"), PAIRS)
def test_a_nan_equals_itself_and_one_that_is_new_is_counted(a: Any, b: Any, wanted: Any, dtype: str) -> None:
    x, y = np.array(a, np.dtype(jnp.dtype(dtype))), np.array(b, np.dtype(jnp.dtype(dtype)))
    found = difference("x", x, y)
    if wanted is None:
        assert found == Difference("x", "equal")
    else:
        assert (found.kind, found.size) == ("differs", len(a))
        assert (found.largest, found.nans) == wanted[::2]
        assert found.relative == pytest.approx(wanted[1], rel=1e-12)


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [
        (np.int32(16777217), np.int32(16777216), 1.0),
        (np.array([True, False]), np.array([True, True]), 1.0),
        (np.array([3 + 4j]), np.array([0j]), 5.0),
        (np.uint8(1), np.uint8(255), 254.0),
    ],
)
def test_counts_bools_and_complex_numbers_are_compared_too(a: Any, b: Any, largest: float) -> None:
    found = difference("x", np.asarray(a), np.asarray(b))
    assert (found.kind, found.largest) == ("differs", largest)


def test_looking_writes_nothing(copied: Path) -> None:
    def everything() -> dict[str, tuple[int, str]]:
        digests = {name: entry["sha256"] for name, entry in files.digests(copied).items()}
        return {name: ((copied / name).stat().st_mtime_ns, digest) for name, digest in digests.items()}

    before = everything()
    store = store_of(copied, keep_last=1)
    inspect.overview(store)
    inspect.quarantined(store)
    list(inspect.check(store))
    inspect.differences(store, store.get(1), store.get(3))
    assert everything() == before
