"""From a config to its dataset: rows or text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtrain.config import RunConfig
from jaxtrain.config.errors import ConfigError
from jaxtrain.config.schema import Arrays, Text
from jaxtrain.data.dataset import Dataset, make_rows, rows_of_schema
from jaxtrain.data.images import ImageForm
from jaxtrain.data.schema import Schema
from jaxtrain.data.sources import SOURCES, Source, image_source
from jaxtrain.data.text import DOCUMENTS, TextDataset, make_text, text_of_schema
from jaxtrain.data.tokens import from_json

Data = Dataset | TextDataset


def make_dataset(config: RunConfig, source: Source | None = None) -> Data:
    """Load, encode, split, normalise. `source` replaces the one that the config names (a user's own arrays)."""
    if source is not None:
        return make_rows(config, source)
    if config.data.kind in DOCUMENTS:
        return make_text(config)
    if isinstance(config.data, Arrays):
        _check_files(config.data)
    return make_rows(config, SOURCES[config.data.kind](config.data))


def _check_files(data: Arrays) -> None:
    for key, value in (("data.path", data.path), ("data.targets_path", data.targets_path)):
        if value is not None and not Path(value).is_file():
            raise ConfigError(f"{key}: {value!r}: no such file (looked in {Path(value).absolute().parent})")


def other_data(path: Path, own: Any, schema: Schema) -> Data:
    """What is at `path`, as the test split of a model that was trained with `schema`; `own`: its config of data.

    Text for a model of tokens; else an .npz of inputs and targets, a folder of pictures (class folders), or what the
    model was trained on, elsewhere. Raises ConfigError.
    """
    if schema.tokenizer is not None:
        kept = {key: getattr(own, key) for key in ("pattern", "encoding", "decode_errors") if hasattr(own, key)}
        return text_of_schema(Text(path=str(path), **kept), schema, from_json(schema.tokenizer))
    return rows_of_schema(_other_source(path, own, schema), schema)


def _other_source(path: Path, own: Any, schema: Schema) -> Source:
    if path.suffix == ".npz":
        return SOURCES["arrays"](Arrays(path=str(path)))
    if not hasattr(own, "path") or isinstance(own, Arrays):
        if schema.image is None or not path.is_dir():
            pictures = ", or a folder with a folder of pictures a class" if schema.image else ""
            raise ConfigError(
                f"{str(path)!r} is nothing to evaluate; allowed: an .npz with inputs and targets{pictures}"
            )
        return image_source(path, ImageForm.from_json(schema.image))
    return SOURCES[own.kind](own.model_copy(update={"path": str(path)}))
