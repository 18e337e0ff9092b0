"""The command in this process, and a finished run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Answer:
    """What a command gave."""

    code: int
    out: str
    err: str

    @property
    def results(self) -> list[str]:
        """Lines of stdout."""
        return self.out.splitlines()


Cli = Callable[..., Answer]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """`jaxtrain ARGUMENTS` in this process, in an empty folder."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", ""))  # a verb that sets it sets it for itself

    def call(*arguments: str | Path) -> Answer:
        from jaxtrain.cli.main import main

        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return Answer(end.value.code, out, err)

    return call


@pytest.fixture
def trained(finished: Path, tmp_path: Path) -> Path:
    """A finished run of 20 steps, a copy of one's own."""
    return Path(shutil.copytree(finished, tmp_path / "runs" / "digits" / "20260101T000000Z"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 20 steps, for reading."""
    import jaxtrain as jt

    place = tmp_path_factory.mktemp("finished") / "20260101T000000Z"
    keys = {"model.kind": "mlp", "model.hidden": [16], "augment.shift": 0, "log.tensorboard": False}
    jt.train("digits", run_dir=place, quiet=True, **keys, **{"train.duration": 20}).close()
    return place
