"""`ragged_dot` by kernels: each tile of rows has the index of its matrix in the stack.

Rows are floats, codes, or floats that the kernel quantizes, as in `dot_general`. The matrices are
laid out for a kernel, and are not copied.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..kernels._shared import products_gpu, products_tpu, weights_gpu, weights_tpu
from ..numerics import Integer, format_of
from ..tensor import QTensor
from ..tensor._shared import found
from ._how._blocks import find_block, with_own_scales
from ._how._formulation import formulation
from ._how._kernel_operands import is_laid_out_for, parameters_of, precision_of, table_of
from ._how._kernels import is_looked_up
from ._how._kernels_of_codes import derived_as, multiplies_codes
from ._how._scales import HowTo
from ._integers._bytes import as_int8
from ._ragged_tiles import Args, Groups, ragged_tiles
from ._row_tiles import RowTiles, row_tiles, rows_in, rows_of_a_tile
from ._what._dimensions import Dimensions

STACK = Dimensions(2, 3, (1,), (1,), (), (0,))
"""The product of rows with each matrix; the rows do not have the axis of the stack."""

LEAST, MOST = 16, 128
"""Rows of a tile that matrix units multiply at once; more do not fit the registers of a GPU."""


def has_kernel(case: Groups, platform: str) -> bool:
    """Whether a kernel of a platform multiplies rows by the matrices of a stack."""
    x, q = case.lhs, case.rhs
    if not isinstance(q, QTensor) or precision_of(case.how.precision) is NotImplemented:
        return False
    plain = q.offset is None and q.order is None and q.layout and not q.layout.swapped
    how = HowTo(STACK, block=find_block(x, q, STACK))
    if not plain or not is_laid_out_for(platform, x, q, how):
        return False
    if isinstance(x, QTensor):
        return multiplies_codes(platform, x, q, how)
    return how.block is not None or is_looked_up(q)


REASON = (
    "rows in groups, and matrices that are laid out for a kernel: a tile of rows is multiplied by "
    "the matrix of its group, which is not copied"
)


@formulation(REASON, ("tpu",), lambda case: has_kernel(case, "tpu"), op="ragged_dot", finds=True)
def ragged_kernel_tpu(lhs: Any, rhs: QTensor, sizes: jax.Array, how: Args) -> jax.Array:
    return _by_kernel(lhs, rhs, sizes, how, weights_tpu, products_tpu)


@formulation(REASON, ("cuda",), lambda case: has_kernel(case, "gpu"), op="ragged_dot", finds=True)
def ragged_kernel_gpu(lhs: Any, rhs: QTensor, sizes: jax.Array, how: Args) -> jax.Array:
    return _by_kernel(lhs, rhs, sizes, how, weights_gpu, products_gpu)


def _by_kernel(
    lhs: Any,
    rhs: QTensor,
    sizes: jax.Array,
    how: Args,
    of_floats: Callable[..., jax.Array],
    of_codes: Callable[..., jax.Array],
) -> jax.Array:
    def run(lhs: Any, rhs: QTensor, sizes: jax.Array) -> jax.Array:
        tiles = tiles_for_kernel(sizes, lhs.shape[0])
        if isinstance(lhs, QTensor):
            rows = as_int8(lhs) if isinstance(format_of(lhs.qtype), Integer) else lhs
            scale = jnp.broadcast_to(rows.real_scale(), (lhs.shape[0], rows.scale.shape[1]))
            return of_tiles(tiles, rows.values, scale, rhs, how, rows.qtype, of_codes)
        wide = jnp.float32 if of_floats is weights_tpu and lhs.dtype == jnp.float16 else lhs.dtype
        kernel = functools.partial(
            of_floats, table=table_of(rhs), precision=precision_of(how.precision)
        )
        rows = _flat(rows_in(lhs.astype(wide), tiles))
        return _products(kernel, tiles, [rows], rhs, wide, how)

    plain = functools.partial(ragged_tiles.compute, how=how)
    return derived_as(run, plain)(lhs, rhs, sizes)


def tiles_for_kernel(sizes: jax.Array, m: int) -> RowTiles:
    """Returns the tiles of `m` rows in groups."""
    return row_tiles(sizes, m, rows_of_a_tile(m, sizes.shape[0], LEAST, MOST))


def of_tiles(
    tiles: RowTiles,
    x: jax.Array,
    x_scale: jax.Array,
    rhs: QTensor,
    how: Args,
    qtype: Any,
    kernel: Callable[..., jax.Array],
) -> jax.Array:
    """Returns the product of rows [m, k], floats or codes, by a kernel that multiplies codes."""
    rows = [_flat(rows_in(leaf, tiles)) for leaf in (x, x_scale.astype(jnp.float32))]
    run = functools.partial(kernel, form=format_of(qtype))
    return _products(run, tiles, rows, rhs, jnp.float32, how)


def _products(
    kernel: Callable[..., jax.Array],
    tiles: RowTiles,
    rows: list[jax.Array],
    rhs: QTensor,
    dtype: Any,
    how: Args,
) -> jax.Array:
    codes, step = found(rhs)
    rhs = with_own_scales(rhs, (0, 2))
    weight, count = parameters_of(rhs, dtype), rhs.shape[0]

    def of_all(leaf: jax.Array | None) -> jax.Array | None:
        return None if leaf is None else jnp.broadcast_to(leaf, (count, *leaf.shape[1:]))

    group = tiles.group.astype(jnp.int32)
    number = jnp.where(tiles.is_row[:, 0], group, ~group)
    result = how.dtype if weight.after is None else jnp.float32
    parameters = of_all(weight.scale), of_all(weight.zero)
    y = kernel(*rows, codes, *parameters, number, step=step, dtype=result)
    if weight.after is not None:
        after = weight.after if weight.after.shape[0] == 1 else weight.after[group]
        y = (y.reshape(len(group), -1, rhs.shape[2]) * after).reshape(y.shape)
    return tiles.result(y).astype(how.dtype)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])
