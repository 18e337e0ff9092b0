"""Sources of rows. A source answers `read(rows) -> inputs` for a whole batch (contract 5).

`ArraySource` holds its rows in memory: `digits`, `mnist`, `arrays` and a library user's own arrays. `ImageSource`
decodes files. Targets are as the user wrote them (numbers or words); `dataset.py` gives them their meaning. Text is
no rows by itself: `text.py`.
"""

from __future__ import annotations

import gzip
import hashlib
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.config import schema
from jaxtrain.config.errors import ConfigError, choices
from jaxtrain.data.folders import scan
from jaxtrain.data.images import ImageForm, ImageRows

_SPLITS = {"train": 0, "validation": 1, "test": 2}


@dataclass(frozen=True)
class ArraySource:
    """inputs [n, ...], targets [n] or [n, K], weights [n] or None, split [n] or None.

    split: 0 train, 1 validation, 2 test, -1 train or validation by data.validation_fraction.
    names: words for classes when the targets are numbers. form: how a picture becomes a row, where there is a way.
    """

    name: str
    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray | None = None
    split: np.ndarray | None = None
    names: tuple[str, ...] | None = None
    form: ImageForm | None = None
    notes: tuple[str, ...] = ()
    in_memory = True

    def __post_init__(self) -> None:
        for label in ("inputs", "targets"):
            if getattr(self, label).ndim == 0:
                raise ConfigError(f"{self.name}: {label} is a single value; one for each row is needed")
        rows = len(self.inputs)
        for label in ("targets", "weights", "split"):
            array = getattr(self, label)
            if array is not None and len(array) != rows:
                raise ConfigError(f"{self.name}: {rows} inputs but {len(array)} {label}; one for each row is needed")
        if rows == 0:
            raise ConfigError(f"{self.name}: no rows")
        if self.inputs.dtype.kind not in "fiub":
            raise ConfigError(f"{self.name}: inputs are of type {self.inputs.dtype}; numbers are needed")
        if self.inputs.dtype.kind == "f" and not np.isfinite(self.inputs).all():
            bad = np.flatnonzero(~np.isfinite(self.inputs.reshape(rows, -1)).all(1))
            raise ConfigError(f"{self.name}: {len(bad)} rows have NaN or infinite inputs, the first is row {bad[0]}")
        wide = self.inputs.dtype.itemsize > 4
        if wide and rows:
            limit = np.finfo(np.float32).max if self.inputs.dtype.kind == "f" else np.iinfo(np.int32).max
            large = np.flatnonzero((np.abs(self.inputs.reshape(rows, -1)) > limit).any(1))
            if len(large):
                raise ConfigError(
                    f"{self.name}: {len(large)} rows have inputs beyond {limit:g}, which the device cannot hold; "
                    f"the first is row {large[0]}"
                )
        if self.weights is not None:
            wrong = np.flatnonzero(~(np.isfinite(self.weights) & (self.weights >= 0)).reshape(rows, -1).all(1))
            if len(wrong):
                raise ConfigError(
                    f"{self.name}: {len(wrong)} weights are negative or not finite, the first is that of row {wrong[0]}"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a row."""
        return self.inputs.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        """Of the inputs."""
        return self.inputs.dtype

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The inputs of these rows, gathered."""
        return self.inputs[rows]

    def fingerprint(self) -> str:
        """sha256 of everything that makes up the rows."""
        digest = hashlib.sha256()
        for array in (self.inputs, self.targets, self.weights, self.split):
            if array is not None:
                digest.update(f"{array.dtype.str}{array.shape}".encode())
                plain = array.dtype.kind != "O"  # repr of a long array of objects leaves its middle out
                digest.update(np.ascontiguousarray(array).data if plain else repr(array.tolist()).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class ImageSource:
    """Pictures in files, decoded when they are read; the rest as in `ArraySource`."""

    name: str
    pictures: ImageRows
    targets: np.ndarray
    split: np.ndarray | None
    names: tuple[str, ...]
    form: ImageForm
    notes: tuple[str, ...] = ()
    weights = None

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def shape(self) -> tuple[int, ...]:
        """[H, W, C]."""
        return self.pictures.shape

    @property
    def dtype(self) -> np.dtype:
        """Bytes."""
        return self.pictures.dtype

    @property
    def in_memory(self) -> bool:
        """Whether decoded pictures are kept."""
        return self.pictures.cached

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The pictures of these rows, [n, H, W, C]."""
        return self.pictures.read(rows)

    def fingerprint(self) -> str:
        """sha256 of files, labels, split and form."""
        digest = hashlib.sha256(self.pictures.fingerprint().encode())
        digest.update(repr((self.targets.tolist(), self.names, self.form)).encode())
        digest.update(b"" if self.split is None else self.split.tobytes())
        return digest.hexdigest()


Source = ArraySource | ImageSource


def _digits(config: schema.Digits) -> ArraySource:
    """The UCI digits (Alpaydin & Kaynak 1998) that scikit-learn carries: 1,797 images of 8x8, values 0..16."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.float32)[..., None]
    names = tuple(str(i) for i in range(10))
    form = ImageForm(8, 8, 1, "stretch", high=16.0)
    return ArraySource("digits", images, bunch.target.astype(np.int64), names=names, form=form)


_IDX = {
    "train-images": "train-images-idx3-ubyte",
    "train-labels": "train-labels-idx1-ubyte",
    "test-images": "t10k-images-idx3-ubyte",
    "test-labels": "t10k-labels-idx1-ubyte",
}


def _mnist(config: schema.Mnist) -> ArraySource:
    """The IDX files of MNIST (LeCun, Cortes, Burges) and of what copies their form: the t10k files are the test."""
    _existing_folder(config.path)
    parts = {name: _read_idx(Path(config.path), stem) for name, stem in _IDX.items()}
    for part in ("train", "test"):
        images, labels = parts[f"{part}-images"], parts[f"{part}-labels"]
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise ConfigError(
                f"data.path: {config.path!r}: {part} images {list(images.shape)} and labels {list(labels.shape)} "
                "do not belong together; [n, H, W] and [n] are needed"
            )
    if parts["train-images"].shape[1:] != parts["test-images"].shape[1:]:
        raise ConfigError(f"data.path: {config.path!r}: training and test images differ in size")
    images = np.concatenate([parts["train-images"], parts["test-images"]])[..., None]
    labels = np.concatenate([parts["train-labels"], parts["test-labels"]]).astype(np.int64)
    split = np.repeat(np.array([-1, 2], np.int8), [len(parts["train-labels"]), len(parts["test-labels"])])
    names = tuple(str(i) for i in range(int(labels.max(initial=-1)) + 1))
    form = ImageForm(images.shape[1], images.shape[2], 1, "stretch")
    return ArraySource("mnist", images, labels, split=split, names=names, form=form)


def _read_idx(folder: Path, stem: str) -> np.ndarray:
    """An IDX file of bytes, plain or gz: two zeros, type 8, number of axes, sizes (big-endian int32), the bytes."""
    places = [folder / f"{stem}{end}" for end in ("", ".gz")] + [folder / stem.replace("-idx", ".idx")]
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        raise ConfigError(f"data.path: no {stem} (or {stem}.gz) in {str(folder)!r}; the four IDX files are needed")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"data.path: {str(path)!r} cannot be read: {error}") from None
    axes = raw[3] if len(raw) > 4 and raw[:3] == b"\0\0\x08" else 0
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(axes)]
    start, size = 4 + 4 * axes, int(np.prod(shape, dtype=np.int64))
    if not axes or len(raw) - start != size:
        raise ConfigError(
            f"data.path: {str(path)!r} is no whole IDX file of bytes: its head says {shape or 'nothing'}, "
            f"{max(len(raw) - start, 0):,} bytes follow"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _existing_folder(path: str) -> Path:
    if not Path(path).is_dir():
        raise ConfigError(
            f"data.path: {path!r}: no such folder (looked in {Path(path).absolute().parent}); "
            "say where it is: --data.path=..."
        )
    return Path(path)


def _images(config: schema.Images) -> ImageSource:
    root = _existing_folder(config.path)
    if len(config.size) > 2:
        raise ConfigError(f"data.size: {list(config.size)}; allowed: one number, or height and width")
    return image_source(
        root, ImageForm(config.size[0], config.size[-1], 3 if config.color == "rgb" else 1, config.resize)
    )


def image_source(root: Path, form: ImageForm) -> ImageSource:
    """The pictures of a folder in one form. Raises ConfigError."""
    found = scan(root)
    split = found.split
    if split is not None and not (split == 1).any():
        split = np.where(split == 0, -1, split).astype(np.int8)  # validation comes out of the training pictures
    pictures = ImageRows(root, found.paths, form)
    return ImageSource(root.absolute().name, pictures, found.labels, split, found.class_names, form, found.notes)


def _arrays(config: schema.Arrays) -> ArraySource:
    path, reading = Path(config.path), ("data.path", config.path)
    try:
        if path.suffix == ".npz":
            with path.open("rb") as opened:
                stored = np.load(opened, allow_pickle=False)
                if isinstance(stored, np.ndarray):
                    raise ValueError("it is one array, an .npy")
                parts = {name: stored[name] for name in stored.files}
        elif config.targets_path is None:
            raise ConfigError(f"data.targets_path: needed beside data.path {config.path!r}, which holds inputs only")
        else:
            parts = {"inputs": _one_array(path)}
            reading = ("data.targets_path", config.targets_path)
            parts["targets"] = _one_array(Path(config.targets_path))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{reading[0]}: {reading[1]!r} cannot be read as arrays: {error}") from None
    known = ("inputs", "targets", "weights", "split")
    for name in parts:
        if name not in known:
            raise ConfigError(f"data.path: {config.path!r} holds an array {name!r}; {choices(name, known)}")
    for name in ("inputs", "targets"):
        if name not in parts:
            raise ConfigError(f"data.path: {config.path!r} has no array {name!r}; it holds {', '.join(parts)}")
    split = parts.get("split")
    if split is not None:
        split = _split_numbers(config.path, split)
    form = _form_of(parts["inputs"])
    return ArraySource(path.name, parts["inputs"], parts["targets"], parts.get("weights"), split, form=form)


def _one_array(path: Path) -> np.ndarray:
    stored = np.load(path, allow_pickle=False)
    if not isinstance(stored, np.ndarray):
        raise ValueError("it holds several arrays, an .npz")
    return stored


def _form_of(inputs: np.ndarray) -> ImageForm | None:
    """Bytes of shape [n, H, W, 1 or 3] are pictures; what else numbers mean is not known."""
    if inputs.dtype != np.uint8 or inputs.ndim != 4 or inputs.shape[3] not in (1, 3):
        return None
    return ImageForm(inputs.shape[1], inputs.shape[2], inputs.shape[3], "stretch")


def _split_numbers(path: str, split: np.ndarray) -> np.ndarray:
    if split.dtype.kind in "US":
        words = split.astype(str)
        unknown = sorted(set(words.tolist()) - set(_SPLITS))
        if unknown:
            raise ConfigError(f"data.path: {path!r}: split {unknown[0]!r}; {choices(unknown[0], _SPLITS)}")
        return np.array([_SPLITS[w] for w in words], np.int8)
    if split.dtype.kind not in "iu" or not np.isin(split, (0, 1, 2)).all():
        raise ConfigError(f"data.path: {path!r}: `split` must hold 0 (train), 1 (validation) or 2 (test) for each row")
    return split.astype(np.int8)


SOURCES: dict[str, Callable[..., Source]] = {
    "digits": _digits,
    "arrays": _arrays,
    "mnist": _mnist,
    "images": _images,
}
