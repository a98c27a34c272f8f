"""A float operand as three int8 digits: fixed point, relative to the largest of each row.

    x  ~  step * (d0 * 256**2 + d1 * 256 + d2),   |error| <= step / 2,   step = max |x| / 8355000

The error is 2**-24 of the largest magnitude: half the last place of a float32. So a product of
floats with int8 codes becomes a product of int8 with three times the rows, which is exact except
for that rounding. On CPU and with few rows, this is faster than converting the codes to float32.

Cf. the split of floats for integer units in H. Ootomo, K. Ozaki, R. Yokota, "DGEMM on Integer
Matrix Multiplication Unit", arXiv:2306.11975.
"""

import math

import jax
import jax.numpy as jnp
from jax import export, lax

from ..._checks import is_at_least
from ...numerics._shared import divide, power_below
from ...tensor import QTensor
from .._integers._bytes import as_int8
from .._integers._products import rows_product, to_rows
from .._what._dimensions import Dimensions
from ._blocks import with_own_scales
from ._formulation import CPU, formulation
from ._scales import HowTo
from ._slices import in_slices
from ._tiles import tangent_tiles

DIGITS = 3
TOP = 8355000
"""A little less than 127 * (256**2 + 256 + 1), the largest number of three digits."""

TINY = 2.0**-100
"""Rows with a smaller largest magnitude use this one: a smaller step would be subnormal."""

HELD = 2**24
"""Bytes of sums that are in memory at once."""

COPIES = 8
"""Number of slices in which codes of another dtype are copied to int8."""


@formulation(
    "few float rows and integers on CPU: the rows are split into three int8 digits, so that the "
    "codes are multiplied as they are, without a float copy",
    CPU,
    lambda case: (
        case.is_beside_floats and case.fits_digits and case.block is None and not case.has_many_rows
    ),
    linear=tangent_tiles,
)
def digits(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    dimensions = how.dimensions
    at = len(dimensions.lhs_batch)
    rows, step = split(to_rows(x.astype(jnp.float32), dimensions), at)
    before, after = _split_steps(step)

    def compute(rows: jax.Array, tile: QTensor) -> jax.Array:
        tile = as_int8(tile)
        total, left, _ = rows_product(
            rows, tile.values, dimensions, left=tile.zero_point is not None
        )
        if tile.zero_point is not None:
            total = total - _beside(tile.zero_point.astype(jnp.int32), dimensions) * left
        return join(total, at, before) * _beside(tile.real_scale().astype(jnp.float32), dimensions)

    q = with_own_scales(q, dimensions.rhs_kept)
    sums = dimensions.columns(q) * rows.size // math.prod(rows.shape[at + 1 :])
    y = in_slices(rows, q, _of_rows(dimensions, rows.ndim), _slices(q, sums), compute)
    return _as_output(y * _spread(after, y.ndim), x, dimensions)


@formulation(
    "few float rows and integers in blocks on CPU: as digits, with several blocks in one product "
    "whose rows are zero outside of their block",
    CPU,
    lambda case: case.is_beside_floats and case.fits_digits and case.has_few_rows_for_blocks,
    linear=tangent_tiles,
)
def block_digits(x: jax.Array, q: QTensor, how: HowTo) -> jax.Array:
    dimensions, block = how.dimensions, how.block
    assert block is not None
    rows, step = split(to_rows(x.astype(jnp.float32), dimensions), 0)
    before, after = _split_steps(step)

    def compute(rows: jax.Array, tile: QTensor) -> jax.Array:
        tile = as_int8(tile)
        columns, count = tile.shape[1:], tile.shape[0] // block.size
        together = _together(rows.shape[0], count)
        apart = _block_diagonal(rows, count, block.size, together)
        codes = tile.values.reshape(count // together, together * block.size, -1)
        numbers = (((2,), (1,)), ((0,), (0,)))
        y = lax.dot_general(apart, codes, numbers, preferred_element_type=jnp.int32)
        y = y.reshape(count, rows.shape[0], -1)
        if tile.zero_point is not None:
            sums = jnp.sum(rows.reshape(-1, count, block.size), axis=2, dtype=jnp.int32).T
            y = y - _flat(tile.zero_point.astype(jnp.int32), columns)[:, None] * sums[:, :, None]
        z = join(y, 1, before) * _flat(tile.real_scale().astype(jnp.float32), columns)[:, None]
        # On CPU, a product with ones sums blocks three times as fast as a sum.
        ones = jnp.ones((2, count), z.dtype)
        y = (ones @ z.reshape(count, -1))[0].reshape(z.shape[1:])
        return y.reshape(-1, *columns)

    q = with_own_scales(q, dimensions.rhs_kept)
    sums = dimensions.columns(q) * rows.size // block.size
    y = in_slices(rows, q, _of_rows(dimensions, 2), _slices(q, sums), compute)
    return _as_output(y * _spread(after, y.ndim), x, dimensions)


def split(rows: jax.Array, at: int) -> tuple[jax.Array, jax.Array]:
    """Splits float32 rows `(*batch, rows, *contracted)`, where `at` axes are batch axes.

    Returns:
      The digits, int8 of shape `(*batch, 3 * rows, *contracted)`, with the highest digits of all
      rows first; and the steps, float32 of shape `(*batch, rows)`. The step of a row with a NaN or
      an infinity is NaN.
    """
    axes = tuple(range(at + 1, rows.ndim))
    largest = jnp.max(jnp.abs(rows), axis=axes, keepdims=True, initial=0.0)
    finite = jnp.all(jnp.isfinite(rows), axis=axes, keepdims=True)
    step = jnp.maximum(jnp.where(finite, largest, 0.0), TINY) / TOP
    fixed = jnp.round(divide(jnp.where(finite, rows, 0.0), step)).astype(jnp.int32)
    low = fixed.astype(jnp.int8)
    fixed = (fixed - low.astype(jnp.int32)) >> 8
    middle = fixed.astype(jnp.int8)
    high = ((fixed - middle.astype(jnp.int32)) >> 8).astype(jnp.int8)
    step = jnp.where(finite, step, jnp.nan).reshape(rows.shape[: at + 1])
    return jnp.concatenate([high, middle, low], axis=at), step


def _split_steps(step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits the steps of rows into two factors. The first multiplies sums of digits before the
    scale: it is the power of two of a small step, so that a large scale multiplies small sums. A
    batch shares it, because slices may run along a batch axis.
    """
    power = jnp.where(step < 1, power_below(step), jnp.ones_like(step))
    power = jnp.max(power, axis=tuple(range(step.ndim - 1)), keepdims=True, initial=0)
    # The barrier keeps XLA from computing them again for each of the sums.
    return lax.optimization_barrier((power, step / power))


def join(total: jax.Array, at: int, power: jax.Array) -> jax.Array:
    """Joins the int32 sums of the digits of each row, along axis `at`, in float32, times a power of
    two per row, of shape `(*batch, rows)` with batch axes of size 1.
    """
    parts = total.reshape(*total.shape[:at], DIGITS, -1, *total.shape[at + 1 :])
    high, middle, low = (
        lax.index_in_dim(parts, i, at, keepdims=False).astype(jnp.float32) for i in range(DIGITS)
    )
    lead, trail = at + 1 - power.ndim, low.ndim - at - 1
    power = power.reshape((1,) * lead + power.shape + (1,) * trail)
    return (high * (65536.0 * power) + middle * (256.0 * power)) + low * power


def _of_rows(dimensions: Dimensions, rank: int) -> Dimensions:
    """Returns the dimensions of rows `(*batch, rows, *contracted)` and the right operand."""
    at = len(dimensions.lhs_batch)
    return Dimensions(
        rank,
        dimensions.rhs_rank,
        tuple(range(at + 1, rank)),
        dimensions.rhs_contracting,
        tuple(range(at)),
        dimensions.rhs_batch,
    )


def _beside(parameter: jax.Array, dimensions: Dimensions) -> jax.Array:
    """Lines a parameter of the right operand up with `(*batch, rows, *columns)`."""
    order = (*dimensions.rhs_batch, *dimensions.rhs_free, *dimensions.rhs_contracting)
    at = len(dimensions.rhs_batch)
    shape = [parameter.shape[axis] for axis in order[: at + len(dimensions.rhs_free)]]
    return parameter.transpose(order).reshape(*shape[:at], 1, *shape[at:])


def _spread(step: jax.Array, rank: int) -> jax.Array:
    return step.reshape(*step.shape, *(1,) * (rank - step.ndim))


def _as_output(y: jax.Array, x: jax.Array, dimensions: Dimensions) -> jax.Array:
    """Splits the rows of `(*batch, rows, *columns)` into the free axes again."""
    at = len(dimensions.lhs_batch)
    free = tuple(x.shape[axis] for axis in dimensions.lhs_free)
    return y.reshape(*y.shape[:at], *free, *y.shape[at + 1 :])


def _slices(q: QTensor, sums: int) -> int:
    """Returns the number of slices of a product, which bounds the int32 sums in memory, and the
    copies of codes that must become int8. A symbolic number of sums counts as many.
    """
    copies = 1 if q.values.dtype == jnp.int8 else COPIES
    held = COPIES if export.is_symbolic_dim(sums) else math.ceil(4 * sums / HELD)
    return max(copies, held)


def _together(rows: int, count: int) -> int:
    """Returns how many blocks share a product, so that its rows fill a matrix unit."""
    return next(
        n for n in (4, 2, 1) if n == 1 or (count % n == 0 and not is_at_least(n * rows, 49))
    )


def _block_diagonal(rows: jax.Array, count: int, size: int, together: int) -> jax.Array:
    """Returns, for each run of blocks, rows that are zero outside of their block:
    `[run, block * rows, elements of the run]`.
    """
    parts = rows.reshape(-1, count // together, 1, together, size)
    own = jnp.eye(together, dtype=jnp.int8)[None, None, :, :, None]
    apart = (parts * own).transpose(1, 2, 0, 3, 4)
    return apart.reshape(count // together, together * rows.shape[0], together * size)


def _flat(parameter: jax.Array, columns: tuple[int, ...]) -> jax.Array:
    """Brings a parameter with blocks along its first axis to `[blocks, columns]`."""
    return jnp.broadcast_to(parameter, (parameter.shape[0], *columns)).reshape(len(parameter), -1)
