"""train.init_from: weights of another run, as far as they fit; what fitted is told; a resume keeps its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_helpers import differing, host, stop_at, tiny

import jaxtrain as jt
from jaxtrain import initial
from jaxtrain.build import build
from jaxtrain.cli.main import main
from jaxtrain.config import load


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 24 steps whose best step is the last."""
    place = tmp_path_factory.mktemp("source") / "run"
    tiny(place, **{"model.norm": "batch", "checkpoint.every": 8, "checkpoint.keep_last": 9}).close()
    return place


def begun(source: Path | str, **more: Any) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
    """The state that a run with these weights begins with, the same without them, the lines."""
    keys = {"model.kind": "mlp", "model.hidden": [16], "model.norm": "batch", **more}
    job = build(load("digits", {**keys, "train.init_from": str(source)}.items()))
    return host(initial.state(job)), host(build(load("digits", keys.items())).init()), initial.lines(job)


def three_classes(place: Path) -> dict[str, Any]:
    """Data with another number of classes, and no normalisation."""
    rng = np.random.default_rng(0)
    np.savez(place / "three.npz", inputs=rng.normal(size=(90, 8, 8, 1)), targets=rng.integers(0, 3, 90))
    return {"data.kind": "arrays", "data.path": str(place / "three.npz"), "data.normalize": "none"}


def test_weights_and_statistics_are_taken_and_nothing_else(source: Path, tmp_path: Path) -> None:
    taken, fresh, lines = begun(source)
    shutil.copytree(source, tmp_path / "source")
    with jt.resume(tmp_path / "source", quiet=True, **{"train.duration": 25}) as run:  # to have the sealed state
        assert run.job is not None
        sealed = host(run._session.store.restore(run._session.store.get(24), run.job.abstract_state))  # type: ignore[union-attr]
    for name in taken:
        ours = name.startswith(("['params']", "['model_state']"))
        assert taken[name].tobytes() == (sealed if ours else fresh)[name].tobytes(), name
        assert not ours or taken[name].tobytes() != fresh[name].tobytes() or not taken[name].any(), name
    assert any(name.startswith("['model_state']") for name in taken)
    assert lines == [f"weights of {source}, step 24: 7 of 7 arrays"]


def test_a_step_is_named_by_its_folder(source: Path) -> None:
    at_eight, _, lines = begun(source / "checkpoints/000000008")
    assert lines == [f"weights of {source / 'checkpoints/000000008'}, step 8: 7 of 7 arrays"]
    last, _, _ = begun(source)
    assert all(at_eight[n].tobytes() != last[n].tobytes() for n in last if n.startswith("['params']") and "kernel" in n)


def test_what_does_not_fit_stays_initialised_and_is_told(source: Path, tmp_path: Path) -> None:
    taken, fresh, lines = begun(source, **three_classes(tmp_path), **{"model.norm": "none"})
    assert lines == [
        f"weights of {source}, step 24: 1 of 4 arrays",
        "  of another shape: params.head.bias float32[3] (there float32[10]), "
        "params.head.kernel float32[16, 3] (there float32[16, 10])",
        "  not there: params.layers.0.bias",
        "  unused: model_state.norms.0.mean, model_state.norms.0.var, params.norms.0.bias, params.norms.0.scale",
    ]
    changed = [name for name in taken if taken[name].tobytes() != fresh[name].tobytes()]
    assert changed == ["['params']['layers.0.kernel']"]


def test_averaged_weights_are_taken_where_they_were_evaluated_and_copied_where_they_are_kept(tmp_path: Path) -> None:
    with tiny(tmp_path / "run", **{"train.ema_decay": 0.9}) as run:
        averaged = host(run.state["ema"]["params"])  # type: ignore[index]
        assert averaged["['head.kernel']"].tobytes() != host(run.state["params"])["['head.kernel']"].tobytes()  # type: ignore[index]
    taken, _, _ = begun(tmp_path / "run", **{"model.norm": "none", "train.ema_decay": 0.9})
    for name, array in averaged.items():
        assert taken[f"['params']{name}"].tobytes() == array.tobytes()
        assert taken[f"['ema']['params']{name}"].tobytes() == array.tobytes()


def test_a_run_trains_on_from_them_and_its_resume_keeps_its_own(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    keys = {"model.norm": "batch", "train.init_from": copy, "checkpoint.every": 5}
    with tiny(tmp_path / "whole", **keys) as whole, tiny(tmp_path / "plain", **{"model.norm": "batch"}) as plain:
        assert whole.metrics()[0]["train/loss"] < plain.metrics()[0]["train/loss"]
        stop_at(monkeypatch, 10)
        tiny(tmp_path / "run", **keys).close()
        monkeypatch.undo()
        shutil.rmtree(copy)  # a resume has no need of it
        with jt.resume(tmp_path / "run", quiet=True) as resumed:
            assert differing(resumed.state, whole.state) == []
    with pytest.raises(jt.ConfigError, match=r"a resume cannot change .* the run has weights of its own by now"):
        jt.resume(tmp_path / "run", quiet=True, **{"train.init_from": source})


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("nowhere", "'nowhere' does not exist; `jaxtrain checkpoints RUN` lists the steps of a run"),
        (".", "is neither a run folder nor a sealed step (RUN/checkpoints/N)"),
    ],
)
def test_a_place_without_weights_is_told_before_a_run_folder_is_made(
    place: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", "--init-from", place])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "jaxtrain: train.init_from: " in said
    assert what.replace("'nowhere'", repr(str(tmp_path / "nowhere"))) in said
    assert list(tmp_path.iterdir()) == []


def test_weights_none_of_which_fit_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(jt.ConfigError, match=r"no array of .* fits this model: of another shape: params.head.bias"):
        begun(source, **three_classes(tmp_path), **{"model.hidden": [17], "model.norm": "none"})


def test_a_damaged_source_is_not_begun_with(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "source")
    victim = max((tmp_path / "source/checkpoints/000000024").rglob("*"), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with pytest.raises(jt.UserError, match="was changed since it was sealed"):
        tiny(tmp_path / "run", **{"model.norm": "batch", "train.init_from": tmp_path / "source"})
