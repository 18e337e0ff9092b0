"""Bad input: one line, that names the path, the value, what is allowed and the nearest name. Exit code 2.

Each case has a control arm: the same place with the right word loads.
"""

from __future__ import annotations

import time
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from config_helpers import of_kind

from jaxtrain.config import ConfigError, NeedsPerson, RunConfig, UserError, load, load_with_notes
from jaxtrain.config import schema_tools as tools
from jaxtrain.config.errors import choices, nearest

Overlays = list[tuple[str, Any]]
SECTIONS = ", ".join(RunConfig.model_fields)


def kinds(section: str) -> str:
    return ", ".join(str(tools.kind_of(cls)) for cls in tools.sections()[section])


def names(section: str, kind: str | None = None) -> str:
    cls = tools.variant(section, kind)
    assert cls is not None
    return ", ".join(cls.model_fields)


def refusal(config: Any, overlays: Overlays | None = None) -> str:
    """The line with which `config` is refused; what holds for each such line is asserted here."""
    with pytest.raises(UserError) as refused:
        load(config, overlays or [])
    line = str(refused.value)
    assert type(refused.value) is ConfigError
    assert refused.value.exit_code == 2
    assert len(line.splitlines()) == 1
    assert line.strip() == line
    assert line != ""
    return line


def yaml_file(folder: Path, content: str | bytes) -> Path:
    file = folder / "config.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


# ---------------------------------------------------------------- keys

KEYS: list[tuple[Overlays, Overlays, str]] = [
    (
        [("optimizer.peak_lrr", 1)],
        [("optimizer.peak_lr", 1)],
        "unknown key optimizer.peak_lrr; did you mean optimizer.peak_lr? "
        f"allowed in optimizer (kind adamw): {names('optimizer', 'adamw')}",
    ),
    (
        [("train.sede", 1)],
        [("train.seed", 1)],
        f"unknown key train.sede; did you mean train.seed? allowed in train: {names('train')}",
    ),
    (
        [("train.zzz", 1)],
        [("train.seed", 1)],
        f"unknown key train.zzz; allowed in train: {names('train')}",
    ),
    (
        [("train.peak_lr", 1)],
        [("optimizer.peak_lr", 1)],
        f"unknown key train.peak_lr; did you mean optimizer.peak_lr? allowed in train: {names('train')}",
    ),
    (
        [("optimiser.peak_lr", 1)],
        [("optimizer.peak_lr", 1)],
        f"unknown key optimiser; did you mean optimizer? allowed: {SECTIONS}",
    ),
    (
        [("presicion", "fp32")],
        [("precision", "fp32")],
        f"unknown key presicion; did you mean precision? allowed: {SECTIONS}",
    ),
    (
        [("seed", 1)],
        [("train.seed", 1)],
        f"unknown key seed; did you mean train.seed? allowed: {SECTIONS}",
    ),
    (
        [("zzzz", 1)],
        [("name", "a")],
        f"unknown key zzzz; allowed: {SECTIONS}",
    ),
]


@pytest.mark.parametrize(("wrong", "right", "line"), KEYS, ids=[str(case[0][-1][0]) for case in KEYS])
def test_a_misspelt_key_or_section_is_named_with_the_nearest(wrong: Overlays, right: Overlays, line: str) -> None:
    assert refusal({}, wrong) == line
    load({}, right)


def test_a_misspelt_section_is_the_same_in_a_file_a_dict_and_a_flag(tmp_path: Path) -> None:
    line = refusal({}, [("optimiser.peak_lr", 1)])
    assert refusal({"optimiser": {"peak_lr": 1}}) == line
    assert refusal(yaml_file(tmp_path, "optimiser: {peak_lr: 1}\n")) == line


@pytest.mark.parametrize("section", tools.sections())
def test_every_field_is_the_nearest_name_to_its_own_misspelling(section: str, tmp_path: Path) -> None:
    for cls in tools.sections()[section]:
        kind = tools.kind_of(cls)
        where = f"{section} (kind {kind})" if kind else section
        base = of_kind(section, kind, tmp_path)
        for leaf in cls.model_fields:
            if leaf != "kind":
                assert refusal({}, [*base, (f"{section}.{leaf}x", 1)]) == (
                    f"unknown key {section}.{leaf}x; did you mean {section}.{leaf}? "
                    f"allowed in {where}: {names(section, kind)}"
                )


@pytest.mark.parametrize(
    ("key", "chosen", "owner"),
    [
        ("optimizer.nesterov", "adamw", "momentum"),
        ("optimizer.ns_steps", "sgd", "muon"),
        ("schedule.timescale", "cosine", "inverse_sqrt"),
        ("objective.positive_weight", "cross_entropy", "binary"),
        ("data.targets_path", "digits", "arrays"),
    ],
)
def test_a_key_of_another_variant_says_which_kind_has_it(key: str, chosen: str, owner: str) -> None:
    section = key.partition(".")[0]
    line = refusal({}, [(f"{section}.kind", chosen), (key, 1)])
    assert line.startswith(f"unknown key {key}; ")
    assert line.endswith(f"allowed in {section} (kind {chosen}): {names(section, chosen)}")
    assert f"kind {owner}" in line


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("optimizer.lr", "optimizer.peak_lr"),
        ("optimizer.learning_rate", "optimizer.peak_lr"),
        ("lr", "optimizer.peak_lr"),
        ("train.epochs", "train.duration"),
        ("epochs", "train.duration"),
        ("train.batch_size", "train.global_batch_size"),
        ("batch_size", "train.global_batch_size"),
        ("train.warmup", "schedule.warmup"),
    ],
)
def test_the_usual_name_of_other_toolkits_leads_to_ours(foreign: str, ours: str) -> None:
    assert f"unknown key {foreign}; did you mean {ours}? allowed" in refusal({}, [(foreign, 3)])


@pytest.mark.parametrize("key", ["a\nb", "optimizer.a\nb", "train.seed\n", "optimizer.kind.\n"])
def test_a_key_with_a_line_break_in_it_gives_one_line_all_the_same(key: str) -> None:
    load({}, [("train.seed", 1), ("optimizer.kind", "sgd")])
    refusal({}, [(key, 1)])


@pytest.mark.parametrize("key", ["", ".", "train.", ".seed", "train..seed", "model.args.", "train.seed.x"])
def test_a_key_with_a_part_missing_or_too_many_is_refused(key: str) -> None:
    refusal({}, [(key, 1)])


@pytest.mark.parametrize(
    ("tree", "path"), [({3: 4}, "3"), ({"train": {3: 4}}, "train.3"), ({"train": {True: 4}}, "train.True")]
)
def test_a_key_that_is_no_word_is_an_unknown_key(tree: Mapping[Any, Any], path: str) -> None:
    line = refusal(tree)
    assert line.startswith(f"unknown key {path}; ")
    assert "allowed" in line


def test_the_unknown_key_is_said_before_the_other_errors_and_they_are_counted() -> None:
    assert refusal({"train": {"seed": -1, "sede": 3}}) == (
        f"unknown key train.sede; did you mean train.seed? allowed in train: {names('train')} (and 1 more)"
    )
    assert "more)" not in refusal({"train": {"sede": 3}})


# ---------------------------------------------------------------- kinds and choices


@pytest.mark.parametrize(
    ("section", "wrong", "hint"),
    [
        ("optimizer", "adamm", "did you mean adam? "),
        ("optimizer", "qqq", ""),
        ("model", "resnett", "did you mean resnet? "),
        ("schedule", "cosin", "did you mean cosine? "),
        ("data", "array", "did you mean arrays? "),
        ("objective", "crossentropy", "did you mean cross_entropy? "),
    ],
)
def test_a_wrong_kind_is_named_with_the_nearest_and_all_kinds(section: str, wrong: str, hint: str) -> None:
    line = f"{section}.kind: {wrong!r} is not allowed; {hint}allowed: {kinds(section)}"
    assert refusal({}, [(f"{section}.kind", wrong)]) == line
    assert refusal({section: {"kind": wrong}}) == line
    assert load({}, [(f"{section}.kind", tools.default_kind(section))])


def test_a_wrong_kind_drops_nothing_so_that_the_line_is_about_the_kind() -> None:
    assert refusal("digits", [("model.kind", "mpl")]) == (
        f"model.kind: 'mpl' is not allowed; did you mean mlp? allowed: {kinds('model')}"
    )


@pytest.mark.parametrize("value", [3, None, ["adam"], {"a": 1}, True, "a\nb"])
def test_a_kind_that_is_no_word_is_refused_with_all_kinds(value: object) -> None:
    line = refusal({"optimizer": {"kind": value}})
    assert line.startswith("optimizer.kind: ")
    assert line.endswith(f"allowed: {kinds('optimizer')}")


@pytest.mark.parametrize(
    ("key", "wrong", "right", "line"),
    [
        ("precision", "fp23", "fp32", "'fp23' is not allowed; did you mean fp32? allowed: auto, fp32, bf16, fp16"),
        ("precision", "x", "bf16", "'x' is not allowed; allowed: auto, fp32, bf16, fp16"),
        ("precision", None, "auto", "None is not allowed; allowed: auto, fp32, bf16, fp16"),
        ("precision", "a\nb", "auto", "'a\\nb' is not allowed; allowed: auto, fp32, bf16, fp16"),
        (
            "data.normalize",
            "chanel",
            "channel",
            "'chanel' is not allowed; did you mean channel? allowed: channel, feature, none",
        ),
        ("data.normalize", False, "none", "False is not allowed; allowed: channel, feature, none"),
        ("evaluate.mode", "mni", "min", "'mni' is not allowed; did you mean min? allowed: auto, min, max"),
    ],
)
def test_a_wrong_choice_is_named_with_the_nearest_and_all_choices(
    key: str, wrong: object, right: str, line: str
) -> None:
    assert refusal({}, [(key, wrong)]) == f"{key}: {line}"
    load({}, [(key, right)])


LITERALS = [
    (section, kind, leaf, [str(choice) for choice in typing.get_args(info.annotation)])
    for section, kind, leaf, info in tools.fields()
    if leaf != "kind" and typing.get_origin(info.annotation) is typing.Literal
]


@pytest.mark.parametrize(("section", "kind", "leaf", "allowed"), LITERALS)
def test_every_choice_of_every_field_stands_in_the_line_of_a_wrong_one(
    section: str, kind: str | None, leaf: str, allowed: list[str], tmp_path: Path
) -> None:
    base = of_kind(section, kind, tmp_path) if section else []
    key = f"{section}.{leaf}" if section else leaf
    line = refusal({}, [*base, (key, "?")])
    assert line == f"{key}: '?' is not allowed; allowed: {', '.join(allowed)}"


def test_a_wrong_depth_names_the_depths() -> None:
    assert refusal({}, [("model.kind", "resnet"), ("model.depth", 21)]) == (
        "model.depth: 21 is not allowed; allowed: 8, 20, 32, 56, 18, 34, 50"
    )
    assert load({}, [("model.kind", "resnet"), ("model.depth", 32)]).model.depth == 32


def test_a_wrong_word_for_class_weights_gives_the_words_that_are_allowed() -> None:
    assert load({}, [("objective.class_weights", "balanced")]).objective.class_weights == "balanced"
    line = refusal({}, [("objective.class_weights", "balancd")])
    assert line.startswith("objective.class_weights: 'balancd' is not ")
    assert "did you mean balanced?" in line
    assert "more)" not in line


# ---------------------------------------------------------------- types and ranges


@pytest.mark.parametrize(
    ("key", "wrong", "right", "parts"),
    [
        ("train.seed", "abc", 3, ["valid integer", "int"]),
        ("train.seed", 1.5, 1, ["valid integer", "int"]),
        ("train.seed", None, 0, ["valid integer", "int"]),
        ("train.seed", [1], 1, ["valid integer", "int"]),
        ("train.seed", {"a": 1}, 1, ["valid integer", "int"]),
        ("train.micro_batch_size", "abc", None, ["valid integer", "int or none"]),
        ("optimizer.peak_lr", "fast", 0.1, ["valid number", "float"]),
        ("log.tensorboard", "perhaps", True, ["bool"]),
        ("evaluate.metric", 3, "loss", ["valid string", "str"]),
        ("train.seed", -1, 0, ["greater than or equal to 0"]),
        ("train.global_batch_size", 0, 1, ["greater than or equal to 1"]),
        ("train.micro_batch_size", 0, 1, ["greater than or equal to 1"]),
        ("optimizer.peak_lr", 0, 1e-9, ["greater than 0"]),
        ("optimizer.peak_lr", -0.1, 0.1, ["greater than 0"]),
        ("optimizer.weight_decay", -0.1, 0, ["greater than or equal to 0"]),
        ("model.dropout", 1.0, 0.99, ["less than 1"]),
        ("model.dropout", -0.1, 0, ["greater than or equal to 0"]),
        ("model.hidden", None, [8], ["list of int"]),
        ("train.duration", -1, 0, ["must not be negative", 'epochs ("20ep")']),
        ("name", "a b", "a-b", ["[A-Za-z0-9_.-]"]),
        ("name", "", "a", ["[A-Za-z0-9_.-]"]),
        ("name", "../up", "up", ["[A-Za-z0-9_.-]"]),
        ("name", "a\n", "a", ["[A-Za-z0-9_.-]"]),
    ],
)
def test_a_wrong_type_or_range_names_the_path_the_value_and_what_is_allowed(
    key: str, wrong: object, right: object, parts: list[str]
) -> None:
    line = refusal({}, [(key, wrong)])
    assert line.startswith(f"{key}: {wrong!r} is not valid: ")
    assert [part for part in parts if part not in line] == []
    load({}, [(key, right)])


@pytest.mark.parametrize("key", ["train.seed", "data.split_seed"])
def test_a_seed_has_32_bits_because_jax_takes_no_more(key: str) -> None:
    """jax.random.key(2**32) is jax.random.key(0) without x64, and 2**63 is an OverflowError inside the run."""
    assert load({}, [(key, 2**32 - 1)])
    assert refusal({}, [(key, 2**32)]).startswith(f"{key}: 4294967296 is not valid: ")


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_that_is_a_way_out_of_the_runs_folder_is_refused(name: str) -> None:
    assert load({}, [("name", f"a{name}b")])
    assert refusal({}, [("name", name)]).startswith(f"name: {name!r} is not valid: ")


@pytest.mark.parametrize(("index", "wrong"), [(0, [0, 8]), (1, [8, 1.5]), (1, [8, "x"])])
def test_a_wrong_element_of_a_list_is_named_by_its_place(index: int, wrong: list[Any]) -> None:
    assert refusal({}, [("model.hidden", wrong)]).startswith(f"model.hidden.{index}: {wrong[index]!r} is not valid: ")


@pytest.mark.parametrize("wrong", ["wide", None, {"a": 1}, 2.5])
def test_what_is_no_list_is_asked_to_be_a_list_and_not_a_python_tuple(wrong: object) -> None:
    line = refusal({}, [("model.hidden", wrong)])
    assert line.startswith("model.hidden")  # or .0, where a single value stands for a list of one
    assert f": {wrong!r} is not valid: " in line
    assert "tuple" not in line
    assert "list of int" in line


NUMBERS = [
    (section, kind, leaf, tools.type_name(info.annotation).startswith("list"))
    for section, kind, leaf, info in tools.fields()
    if {"int", "float"} & set(tools.type_name(info.annotation).split())
]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), True, False])
def test_no_number_may_be_nan_infinite_or_a_bool(bad: float | bool, tmp_path: Path) -> None:
    not_refused = []
    for section, kind, leaf, many in NUMBERS:
        key = f"{section}.{leaf}"
        overlays = [*of_kind(section, kind, tmp_path), (key, [bad, bad] if many else bad)]
        head = f"{key}.0: {bad!r} is not valid: " if many else f"{key}: {bad!r} is not valid: "
        try:
            load({}, overlays)
        except ConfigError as error:
            if not str(error).startswith(head) or len(str(error).splitlines()) != 1:
                not_refused.append(f"{kind} {key}: {error}")
        else:
            not_refused.append(f"{kind} {key}: taken")
    assert len(NUMBERS) > 60
    assert not_refused == []


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf"])
def test_nan_and_infinity_in_yaml_are_refused(text: str, tmp_path: Path) -> None:
    line = refusal(yaml_file(tmp_path, f"optimizer: {{peak_lr: {text}}}\n"))
    assert line.startswith("optimizer.peak_lr: ")
    assert "finite" in line
    assert load(yaml_file(tmp_path, "optimizer: {peak_lr: 0.5}\n")).optimizer.peak_lr == 0.5


# ---------------------------------------------------------------- sections and plain values


@pytest.mark.parametrize("value", [3, "adam", [1], True])
@pytest.mark.parametrize("section", tools.sections())
def test_a_section_given_a_plain_value_says_that_it_has_fields(section: str, value: object) -> None:
    in_dict = refusal({section: value})
    in_flag = refusal({}, [(section, value)])
    assert in_dict == f"{section}: {value!r} is no section; a mapping of fields is needed"
    assert in_flag.startswith(f"{section}: {value!r} is no section; set its fields, as in --{section}.")
    assert in_flag.endswith("=VALUE")


def test_a_flag_into_a_section_that_the_file_made_a_plain_value_says_what_is_wrong_there() -> None:
    """The key is known: what is wrong is `optimizer: adam` in the file below it."""
    line = refusal({"optimizer": "adam"}, [("optimizer.peak_lr", 1)])
    assert line.startswith("optimizer: 'adam' is no section; ")
    assert "unknown key" not in line


def test_a_plain_value_given_a_section_says_what_it_takes() -> None:
    assert refusal({"precision": {"kind": "fp32"}}) == (
        "precision: {'kind': 'fp32'} is not allowed; allowed: auto, fp32, bf16, fp16"
    )
    assert "precision" in refusal({}, [("precision.kind", "fp32")])
    assert refusal({"name": {"a": 1}}).startswith("name: {'a': 1} is not valid: ")


def test_a_flag_below_a_plain_value_names_it() -> None:
    assert refusal({"precision": "fp32"}, [("precision.kind", "x")]) == (
        "unknown key precision.kind: precision is a plain value, not a section"
    )


def test_a_flag_below_an_argument_that_is_a_plain_value_is_refused() -> None:
    own: Overlays = [("model.kind", "custom"), ("model.target", "net.py:Net"), ("model.args.a", 1)]
    load({}, own)
    assert "model.args.a" in refusal({}, [*own, ("model.args.a.b", 2)])


def test_arguments_of_an_own_model_must_be_values_that_a_file_can_hold() -> None:
    own: Overlays = [("model.kind", "custom"), ("model.target", "net.py:Net")]
    load({}, [*own, ("model.args.width", 3)])
    assert refusal({}, [*own, ("model.args.act", object)]).startswith("model.args")


# ---------------------------------------------------------------- what is missing


def test_a_missing_file_is_named_with_the_shipped_configs(tmp_path: Path) -> None:
    path = tmp_path / "nope.yaml"
    assert refusal(path).startswith(f"config {str(path)!r}: no such file; shipped configs: ")
    assert "digits" in refusal(path)
    path.write_text("name: there\n")
    assert load(path).name == "there"


def test_a_missing_shipped_name_gives_the_nearest_and_all() -> None:
    line = refusal("digitz")
    assert line.startswith("config 'digitz': no such file or shipped config; did you mean digits? allowed: ")
    assert refusal("qqq").startswith("config 'qqq': no such file or shipped config; allowed: ")
    assert load("digits").name == "digits"


@pytest.mark.parametrize("name", ["", "a\nb", "no/such"])
def test_a_strange_name_of_a_config_gives_one_line(name: str) -> None:
    assert refusal(name).startswith(f"config {name!r}: no such file")


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"config {str(tmp_path)!r}: no such file")


@pytest.mark.parametrize(
    ("section", "kind", "leaf"),
    [("data", "arrays", "path"), ("model", "custom", "target"), ("objective", "custom", "target")],
)
def test_a_needed_value_that_is_missing_says_what_it_is(section: str, kind: str, leaf: str, tmp_path: Path) -> None:
    cls = tools.variant(section, kind)
    assert cls is not None
    assert refusal({section: {"kind": kind}}) == (
        f"{section}.{leaf}: a value is needed: {cls.model_fields[leaf].description}"
    )
    load({}, of_kind(section, kind, tmp_path))


# ---------------------------------------------------------------- YAML

YAML: list[tuple[str | bytes, str, list[str]]] = [
    (
        "train: {seed: 1}\ntrain: {seed: 2}\n",
        "train: {seed: 1}\n",
        ["not valid YAML", "'train' stands twice", "line 2"],
    ),
    ("train:\n  seed: 1\n  seed: 2\n", "train:\n  seed: 1\n", ["not valid YAML", "'seed' stands twice", "line 3"]),
    ("train: {seed: 1, seed: 1}\n", "train: {seed: 1}\n", ["not valid YAML", "'seed' stands twice", "line 1"]),
    ("name: a\ntrain: {seed: 1\n", "name: a\ntrain: {seed: 1}\n", ["not valid YAML", "line 2", "expected"]),
    ("train:\n\tseed: 1\n", "train:\n  seed: 1\n", ["not valid YAML", "line 2", "'\\t'"]),
    ("train:\n  seed: 1\n name: a\n", "train:\n  seed: 1\nname: a\n", ["not valid YAML", "line 3"]),
    ("name: *a\n", "name: a\n", ["not valid YAML", "line 1", "undefined alias"]),
    ("name: !!python/name:os.system\n", "name: os.system\n", ["not valid YAML", "line 1", "constructor"]),
    ("---\nname: a\n---\nname: b\n", "---\nname: a\n", ["not valid YAML", "line 3", "single document"]),
    ("? [a, b]\n: 3\n", "name: a\n", ["not valid YAML", "line 1"]),
    ("train: {? {a: b} : 3}\n", "train: {seed: 3}\n", ["not valid YAML", "line 1"]),
    ("- a\n- b\n", "name: a\n", ["holds a list", "a mapping of sections is needed"]),
    ("only words\n", "name: words\n", ["holds a str", "a mapping of sections is needed"]),
    ("3\n", "name: a\n", ["holds a", "int", "a mapping of sections is needed"]),
    (b"name: \xff\xfe\n", "name: a\n", ["cannot be read", "utf-8", "0xff"]),
    (b"name: a\x00\n", "name: a\n", ["not valid YAML", "#x0000"]),
]


@pytest.mark.parametrize(("wrong", "right", "parts"), YAML)
def test_a_file_that_is_no_config_is_named_with_the_reason_and_the_line(
    wrong: str | bytes, right: str, parts: list[str], tmp_path: Path
) -> None:
    file = yaml_file(tmp_path, wrong)
    line = refusal(file)
    assert line.startswith(f"config {str(file)!r} ")
    assert [part for part in parts if part not in line] == []
    load(yaml_file(tmp_path, right))


def test_the_same_key_in_two_sections_is_no_double_key(tmp_path: Path) -> None:
    config = load(yaml_file(tmp_path, "evaluate: {every: 2ep}\nlog: {every: 3}\n"))
    assert (config.evaluate.every, config.log.every) == ("2ep", 3)


# ---------------------------------------------------------------- combinations that cannot work

COMBINATIONS: list[tuple[Overlays, Overlays, str]] = [
    (
        [("train.global_batch_size", 64), ("train.micro_batch_size", 7)],
        [("train.global_batch_size", 63), ("train.micro_batch_size", 7)],
        "train.micro_batch_size: 7 does not divide train.global_batch_size 64; allowed: 1, 2, 4, 8, 16, 32, 64",
    ),
    (
        [("train.global_batch_size", 4), ("train.micro_batch_size", 8)],
        [("train.global_batch_size", 8), ("train.micro_batch_size", 8)],
        "train.micro_batch_size: 8 does not divide train.global_batch_size 4; allowed: 1, 2, 4",
    ),
    (
        [("data.validation_fraction", 0.6), ("data.test_fraction", 0.4)],
        [("data.validation_fraction", 0.6), ("data.test_fraction", 0.39)],
        "data.validation_fraction + data.test_fraction = 1 leaves no rows to train on; allowed: a sum below 1",
    ),
    (
        [("mesh.data", 0)],
        [("mesh.data", 1)],
        "mesh.data: 0 is not allowed; allowed: -1 (all devices) or 1, 2, ...",
    ),
    (
        [("mesh.data", -2)],
        [("mesh.data", -1)],
        "mesh.data: -2 is not allowed; allowed: -1 (all devices) or 1, 2, ...",
    ),
    (
        [("schedule.kind", "piecewise"), ("schedule.factors", [0.1])],
        [("schedule.kind", "piecewise"), ("schedule.factors", [0.1]), ("schedule.boundaries", ["50%"])],
        "schedule.factors: 1 values for 2 boundaries; one factor for each boundary is needed",
    ),
    (
        [("objective.focal_gamma", 2.0), ("objective.label_smoothing", 0.1)],
        [("objective.focal_gamma", 2.0), ("objective.label_smoothing", 0.0)],
        "objective.focal_gamma 2 with objective.label_smoothing 0.1: focal loss is defined for hard targets; "
        "set one of them to 0",
    ),
    (
        [("model.kind", "resnet"), ("model.depth", 32), ("model.norm", "none")],
        [("model.kind", "resnet"), ("model.depth", 20), ("model.norm", "none")],
        "model.norm=none with model.depth=32: a residual net this deep does not train without normalisation; "
        "allowed: batch, group, layer, or a depth up to 20",
    ),
]


@pytest.mark.parametrize(("wrong", "right", "line"), COMBINATIONS)
def test_fields_that_cannot_go_together_are_named_with_what_can(wrong: Overlays, right: Overlays, line: str) -> None:
    assert refusal({}, wrong) == line
    load({}, right)


@pytest.mark.parametrize(("field", "value"), [("flip", True), ("shift", 1)])
def test_moving_pixels_and_a_scale_for_each_pixel_exclude_each_other(field: str, value: int) -> None:
    load({}, [(f"augment.{field}", value), ("data.normalize", "channel")])
    load({}, [("data.normalize", "feature")])
    line = refusal({}, [(f"augment.{field}", value), ("data.normalize", "feature")])
    assert line.startswith(f"augment.{field}")
    assert "data.normalize=feature: pixels would change places with their scale" in line


@pytest.mark.parametrize(("field", "value"), [("flip", True), ("shift", 1)])
def test_moving_pixels_and_a_scale_for_each_pixel_say_what_to_do(field: str, value: int) -> None:
    line = refusal({}, [(f"augment.{field}", value), ("data.normalize", "feature")])
    assert line.startswith(f"augment.{field}={value} ")
    assert line.endswith("; allowed: data.normalize channel or none")


def test_inputs_in_an_npy_file_need_their_targets(tmp_path: Path) -> None:
    inputs, targets = tmp_path / "x.npy", tmp_path / "y.npy"
    inputs.touch()
    targets.touch()
    arrays: Overlays = [("data.kind", "arrays"), ("data.path", str(inputs))]
    load({}, [*arrays, ("data.targets_path", str(targets))])
    assert refusal({}, arrays).startswith("data.targets_path: a value is needed")


def test_a_large_batch_is_refused_as_quickly_as_a_small_one() -> None:
    """The divisors are found by trying up to the root of the batch, not every number up to it."""
    batch = 2**23
    began = time.perf_counter()
    line = refusal({}, [("train.global_batch_size", batch), ("train.micro_batch_size", 3)])
    seconds = time.perf_counter() - began
    allowed = ", ".join(str(2**power) for power in range(24))
    assert line == f"train.micro_batch_size: 3 does not divide train.global_batch_size {batch}; allowed: {allowed}"
    assert seconds < 0.1


def test_combinations_are_looked_at_after_all_layers_are_laid() -> None:
    file = {"train": {"global_batch_size": 64, "micro_batch_size": 7}}
    refusal(file)
    assert load(file, [("train.micro_batch_size", 8)]).train.micro_batch_size == 8


# ---------------------------------------------------------------- the errors themselves


def test_load_with_notes_refuses_as_load_does() -> None:
    with pytest.raises(ConfigError) as refused:
        load_with_notes({}, [("train.sede", 1)])
    assert str(refused.value) == refusal({}, [("train.sede", 1)])


def test_the_traceback_of_pydantic_is_not_chained() -> None:
    with pytest.raises(ConfigError) as refused:
        load({}, [("train.sede", 1)])
    assert refused.value.__suppress_context__
    assert refused.value.__cause__ is None


def test_exit_codes_are_the_contract() -> None:
    assert (UserError.exit_code, ConfigError.exit_code, NeedsPerson.exit_code) == (1, 2, 78)
    assert issubclass(ConfigError, UserError)
    assert issubclass(NeedsPerson, UserError)


def test_the_nearest_name_is_near_or_none() -> None:
    allowed = ["sgd", "adam", "adamw"]
    assert nearest("adm", allowed) == "adam"
    assert nearest("adamw", allowed) == "adamw"
    assert nearest("zzz", allowed) is None
    assert nearest("adam", []) is None
    assert choices("adm", allowed) == "did you mean adam? allowed: sgd, adam, adamw"
    assert choices("zzz", iter(allowed)) == "allowed: sgd, adam, adamw"
