"""Sources, texts and configs of the tests of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxtrain.config import RunConfig, load
from jaxtrain.data.dataset import Dataset
from jaxtrain.data.make import make_dataset
from jaxtrain.data.sources import ArraySource
from jaxtrain.data.text import TextDataset
from jaxtrain.data.tokens import from_json


def config_of(**overrides: Any) -> RunConfig:
    """The default config; `data__normalize="none"` is data.normalize=none."""
    return load({}, [(key.replace("__", "."), value) for key, value in overrides.items()])


def source_of(targets: Any, inputs: Any = None, **more: Any) -> ArraySource:
    """Rows whose first input is their number, unless `inputs` are given."""
    targets = np.asarray(targets)
    if inputs is None:
        inputs = np.stack([np.arange(len(targets)), np.arange(len(targets)) ** 2 % 7], 1).astype(np.float32)
    return ArraySource("made", np.asarray(inputs), targets, **more)


def dataset_of(
    targets: Any, inputs: Any = None, *, split: Any = None, weights: Any = None, **overrides: Any
) -> Dataset:
    split = None if split is None else np.asarray(split, np.int8)
    return make_dataset(config_of(**overrides), source_of(targets, inputs, split=split, weights=weights))


def text_of(path: Path, blocks: int = 8, parts: tuple[float, float] = (0.1, 0.1), **overrides: Any) -> TextDataset:
    """The text at `path`: `blocks` is data.block_size, `parts` the fractions of validation and test.

    A key without "__" is one of `data`.
    """
    data = {"kind": "text", "path": str(path), "block_size": blocks}
    data |= {"validation_fraction": parts[0], "test_fraction": parts[1]}
    data |= {key: value for key, value in overrides.items() if "__" not in key}
    more = [(key.replace("__", "."), value) for key, value in overrides.items() if "__" in key]
    dataset = make_dataset(load({"data": data}, more))
    assert isinstance(dataset, TextDataset)
    return dataset


def written(dataset: TextDataset, split: str) -> str:
    """A split of text, in words again."""
    assert dataset.schema.tokenizer is not None
    return from_json(dataset.schema.tokenizer).decode(dataset.tokens[split])


MERGES = [("t", "h"), ("th", "e"), ("\u0120", "the")]  # U+0120 is how a blank is written at the byte level


def tokenizer_file(path: Path, specials: tuple[str, ...] = ("<|endoftext|>",)) -> Path:
    """A byte-level BPE with three merges, as GPT-2 has 50,000: specials, 256 bytes, "th", "the", " the"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*specials, *alphabet, *("".join(pair) for pair in MERGES)]
    made = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(specials))
    made.save(str(path))
    return path
