"""YAML + overlays -> one validated RunConfig.

A config is a plain dict until every layer lies on it (file, then flags or keyword arguments, in order); it is
validated once. Errors are one line each: what, which value, what is allowed, the nearest name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from jaxtrain.config import schema_tools as tools
from jaxtrain.config.checks import check
from jaxtrain.config.errors import ConfigError, choices, nearest
from jaxtrain.config.schema import RunConfig

Overlay = tuple[str, Any]


def shipped() -> dict[str, Path]:
    """Configs by name: inside the wheel, or beside the package in a checkout."""
    here = Path(__file__).resolve().parent.parent
    for folder in (here / "configs", here.parent / "configs"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def find(config: str | Path) -> Path:
    """The file that a path or a shipped name stands for. Raises ConfigError, naming the nearest."""
    path = Path(config)
    if path.is_file():
        return path
    known = shipped()
    if str(config) in known:
        return known[str(config)]
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise ConfigError(f"config {str(path)!r}: no such file; shipped configs: {', '.join(known)}")
    raise ConfigError(f"config {str(config)!r}: no such file or shipped config; {choices(str(config), known)}")


def load(config: str | Path | Mapping[str, Any] | RunConfig, overlays: Iterable[Overlay] = ()) -> RunConfig:
    """Read `config` (path, shipped name, dict or RunConfig), lay `overlays` over it, validate once."""
    return load_with_notes(config, overlays)[0]


def load_with_notes(
    config: str | Path | Mapping[str, Any] | RunConfig, overlays: Iterable[Overlay] = ()
) -> tuple[RunConfig, list[str]]:
    """As `load`, and a line for each key of a lower layer that a new `kind` does not have."""
    if isinstance(config, RunConfig):
        tree: dict[str, Any] = config.model_dump(mode="json")
    elif isinstance(config, Mapping):
        tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    else:
        tree = read_yaml(find(config))
    notes: list[str] = []
    for key, value in overlays:
        notes += _set(tree, key, value)
    for section in tools.sections():
        part = tree.get(section)
        if isinstance(part, dict) and "kind" not in part and tools.default_kind(section):
            part["kind"] = tools.default_kind(section)
    try:
        parsed = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None
    check(parsed)
    return parsed, notes


def dump(config: RunConfig) -> str:
    """YAML that loads back equal, fields in the order of the schema."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=100)


def parse_value(text: str) -> Any:
    """The value of a flag, read as YAML: 3, 1e-3, true, [64, 64], null, "20ep"."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:  # YAML 1.1 takes 1e-3 for a word
            return float(value) if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value) else value
        except ValueError:
            return value
    return text if isinstance(value, dict) else value


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice in one mapping; the plain loader keeps the last, silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.YAMLError(f"key {key.value!r} stands twice (line {key.start_mark.line + 1})")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError with the line when it cannot be read."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config {str(path)!r} is not valid YAML: {reason}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config {str(path)!r} holds a {type(tree).__name__}; a mapping of sections is needed")
    return tree


def _set(tree: dict[str, Any], dotted: str, value: Any) -> list[str]:
    """Lay one value over the tree; a changed `kind` drops what the new variant does not know."""
    section, _, leaf = dotted.partition(".")
    if not leaf:
        if section in tools.sections() and not isinstance(value, Mapping):
            example = next(key for key in tools.dotted_keys() if key.startswith(section + "."))
            raise ConfigError(f"{section}: {value!r} is no section; set its fields, as in --{example}=VALUE")
        tree[section] = dict(value) if isinstance(value, Mapping) else value
        return []
    part = tree.setdefault(section, {})
    if not isinstance(part, dict):
        raise ConfigError(f"unknown key {dotted}: {section} is a plain value, not a section")
    notes: list[str] = []
    if leaf == "kind" and value != part.get("kind", tools.default_kind(section)):
        new = tools.variant(section, value)
        dropped = [key for key in part if new and key != "kind" and key not in new.model_fields]
        for key in dropped:
            del part[key]
        notes = [f"{section}.kind={value}: {section}.{key} dropped, {value} has none" for key in dropped]
    name, *rest = leaf.split(".")
    if rest:  # below a field of its own mapping, as in model.args.width
        inner = part.get(name)
        part[name] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        for key in rest[:-1]:
            inner = inner.setdefault(key, {})
        inner[rest[-1]] = value
    else:
        part[name] = value
    return notes


def _one_line(error: ValidationError) -> str:
    errors = error.errors(include_url=False)
    # A key that is unknown explains more than the type errors beside it.
    first = min(errors, key=lambda e: e["type"] != "extra_forbidden")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return _explain(first) + more


def _explain(error: Any) -> str:
    loc = [str(part) for part in error["loc"]]
    section, kind = loc[0] if loc else "", None
    if len(loc) > 1 and len(tools.sections().get(section, [])) > 1:
        kind = loc.pop(1)  # the tag of the union, which the user never wrote
    path = ".".join(part for part in loc if not part.startswith("function-") and "[" not in part)
    value = error.get("input")
    match error["type"]:
        case "extra_forbidden":
            return _unknown_key(section, kind, loc)
        case "union_tag_invalid":
            tags = [str(tools.kind_of(cls)) for cls in tools.sections()[section]]
            tag = error["ctx"]["tag"]
            return f"{section}.kind: {tag!r} is not allowed; {choices(tag, tags)}"
        case "literal_error":
            allowed = re.findall(r"'([^']+)'|(\d+)", error["ctx"]["expected"])
            return f"{path}: {value!r} is not allowed; {choices(str(value), [a or b for a, b in allowed])}"
        case "missing":
            cls = tools.variant(section, kind)
            about = cls.model_fields[loc[-1]].description if cls and loc[-1] in cls.model_fields else ""
            return f"{path}: a value is needed: {about}"
        case "model_type" | "model_attributes_type":
            return f"{path}: {value!r} is no section; a mapping of fields is needed"
    reason = error["msg"].removeprefix("Value error, ")
    cls = tools.variant(section, kind)
    wanted = cls.model_fields[loc[1]] if cls and len(loc) > 1 and loc[1] in cls.model_fields else None
    expected = f" (a field of type {tools.type_name(wanted.annotation)})" if wanted else ""
    return f"{path}: {value!r} is not valid: {reason[0].lower() + reason[1:]}{expected}"


def _unknown_key(section: str, kind: str | None, loc: list[str]) -> str:
    path = ".".join(loc)
    if len(loc) == 1:
        top = list(RunConfig.model_fields)
        every = tools.dotted_keys()
        close = nearest(path, top) or nearest(path, [key.rpartition(".")[2] for key in every])
        full = next((key for key in every if close and key.rpartition(".")[2] == close), close)
        hint = f"did you mean {close if close in top else full}? " if close else ""
        return f"unknown key {path}; {hint}allowed: {', '.join(top)}"
    cls = tools.variant(section, kind)
    names = list(cls.model_fields) if cls else []
    close = nearest(loc[-1], names)
    where = f"{section} (kind {kind})" if kind else section
    if close:
        hint = f"did you mean {section}.{close}? "
    else:
        other = nearest(path, tools.dotted_keys())
        hint = f"did you mean {other}? " if other and other.partition(".")[0] != section else ""
    return f"unknown key {path}; {hint}allowed in {where}: {', '.join(names)}"
