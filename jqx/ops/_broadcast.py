"""Lining parameters up with the array they belong to, and summing cotangents back."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def expand_to_axes(parameter: jax.Array, axes: Sequence[int], rank: int) -> jax.Array:
    """Reshapes a parameter with one dim per axis of `axes` (increasing) to `rank` dims."""
    shape = [1] * rank
    for axis, size in zip(axes, parameter.shape, strict=True):
        shape[axis] = size
    return parameter.reshape(shape)


def sum_to_shape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Sums `x` over the axes along which `shape`, of equal rank, has been broadcast to it."""
    axes = tuple(i for i, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if n != m)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x
