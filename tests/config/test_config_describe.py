"""Words about the schema: nothing is left out, wrong names give the near one, editors get JSON Schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxtrain.config import ConfigError, RunConfig, load
from jaxtrain.config import schema_tools as tools
from jaxtrain.config.describe import describe, schema_json

SECTIONS = ", ".join(RunConfig.model_fields)
FIELDS = list(tools.fields())
IDS = [".".join(part for part in (section, kind, leaf) if part) for section, kind, leaf, _ in FIELDS]


def shown(value: Any) -> str:
    """A default as `describe` writes it."""
    return "none" if value is None else str(list(value)) if isinstance(value, tuple) else str(value)


def test_every_field_has_a_description_of_one_line() -> None:
    texts = {
        name: info.description or "" for name, (_, _, leaf, info) in zip(IDS, FIELDS, strict=True) if leaf != "kind"
    }
    assert len(texts) > 100
    assert [name for name, text in texts.items() if not text or text != text.strip() or "\n" in text] == []


def test_every_section_has_a_description() -> None:
    assert [name for name, info in RunConfig.model_fields.items() if not info.description] == []


@pytest.mark.parametrize(("section", "kind", "leaf", "info"), FIELDS, ids=IDS)
def test_describe_names_each_field_with_its_type_default_and_description(
    section: str, kind: str | None, leaf: str, info: Any
) -> None:
    if not section:
        assert describe(leaf) == (f"{leaf}: {tools.type_name(info.annotation)} = {info.default}\n  {info.description}")
        return
    if leaf == "kind":
        assert f"{section}.kind = {kind}" in describe(section)
        return
    value = "needed" if info.is_required() else f"= {shown(info.default)}"
    block = f"  {leaf}: {tools.type_name(info.annotation)} {value}\n      {info.description}"
    for text in (describe(section), describe(f"{section}.{kind}" if kind else section)):
        assert block in text


@pytest.mark.parametrize("section", tools.sections())
def test_describe_of_a_section_shows_all_variants_and_of_a_variant_only_that_one(section: str) -> None:
    kinds = [tools.kind_of(cls) for cls in tools.sections()[section]]
    heads = [line for line in describe(section).splitlines() if line and not line.startswith(" ")]
    if kinds == [None]:
        assert heads == [section]
        return
    default = tools.default_kind(section)
    assert heads == [f"{section}.kind = {k}" + (" (default)" if k == default else "") for k in kinds]
    for kind in kinds:
        assert describe(section).split("\n\n").count(describe(f"{section}.{kind}")) == 1


def test_describe_of_sgd_in_full() -> None:
    assert describe("optimizer.sgd") == (
        "optimizer.kind = sgd\n"
        "  peak_lr: float = 0.1\n"
        "      the highest learning rate of the schedule\n"
        "  clip_norm: float = 1.0\n"
        "      gradients are scaled down to this global norm; 0 = never\n"
        "  offload: none | host = none\n"
        "      host: moments live in the host's memory, not in the GPU's\n"
        "  weight_decay: float = 0.0\n"
        "      L2 term added to the gradient; not on biases, norms, embeddings"
    )


def test_describe_without_a_name_lists_every_section_with_its_description() -> None:
    lines = describe().splitlines()
    for name, info in RunConfig.model_fields.items():
        assert f"{name:<16} {info.description}" in lines
    assert lines[-1] == "jaxtrain config describe SECTION shows the fields of one."


def test_a_needed_field_says_so_and_has_no_default() -> None:
    assert "  path: str needed\n" in describe("data.arrays")
    assert "  targets_path: str or none = none\n" in describe("data.arrays")


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("optimiser", f"section 'optimiser' does not exist; did you mean optimizer? allowed: {SECTIONS}"),
        ("trian", f"section 'trian' does not exist; did you mean train? allowed: {SECTIONS}"),
        ("zzz", f"section 'zzz' does not exist; allowed: {SECTIONS}"),
        ("", f"section '' does not exist; allowed: {SECTIONS}"),
        ("a\nb", f"section 'a\\nb' does not exist; allowed: {SECTIONS}"),
        (
            "data.digit",
            "data.kind: 'digit' is not allowed; did you mean digits? allowed: digits, arrays, mnist, images, text, "
            "pystdlib",
        ),
        ("data.zzz", "data.kind: 'zzz' is not allowed; allowed: digits, arrays, mnist, images, text, pystdlib"),
    ],
)
def test_a_wrong_name_gives_one_line_with_the_near_one_and_all_allowed(wrong: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        describe(wrong)
    assert str(refused.value) == line
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("name", ["train.seed", "train.micro_batch_size", "optimizer.peak_lr", "checkpoint.every"])
def test_describe_of_a_key_as_it_stands_in_a_flag_shows_that_field(name: str) -> None:
    """`config describe train.seed` is the natural question; "train.kind: 'seed' is not allowed" is no answer."""
    section, leaf = name.split(".")
    info = next(info for s, _, field, info in tools.fields() if (s, field) == (section, leaf))
    try:
        text = describe(name)
    except ConfigError as error:
        pytest.fail(f"describe({name!r}): {error}", pytrace=False)
    assert leaf in text
    assert info.description in text
    assert "clip_norm" not in text
    assert "overfit_batches" not in text


def test_a_misspelt_key_of_a_plain_section_gives_its_near_fields_and_no_kinds() -> None:
    with pytest.raises(ConfigError) as refused:
        describe("train.seeed")
    line = str(refused.value)
    assert "did you mean" in line
    assert "train.kind" not in line
    assert "None" not in line


# ---------------------------------------------------------------- JSON Schema


def test_schema_json_is_an_object_schema_of_all_sections_that_forbids_others() -> None:
    schema = json.loads(schema_json())
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert list(schema["properties"]) == list(RunConfig.model_fields)
    for name, info in RunConfig.model_fields.items():
        assert schema["properties"][name]["description"] == info.description


def test_schema_json_has_every_variant_with_every_field_its_description_and_its_kind() -> None:
    definitions = json.loads(schema_json())["$defs"]
    for classes in tools.sections().values():
        for cls in classes:
            found = definitions[cls.__name__]
            assert found["additionalProperties"] is False
            assert list(found["properties"]) == list(cls.model_fields)
            for leaf, info in cls.model_fields.items():
                if leaf == "kind":
                    assert found["properties"]["kind"]["const"] == tools.kind_of(cls)
                else:
                    assert found["properties"][leaf]["description"] == info.description


def test_schema_json_points_only_at_what_it_defines() -> None:
    schema = json.loads(schema_json())

    def references(node: object) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [ref for child in node.values() for ref in references(child)]
        return [ref for child in node for ref in references(child)] if isinstance(node, list) else []

    assert {ref.removeprefix("#/$defs/") for ref in references(schema)} == set(schema["$defs"])


def test_schema_json_names_the_choices_of_a_literal() -> None:
    schema = json.loads(schema_json())
    assert schema["properties"]["precision"]["enum"] == ["auto", "fp32", "bf16", "fp16"]


# ---------------------------------------------------------------- the tools behind them


def test_dotted_keys_are_each_there_once_and_hold_the_names_of_the_contract() -> None:
    keys = tools.dotted_keys()
    assert len(keys) == len(set(keys))
    contract = (
        "train.duration train.seed train.global_batch_size train.micro_batch_size precision optimizer.kind "
        "optimizer.peak_lr schedule.kind schedule.warmup mesh.data checkpoint.every checkpoint.keep_last "
        "checkpoint.keep_best evaluate.every evaluate.metric evaluate.mode log.every data.kind data.path model.kind"
    )
    assert [key for key in contract.split() if key not in keys] == []


def test_no_two_variants_of_a_section_answer_to_one_kind_and_the_default_is_one_of_them() -> None:
    for section, classes in tools.sections().items():
        kinds = [tools.kind_of(cls) for cls in classes]
        assert len(kinds) == len(set(kinds))
        assert tools.default_kind(section) in kinds
        assert [tools.variant(section, kind) for kind in kinds] == classes
    assert tools.variant("optimizer", "none of them") is None


def test_the_default_of_a_section_is_what_an_empty_config_gets() -> None:
    config = load({})
    for section in tools.sections():
        assert getattr(config, section) == RunConfig.model_fields[section].default
