"""The confusion matrix as pixels."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxtrain.report import confusion_image


@pytest.mark.parametrize("classes", [2, 10, 30, 100])
def test_pixels_of_any_number_of_classes(classes: int) -> None:
    image = confusion_image(np.eye(classes, dtype=int).tolist(), None)
    assert image.dtype == np.uint8
    assert image.ndim == 3
    assert image.shape[2] == 3
    assert 400 < image.shape[0] < 1400
    assert image.flags.c_contiguous


def test_a_confusion_of_three_per_cent_is_visible() -> None:
    clean = confusion_image([[100, 0], [0, 100]], ["a", "b"]).astype(int)
    confused = confusion_image([[97, 3], [0, 100]], ["a", "b"]).astype(int)
    across = slice(int(clean.shape[1] * 0.45), int(clean.shape[1] * 0.6))
    part = (slice(int(clean.shape[0] * 0.15), int(clean.shape[0] * 0.4)), across)
    assert np.abs(clean[part] - confused[part]).sum(-1).max() > 60
    np.testing.assert_array_equal(clean, confusion_image([[100, 0], [0, 100]], ["a", "b"]))


def test_names_are_text_and_never_formulas() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        confusion_image([[1, 0], [0, 1]], ["$x^{", "猫 with a very long name that goes on"])
        confusion_image([[0, 0], [0, 0]], None)


def test_no_pyplot_and_threads_do_not_disturb_each_other() -> None:
    had = "matplotlib.pyplot" in sys.modules
    matrices = [(np.eye(n, dtype=int) * n).tolist() for n in (2, 3, 4, 5)]
    alone = [confusion_image(m, None) for m in matrices]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda m: confusion_image(m, None), matrices))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    assert ("matplotlib.pyplot" in sys.modules) == had
