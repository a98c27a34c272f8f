"""Codes converted to floats a tile at a time, so that no float copy of them all is ever held."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

from ..numerics import common_dtype, format_of
from ..ops import affine_dequantize
from ..tensor import QTensor
from ._blocks import shares_scale, with_own_scales
from ._convert import is_exact_in, numbers_of
from ._formulation import formulation
from ._products import needs_shape
from ._scales import HowTo, with_scales
from ._slices import in_slices

TILE = 2**20
"""Elements of a tile, which the cache holds."""

TILES = 8
"""At least so many tiles, unless one that is larger is no larger than the arrays beside it."""


@formulation(
    "a float operand on CPU, which holds converted codes in memory: converted a tile at a time"
)
def tiles(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    return _in_tiles(x, q, how)


@formulation("two operands of 8-bit floats on CPU: as bfloat16, which holds them, a tile at a time")
def float8_tiles(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    y = _in_tiles(numbers_of(lhs, jnp.bfloat16), rhs, how)
    return with_scales(y, lhs, None, how.dimensions)


def _in_tiles(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    dimensions = how.dimensions
    wide = common_dtype(x.dtype, q.dtype)
    if x.dtype.itemsize == 2 and needs_shape(x, q, dimensions):
        x = x.astype(wide)  # XLA on CPU multiplies 16-bit floats in some layouts alone
    shared = shares_scale(q, dimensions.rhs_contracting)
    scale_after = shared and q.zero_point is None and is_exact_in(q, x.dtype)
    q = with_own_scales(q, dimensions.rhs_kept)

    def compute(x: jax.Array, tile: QTensor) -> jax.Array:
        if scale_after:
            real = format_of(tile.qtype).decode(tile.codes).astype(x.dtype)
        else:
            real, x = _real(tile, wide), x.astype(wide)
        y = lax.dot_general(
            x, real, dimensions.numbers, precision=how.precision, preferred_element_type=wide
        )
        return with_scales(y, None, tile, dimensions) if scale_after else y

    result = x.size // dimensions.contracted_size(x) * dimensions.columns(q)
    return in_slices(x, q, dimensions, count_of(q, x.size, result), compute)


def count_of(q: QTensor, *beside: Any) -> int:
    """Returns in how many tiles to convert codes, from the sizes of the arrays beside them.

    Few where those are large, for each tile passes over all of them; a symbolic size counts as a
    small one.
    """
    sizes = [size for size in beside if not export.is_symbolic_dim(size)]
    count = max(TILES, math.ceil(q.size / TILE))
    return min(count, math.ceil(q.size / max([1, *sizes])))


def _real(q: QTensor, dtype: Any) -> jax.Array:
    """Returns the real values, linear in the scale also where that is a tangent."""
    groups, scale = q.groups, q.real_scale().astype(dtype)
    numbers = affine_dequantize(
        groups.split(q.codes),
        jnp.ones((), dtype),
        None if q.zero_point is None else groups.split_scale(q.zero_point),
        qtype=q.qtype,
        dtype=dtype,
    )
    return groups.join(numbers * groups.split_scale(scale))
