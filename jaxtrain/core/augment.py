"""Random changes of training images inside jit. `images`: [B, H, W, C], any dtype; a new array of the same shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import Augment


def shift(key: jax.Array, images: jax.Array, pixels: int) -> jax.Array:
    """Move each image by up to `pixels` along both axes; zeros come in."""
    count, height, width, channels = images.shape
    padded = jnp.pad(images, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)))
    corners = jax.random.randint(key, (count, 2), 0, 2 * pixels + 1)

    def crop(image: jax.Array, corner: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), (height, width, channels))

    return jax.vmap(crop)(padded, corners)


def flip(key: jax.Array, images: jax.Array) -> jax.Array:
    """Mirror each image left to right with probability 1/2."""
    mirrored = jax.random.bernoulli(key, 0.5, (images.shape[0], 1, 1, 1))
    return jnp.where(mirrored, images[:, :, ::-1, :], images)


def augment(config: Augment, key: jax.Array, images: jax.Array) -> jax.Array:
    """All changes that the config asks for."""
    if not (config.shift or config.flip):
        return images
    shift_key, flip_key = jax.random.split(key)
    if config.shift:
        images = shift(shift_key, images, config.shift)
    if config.flip:
        images = flip(flip_key, images)
    return images
