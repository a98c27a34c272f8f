"""The static arguments of a contraction, and its scales, which are applied after the sum."""

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
      block: the blocks of a scale that changes along a contracted axis; `None` if scales can leave
        the sum.
      dtype: the dtype to which a kernel may round the result; `None` leaves it to the caller.
    """

    dimensions: Dimensions
    precision: lax.PrecisionLike = None
    block: Block | None = None
    dtype: Any = None

    @classmethod
    def of(
        cls, lhs: Any, rhs: Any, dimensions: Dimensions, precision: lax.PrecisionLike = None
    ) -> "HowTo":
        """Returns the static arguments of the contraction of two operands."""
        return cls(dimensions, precision, find_block(lhs, rhs, dimensions))


def with_scales(y: jax.Array, lhs: Any, rhs: Any, dimensions: Dimensions) -> jax.Array:
    """Multiplies a float contraction of codes by the scales of the operands that are QTensors."""
    left = dimensions.lhs_to_output(lhs.real_scale()) if isinstance(lhs, QTensor) else None
    right = dimensions.rhs_to_output(rhs.real_scale()) if isinstance(rhs, QTensor) else None
    return times_scales(y, left, right)


def times_scales(y: jax.Array, left: jax.Array | None, right: jax.Array | None) -> jax.Array:
    """Multiplies sums of codes by one or two scales, lined up with them, the left one first.

    A very large or small left scale is brought nearer to 1 by a power of two, which is applied
    last, so that no intermediate product is out of range if the result is not. Other scales do not
    change.
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
