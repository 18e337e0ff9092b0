"""Layers over layers: YAML, flags and keyword arguments become one frozen RunConfig, and go back to YAML."""

from __future__ import annotations

import copy
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_helpers import of_kind
from pydantic import ValidationError

from jaxtrain.config import RunConfig, dump, load, load_with_notes, parse_value, shipped
from jaxtrain.config import schema_tools as tools

VARIANTS = [(section, tools.kind_of(cls)) for section, classes in tools.sections().items() for cls in classes]
FIELDS = [(section, kind, leaf) for section, kind, leaf, _ in tools.fields() if leaf != "kind"]


def yaml_file(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def reload(config: RunConfig, folder: Path) -> RunConfig:
    return load(yaml_file(folder, dump(config)))


# ---------------------------------------------------------------- sources


def test_a_path_a_shipped_name_and_a_dict_of_the_same_words_are_one_config(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "optimizer: {kind: sgd, peak_lr: 0.5}\n")
    assert load(file) == load(str(file)) == load({"optimizer": {"kind": "sgd", "peak_lr": 0.5}})
    assert load("digits") == load(shipped()["digits"])
    assert load("digits").model.kind == "cnn"
    assert load("digits") != load({})


def test_nothing_is_all_defaults(tmp_path: Path) -> None:
    assert load({}) == RunConfig()
    assert load(yaml_file(tmp_path, "")) == RunConfig()
    assert load(yaml_file(tmp_path, "# only words\n")) == RunConfig()


def test_a_section_whose_lines_are_all_commented_out_is_its_defaults(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "train:\n  # seed: 3\noptimizer:\n  # peak_lr: 1e-2\n")
    assert load(file) == RunConfig()
    assert load(file, [("train.seed", 4)]).train.seed == 4


def test_a_file_in_the_working_folder_goes_before_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("digits").name == "digits"
    (tmp_path / "digits").write_text("name: mine\n")
    assert load("digits").name == "mine"


def test_a_byte_order_mark_and_words_beyond_ascii_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(b"\xef\xbb\xbfname: mine  # \xc3\xa9t\xc3\xa9\n")
    assert load(file).name == "mine"


def test_a_run_config_is_a_source_too() -> None:
    first = load("digits")
    assert load(first) == first
    assert load(first, [("train.seed", 3)]).train.seed == 3
    assert first.train.seed == 0


def test_a_run_config_made_in_python_keeps_the_kinds_of_its_parts() -> None:
    from jaxtrain.config.schema import Mlp, Momentum

    config = RunConfig(optimizer=Momentum(nesterov=True), model=Mlp(hidden=(8,)))
    assert load(config) == config
    assert load(config, [("optimizer.peak_lr", 0.5)]).optimizer == Momentum(nesterov=True, peak_lr=0.5)


def test_a_new_kind_over_a_run_config_has_its_own_defaults_as_over_a_file() -> None:
    """sgd's peak_lr is 0.1: adamw's default 1e-3 was never set by anybody, so it must not stay."""
    over_dict, over_config = load({}, [("optimizer.kind", "sgd")]), load(load({}), [("optimizer.kind", "sgd")])
    assert over_dict.optimizer.peak_lr == 0.1
    assert over_config == over_dict
    assert load_with_notes(load({}), [("optimizer.kind", "sgd")])[1] == []


@pytest.mark.parametrize(
    ("given", "overlays"),
    [
        ({"train": {"seed": 1}}, [("train.seed", 2)]),
        ({"optimizer": {"kind": "adamw", "b1": 0.5}}, [("optimizer.kind", "sgd")]),
        ({"model": {"kind": "custom", "target": "f.py:F", "args": {"width": 1}}}, [("model.args.width", 2)]),
        ({"model": {"kind": "custom", "target": "f.py:F", "args": {"a": {"b": 1}}}}, [("model.args.a.b", 2)]),
    ],
)
def test_the_dict_of_the_caller_is_left_as_it_was(given: dict[str, Any], overlays: list[tuple[str, Any]]) -> None:
    before = copy.deepcopy(given)
    assert load(given, overlays) != load(given)
    assert given == before


# ---------------------------------------------------------------- overlays


def test_the_last_overlay_wins() -> None:
    assert load({"train": {"seed": 1}}).train.seed == 1
    assert load({"train": {"seed": 1}}, [("train.seed", 2)]).train.seed == 2
    assert load({"train": {"seed": 1}}, [("train.seed", 2), ("train.seed", 3)]).train.seed == 3
    assert load({"train": {"seed": 1}}, [("train.seed", 3), ("train.seed", 2)]).train.seed == 2


def test_overlays_may_be_a_generator() -> None:
    assert load({}, (pair for pair in [("train.seed", 5)])).train.seed == 5


def test_an_overlay_leaves_its_neighbours_alone() -> None:
    plain, changed = load("digits"), load("digits", [("optimizer.peak_lr", 0.5)])
    assert changed.optimizer.peak_lr == 0.5
    assert changed.model_copy(update={"optimizer": plain.optimizer}) == plain
    assert changed.optimizer.weight_decay == plain.optimizer.weight_decay == 0.01


def test_a_peak_lr_alone_keeps_the_default_kind() -> None:
    optimizer = load({}, [("optimizer.peak_lr", 0.25)]).optimizer
    assert (optimizer.kind, optimizer.peak_lr) == ("adamw", 0.25)


def test_a_whole_section_may_be_laid_over_another() -> None:
    changed = load("digits", [("optimizer", {"kind": "sgd"}), ("optimizer.peak_lr", 0.5)])
    assert changed.optimizer == load({"optimizer": {"kind": "sgd", "peak_lr": 0.5}}).optimizer


def test_a_new_kind_drops_the_keys_of_the_old_one_and_says_so() -> None:
    config, notes = load_with_notes("digits", [("model.kind", "mlp")])
    assert (config.model.kind, config.model.hidden, config.model.dropout) == ("mlp", (128, 128), 0.3)
    assert notes == [
        "model.kind=mlp: model.channels dropped, mlp has none",
        "model.kind=mlp: model.dense dropped, mlp has none",
    ]


def test_the_same_kind_again_drops_and_says_nothing() -> None:
    config, notes = load_with_notes("digits", [("model.kind", "cnn")])
    assert config == load("digits")
    assert notes == []


def test_keys_laid_over_after_the_new_kind_stay() -> None:
    config, notes = load_with_notes("digits", [("model.kind", "mlp"), ("model.hidden", 7)])
    assert config.model.hidden == (7,)
    assert len(notes) == 2


def test_a_key_of_the_old_kind_laid_over_before_the_new_kind_is_dropped_with_a_note() -> None:
    config, notes = load_with_notes({}, [("optimizer.b1", 0.5), ("optimizer.kind", "sgd")])
    assert config == load({}, [("optimizer.kind", "sgd")])
    assert notes == ["optimizer.kind=sgd: optimizer.b1 dropped, sgd has none"]


def test_the_default_kind_counts_as_the_old_one() -> None:
    config, notes = load_with_notes({"optimizer": {"b1": 0.5}}, [("optimizer.kind", "adamw")])
    assert (config.optimizer.b1, notes) == (0.5, [])


@pytest.mark.parametrize("dotted", ["model.args.width", "model.args.block.width", "model.args.a.b.c"])
def test_a_flag_reaches_into_the_arguments_of_an_own_model(dotted: str) -> None:
    own = [("model.kind", "custom"), ("model.target", "net.py:Net")]
    *path, last = dotted.split(".")[2:]
    inner: Any = load({}, [*own, (dotted, 3)]).model.args
    for key in path:
        inner = inner[key]
    assert inner == {last: 3}


def test_a_flag_into_arguments_keeps_the_others() -> None:
    own = {"model": {"kind": "custom", "target": "net.py:Net", "args": {"width": 1, "depth": 2}}}
    assert load(own, [("model.args.width", 9)]).model.args == {"width": 9, "depth": 2}


@pytest.mark.parametrize("key", ["model.hidden", "model.channels", "model.dense"])
def test_a_single_number_is_a_list_of_one(key: str) -> None:
    kind = "mlp" if key == "model.hidden" else "cnn"
    changed = load({}, [("model.kind", kind), (key, 48)])
    assert getattr(changed.model, key.partition(".")[2]) == (48,)
    assert changed == load({}, [("model.kind", kind), (key, [48])])


def test_one_boundary_and_one_factor_are_lists_of_one() -> None:
    changed = load({}, [("schedule.kind", "piecewise"), ("schedule.boundaries", "50%"), ("schedule.factors", 0.1)])
    assert (changed.schedule.boundaries, changed.schedule.factors) == (("50%",), (0.1,))


def test_values_may_be_python_values() -> None:
    changed = load(
        "digits",
        [
            ("model.channels", (8, 16)),
            ("train.micro_batch_size", None),
            ("log.tensorboard", False),
            ("optimizer.peak_lr", 1e-2),
            ("train.duration", "3ep"),
            ("objective.class_weights", [1, 2.5]),
        ],
    )
    assert changed.model.channels == (8, 16)
    assert changed.train.micro_batch_size is None
    assert changed.log.tensorboard is False
    assert changed.optimizer.peak_lr == 0.01
    assert changed.train.duration == "3ep"
    assert changed.objective.class_weights == (1.0, 2.5)


@pytest.mark.parametrize(
    ("key", "value", "plain"),
    [
        ("train.seed", np.int64(3), 3),
        ("train.duration", np.int64(3), 3),
        ("model.hidden", np.int64(3), (3,)),
        ("optimizer.peak_lr", np.float64(0.5), 0.5),
        ("optimizer.peak_lr", np.float32(0.5), 0.5),
    ],
)
def test_values_may_be_numpy_numbers_as_a_sweep_gives_them(key: str, value: Any, plain: Any) -> None:
    section, leaf = key.split(".")
    found = getattr(getattr(load({}, [(key, value)]), section), leaf)
    assert found == plain
    assert type(found) is type(plain)


def test_a_path_object_may_stand_for_a_path(tmp_path: Path) -> None:
    file = tmp_path / "rows.npz"
    file.touch()
    assert load({}, [("data.kind", "arrays"), ("data.path", str(file))]).data.path == str(file)
    assert load({}, [("data.kind", "arrays"), ("data.path", file)]).data.path == str(file)


# ---------------------------------------------------------------- the value of a flag


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("3e-4", 3e-4),
        ("1E-3", 1e-3),
        ("-1e-3", -1e-3),
        ("1e5", 1e5),
        (".5e2", 50.0),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("[64, 64]", [64, 64]),
        ("[]", []),
        ("[1e-1, 0.5]", [0.1, 0.5]),
        ('["50%", 75%]', ["50%", "75%"]),
        ("20ep", "20ep"),
        ("2h", "2h"),
        ("5%", "5%"),
        ('"5%"', "5%"),
        ('"3"', "3"),
        ("relu", "relu"),
        ("net.py:Net", "net.py:Net"),
        ("a: b", "a: b"),
        ("1:30", "1:30"),
        ("C:\\rows.npz", "C:\\rows.npz"),
        ("s3://bucket/rows", "s3://bucket/rows"),
        ("{a: 1}", "{a: 1}"),
        ("{", "{"),
        ("run-{x}", "run-{x}"),
        ("[1, 2", "[1, 2"),
        ('"unfinished', '"unfinished'),
        ("@x", "@x"),
        ("*x", "*x"),
        ("1.2.3", "1.2.3"),
        ("1.2.3e4", "1.2.3e4"),
        ("2024-01-31", "2024-01-31"),
    ],
)
def test_the_text_of_a_flag_is_this_value(text: str, value: Any) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_a_date_may_be_the_name_of_a_run(tmp_path: Path) -> None:
    assert load({}, [("name", parse_value("2024-01-31"))]).name == "2024-01-31"
    assert load(yaml_file(tmp_path, "name: 2024-01-31\n")).name == "2024-01-31"


@pytest.mark.parametrize("word", ["1e-3", "3e-4", "1E3", "0.001"])
def test_a_number_is_the_same_number_in_a_file_and_in_a_flag(word: str, tmp_path: Path) -> None:
    own = "kind: custom, target: net.py:Net"
    in_file = load(yaml_file(tmp_path, f"model: {{{own}, args: {{rate: {word}}}}}\n"))
    in_flag = load(yaml_file(tmp_path, f"model: {{{own}}}\n"), [("model.args.rate", parse_value(word))])
    assert in_flag.model.args == {"rate": float(word)}
    assert in_file.model.args == {"rate": float(word)}


def test_a_quoted_number_stays_a_word_through_dump_and_load(tmp_path: Path) -> None:
    own = load({"model": {"kind": "custom", "target": "net.py:Net", "args": {"tag": "1e-3", "day": "2024-01-31"}}})
    assert own.model.args == {"tag": "1e-3", "day": "2024-01-31"}
    assert reload(own, tmp_path) == own


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_config_survives_dump_and_load(name: str, tmp_path: Path) -> None:
    assert reload(load(name), tmp_path) == load(name)


@pytest.mark.parametrize(("section", "kind"), VARIANTS)
def test_every_variant_survives_dump_and_load(section: str, kind: str | None, tmp_path: Path) -> None:
    config = load({}, of_kind(section, kind, tmp_path))
    assert getattr(getattr(config, section), "kind", None) == kind
    assert reload(config, tmp_path) == config


def other_values(annotation: Any, file: str) -> Iterator[Any]:
    """Values that some field might take; the first that is allowed and is not the default is taken."""
    parts = [annotation]
    while parts:
        part = parts.pop()
        if typing.get_origin(part) is typing.Literal:
            yield from typing.get_args(part)
        elif typing.get_origin(part) is not dict:
            parts += [arg for arg in typing.get_args(part) if arg is not ...]
    yield from (8, 2, 0.5, True, False, [3, 4], {"width": 3}, "7%", "x", file)


@pytest.mark.parametrize(("section", "kind", "leaf"), FIELDS)
def test_every_field_can_be_set_and_survives_dump_and_load(
    section: str, kind: str | None, leaf: str, tmp_path: Path
) -> None:
    base = of_kind(section, kind, tmp_path) if section else []
    key = f"{section}.{leaf}" if section else leaf
    info = next(i for s, k, name, i in tools.fields() if (s, k, name) == (section, kind, leaf))
    (tmp_path / "other.npz").touch()

    def value_in(config: RunConfig) -> Any:
        return getattr(getattr(config, section) if section else config, leaf)

    plain = load({}, base)
    for value in other_values(info.annotation, str(tmp_path / "other.npz")):
        try:
            changed = load({}, [*base, (key, value)])
        except Exception:
            continue
        if value_in(changed) != value_in(plain):
            assert changed != plain
            assert reload(changed, tmp_path) == changed
            return
    pytest.fail(f"no other value found for {key}")


@pytest.mark.parametrize(
    "value", [(3, 3), [3, 3], {"a": (1, 2)}, None, True, 0.1, 1e-8, "", "no", "5%", "null", "a: b"]
)
def test_arguments_of_an_own_model_survive_dump_and_load(value: Any, tmp_path: Path) -> None:
    own = load({"model": {"kind": "custom", "target": "net.py:Net", "args": {"x": value}}})
    assert reload(own, tmp_path) == own


def test_dump_says_every_field_in_the_order_of_the_schema_and_no_python() -> None:
    text = dump(load("digits"))
    heads = [line.partition(":")[0] for line in text.splitlines() if not line.startswith(" ")]
    assert heads == list(RunConfig.model_fields)
    assert "!!" not in text
    everything = load("digits")
    leaves = [leaf for section in tools.sections() for leaf in type(getattr(everything, section)).model_fields]
    assert [leaf for leaf in leaves if f"{leaf}: " not in text] == []


# ---------------------------------------------------------------- frozen


def test_a_config_is_frozen_at_every_level() -> None:
    config = load("digits")
    for part, leaf in [(config, "name"), *[(getattr(config, s), None) for s in tools.sections()]]:
        for field in [leaf] if leaf else type(part).model_fields:
            before = getattr(part, field)
            with pytest.raises(ValidationError, match="frozen"):
                setattr(part, field, before)
    assert config == load("digits")
    assert config.model_copy(update={"name": "other"}).name == "other"


def test_lists_are_tuples_so_that_they_cannot_change() -> None:
    assert load("digits").model.channels == (32, 64)
    assert isinstance(load({}, [("model.hidden", [1, 2])]).model.hidden, tuple)
    assert isinstance(load({}, [("objective.class_weights", [1, 2])]).objective.class_weights, tuple)


def test_two_loads_share_no_mutable_arguments() -> None:
    own = [("model.kind", "custom"), ("model.target", "net.py:Net")]
    first, second = load({}, own), load({}, own)
    assert first.model.args == {}
    assert first.model.args is not second.model.args


# ---------------------------------------------------------------- what importing costs


@pytest.mark.parametrize("module", ["jaxtrain", "jaxtrain.config", "jaxtrain.config.describe"])
def test_importing_loads_neither_jax_nor_flax_nor_numpy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(sys.modules.keys() & {{'jax', 'jaxlib', 'flax', 'optax', 'numpy'}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_import_test_sees_numpy_when_it_is_loaded() -> None:
    code = "import sys, numpy; print(*sorted(sys.modules.keys() & {'jax', 'flax', 'numpy'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["numpy"]


def test_loading_and_dumping_a_config_loads_neither_jax_nor_numpy() -> None:
    code = (
        "import sys; from jaxtrain.config import dump, load; dump(load('digits', [('train.seed', 3)])); "
        "print(*sorted(sys.modules.keys() & {'jax', 'jaxlib', 'flax', 'optax', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
