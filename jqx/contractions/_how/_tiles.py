"""Conversion of codes to floats one tile at a time, without a float copy of all of them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

from ..._checks import is_at_least
from ...numerics import format_of
from ...numerics._shared import common_dtype
from ...tensor import QTensor
from .._integers._products import needs_shape
from .._what._dimensions import Dimensions
from ._blocks import with_own_scales
from ._convert import is_exact_in, numbers_of, real_of, split_power
from ._formulation import CPU, formulation
from ._scales import HowTo, with_scales
from ._slices import in_slices

TILE = 2**20
"""Elements of a tile, which fits in the cache."""

TILES = 8
"""The minimum number of tiles, unless larger tiles are no larger than the other arrays."""


@formulation(
    "a float operand on CPU, which stores converted codes in memory: converted a tile at a time",
    CPU,
    lambda case: case.is_beside_floats,
)
def tiles(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    # Sums of products with float16 never overflow float32.
    return _in_tiles(x, q, how, look=x.dtype != jnp.float16)


def tangent_tiles(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    """The same as `tiles`, but linear in either operand: it does not depend on magnitudes."""
    return _in_tiles(x, q, how)


@formulation(
    "two operands of 8-bit floats on CPU: as bfloat16, which represents them, a tile at a time",
    CPU,
    lambda case: case.are_float8,
)
def float8_tiles(lhs: QTensor, rhs: QTensor, how: HowTo) -> jax.Array:
    one = jnp.ones((1,) * rhs.ndim, jnp.float32)
    codes = dataclasses.replace(rhs, scale=one, blocks=())
    y = _in_tiles(numbers_of(lhs, jnp.bfloat16), codes, how)
    return with_scales(y, lhs, rhs, how.dimensions)


def _in_tiles(x: jax.Array, q: QTensor, how: HowTo, look: bool = False) -> jax.Array:
    """Contracts one tile at a time. `look` keeps sums of codes in range by powers of two, which
    multiply the smaller operand: very large rows, or the codes.
    """
    dimensions = how.dimensions
    wide = common_dtype(x.dtype, q.dtype)
    if x.dtype.itemsize == 2 and needs_shape(x, q, dimensions):
        x = x.astype(wide)  # XLA on CPU multiplies 16-bit floats only in some layouts
    scale_after = how.block is None and q.zero_point is None and is_exact_in(q, x.dtype)
    q = with_own_scales(q, dimensions.rhs_kept)
    look = look and scale_after
    by_rows = look and is_at_least(q.size, x.size)
    back = None
    if by_rows:
        x, back = _near_one(x, dimensions)

    def compute(x: jax.Array, tile: QTensor) -> jax.Array:
        if scale_after:
            real = format_of(tile.qtype).decode(tile.codes).astype(x.dtype)
        else:
            real, x = real_of(tile, wide), x.astype(wide)
        scale = tile.real_scale().astype(wide)
        if look and not by_rows:
            power, scale = split_power(scale)
            real = real * power.astype(x.dtype)
        y = lax.dot_general(
            x, real, dimensions.numbers, precision=how.precision, preferred_element_type=wide
        )
        return y * dimensions.rhs_to_output(scale) if scale_after else y

    result = x.size // dimensions.contracted_size(x) * dimensions.columns(q)
    y = in_slices(x, q, dimensions, count_of(q, x.size, result), compute)
    return y if back is None else y * back.astype(wide)


def _near_one(x: jax.Array, dimensions: Dimensions) -> tuple[jax.Array, jax.Array]:
    """Returns an array with very large rows scaled down by a power of two, so that their sums with
    codes fit float32, and the inverse factor of the results, lined up with them.
    """
    size = jnp.abs(lax.stop_gradient(x))
    largest = jnp.max(size, axis=dimensions.lhs_contracting, keepdims=True, initial=0)
    far, one = largest > 2.0**80, jnp.ones((), x.dtype)
    back = dimensions.lhs_to_output(jnp.where(far, one * 2.0**40, one))
    return x * jnp.where(far, one * 2.0**-40, one), back


def count_of(q: QTensor, *others: Any) -> int:
    """Returns the number of tiles for the conversion of codes, given the sizes of other arrays.

    It is small if those arrays are large, because each tile reads all of them. A symbolic size
    counts as small, and codes of a symbolic size are not cut.
    """
    if export.is_symbolic_dim(q.size):
        return 1
    sizes = [size for size in others if not export.is_symbolic_dim(size)]
    count = max(TILES, math.ceil(q.size / TILE))
    return min(count, math.ceil(q.size / max([1, *sizes])))
