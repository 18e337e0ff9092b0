"""Text: documents -> tokens -> rows of `block_size` tokens, each with the next tokens as its targets.

Training rows are windows side by side; where they begin is shifted anew in each epoch, so that a token stands at all
places of a window and is a target about once an epoch. Evaluation windows do not overlap and leave no token out: the
last one is filled up, and its `mask` [B, T] says which tokens count.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import RunConfig, schema
from jaxtrain.config.errors import ConfigError
from jaxtrain.data.folders import is_hidden
from jaxtrain.data.order import permute
from jaxtrain.data.schema import Schema
from jaxtrain.data.tokens import Bytes, Characters, FileTokenizer, Tokenizer, code_points, normal

SPLITS = ("train", "validation", "test")
MANY_FILES = 20
"""So many files are split as files; fewer by position, so that each split gets its share."""
_SHIFT, _FILES = 0x5417F, 0xF11E5  # streams of the permutation: window shifts, order of files
_BUILT = ("config-", "_sysconfigdata")  # made when this Python was built
_LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo")


@dataclass(frozen=True)
class Document:
    """name: its path below the source. text: with line ends as they were."""

    name: str
    text: str


@dataclass(frozen=True)
class TextDataset:
    """tokens: {split: [n] of the smallest type that holds them}. A row is numbered by its place in the split."""

    name: str
    tokens: dict[str, np.ndarray]
    block: int
    seed: int
    schema: Schema
    notes: tuple[str, ...] = ()
    in_memory = True

    @property
    def unit(self) -> str:
        """What is counted."""
        return f"rows of {self.block} tokens"

    def rows(self, split: str) -> int:
        """Training windows: one fewer than fit, so that they can be shifted."""
        n = len(self.tokens[split])
        return max((n - self.block) // self.block, 1) if n > self.block else 0

    def eval_rows(self, split: str) -> int:
        """Windows that cover every target once."""
        return max(-(-(len(self.tokens[split]) - 1) // self.block), 0)

    def read(self, split: str, rows: np.ndarray, epoch: int = 0) -> dict[str, np.ndarray]:
        """A training batch; `ids` are the places of the first tokens."""
        return self._windows(self.tokens[split], rows, epoch, self.rows(split), np)

    def take(self, resident: dict[str, Any], rows: Any, epoch: Any) -> dict[str, Any]:
        """Inside jit: `read` from the resident tokens of the training split."""
        return self._windows(resident["tokens"], rows, epoch, self.rows("train"), jnp)

    def _windows(self, tokens: Any, rows: Any, epoch: Any, count: int, xp: Any) -> dict[str, Any]:
        room = len(tokens) - count * self.block  # up to two blocks: the end is trained on too
        shift = permute(self.seed, xp.asarray(epoch) + _SHIFT, xp.zeros(1, xp.int32), room, xp)
        start = (rows * self.block + shift).astype(xp.int32)
        window = tokens[start[:, None] + xp.arange(self.block + 1, dtype=xp.int32)].astype(xp.int32)
        return {"inputs": window[:, :-1], "targets": window[:, 1:], "ids": start}

    def evaluation(self, split: str, rows: np.ndarray, mask: np.ndarray) -> dict[str, Any]:
        """A batch for figures: windows side by side; mask [B, T] leaves out what lies behind the end."""
        tokens = self.tokens[split]
        start = (rows * self.block).astype(np.int32)
        place = start[:, None] + np.arange(self.block + 1)
        window = tokens[np.minimum(place, len(tokens) - 1)].astype(np.int32)
        real = mask[:, None] & (place[:, 1:] < len(tokens))
        return {"inputs": window[:, :-1], "targets": window[:, 1:], "ids": start, "mask": real, "epoch": np.int32(0)}

    def shapes(self, n: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of what `read` gives for n rows."""
        tokens = jax.ShapeDtypeStruct((n, self.block), np.int32)
        return {"inputs": tokens, "targets": tokens, "ids": jax.ShapeDtypeStruct((n,), np.int32)}

    def resident_shapes(self, split: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of `resident`."""
        tokens = self.tokens[split]
        return {"tokens": jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)}

    def resident(self, split: str) -> dict[str, np.ndarray]:
        """The tokens themselves; windows are cut on the device."""
        return {"tokens": self.tokens[split]}

    def class_counts(self) -> np.ndarray:
        """How often each token stands in the training text, [V]."""
        return np.bincount(self.tokens["train"], minlength=self.schema.outputs)

    def fingerprint(self) -> dict[str, str]:
        """{part: what tells it from another}: tokens of the splits, how many and which; encoding."""
        digest = hashlib.sha256()
        for split in SPLITS:
            digest.update(f"{split}{len(self.tokens[split])}".encode())
            digest.update(np.ascontiguousarray(self.tokens[split]).data)
        tokens = "/".join(f"{len(self.tokens[split]):,}" for split in SPLITS)
        return {"tokens": tokens, "content": digest.hexdigest(), "encoding": self.schema.digest()}


def make_text(config: RunConfig) -> TextDataset:
    """Read, split, encode. The vocabulary of characters comes from the training text alone."""
    data: Any = config.data
    if config.objective.kind not in ("cross_entropy", "custom"):
        raise ConfigError(
            f"objective.kind={config.objective.kind} with data.kind={data.kind}: text is predicted token by token; "
            "allowed: cross_entropy, custom"
        )
    documents, notes = DOCUMENTS[data.kind](data)
    made = tokenizer_of(data)
    # Characters are split before they are numbered: the numbers come from the training part.
    encode = (lambda text: code_points(normal(text))) if isinstance(made, Characters) else made.encode
    raw = _pieces(encode, documents, made.end)
    name = Path(getattr(data, "path", data.kind)).absolute().name
    parts = _split(data, raw, name)
    used = {"train": 1.0, "validation": data.validation_fraction, "test": data.test_fraction}
    counts = {split: len(parts[split]) for split in SPLITS if used[split]}
    if min(counts.values()) < data.block_size + 1:
        told = ", ".join(f"{split} {n:,}" for split, n in counts.items())
        raise ConfigError(
            f"data.block_size: {data.block_size} needs {data.block_size + 1} tokens in each split; {name} has {told} "
            f"of {sum(map(len, raw)):,}; take a smaller block_size, more text, or set data.validation_fraction=0, "
            "data.test_fraction=0"
        )
    tokenizer, tokens = _finish(data, made, parts, name, notes)
    if config.train.overfit_batches:
        # A block more than the rows need, as their windows are shifted.
        most = (config.train.overfit_batches * config.train.global_batch_size + 1) * data.block_size
        tokens["train"] = tokens["validation"] = tokens["train"][:most]
        tokens["test"] = tokens["test"][:0]
        notes.append(f"overfitting {len(tokens['train']):,} tokens: they are trained on and evaluated")
    described = Schema(
        task="tokens",
        input_shape=(data.block_size,),
        input_dtype="int32",
        outputs=tokenizer.size,
        target_shape=(data.block_size,),
        tokenizer=tokenizer.to_json(),
    )
    return TextDataset(name, tokens, data.block_size, config.train.seed, described, tuple(notes))


def text_of_schema(data: Any, described: Schema, tokenizer: Tokenizer) -> TextDataset:
    """Other text as the test split of a trained model, in its tokens."""
    documents, notes = DOCUMENTS[data.kind](data)
    tokens = _narrow(np.concatenate(_pieces(tokenizer.encode, documents, tokenizer.end)), tokenizer.size)
    name = Path(getattr(data, "path", data.kind)).absolute().name
    if len(tokens) < 2:
        raise ConfigError(f"{name}: {len(tokens)} tokens; at least 2 are needed")
    empty = tokens[:0]
    parts = {"train": empty, "validation": empty, "test": tokens}
    return TextDataset(name, parts, described.input_shape[0], 0, described, tuple(notes))


def tokenizer_of(data: Any) -> Tokenizer:
    """The tokenizer that a config names; of characters, one that has yet to learn them."""
    named = getattr(data, "tokenizer", "byte")
    if named == "char":
        return Characters("")
    if named == "byte":
        return Bytes()
    path = Path(named)
    if not path.is_file():
        raise ConfigError(f"data.tokenizer: {named!r}: no such file; allowed: char, byte, or a tokenizer.json")
    try:
        return FileTokenizer(path.read_text(encoding="utf-8"), named)
    except UnicodeDecodeError:
        raise ConfigError(f"data.tokenizer: {named} is no tokenizer.json: it is not UTF-8") from None


def _pieces(encode: Callable[[str], np.ndarray], documents: list[Document], end: int | None) -> list[np.ndarray]:
    """Each document in tokens. Where there are several, each ends: with the tokenizer's end token or a line end."""
    if len(documents) == 1:
        return [encode(documents[0].text)]
    if end is not None:
        return [np.append(encode(document.text), np.int32(end)) for document in documents]
    return [encode(d.text if d.text.endswith(("\n", "\r")) else d.text + "\n") for d in documents]


def _split(data: Any, raw: list[np.ndarray], name: str) -> dict[str, np.ndarray]:
    fractions = (data.validation_fraction, data.test_fraction)
    by_file = data.split_by == "file" or (data.split_by == "auto" and len(raw) >= MANY_FILES)
    if by_file:
        groups = _whole_files([len(piece) for piece in raw], fractions, data.split_seed)
        for split, share, group in zip(SPLITS, (1.0, *fractions), groups, strict=True):
            if share and not group:
                raise ConfigError(
                    f"data.split_by=file: the {len(raw)} files of {name} leave none for {split}; add files, set "
                    "data.validation_fraction=0 or data.test_fraction=0, or take data.split_by=position"
                )
        joined = [np.concatenate([raw[i] for i in group]) if group else raw[0][:0] for group in groups]
        return dict(zip(SPLITS, joined, strict=True))
    whole = np.concatenate(raw)
    first = int(len(whole) * (1.0 - sum(fractions)) + 1e-6)
    second = int(len(whole) * (1.0 - fractions[1]) + 1e-6)
    return dict(zip(SPLITS, np.split(whole, [first, second]), strict=True))


def _whole_files(sizes: list[int], fractions: tuple[float, float], seed: int) -> list[list[int]]:
    """Files of (train, validation, test), in their order: drawn until each part has its share of the tokens."""
    order = permute(seed, _FILES, np.arange(len(sizes), dtype=np.int32), len(sizes)).tolist()
    total, groups = sum(sizes), []
    for fraction in fractions:
        group: list[int] = []
        while order and sum(sizes[i] for i in group) < fraction * total:
            group.append(order.pop())
        groups.append(sorted(group))
    return [sorted(order), *groups]


def _finish(
    data: Any, made: Tokenizer, parts: dict[str, np.ndarray], name: str, notes: list[str]
) -> tuple[Tokenizer, dict[str, np.ndarray]]:
    """The tokenizer, with the characters of the training text, and every split in its tokens."""
    if not isinstance(made, Characters):
        return made, {split: _narrow(tokens, made.size) for split, tokens in parts.items()}
    known = np.unique(parts["train"])
    strange = {s: np.setdiff1d(parts[s], known) for s in ("validation", "test")}
    listed = np.unique(np.concatenate(list(strange.values())))
    if len(listed) and data.unknown == "error":
        words = ", ".join(repr(chr(c)) for c in listed[:20])
        where = " and ".join(split for split in strange if len(strange[split]))
        raise ConfigError(
            f"{name}: {where} has characters that the training part lacks: {words}; "
            "set data.unknown=token to make them one token, or data.tokenizer=byte"
        )
    if len(listed):
        count = sum(int(np.isin(parts[s], listed).sum()) for s in strange)
        notes.append(f"{count:,} characters ({len(listed)} different) of {name} are unknown to its training part")
    tokenizer = Characters("".join(map(chr, known)), data.unknown == "token")
    coded = {}
    for split, points in parts.items():
        place = np.minimum(np.searchsorted(known, points), len(known) - 1)
        coded[split] = _narrow(np.where(known[place] == points, place, len(known)), tokenizer.size)
    return tokenizer, coded


def _narrow(tokens: np.ndarray, size: int) -> np.ndarray:
    return tokens.astype(np.uint8 if size <= 256 else np.uint16 if size <= 65536 else np.int32)


def _text_files(data: schema.Text) -> tuple[list[Document], list[str]]:
    root = Path(data.path)
    if not root.exists():
        raise ConfigError(
            f"data.path: {data.path!r}: no such file or folder (looked in {root.absolute().parent}); "
            "say where it is: --data.path=..."
        )
    try:
        below = [root] if root.is_file() else list(root.rglob(data.pattern))
    except (NotImplementedError, ValueError) as error:  # pathlib's answers to an absolute and to an empty pattern
        raise ConfigError(f"data.pattern: {data.pattern!r}: {str(error).lower()}; usual: *.txt, *") from None
    paths = sorted(path for path in below if path.is_file() and not is_hidden(path.relative_to(root)))
    if not paths:
        raise ConfigError(f"data.path: no file {data.pattern!r} (data.pattern) below {str(root)!r}")
    documents, notes, replaced = [], [], 0
    for path in paths:
        text, count = _decode(path, data.encoding, data.decode_errors)
        documents.append(Document(path.name if root.is_file() else path.relative_to(root).as_posix(), text))
        replaced += count
    if replaced:
        notes.append(f"{replaced:,} bytes are not {data.encoding} and are read as U+FFFD")
    return documents, notes


def _decode(path: Path, encoding: str, errors: str) -> tuple[str, int]:
    """(text, replaced bytes); a byte order mark is left out."""
    raw = path.read_bytes()
    try:
        return raw.decode(encoding).removeprefix("\ufeff"), 0
    except LookupError:
        raise ConfigError(f"data.encoding: {encoding!r} is not known; usual: utf-8, cp1252, latin-1") from None
    except UnicodeDecodeError as error:
        if errors == "replace":
            text = raw.decode(encoding, "replace")
            own = raw.decode(encoding, "ignore").count("\ufffd")
            return text.removeprefix("\ufeff"), text.count("\ufffd") - own
        place = error.start + len(raw) - len(error.object)  # utf-8-sig counts from behind its mark
        raise ConfigError(
            f"{path}: byte 0x{raw[place]:02x} at offset {place} is not {encoding}; set data.encoding "
            "(cp1252 is usual for old Windows files), or data.decode_errors=replace"
        ) from None


def _standard_library(data: schema.Pystdlib) -> tuple[list[Document], list[str]]:
    """The .py files of the running Python's standard library, without its tests and tools: some 9 MB of source."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not set(inside.parts) & set(_LEFT_OUT) and not inside.parts[0].startswith(_BUILT):
            # A few files are not UTF-8 on purpose; their bytes are kept.
            documents.append(Document(inside.as_posix(), path.read_bytes().decode("utf-8", "surrogateescape")))
    if not documents:
        raise ConfigError(f"data.kind=pystdlib: no source files below {root}; this Python comes without them")
    return documents, []


DOCUMENTS: dict[str, Callable[..., tuple[list[Document], list[str]]]] = {
    "text": _text_files,
    "pystdlib": _standard_library,
}
