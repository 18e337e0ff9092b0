"""Words about the schema: `config describe SECTION`, `config schema`."""

from __future__ import annotations

import json

from jaxtrain.config import schema_tools as tools
from jaxtrain.config.errors import ConfigError, choices
from jaxtrain.config.schema import RunConfig


def schema_json() -> str:
    """JSON Schema of a config file, for editors."""
    return json.dumps(RunConfig.model_json_schema(), indent=2)


def describe(name: str | None = None) -> str:
    """Fields, types, defaults and descriptions of a section (`optimizer`) or a variant (`optimizer.sgd`)."""
    known = tools.sections()
    plain = [n for n in RunConfig.model_fields if n not in known]
    if name is None:
        lines = [f"{n:<16} {RunConfig.model_fields[n].description}" for n in RunConfig.model_fields]
        return "\n".join([*lines, "", "jaxtrain config describe SECTION shows the fields of one."])
    section, _, kind = name.partition(".")
    if section in plain:
        info = RunConfig.model_fields[section]
        return f"{section}: {tools.type_name(info.annotation)} = {info.default}\n  {info.description}"
    if section not in known:
        raise ConfigError(f"section {section!r} does not exist; {choices(section, RunConfig.model_fields)}")
    classes = known[section]
    only = None
    if kind:
        kinds = [str(tools.kind_of(cls)) for cls in classes if tools.kind_of(cls)]
        leaves = dict.fromkeys(leaf for cls in classes for leaf in cls.model_fields if leaf != "kind")
        if kind in kinds:
            classes = [cls for cls in classes if tools.kind_of(cls) == kind]
        elif kind in leaves:  # a key, as in a flag: that field of every variant that has it
            only, classes = kind, [cls for cls in classes if kind in cls.model_fields]
        elif kinds:
            raise ConfigError(f"{section}.kind: {kind!r} is not allowed; {choices(kind, kinds)}")
        else:
            raise ConfigError(f"unknown key {name}; {choices(kind, leaves)}")
    blocks = []
    for cls in classes:
        own = tools.kind_of(cls)
        default = " (default)" if own and own == tools.default_kind(section) else ""
        lines = [f"{section}.kind = {own}{default}" if own else section]
        for leaf, info in cls.model_fields.items():
            if leaf == "kind" or only not in (None, leaf):
                continue
            value = "needed" if info.is_required() else f"= {_plain(info.default)}"
            lines.append(f"  {leaf}: {tools.type_name(info.annotation)} {value}")
            lines.append(f"      {info.description}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else "none" if value is None else str(value)
