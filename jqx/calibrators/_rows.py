"""The elements that share a scale as a row: what is sorted, counted or searched scale by scale."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ._groups import Groups


def rows_of(x: jax.Array, groups: Groups, fill: float) -> jax.Array:
    """Returns one row per scale, `(*scale_shape, elements)`; that of a tail is filled up."""
    x, axes = groups.split(x, fill), groups.axes
    length = math.prod(x.shape[axis] for axis in axes)
    x = jnp.moveaxis(x, axes, range(-len(axes), 0))
    return x.reshape(*groups.scale_shape, length)


def members(groups: Groups) -> jax.Array:
    """Returns how many elements share each scale, uint32, of the shape of the scale."""
    rank = len(groups.shape)
    total = jnp.ones((1,) * rank, jnp.uint32)
    for axis, (n, b, m) in enumerate(
        zip(groups.shape, groups.sizes, groups.scale_shape, strict=True)
    ):
        sizes = np.full(m, b, np.uint32)
        sizes[-1:] = n - (m - 1) * b
        total = total * sizes.reshape([m if i == axis else 1 for i in range(rank)])
    return total
