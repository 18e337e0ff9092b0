"""Data by name: what `data.kind` allows, and the fields of each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxtrain.config.fields import Fraction, PathText, Section, Seed, Size, Sizes
from jaxtrain.config.fields import described as _field

Normalize = Literal["channel", "feature", "none"]


class _Data(Section):
    validation_fraction: Fraction = _field(0.2, "share of all rows that chooses (epoch, stop, learning rate)")
    split_seed: Seed = _field(0, "seed of the split; train.seed does not move rows between splits")
    feed: Literal["auto", "resident", "prefetch", "direct"] = _field(
        "auto", "rows live on the device, are prefetched by a thread, or are put directly by the loop"
    )


class _Tested(_Data):
    test_fraction: Fraction = _field(0.2, "share of all rows that is read once, at the end")


class _Normalized(_Data):
    normalize: Normalize = _field(
        "channel",
        "subtract mean and divide by sd of the training rows: over each channel, each feature, or not",
    )


class Digits(_Tested, _Normalized):
    kind: Literal["digits"] = "digits"


class Arrays(_Tested, _Normalized):
    kind: Literal["arrays"] = "arrays"
    path: PathText = _field(..., "an .npz with `inputs` and `targets` (`weights`, `split` optional), or inputs.npy")
    targets_path: PathText | None = _field(None, "targets.npy, when `path` is an .npy file")


class Mnist(_Normalized):
    kind: Literal["mnist"] = "mnist"
    path: PathText = _field(..., "folder of the four IDX files, plain or .gz; their test set is the test split")
    validation_fraction: Fraction = _field(0.1, "share of the training set that chooses (epoch, stop, learning rate)")


class Images(_Tested, _Normalized):
    kind: Literal["images"] = "images"
    path: PathText = _field(..., "a folder with a folder of pictures a class, or train/ validation/ test/ of such")
    size: Sizes = _field((64,), "pixels that every picture gets: one number, or height and width")
    resize: Literal["crop", "pad", "stretch"] = _field(
        "crop", "other shapes: cut the middle out, add black bars, or distort; always antialiased"
    )
    color: Literal["rgb", "grey"] = _field("rgb", "three channels or one; transparent parts become white")


class _Tokens(_Tested):
    validation_fraction: Fraction = _field(0.1, "share of the text that chooses (epoch, stop, learning rate)")
    test_fraction: Fraction = _field(0.1, "share of the text that is read once, at the end")
    block_size: Size = _field(256, "tokens that a row has, and that the model sees at once")
    split_by: Literal["auto", "file", "position"] = _field(
        "auto", "whole files go to a split, or its first part to training, its last to the test; auto: 20 files or more"
    )


class Text(_Tokens):
    kind: Literal["text"] = "text"
    path: PathText = _field(..., "a text file, or a folder of them")
    pattern: str = _field("*.txt", "which files of a folder, at any depth")
    tokenizer: PathText = _field("char", "char, byte, or the path of a tokenizer.json (library `tokenizers`)")
    encoding: str = _field("utf-8", "how the files are encoded, such as utf-8 or cp1252")
    decode_errors: Literal["strict", "replace"] = _field(
        "strict", "a byte that is not of this encoding is an error, or becomes U+FFFD and is counted"
    )
    unknown: Literal["error", "token"] = _field(
        "error", "a character that training never saw is an error, or one token for all such (tokenizer=char)"
    )


class Pystdlib(_Tokens):
    kind: Literal["pystdlib"] = "pystdlib"


Data = Annotated[Digits | Arrays | Mnist | Images | Text | Pystdlib, Field(discriminator="kind")]
