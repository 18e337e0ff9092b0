"""Tiny data in files for the tests of this folder: pictures, IDX files, texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

RAIN = "the rain in spain stays mainly in the plain\n"
GPT = {"kind": "gpt", "layers": 1, "heads": 2, "kv_heads": 1, "width": 16}
"""A language model that compiles in a second or two."""


def write_pictures(root: Path, classes: dict[str, int], size: tuple[int, int] = (6, 9), seed: int = 0) -> Path:
    """`classes`: how many PNGs each folder gets. Class k is brighter in colour k: there is something to learn."""
    rng = np.random.default_rng(seed)
    for k, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 160, (*size, 3))
            pixels[..., k % 3] += 90
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i:03}.png")
    return root


def write_idx(root: Path, train: int = 80, test: int = 20, size: tuple[int, int] = (6, 5), seed: int = 0) -> Path:
    """The four files of MNIST with 3 classes: class k is brighter in the rows 2k and 2k + 1."""
    rng = np.random.default_rng(seed)
    root.mkdir(parents=True)
    for stem, count in (("train", train), ("t10k", test)):
        labels = np.arange(count) % 3
        images = rng.integers(0, 120, (count, *size))
        for k in range(3):
            images[labels == k, 2 * k : 2 * k + 2] += 120
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
            content = bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()
            (root / f"{stem}-{name}-ubyte").write_bytes(content)
    return root


def write_texts(root: Path, count: int, ending: str = ".txt", words: str = RAIN) -> Path:
    """A folder of small texts, each longer than the one before."""
    root.mkdir(parents=True)
    for i in range(count):
        (root / f"{i:03}{ending}").write_text(words * (2 + i % 7) + "a" * i + "\n")
    return root
