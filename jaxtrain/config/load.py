"""YAML + overlays -> one validated RunConfig.

A config is a plain dict until every layer lies on it (file, then flags or keyword arguments, in order); it is
validated once. Errors are one line each: what, which value, what is allowed, the nearest name.
"""

from __future__ import annotations

import copy
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
USUAL_NAMES = {  # what other toolkits call it
    "lr": "optimizer.peak_lr",
    "learning_rate": "optimizer.peak_lr",
    "epochs": "train.duration",
    "steps": "train.duration",
    "batch_size": "train.global_batch_size",
    "warmup": "schedule.warmup",
}


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
        tree = _set_values(config)
    elif isinstance(config, Mapping):
        tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
        tree = copy.deepcopy(tree)  # flags may reach below the sections, and the dict is the caller's
    else:
        tree = read_yaml(find(config))
    for section in tools.sections():  # `train:` with all its lines commented out
        if section in tree and tree[section] is None:
            tree[section] = {}
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


def _set_values(config: RunConfig) -> dict[str, Any]:
    """What was set in `config`, and each kind: a default must not outlive its variant when the kind changes."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    for section in tools.sections():
        if kind := getattr(getattr(config, section), "kind", None):
            tree.setdefault(section, {})["kind"] = kind
    return tree


def dump(config: RunConfig) -> str:
    """YAML that loads back equal, fields in the order of the schema."""
    tree = config.model_dump(mode="json")
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


def parse_value(text: str) -> Any:
    """The value of a flag, read as YAML: 3, 1e-3, true, [64, 64], null, "20ep"."""
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) else value


def _resolvers(old: dict[str, Any]) -> dict[str, Any]:
    """Plain words as YAML 1.2 reads them: 1e-3 is a number; 1:30 and 2024-01-31 are words."""
    retold = {"tag:yaml.org,2002:" + name for name in ("float", "int", "timestamp")}
    new = {first: [(tag, exp) for tag, exp in pairs if tag not in retold] for first, pairs in old.items()}
    numbers = {
        "float": r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*([eE][-+]?\d+)?"
        r"|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$",
        "int": r"[-+]?(0b[01_]+|0x[\da-fA-F_]+|0|[1-9][\d_]*)$",
    }
    for name, pattern in numbers.items():
        for first in "-+0123456789.":
            new.setdefault(first, []).append(("tag:yaml.org,2002:" + name, re.compile(pattern)))
    return new


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would not read as a word."""

    yaml_implicit_resolvers = _resolvers(yaml.SafeDumper.yaml_implicit_resolvers)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers, and no key twice in one mapping; the plain loader keeps the last, silently."""

    yaml_implicit_resolvers = _resolvers(yaml.SafeLoader.yaml_implicit_resolvers)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key must be a word (line {key.start_mark.line + 1})")
            if key.value in seen:
                raise yaml.YAMLError(f"key {key.value!r} stands twice (line {key.start_mark.line + 1})")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError with the line when it cannot be read."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
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
        if section in tools.sections():
            raise ConfigError(f"{section}: {part!r} is no section; a mapping of fields is needed")
        raise ConfigError(f"unknown key {_word(dotted)}: {section} is a plain value, not a section")
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
        for depth, key in enumerate(rest[:-1], 1):
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                above = ".".join([section, name, *rest[:depth]])
                raise ConfigError(f"unknown key {_word(dotted)}: {above} is a plain value ({inner!r}), not a section")
        inner[rest[-1]] = value
    else:
        part[name] = value
    return notes


def _one_line(error: ValidationError) -> str:
    errors = error.errors(include_url=False)
    # A key that is unknown explains more than the type errors beside it.
    first = min(errors, key=lambda e: e["type"] != "extra_forbidden")
    others = {_place(e) for e in errors} - {_place(first)}  # the branches of a union are one place
    more = f" (and {len(others)} more)" if others else ""
    return _explain(first) + more


def _place(error: Any) -> tuple[Any, ...]:
    loc = error["loc"]
    return tuple(loc[:3] if len(tools.sections().get(str(loc[0]), [])) > 1 else loc[:2])


def _explain(error: Any) -> str:
    loc = [str(part) for part in error["loc"]]
    section, kind = loc[0] if loc else "", None
    if len(loc) > 1 and len(tools.sections().get(section, [])) > 1:
        kind = loc.pop(1)  # the tag of the union, which the user never wrote
    path = _word(".".join(part for part in loc if not part.startswith("function-") and "[" not in part))
    value = error.get("input")
    match error["type"]:
        case "invalid_key" if kind or len(loc) < 3:  # 3 or True where a name is wanted
            return _unknown_key(section, kind, [*loc[:-1], str(value)])
        case "tuple_type" if path == "objective.class_weights" and isinstance(value, str):
            return f"{path}: {value!r} is not allowed; {choices(value, ('none', 'balanced'))}, or a list of numbers"
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
    usual = USUAL_NAMES.get(loc[-1])
    if len(loc) == 1:
        top = list(RunConfig.model_fields)
        every = tools.dotted_keys()
        close = nearest(path, top) or nearest(path, [key.rpartition(".")[2] for key in every])
        full = next((key for key in every if close and key.rpartition(".")[2] == close), close)
        hint = f"did you mean {usual or (close if close in top else full)}? " if usual or close else ""
        return f"unknown key {_word(path)}; {hint}allowed: {', '.join(top)}"
    cls = tools.variant(section, kind)
    names = list(cls.model_fields) if cls else []
    close = nearest(loc[-1], names)
    where = f"{section} (kind {kind})" if kind else section
    owners = [tools.kind_of(cls) for cls in tools.sections().get(section, []) if loc[-1] in cls.model_fields]
    if len(loc) == 2 and kind and owners:
        hint = f"only kind {', '.join(map(str, owners))} has it; "
    elif usual:
        hint = f"did you mean {usual}? "
    elif close:
        hint = f"did you mean {section}.{close}? "
    else:
        other = nearest(path, tools.dotted_keys())
        hint = f"did you mean {other}? " if other and other.partition(".")[0] != section else ""
    return f"unknown key {_word(path)}; {hint}allowed in {where}: {', '.join(names)}"


def _word(path: str) -> str:
    """A path as it was written, or quoted when it would break the line."""
    return path if path.isprintable() else repr(path)
