r"""Tokenizers: text -> numbers and back. Each is stored with the model as plain values (`to_json`).

Line ends are one character for all of them, in training and in a prompt alike: `normal` makes \r\n and \r into \n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxtrain.config.errors import ConfigError, UserError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What the token for all unknown characters is written as."""
_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")


class Tokenizer(Protocol):
    """Text to numbers and back."""

    @property
    def size(self) -> int:
        """The vocabulary."""

    @property
    def end(self) -> int | None:
        """The token that ends a document, where there is one."""

    def encode(self, text: str) -> np.ndarray:
        """[n] int32. Raises UserError for what it cannot say."""

    def decode(self, tokens: np.ndarray) -> str:
        """The text of some tokens."""

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` takes."""


def normal(text: str) -> str:
    """One kind of line end."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


@dataclass(frozen=True)
class Characters:
    """A token a character. characters: in the order of their code points. unknown: a last token for all others."""

    characters: str
    unknown: bool = False
    end = None

    @property
    def size(self) -> int:
        return len(self.characters) + self.unknown

    def encode(self, text: str) -> np.ndarray:
        points, known = code_points(normal(text)), code_points(self.characters)
        place = np.minimum(np.searchsorted(known, points), len(known) - 1)
        strange = known[place] != points
        if strange.any() and not self.unknown:
            unseen = np.unique(points[strange])
            listed = ", ".join(repr(chr(p)) for p in unseen[:10])
            raise UserError(
                f"{listed}: the model has never seen {'this character' if len(unseen) == 1 else 'these characters'}; "
                f"it knows {len(known)}: {self.characters!r}"
            )
        return np.where(strange, len(known), place).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        table = self.characters + UNKNOWN * self.unknown
        return "".join(table[int(t)] for t in tokens)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "char", "characters": self.characters, "unknown": self.unknown}


@dataclass(frozen=True)
class Bytes:
    """A token a byte of the UTF-8 form."""

    size: int = 256
    end = None

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf_8(text, "surrogateescape"), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": "byte"}


class FileTokenizer:
    """A tokenizer.json of the library `tokenizers`; its whole text is stored with the model."""

    def __init__(self, text: str, name: str = "the stored tokenizer") -> None:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(f"{name}: a tokenizer.json needs the library: pip install 'jaxtrain[text]'") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exceptions
            raise ConfigError(f"data.tokenizer: {name} is no tokenizer.json: {str(error).splitlines()[0]}") from None
        # What is meant for sentences: a text is neither cut off nor filled up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._text = text
        # Numbers may be left out, and a token beyond the size would be clamped without an error.
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def end(self) -> int | None:
        """The token that ends a document, where the vocabulary has one by a usual name."""
        ids = (self._tokenizer.token_to_id(word) for word in _ENDS)
        return next((int(i) for i in ids if i is not None), None)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(_utf_8(text).decode(), add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return str(self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "file", "text": self._text}


TOKENIZERS: dict[str, Callable[[dict[str, Any]], Tokenizer]] = {
    "char": lambda values: Characters(values["characters"], values["unknown"]),
    "byte": lambda values: Bytes(),
    "file": lambda values: FileTokenizer(values["text"]),
}


def from_json(values: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_json` wrote."""
    return TOKENIZERS[values["kind"]](values)


def _utf_8(text: str, errors: str = "strict") -> bytes:
    """With one kind of line end. Raises UserError for half of a UTF-16 pair, which is no character."""
    try:
        return normal(text).encode("utf-8", errors)
    except UnicodeEncodeError as error:
        wrong = error.object[error.start]
        raise UserError(f"{wrong!r} at place {error.start} is no character: it has no UTF-8 form") from None


def code_points(text: str) -> np.ndarray:
    """[n] uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
