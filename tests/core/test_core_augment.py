"""Shift and flip, image by image: every output is one of the allowed images, and all of them occur."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.config.schema import Augment
from jaxtrain.core.augment import augment, flip, shift

KEY = jax.random.key(3)
IMAGES = np.random.default_rng(0).integers(1, 255, (200, 6, 5, 2)).astype(np.uint8)  # no zeros of its own


def moved(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """The image moved by (down, right), zeros coming in."""
    height, width, _ = image.shape
    out = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                out[y, x] = image[y - down, x - right]
    return out


def moves_of(images: np.ndarray, out: np.ndarray, pixels: int) -> list[tuple[int, int]]:
    """The move of each image; fails where an output is none of the (2 pixels + 1)^2 moves."""
    span = range(-pixels, pixels + 1)
    found = []
    for image, result in zip(images, out, strict=True):
        fits = [(dy, dx) for dy in span for dx in span if np.array_equal(moved(image, dy, dx), result)]
        assert len(fits) == 1
        found.append(fits[0])
    return found


def test_shift_moves_each_image_by_at_most_its_pixels_with_zeros_coming_in() -> None:
    out = np.asarray(jax.jit(shift, static_argnums=2)(KEY, IMAGES, 2))
    assert out.dtype == IMAGES.dtype
    moves = moves_of(IMAGES, out, 2)
    assert len(set(moves)) == 25  # all of them occur, the extremes too


def test_a_wrap_around_shift_would_be_found() -> None:
    rolled = np.roll(IMAGES[:1], 1, axis=1)
    with pytest.raises(AssertionError):
        moves_of(IMAGES[:1], rolled, 2)


def test_a_shift_beyond_the_limit_would_be_found() -> None:
    beyond = moved(IMAGES[0], 3, 0)[None]
    with pytest.raises(AssertionError):
        moves_of(IMAGES[:1], beyond, 2)


def test_flip_gives_the_image_or_its_mirror_about_half_and_half() -> None:
    out = np.asarray(flip(KEY, IMAGES))
    same = (out == IMAGES).all((1, 2, 3))
    mirrored = (out == IMAGES[:, :, ::-1]).all((1, 2, 3))
    assert (same ^ mirrored).all()
    assert 70 <= mirrored.sum() <= 130  # 200 fair coins: 100 +- 4.2 sd
    assert not (out == IMAGES[:, ::-1]).all((1, 2, 3)).any()  # never upside down


@pytest.mark.parametrize("config", [Augment(shift=2), Augment(flip=True), Augment(shift=2, flip=True)])
def test_the_same_key_gives_the_same_images_and_another_key_others(config: Any) -> None:
    one, again = augment(config, KEY, IMAGES), augment(config, KEY, IMAGES)
    other = augment(config, jax.random.key(4), IMAGES)
    np.testing.assert_array_equal(one, again)
    assert (np.asarray(one) != np.asarray(other)).any()


def test_augmentation_that_is_off_is_the_identity() -> None:
    np.testing.assert_array_equal(augment(Augment(), KEY, IMAGES), IMAGES)
    assert (np.asarray(augment(Augment(flip=True), KEY, IMAGES)) != IMAGES).any()
    assert (np.asarray(augment(Augment(shift=1), KEY, IMAGES)) != IMAGES).any()


def test_shift_and_flip_together_draw_independently() -> None:
    out = np.asarray(augment(Augment(shift=1, flip=True), KEY, IMAGES))
    kinds = set()
    for image, result in zip(IMAGES, out, strict=True):
        hits = {
            (mirror, dy, dx)
            for mirror in (False, True)
            for dy in (-1, 0, 1)
            for dx in (-1, 0, 1)
            if np.array_equal(moved(image, dy, dx)[:, ::-1] if mirror else moved(image, dy, dx), result)
        }
        assert len(hits) == 1
        kinds |= hits
    assert len(kinds) == 18  # each move with and without the mirror
