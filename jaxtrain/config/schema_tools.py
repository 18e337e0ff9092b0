"""Walk the schema: sections, variants and fields by dotted path. Feeds errors, `describe`, completion, tests."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jaxtrain.config.schema import RunConfig


def variants(annotation: Any) -> list[type[BaseModel]]:
    """The section classes that an annotation allows: one for a plain section, several for a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin in (Annotated, Union, types.UnionType):
        parts = typing.get_args(annotation)
        parts = parts[:1] if origin is Annotated else parts
        return [cls for part in parts for cls in variants(part)]
    return []


def kind_of(section: type[BaseModel]) -> str | None:
    """The `kind` that a variant answers to; None for a plain section."""
    return section.model_fields["kind"].default if "kind" in section.model_fields else None


def sections() -> dict[str, list[type[BaseModel]]]:
    """Section name -> its variants, in the order of RunConfig."""
    found = {name: variants(field.annotation) for name, field in RunConfig.model_fields.items()}
    return {name: classes for name, classes in found.items() if classes}


def variant(section: str, kind: str | None) -> type[BaseModel] | None:
    """The class behind `section` for `kind`, or None."""
    for cls in sections().get(section, []):
        if kind_of(cls) == kind:
            return cls
    return None


def default_kind(section: str) -> str | None:
    """The kind a section has when a config does not name one."""
    field = RunConfig.model_fields.get(section)
    return getattr(field.default, "kind", None) if field else None


def fields() -> Iterator[tuple[str, str | None, str, FieldInfo]]:
    """Every leaf of the schema as (section or "", kind, field name, its info)."""
    for name, field in RunConfig.model_fields.items():
        classes = variants(field.annotation)
        if not classes:
            yield "", None, name, field
        for cls in classes:
            for leaf, info in cls.model_fields.items():
                yield name, kind_of(cls), leaf, info


def dotted_keys() -> list[str]:
    """Every key that a flag may name, once each."""
    keys = (f"{section}.{leaf}" if section else leaf for section, _, leaf, _ in fields())
    return list(dict.fromkeys(keys))


def type_name(annotation: Any) -> str:
    """An annotation as a user reads it: `int`, `relu | gelu`, `list of int`, `float or none`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(str(a) for a in args)
    if origin is Annotated:
        return type_name(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(a) for a in args))
    if origin is tuple:
        return f"list of {type_name(args[0])}"
    if annotation is type(None):
        return "none"
    return getattr(origin or annotation, "__name__", str(annotation))
