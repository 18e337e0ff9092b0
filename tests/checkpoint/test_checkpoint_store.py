"""Sealed steps: save, list, restore; what is corrupt is found; what is kept is the best and the newest."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import META, abstract, files_of, same, saved, state_of, store_of

from jaxtrain.build import build
from jaxtrain.checkpoint import Checkpoints, CorruptStep, files, seal
from jaxtrain.checkpoint import store as writing
from jaxtrain.config import NeedsPerson, UserError, load


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 with losses 1 and 2; tests copy the folder before they touch it."""
    folder = tmp_path_factory.mktemp("store") / "checkpoints"
    saved(folder, {1: 1.0, 2: 2.0}).close()
    return folder


@pytest.fixture
def copied(two_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))


# ---------------------------------------------------------------- what is there


def test_an_empty_folder_has_no_steps(tmp_path: Path) -> None:
    store = store_of(tmp_path / "none")
    assert store.steps() == []
    assert store.latest() is None is store.best()
    assert store.restore_newest(abstract(state_of())) is None
    with pytest.raises(UserError, match="no sealed checkpoint; the run ended before its first save"):
        store.get("last")


def test_steps_are_listed_oldest_first_with_what_was_saved_beside_them(two_steps: Path) -> None:
    store = store_of(two_steps)
    assert [(s.step, s.path.name, s.meta) for s in store.steps()] == [
        (1, "000000001", {"evaluation": {"loss": 1.0}}),
        (2, "000000002", {"evaluation": {"loss": 2.0}}),
    ]
    latest, best = store.latest(), store.best()
    assert latest is not None
    assert best is not None
    assert (latest.step, best.step) == (2, 1)


@pytest.mark.parametrize(("which", "step"), [("last", 2), ("best", 1), (1, 1), ("2", 2)])
def test_get_finds_a_step_by_word_or_number(which: str | int, step: int, two_steps: Path) -> None:
    assert store_of(two_steps).get(which).step == step


def test_get_names_what_is_there(two_steps: Path) -> None:
    with pytest.raises(UserError) as caught:
        store_of(two_steps).get(7)
    assert str(caught.value) == "checkpoint 7 is not there; allowed: best, last, 1, 2"


def test_mode_max_turns_the_ranking_round(two_steps: Path) -> None:
    assert store_of(two_steps, mode="max").get("best").step == 2
    assert store_of(two_steps, metric="accuracy").best() is None
    assert store_of(two_steps, metric="accuracy").get("best").step == 2  # without a figure, the newest


# ---------------------------------------------------------------- restore


def test_a_restored_state_is_bit_equal_in_structure_types_and_values(two_steps: Path) -> None:
    store, state = store_of(two_steps), state_of(2 / 8)
    restored = store.restore(store.get(2), abstract(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert same(restored, state)
    assert type(restored["opt_state"][0]) is type(state["opt_state"][0])
    assert restored["opt_state"][0].mu["head.bias"].dtype == jnp.bfloat16
    assert restored["step"].dtype == jnp.int32
    assert int(restored["step"]) == 16777217  # as a float32 it would be ...16
    assert not same(store.restore(store.get(1), abstract(state)), state)  # the control


def test_values_that_are_not_finite_and_minus_zero_are_restored_too(tmp_path: Path) -> None:
    state = {"x": jnp.array([jnp.nan, jnp.inf, -0.0, 1e-45], jnp.float32), "h": jnp.array([jnp.nan, 1], jnp.bfloat16)}
    store = store_of(tmp_path)
    store.save(1, state, META)
    store.wait()
    assert same(store.restore(store.get(1), abstract(state)), state)
    store.close()


def test_the_manifest_lists_every_file_with_its_digest_and_every_array(two_steps: Path) -> None:
    step = two_steps / "000000002"
    manifest = json.loads((step / "manifest.json").read_text())
    assert manifest["step"] == 2
    assert sorted([*manifest["files"], "manifest.json"]) == files_of(step)
    for name, entry in manifest["files"].items():
        content = (step / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    wanted, _ = seal.flat(state_of(2 / 8))
    for name, leaf in manifest["leaves"].items():
        array = np.asarray(wanted[name])
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        assert leaf == {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest}
    kinds = {leaf["dtype"] for leaf in manifest["leaves"].values()}
    assert kinds == {"float32", "int32", "bfloat16", "bool"}
    assert len(manifest["leaves"]) == len(jax.tree.leaves(state_of()))


def kernel_of(state: dict[str, Any], value: Any) -> dict[str, Any]:
    return {**state, "params": {**state["params"], "layers.0.kernel": value}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda s: kernel_of(s, jnp.zeros((5, 3))),
            "params.layers.0.kernel was float32[4, 3] and is now float32[5, 3]",
        ),
        (
            lambda s: kernel_of(s, jnp.zeros((4, 3), jnp.bfloat16)),
            "params.layers.0.kernel was float32[4, 3] and is now bfloat16[4, 3]; --cast converts them",
        ),
        (lambda s: {**s, "step": jnp.float32(0)}, "step was int32[] and is now float32[]"),
        (lambda s: {**s, "extra": jnp.zeros(2)}, "extra is new"),
        (lambda s: {k: v for k, v in s.items() if k != "step"}, "step is no longer wanted"),
        (
            lambda s: {**s, "step": jnp.float32(0), "extra": jnp.zeros(2)},
            "extra is new (and 1 more)",
        ),
    ],
    ids=["shape", "dtype", "int-to-float", "new", "left-over", "several"],
)
def test_arrays_that_do_not_fit_are_refused_in_plain_words(change: Any, expected: str, two_steps: Path) -> None:
    store = store_of(two_steps)
    with pytest.raises(UserError) as caught:
        store.restore(store.get(2), abstract(change(state_of())))
    assert str(caught.value) == f"checkpoint 2 does not fit this model and optimizer: {expected}"
    assert not isinstance(caught.value, CorruptStep)  # it is whole: it must not be set aside


def test_restore_newest_does_not_set_a_step_aside_that_only_does_not_fit(copied: Path) -> None:
    store = store_of(copied)
    with pytest.raises(UserError, match="does not fit"):
        store.restore_newest(abstract({"other": jnp.zeros(1)}))
    assert [s.step for s in store.steps()] == [1, 2]


def test_restore_part_reads_some_arrays_and_still_compares_them(two_steps: Path) -> None:
    store, state = store_of(two_steps), state_of(1 / 8)
    part = {"params": state["params"]}
    assert same(store.restore_part(store.get(1), abstract(part)), part)
    with pytest.raises(UserError, match=r"head\.bias was float32\[3\] and is now float32\[4\]"):
        store.restore_part(store.get(1), abstract({"params": {"head.bias": jnp.zeros(4)}}))
    with pytest.raises(UserError, match=r"params\.new is new"):
        store.restore_part(store.get(1), abstract({"params": {"new": jnp.zeros(4)}}))
    with pytest.raises(UserError, match="is no longer wanted"):  # the control
        store.restore(store.get(1), abstract(part))


@pytest.mark.parametrize("name", ["../../evil", "a/b", "a b", "", "é", "line\n"])
def test_names_that_could_leave_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    store = store_of(tmp_path / "store")
    with pytest.raises(UserError, match=r"allowed in names: letters, digits, _ \. -"):
        store.save(1, {name: jnp.zeros(1)}, META)
    assert store.steps() == []
    store.close()


def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    """One would silently take the place of the other."""
    store = store_of(tmp_path)
    with pytest.raises((UserError, ValueError), match=r"a\.b"):
        store.save(1, {"a": {"b": jnp.zeros(1)}, "a.b": jnp.ones(1)}, META)
    store.close()


# ---------------------------------------------------------------- corruption


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


DAMAGE = {"flip": flip, "cut": cut, "empty": empty, "delete": delete}
WORDS = {"flip": "was changed", "cut": "was changed", "empty": "was changed", "delete": "is missing"}


def largest(step: Path) -> Path:
    return max((p for p in (step / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_array_file_is_found_and_named(damage: str, copied: Path) -> None:
    store = store_of(copied)
    sealed = store.get(2)
    store.verify(sealed)  # the control
    victim = largest(sealed.path)
    DAMAGE[damage](victim)
    with pytest.raises(CorruptStep) as caught:
        store.restore(sealed, abstract(state_of()))
    assert str(caught.value) == f"checkpoint 2: {victim} {WORDS[damage]} since it was sealed"
    assert caught.value.exit_code == 78


def test_a_file_that_was_added_is_found(copied: Path) -> None:
    store = store_of(copied)
    (copied / "000000002/state/extra").write_bytes(b"1")
    with pytest.raises(CorruptStep, match=r"state/extra is not part of it since it was sealed"):
        store.verify(store.get(2))


def test_a_flip_in_any_one_file_of_a_step_is_found(copied: Path) -> None:
    store = store_of(copied)
    sealed = store.get(2)
    for name in files_of(sealed.path):
        path = sealed.path / name
        before = path.read_bytes()
        if before and name != "manifest.json":
            flip(path)
            with pytest.raises(CorruptStep):
                store.verify(sealed)
            path.write_bytes(before)
    store.verify(sealed)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("where", ["arrays", "meta.json", "manifest.json"])
def test_the_next_older_step_is_taken_and_the_corrupt_one_set_aside(
    where: str, damage: str, copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the corrupt file is one of ours; a step without its seal is simply not there."""
    step = copied / "000000002"
    DAMAGE[damage](largest(step) if where == "arrays" else step / where)
    store = store_of(copied)
    with caplog.at_level(logging.WARNING, "jaxtrain"):
        found = store.restore_newest(abstract(state_of()))
    assert found is not None
    sealed, state = found
    assert sealed.step == 1
    assert same(state, state_of(1 / 8))
    assert [s.step for s in store.steps()] == [1]
    if (where, damage) != ("manifest.json", "delete"):
        assert "since it was sealed" in (copied / ".quarantine-000000002/why.txt").read_text()
        assert not step.exists()
        assert "taking the next older" in caplog.text


@pytest.mark.parametrize(("was", "now"), [('"int32"', '"int33"'), ('"step": 2', '"step": 3')])
def test_a_flip_inside_the_seal_itself_is_corruption_and_not_another_model(was: str, now: str, copied: Path) -> None:
    """Told as "does not fit this model", it would end a resume that an older step could have carried."""
    manifest = copied / "000000002/manifest.json"
    text = manifest.read_text()
    assert was in text
    manifest.write_text(text.replace(was, now, 1))
    store = store_of(copied)
    with pytest.raises(CorruptStep, match=r"manifest\.json"):
        store.restore(store.get(2), abstract(state_of()))


def test_a_step_whose_meta_is_unreadable_hides_no_other_step(copied: Path) -> None:
    empty(copied / "000000002/meta.json")
    store = store_of(copied)
    assert store.get(1).step == 1
    best = store.best()
    assert best is not None
    assert best.step == 1


def test_when_every_step_is_corrupt_a_person_is_needed(copied: Path) -> None:
    for step in ("000000001", "000000002"):
        flip(largest(copied / step))
    store = store_of(copied)
    with pytest.raises(NeedsPerson) as caught:
        store.restore_newest(abstract(state_of()))
    assert str(caught.value) == (
        f"{copied}: none of 2 checkpoints is intact; bring a copy back, or begin anew with jaxtrain train "
        "--run-dir=... --resume=auto --allow-fresh"
    )
    assert caught.value.exit_code == 78
    assert sorted(p.name for p in copied.iterdir()) == [".quarantine-000000001", ".quarantine-000000002"]


def test_the_newest_intact_step_is_taken_when_nothing_is_wrong(two_steps: Path) -> None:
    found = store_of(two_steps).restore_newest(abstract(state_of()))
    assert found is not None
    assert found[0].step == 2
    assert same(found[1], state_of(2 / 8))


def test_the_newest_step_is_verified_once(two_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large checkpoint is read for its digests, and then for its arrays; not a third time."""
    verified: list[int] = []
    verify = Checkpoints.verify

    def counted(self: Checkpoints, sealed: Any) -> None:
        verified.append(sealed.step)
        verify(self, sealed)

    monkeypatch.setattr(Checkpoints, "verify", counted)
    assert store_of(two_steps).restore_newest(abstract(state_of())) is not None
    assert verified == [2]
    store_of(two_steps).restore(store_of(two_steps).get(1), abstract(state_of()))
    assert verified == [2, 1]


# ---------------------------------------------------------------- sealing


def test_an_unsealed_step_is_invisible_and_swept(copied: Path) -> None:
    (copied / "000000002/manifest.json").unlink()
    (copied / ".trash-000000000").mkdir()
    (copied / "notes.txt").write_text("mine")
    (copied / ".quarantine-000000000").mkdir()
    store = store_of(copied)
    assert [s.step for s in store.steps()] == [1]
    store.sweep()
    left = sorted(p.name for p in copied.iterdir())
    assert left == [".quarantine-000000000", "000000001", "notes.txt"]
    assert same(store.restore(store.get(1), abstract(state_of())), state_of(1 / 8))


def test_the_seal_is_written_last_after_everything_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    tree, text = files.fsync_tree, files.write_text

    def sync(folder: Path) -> None:
        assert "manifest.json" not in files_of(folder)
        order.append("sync")
        tree(folder)

    def write(path: Path, content: str) -> None:
        order.append(path.name)
        text(path, content)

    monkeypatch.setattr(files, "fsync_tree", sync)
    monkeypatch.setattr(files, "write_text", write)
    saved(tmp_path, {1: 1.0}).close()
    assert order == ["meta.json", "sync", "manifest.json"]


def test_a_step_is_not_there_before_its_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, reached, tree = threading.Event(), threading.Event(), files.fsync_tree

    def held(folder: Path) -> None:
        reached.set()
        assert go.wait(20)
        tree(folder)

    monkeypatch.setattr(files, "fsync_tree", held)
    store = store_of(tmp_path)
    store.save(1, state_of(), META)  # comes back while the save is held
    assert reached.wait(20)
    assert store.steps() == []
    go.set()
    store.wait()
    assert [s.step for s in store.steps()] == [1]
    store.close()


def test_a_sealed_step_is_not_saved_again_and_an_unsealed_one_is(copied: Path) -> None:
    store = store_of(copied)
    store.save(2, state_of(9.0), META)
    store.wait()
    assert same(store.restore(store.get(2), abstract(state_of())), state_of(2 / 8))
    (copied / "000000002/manifest.json").unlink()
    store.save(2, state_of(9.0), META)
    store.wait()
    assert same(store.restore(store.get(2), abstract(state_of())), state_of(9.0))
    store.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "RETRIES", (0.0, 0.0))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("surfaces_at", ["save", "wait", "poll", "close"])
def test_a_failed_save_surfaces_and_the_step_before_stays(
    surfaces_at: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def full(folder: Path) -> None:
        tried.append(folder.name)
        raise OSError(28, "No space left on device")

    store = store_of(copied)
    with monkeypatch.context() as patched:
        patched.setattr(files, "fsync_tree", full)
        store.save(3, state_of(), META)  # says nothing: it fails in the background
        assert store._saving is not None
        store._saving.join()
    assert tried == ["000000003"] * 3
    assert sorted(p.name for p in copied.iterdir()) == ["000000001", "000000002"]  # nothing half-written stays
    arguments: tuple[Any, ...] = (4, state_of(), META) if surfaces_at == "save" else ()
    with pytest.raises(NeedsPerson) as caught:
        getattr(store, surfaces_at)(*arguments)
    said = rf"saving step 3 into {copied} failed: OSError: \[Errno 28\] No space left on device; it needs 1\.049 MB, "
    assert re.fullmatch(said + r"\S+ .?B are free; the newest sealed step is 2", str(caught.value))
    assert [s.step for s in store.steps()] == [1, 2]
    store.save(5, state_of(5 / 8), META)  # the error was told once; the store goes on
    store.wait()
    assert [s.step for s in store.steps()] == [1, 2, 5]
    store.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("where", ["begin", "write", "seal"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_save_that_fails_is_tried_again_with_the_state_of_its_step(
    where: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice more; the third failure surfaces. The state goes on meanwhile, and what is saved is that of the step."""
    failures = [OSError(5, "Input/output error")] * times
    place, name = {"begin": (Path, "mkdir"), "write": (Flaky, "wait_until_finished"), "seal": (seal, "close")}[where]
    Flaky.real = Checkpoints._checkpointer
    monkeypatch.setattr(Checkpoints, "_checkpointer", lambda self: Flaky(self))
    real = getattr(place, name)

    def flaky(first: Any, *more: Any, **named: Any) -> Any:
        if failures and (where != "begin" or first.name == "000000001"):
            raise failures.pop()
        return real(first, *more, **named)

    store, state = store_of(tmp_path / "checkpoints"), {"x": jnp.arange(3.0)}
    store.sweep()
    monkeypatch.setattr(place, name, flaky)
    store.save(1, state, META)
    jax.jit(lambda s: {"x": s["x"] + 1}, donate_argnums=0)(state)
    if times == 3:
        with pytest.raises(NeedsPerson, match="Input/output error"):
            store.wait()
        assert list(store.folder.iterdir()) == []
    else:
        store.wait()
        assert same(store.restore(store.get(1), abstract({"x": jnp.zeros(3)})), {"x": jnp.arange(3.0)})
    assert caplog.text.count("trying again") == min(times, 2)
    store.close()


class Flaky:
    """Orbax's checkpointer, with a method that a test replaces."""

    real: Any

    def __init__(self, store: Checkpoints) -> None:
        self._orbax = Flaky.real(store)

    def save(self, *arguments: Any) -> None:
        self._orbax.save(*arguments)

    def wait_until_finished(self) -> None:
        self._orbax.wait_until_finished()


def test_without_room_nothing_is_begun(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays and a MiB for the rest; one byte less is too little."""
    store, needed = store_of(copied), sum(x.nbytes for x in jax.tree.leaves(state_of())) + 2**20
    usage = shutil.disk_usage(copied)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(NeedsPerson) as caught:
        store.save(3, state_of(), META)
    assert str(caught.value) == (
        f"{copied}: no room for a checkpoint: it needs 1.049 MB, 1.049 MB are free; the newest sealed step is 2; "
        "make room, or name another folder"
    )
    assert sorted(p.name for p in copied.iterdir()) == ["000000001", "000000002"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    store.save(3, state_of(), META)
    store.wait()
    assert store.get(3).step == 3
    store.close()


@pytest.mark.usefixtures("impatient")
def test_a_folder_that_cannot_be_written_needs_a_person(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    store = store_of(tmp_path / "checkpoints")
    store.save(1, state_of(), META)
    with pytest.raises(NeedsPerson, match=f"saving step 1 into {tmp_path}/checkpoints failed: NotADirectoryError"):
        store.wait()
    assert (tmp_path / "checkpoints").read_text() == "a file"
    store.close()


def test_nobody_else_can_read_a_step(two_steps: Path) -> None:
    modes = {oct(path.stat().st_mode & 0o777) for path in two_steps.rglob("*") if path.is_file()}
    assert modes == {"0o600"}
    assert {oct(p.stat().st_mode & 0o777) for p in (two_steps / "000000001").rglob("*") if p.is_dir()} == {"0o700"}
    assert oct((two_steps / "000000001").stat().st_mode & 0o777) == "0o700"


def test_every_array_is_compared_with_what_the_devices_held(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that was written wrongly has files that fit their seal; only the array's own digest tells."""
    store = store_of(copied)
    assert store.verify_arrays(store.get(2)) == len(jax.tree.leaves(state_of()))
    arrays = store.arrays(store.get(2), ["params.head.bias"])
    assert arrays.keys() == {"params.head.bias"}
    np.testing.assert_array_equal(arrays["params.head.bias"], np.arange(3, dtype=np.float32) + np.float32(0.25))
    described = seal.HostArray.description
    monkeypatch.setattr(seal.HostArray, "description", lambda self: described(self) | {"sha256": "0" * 64})
    store.save(3, state_of(), META)
    store.wait()
    store.verify(store.get(3))
    with pytest.raises(CorruptStep, match=r"checkpoint 3: \S+ is not what was saved: it was written wrongly"):
        store.verify_arrays(store.get(3))
    store.close()


def test_the_digest_of_an_array_does_not_depend_on_how_it_lies_on_the_devices() -> None:
    """A sharded array, a replicated one, one in Fortran order: one digest."""
    plain = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    wanted = {"shape": [3, 4], "dtype": "float32", "sha256": hashlib.sha256(plain.tobytes()).hexdigest()}
    assert seal.HostArray(jnp.asarray(plain)).description() == wanted
    assert seal.HostArray(np.asfortranarray(plain)).description() == wanted
    split = seal.HostArray(plain)
    split._pieces = [((slice(0, 2), slice(None)), plain[:2]), ((slice(2, 3), slice(None)), plain[2:])]
    assert split.description() == wanted
    assert seal.HostArray(jnp.asarray(plain.T)).description() != wanted  # the control


def test_another_type_of_floats_needs_cast_and_a_count_is_never_cast(two_steps: Path) -> None:
    store, state = store_of(two_steps), state_of(2 / 8)
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, state)
    with pytest.raises(UserError, match=r"does not fit .* \(and \d more\); --cast converts them"):
        store.restore(store.get(2), abstract(halved))
    assert same(store.restore(store.get(2), abstract(halved), cast=True), halved)
    counted = {**state, "step": jnp.float32(0)}
    with pytest.raises(UserError, match=r"step was int32\[\] and is now float32\[\]$"):
        store.restore(store.get(2), abstract(counted), cast=True)


def test_a_figure_that_is_not_finite_in_the_meta_fails_the_save_loudly(tmp_path: Path) -> None:
    """JSON here is strict; the caller makes NaN a word."""
    store = store_of(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        store.save(1, state_of(), {"evaluation": {"loss": float("nan")}})
    assert store.steps() == []
    store.close()


# ---------------------------------------------------------------- retention

NAN = "NaN"  # as a run writes it: strict JSON has no such number


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Retention needs folders and seals, not arrays."""
    monkeypatch.setattr(Checkpoints, "_checkpointer", lambda self: Nothing())
    return


class Nothing:
    def save(self, path: Path, arrays: Any) -> None:
        path.mkdir()

    def wait_until_finished(self) -> None:
        pass


def kept(folder: Path, losses: list[Any], **options: Any) -> list[int]:
    store = store_of(folder, **options)
    for step, loss in enumerate(losses, 1):
        store.save(step, {}, {"evaluation": {"loss": loss}})
        store.wait()
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []
    return [s.step for s in store.steps()]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("losses", "options", "expected"),
    [
        ([3, 1, 2, 5], {"keep_last": 2, "keep_best": 0}, [3, 4]),
        ([3, 1, 2, 5], {"keep_last": 1, "keep_best": 0}, [4]),
        ([3, 1, 2, 5], {"keep_last": 1, "keep_best": 1}, [2, 4]),
        ([3, 1, NAN, 2, 5], {"keep_last": 1, "keep_best": 2}, [2, 4, 5]),
        ([3, 1, NAN, 2, 5], {"keep_last": 2, "keep_best": 2}, [2, 4, 5]),
        ([NAN, NAN, NAN], {"keep_last": 1, "keep_best": 2}, [3]),
        ([NAN, 2, NAN], {"keep_last": 1, "keep_best": 1}, [2, 3]),
        ([1, 1, 1, 5], {"keep_last": 1, "keep_best": 1}, [3, 4]),
        ([3, 1, NAN, 2, 5], {"keep_last": 1, "keep_best": 2, "mode": "max"}, [1, 5]),
        ([9, 1, NAN, 2, 5], {"keep_last": 1, "keep_best": 1, "mode": "max"}, [1, 5]),
        ([-1, -3, 2], {"keep_last": 1, "keep_best": 1}, [2, 3]),
        ([3, 1, 2, 5, 4, 9, 8], {"keep_last": 1, "keep_best": 1, "keep_every": 3}, [2, 3, 6, 7]),
        ([3, 1, 2, 5, 4, 9, 8], {"keep_last": 1, "keep_best": 0, "keep_every": 7}, [7]),
    ],
)
def test_the_newest_and_the_best_are_kept(losses: Any, options: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    assert kept(tmp_path, losses, **options) == expected


@pytest.mark.usefixtures("quick")
def test_a_step_that_stays_for_ever_says_so_itself(tmp_path: Path) -> None:
    """Who prunes may not know how many steps an epoch has; and steps from before the option count too."""
    kept(tmp_path, [5, 4, 3, 2, 1], keep_every=2)
    assert [s.meta.get("snapshot") for s in store_of(tmp_path).steps()] == [None, True, None, True, None]
    store = store_of(tmp_path, keep_last=1, keep_best=0, keep_every=3)
    assert [s.step for s in store.superfluous()] == [1]
    store = store_of(tmp_path, keep_last=1, keep_best=0)
    assert [s.step for s in store.prune()] == [1, 3]
    steps = build(load({"model": {"hidden": [4]}, "checkpoint": {"keep_every": "2ep"}})).steps
    assert steps.keep_every == 2 * steps.per_epoch


@pytest.mark.usefixtures("quick")
def test_nan_ranks_worst_and_never_best_in_either_mode(tmp_path: Path) -> None:
    kept(tmp_path, [NAN, 3, NAN])
    for mode in ("min", "max"):
        best = store_of(tmp_path, mode=mode).best()
        assert best is not None
        assert best.step == 2


@pytest.mark.usefixtures("quick")
def test_a_save_without_an_evaluation_takes_no_place_of_the_best(tmp_path: Path) -> None:
    store = store_of(tmp_path, keep_last=1, keep_best=1)
    for step, meta in ((1, META), (2, {"evaluation": None}), (3, {"evaluation": {}}), (4, {})):
        store.save(step, {}, meta)
        store.wait()
    assert [s.step for s in store.steps()] == [1, 4]


@pytest.mark.usefixtures("quick")
def test_nothing_is_removed_before_something_that_stays_is_verified(tmp_path: Path) -> None:
    kept(tmp_path, [1, 2, 3])
    cut(tmp_path / "000000003/meta.json")
    store = store_of(tmp_path, keep_last=1, keep_best=0)
    assert [s.step for s in store.superfluous()] == [1, 2]
    store._retain()
    assert [s.step for s in store.steps()] == [1, 2, 3]
    with pytest.raises(CorruptStep):
        store.prune()
    assert [s.step for s in store.steps()] == [1, 2, 3]
    kept(tmp_path / "intact", [1, 2, 3])
    store = store_of(tmp_path / "intact", keep_last=1, keep_best=0)
    assert [s.step for s in store.prune()] == [1, 2]
    assert [s.step for s in store.steps()] == [3]


@pytest.mark.usefixtures("quick")
def test_a_step_is_removed_by_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in a deletion, what is listed can still be read."""
    store = store_of(tmp_path, keep_last=1, keep_best=0)
    store.save(1, {}, META)
    store.wait()
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)  # killed before the first file was removed
    store.save(2, {}, META)
    store.wait()
    assert [s.step for s in store.steps()] == [2]
    assert files_of(tmp_path / ".trash-000000001") == ["manifest.json", "meta.json"]
    monkeypatch.undo()
    store.sweep()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000002"]


# ---------------------------------------------------------------- beside a running step


def test_what_is_saved_is_the_state_of_its_step_though_the_next_step_takes_its_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is held open while the real jitted step, which is given the state, runs on."""
    go, tree = threading.Event(), files.fsync_tree
    monkeypatch.setattr(files, "fsync_tree", lambda folder: (go.wait(20), tree(folder)))
    job = build(load({"model": {"hidden": [16]}, "train": {"duration": 6}, "log": {"every": 1}}))
    feeder, store = job.feeder(), store_of(tmp_path)

    def at(step: int) -> Any:
        state = job.init()
        for position in range(step):
            kernel = state["params"]["head.kernel"]
            state, _ = job.advance(state, feeder(position))
            assert kernel.is_deleted()  # the step takes the buffers that it is given
        return state

    expected = jax.tree.map(lambda x: np.array(x), at(2))
    state = at(2)
    store.save(2, state, META)
    for position in range(2, 6):
        state, _ = job.advance(state, feeder(position))
    assert store.steps() == []  # the save is still going on
    go.set()
    store.wait()
    restored = store.restore(store.get(2), job.abstract_state)
    assert same(restored, expected)
    assert not same(restored, jax.tree.map(lambda x: np.array(x), state))  # the control: the state went on
    assert all(
        x.sharding == a.sharding for x, a in zip(*map(jax.tree.leaves, (restored, job.abstract_state)), strict=True)
    )
    going_on = restored
    for position in range(2, 6):
        going_on, _ = job.advance(going_on, feeder(position))
    assert same(jax.tree.map(np.asarray, going_on), jax.tree.map(np.asarray, state))
    store.close()
