"""Change one value in the text of a config file; comments, order and all other bytes stay."""

from __future__ import annotations

from typing import Any

import yaml

from jaxtrain.config.errors import ConfigError


def changed(text: str, key: str, value: float | int | str | None) -> str:
    """`text` (YAML, a mapping) with `section.key` set to `value`. Raises ConfigError for a text of another form."""
    section, _, leaf = key.partition(".")
    written = yaml.safe_dump(value).splitlines()[0]
    root = yaml.compose(text)
    if root is None:
        return f"{text}{section}: {{{leaf}: {written}}}\n"
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("a config is a mapping of sections to their keys")
    node = _value(root, section)
    if node is None:
        end = "" if text.endswith("\n") else "\n"
        return f"{text}{end}{section}: {{{leaf}: {written}}}\n"
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{section}: a mapping of its keys is expected, and the file has {node.value!r}")
    old = _value(node, leaf)
    if old is not None:
        return text[: old.start_mark.index] + written + text[old.end_mark.index :]
    if node.flow_style:
        place = node.start_mark.index + 1
        return f"{text[:place]}{leaf}: {written}{', ' if node.value else ''}{text[place:]}"
    place = node.start_mark.index
    return f"{text[:place]}{leaf}: {written}\n{' ' * node.start_mark.column}{text[place:]}"


def _value(node: yaml.MappingNode, key: str) -> Any:
    return next((value for name, value in node.value if name.value == key), None)
