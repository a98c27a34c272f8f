"""The backward pass of a product of arrays, in a dtype of choice."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ._what._dimensions import Dimensions


def dot_gradients(
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: lax.DotDimensionNumbers,
    cotangent: jax.Array,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of both operands, as float32 or wider.

    Operands are rounded to `dtype`, and products are summed in float32 or wider. (On CPU, a product
    with a bfloat16 result would be computed in float32 throughout.)
    """
    wide = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
    d = Dimensions.of(numbers, lhs.ndim, rhs.ndim)
    batch, lefts = len(d.lhs_batch), len(d.lhs_free)
    ahead = tuple(range(batch))
    left = tuple(range(batch, batch + lefts))
    right = tuple(range(batch + lefts, cotangent.ndim))
    x, w, g = lhs.astype(dtype), rhs.astype(dtype), cotangent.astype(dtype)
    # Free axes keep their order; contracted axes have the order of the left operand.
    of_lhs = [*d.lhs_batch, *d.lhs_free, *_in_order(d.lhs_contracting, d.rhs_contracting)]
    of_rhs = [*d.rhs_batch, *d.rhs_free, *_in_order(d.rhs_contracting, d.lhs_contracting)]
    dx = _product((g, right, ahead), (w, d.rhs_free, d.rhs_batch), of_lhs, lefts, wide)
    dw = _product((g, left, ahead), (x, d.lhs_free, d.lhs_batch), of_rhs, len(right), wide)
    return dx, dw


_Factor = tuple[jax.Array, Sequence[int], Sequence[int]]
"""An operand, its contracted axes, and its batch axes."""


def _product(
    cotangent: _Factor, other: _Factor, axes: Sequence[int], free: int, dtype: DTypeLike
) -> jax.Array:
    """Returns the gradient of an operand. Its `axes` are those of the batch, `free` ones from the
    cotangent, and the rest from the other operand.

    The factor with the last axis comes second. XLA on CPU makes one product of a product and the
    swap of its two sides, and cannot run it if it multiplies bfloat16 into float32.
    """
    first, second = cotangent, other
    batch = len(cotangent[2])
    end = batch + free
    if axes and axes.index(len(axes) - 1) < end:
        first, second = second, first
        axes = [*axes[:batch], *axes[end:], *axes[batch:end]]
    numbers = (first[1], second[1]), (first[2], second[2])
    found = lax.dot_general(first[0], second[0], numbers, preferred_element_type=dtype)
    return jnp.transpose(found, [axes.index(axis) for axis in range(len(axes))])


def _in_order(axes: Sequence[int], partners: Sequence[int]) -> list[int]:
    """Returns axes in the order of their partners."""
    return [axis for _, axis in sorted(zip(partners, axes, strict=True))]
