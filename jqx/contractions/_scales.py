"""What a contraction is told, and its scales, which come after the sum."""

from typing import Any, NamedTuple

import jax
from jax import lax

from ..tensor import QTensor
from ._dimensions import Dimensions


class HowTo(NamedTuple):
    """The static arguments of a contraction.

    Attributes:
      dimensions: which axes are contracted.
      precision: of float products.
    """

    dimensions: Dimensions
    precision: lax.PrecisionLike = None


def with_scales(y: jax.Array, lhs: Any, rhs: Any, dimensions: Dimensions) -> jax.Array:
    """Multiplies a float contraction of codes by the scales of the operands that are QTensors."""
    if isinstance(lhs, QTensor):
        y = y * dimensions.lhs_to_output(lhs.real_scale()).astype(y.dtype)
    if isinstance(rhs, QTensor):
        y = y * dimensions.rhs_to_output(rhs.real_scale()).astype(y.dtype)
    return y
