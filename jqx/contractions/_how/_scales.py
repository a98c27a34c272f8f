"""What a contraction is told, and its scales, which come after the sum."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...tensor import QTensor
from .._what._dimensions import Dimensions
from ._blocks import Block, find_block


class HowTo(NamedTuple):
    """The static arguments of a contraction.

    Attributes:
      dimensions: which axes are contracted.
      precision: of float products.
      block: where a scale changes along a contracted axis; `None` where it does not, so that it may
        leave the sum.
      dtype: what the result is rounded to, where a kernel may do it; `None` is left to the caller.
    """

    dimensions: Dimensions
    precision: lax.PrecisionLike = None
    block: Block | None = None
    dtype: Any = None

    @classmethod
    def of(
        cls, lhs: Any, rhs: Any, dimensions: Dimensions, precision: lax.PrecisionLike = None
    ) -> "HowTo":
        """Returns what the contraction of two operands is told."""
        return cls(dimensions, precision, find_block(lhs, rhs, dimensions))


def with_scales(y: jax.Array, lhs: Any, rhs: Any, dimensions: Dimensions) -> jax.Array:
    """Multiplies a float contraction of codes by the scales of the operands that are QTensors."""
    left = dimensions.lhs_to_output(lhs.real_scale()) if isinstance(lhs, QTensor) else None
    right = dimensions.rhs_to_output(rhs.real_scale()) if isinstance(rhs, QTensor) else None
    return times_scales(y, left, right)


def times_scales(y: jax.Array, left: jax.Array | None, right: jax.Array | None) -> jax.Array:
    """Multiplies sums of codes by one scale or by two, lined up with them: the left one first.

    A left scale that is very large or small is brought nearer to 1 by a power of two, which comes
    last: no product on the way is out of range where the result is not. Others are as they were.
    """
    if left is None or right is None:
        scale = left if right is None else right
        return y if scale is None else y * scale.astype(y.dtype)
    left = left.astype(y.dtype)
    size = jnp.abs(lax.stop_gradient(left))
    large, small, one = size > 2.0**64, size < 2.0**-64, jnp.ones((), y.dtype)
    nearer = jnp.where(large, one * 2.0**-64, jnp.where(small, one * 2.0**32, one))
    back = jnp.where(large, one * 2.0**64, jnp.where(small, one * 2.0**-32, one))
    return y * (left * nearer) * right.astype(y.dtype) * back
