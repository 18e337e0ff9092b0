"""MNIST and what copies its form: four IDX files, plain or gz; the t10k files are the test split."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtrain.config import ConfigError, load
from jaxtrain.data.dataset import Dataset
from jaxtrain.data.make import make_dataset
from jaxtrain.data.sources import ArraySource

STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    """An IDX file: two zeros, the type, the number of axes, the sizes, the bytes."""
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, kind, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def arrays(train: int = 40, test: int = 8, height: int = 3, width: int = 2) -> dict[str, np.ndarray]:
    """Pictures of random bytes; labels go round through 0 to 3."""
    rng = np.random.default_rng(0)
    made = {}
    for part, n in (("train", train), ("t10k", test)):
        made[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (n, height, width), np.uint8)
        made[f"{part}-labels-idx1-ubyte"] = (np.arange(n) % 4).astype(np.uint8)
    return made


def write(folder: Path, parts: dict[str, Any], ending: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    for stem, part in parts.items():
        content = part if isinstance(part, bytes) else idx(part)
        (folder / f"{stem}{ending}").write_bytes(gzip.compress(content) if ending == ".gz" else content)
    return folder


def mnist_of(folder: Path, **data: Any) -> Dataset:
    dataset = make_dataset(load({"data": {"kind": "mnist", "path": str(folder), **data}}))
    assert isinstance(dataset, Dataset)
    return dataset


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        mnist_of(folder)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- the whole of it


@pytest.fixture(scope="module")
def mnist(shared: Path) -> Dataset:
    return mnist_of(shared / "data/mnist_idx")


def moments(inputs: np.ndarray) -> tuple[float, float]:
    """Mean and sd of bytes, summed as integers."""
    total = squares = 0
    for part in np.array_split(inputs, 30):
        wide = part.astype(np.int64)
        total, squares = total + int(wide.sum()), squares + int((wide * wide).sum())
    mean = total / inputs.size
    return mean, (squares / inputs.size - mean**2) ** 0.5


def test_mnist_is_the_one_that_everybody_has(mnist: Dataset) -> None:
    source = mnist.source
    assert isinstance(source, ArraySource)
    assert source.inputs.shape == (70_000, 28, 28, 1)
    assert source.inputs.dtype == np.uint8
    assert source.targets[:5].tolist() == [5, 0, 4, 1, 9]
    assert source.targets[60_000:60_005].tolist() == [7, 2, 1, 0, 4]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(source.targets[:60_000]).tolist() == counts
    assert np.bincount(source.targets[60_000:]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    mean, sd = moments(source.inputs[:60_000])
    assert (round(mean / 255, 4), round(sd / 255, 4)) == (0.1307, 0.3081)


def test_the_t10k_files_are_the_test_split(mnist: Dataset) -> None:
    np.testing.assert_array_equal(mnist.splits.test, np.arange(60_000, 70_000))
    both = np.concatenate([mnist.splits.train, mnist.splits.validation])
    np.testing.assert_array_equal(np.sort(both), np.arange(60_000))


def test_validation_comes_out_of_the_training_files_class_by_class(mnist: Dataset) -> None:
    validation = np.bincount(mnist.targets[mnist.splits.validation])
    assert validation.tolist() == [592, 674, 596, 613, 584, 542, 592, 626, 585, 595]  # a tenth of each
    assert mnist.rows("validation") == 5999
    assert mnist.rows("train") == 54_001
    assert mnist.schema.class_names == tuple("0123456789")
    assert mnist.schema.outputs == 10


def test_the_normalisation_is_that_of_the_training_rows(mnist: Dataset) -> None:
    source = mnist.source
    assert isinstance(source, ArraySource)
    mean, sd = moments(source.inputs[mnist.splits.train])
    assert mnist.schema.mean == [pytest.approx(mean, rel=1e-12)]
    assert mnist.schema.sd == [pytest.approx(sd, rel=1e-9)]
    assert moments(source.inputs[:60_000])[0] != pytest.approx(mean, rel=1e-6)  # the control


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_plain_and_packed_files_give_the_same_rows(ending: str, tmp_path: Path) -> None:
    parts = arrays()
    dataset = mnist_of(write(tmp_path / "mnist", parts, ending), validation_fraction=0.3)
    source = dataset.source
    assert isinstance(source, ArraySource)
    train, test = parts[STEMS[0]], parts[STEMS[2]]
    np.testing.assert_array_equal(source.inputs, np.concatenate([train, test])[..., None])
    assert source.targets.tolist() == [i % 4 for i in range(40)] + [i % 4 for i in range(8)]
    assert source.targets.dtype == np.int64
    assert [dataset.rows(split) for split in ("train", "validation", "test")] == [28, 12, 8]
    assert np.bincount(dataset.targets[dataset.splits.validation]).tolist() == [3, 3, 3, 3]
    assert dataset.schema.input_shape == (3, 2, 1)
    assert dataset.schema.input_dtype == "uint8"
    assert dataset.schema.image == {"height": 3, "width": 2, "channels": 1, "resize": "stretch", "high": 255.0}
    np.testing.assert_array_equal(dataset.read("test", np.array([7, 0]))["inputs"], test[[7, 0]][..., None])
    rows = dataset.splits.train
    assert dataset.schema.mean == [pytest.approx(train[rows].mean(), rel=1e-12)]
    assert train[rows].mean() != pytest.approx(train.mean(), rel=1e-4)  # the control


def test_files_may_have_the_dot_that_some_copies_have(tmp_path: Path) -> None:
    parts = {stem.replace("-idx", ".idx"): part for stem, part in arrays().items()}
    assert (
        mnist_of(write(tmp_path / "a", parts)).fingerprint() == mnist_of(write(tmp_path / "b", arrays())).fingerprint()
    )


def test_fraction_and_seed_choose_the_validation_and_never_touch_the_test(tmp_path: Path) -> None:
    folder = write(tmp_path / "mnist", arrays(train=200))
    first, more, other = (
        mnist_of(folder, validation_fraction=0.1),
        mnist_of(folder, validation_fraction=0.3),
        mnist_of(folder, validation_fraction=0.1, split_seed=1),
    )
    assert [d.rows("validation") for d in (first, more, other)] == [20, 60, 20]
    assert first.splits.validation.tolist() != other.splits.validation.tolist()
    for dataset in (first, more, other):
        assert dataset.splits.test.tolist() == list(range(200, 208))
    assert mnist_of(folder, validation_fraction=0.0).rows("train") == 200


@pytest.mark.parametrize("stem", STEMS)
def test_a_missing_file_is_named(stem: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "mnist", arrays())
    (folder / stem).unlink()
    assert refused(folder) == f"data.path: no {stem} (or {stem}.gz) in {str(folder)!r}; the four IDX files are needed"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert refused(gone) == (
        f"data.path: {str(gone)!r}: no such folder (looked in {tmp_path}); say where it is: --data.path=..."
    )


def broken(folder: Path, stem: str, content: bytes, ending: str = "") -> str:
    write(folder, arrays())
    mnist_of(folder)  # the control
    (folder / stem).unlink()
    (folder / f"{stem}{ending}").write_bytes(content)
    return refused(folder)


@pytest.mark.parametrize("stem", STEMS)
def test_a_file_that_is_cut_off_is_named(stem: str, tmp_path: Path) -> None:
    whole = idx(arrays()[stem])
    head = 4 + 4 * whole[3]
    shape = [int(n) for n in arrays()[stem].shape]
    line = broken(tmp_path / "mnist", stem, whole[:-3])
    assert line == (
        f"data.path: {str(tmp_path / 'mnist' / stem)!r} is no whole IDX file of bytes: its head says {shape}, "
        f"{len(whole) - 3 - head} bytes follow"
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0\x08",
        b"hello, I am a text of some length",
        idx(arrays()[STEMS[0]], kind=9),
        b"\0\x01" + idx(arrays()[STEMS[0]])[2:],
        idx(arrays()[STEMS[0]])[:10],
        idx(arrays()[STEMS[0]]) + b"\0",
        gzip.compress(idx(arrays()[STEMS[0]])),
    ],
    ids=["empty", "three-bytes", "text", "signed", "magic", "half-a-head", "a-byte-too-many", "gz-by-another-name"],
)
def test_a_file_of_another_kind_is_named(content: bytes, tmp_path: Path) -> None:
    line = broken(tmp_path / "mnist", STEMS[0], content)
    named = str(tmp_path / "mnist" / STEMS[0])
    assert line.startswith(f"data.path: {named!r} is no whole IDX file of bytes: its head says ")


@pytest.mark.parametrize("kind", ["cut", "plain", "empty", "damaged"])
def test_a_packed_file_that_cannot_be_unpacked_is_named(kind: str, tmp_path: Path) -> None:
    packed = gzip.compress(idx(arrays()[STEMS[2]]))
    damaged = bytearray(packed)
    damaged[-20:-12] = b"\xff" * 8
    content = {"cut": packed[:-9], "plain": idx(arrays()[STEMS[2]]), "empty": b"", "damaged": bytes(damaged)}[kind]
    line = broken(tmp_path / "mnist", STEMS[2], content, ".gz")
    named = str(tmp_path / "mnist" / f"{STEMS[2]}.gz")
    assert line.startswith(f"data.path: {named!r} ")


@pytest.mark.parametrize(
    ("stem", "array", "told"),
    [
        (STEMS[1], np.zeros(39), "train images [40, 3, 2] and labels [39]"),
        (STEMS[3], np.zeros(9), "test images [8, 3, 2] and labels [9]"),
        (STEMS[0], np.zeros(40), "train images [40] and labels [40]"),
        (STEMS[3], np.zeros((8, 1)), "test images [8, 3, 2] and labels [8, 1]"),
    ],
)
def test_images_and_labels_that_do_not_belong_together_are_told(
    stem: str, array: np.ndarray, told: str, tmp_path: Path
) -> None:
    line = broken(tmp_path / "mnist", stem, idx(array))
    folder = str(tmp_path / "mnist")
    assert line == f"data.path: {folder!r}: {told} do not belong together; [n, H, W] and [n] are needed"


def test_training_and_test_images_of_two_sizes_are_told(tmp_path: Path) -> None:
    line = broken(tmp_path / "mnist", STEMS[2], idx(np.zeros((8, 2, 3))))
    assert line == f"data.path: {str(tmp_path / 'mnist')!r}: training and test images differ in size"


def test_a_class_that_only_the_test_files_have_is_refused(tmp_path: Path) -> None:
    labels = np.arange(8) % 4
    labels[5] = 9
    line = broken(tmp_path / "mnist", STEMS[3], idx(labels))
    assert line == "mnist: class '9' (row 45) has no training row"


def test_files_without_rows_are_one_line(tmp_path: Path) -> None:
    assert refused(write(tmp_path / "mnist", arrays(0, 0))) == "mnist: no rows"
