"""The resolved form of every shipped config, word for word: a changed default or field shows up in review.

JAXTRAIN_UPDATE_GOLDEN=1 pytest tests/config    writes the files anew.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from jaxtrain.config import dump, load, shipped

GOLDEN = Path(__file__).parent / "golden"
HOW = "JAXTRAIN_UPDATE_GOLDEN=1 pytest tests/config"


def compare(name: str, folder: Path) -> None:
    """Fail, with the difference and the way out, unless `folder` holds the resolved form of config `name`."""
    resolved = dump(load(name))
    file = folder / f"{name}.yaml"
    if os.environ.get("JAXTRAIN_UPDATE_GOLDEN") == "1":
        folder.mkdir(exist_ok=True)
        file.write_text(resolved, encoding="utf-8")
    if not file.is_file():
        pytest.fail(f"config {name} has no golden file {file}; if it is right as it is: {HOW}", pytrace=False)
    golden = file.read_text(encoding="utf-8")
    if resolved != golden:
        diff = difflib.unified_diff(golden.splitlines(), resolved.splitlines(), "golden", "now", lineterm="")
        pytest.fail(
            "\n".join([f"config {name} resolves to something else than {file}:", *diff, f"if that is meant: {HOW}"]),
            pytrace=False,
        )


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_config_resolves_to_its_golden_file(name: str) -> None:
    compare(name, GOLDEN)


def test_there_are_shipped_configs_and_digits_is_one() -> None:
    assert "digits" in shipped()


def test_no_golden_file_is_left_of_a_config_that_is_gone() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == sorted(shipped())


def test_a_golden_file_loads_back_to_the_config() -> None:
    for name in shipped():
        assert load(GOLDEN / f"{name}.yaml") == load(name)


# ---------------------------------------------------------------- the comparison itself


def test_a_config_without_golden_file_fails_and_says_how_to_write_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAXTRAIN_UPDATE_GOLDEN", raising=False)
    with pytest.raises(pytest.fail.Exception, match=HOW):
        compare("digits", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_value_fails_with_the_line_that_differs_and_says_how_to_accept_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAXTRAIN_UPDATE_GOLDEN", raising=False)
    (tmp_path / "digits.yaml").write_text(dump(load("digits")).replace("name: digits", "name: letters"))
    with pytest.raises(pytest.fail.Exception, match=HOW) as failure:
        compare("digits", tmp_path)
    assert "-name: letters\n+name: digits\n" in str(failure.value)


def test_the_variable_writes_the_file_that_then_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTRAIN_UPDATE_GOLDEN", "1")
    compare("digits", tmp_path)
    monkeypatch.delenv("JAXTRAIN_UPDATE_GOLDEN")
    compare("digits", tmp_path)
    assert load(tmp_path / "digits.yaml") == load("digits")
