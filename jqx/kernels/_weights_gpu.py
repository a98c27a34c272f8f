"""Products of floats and codes with scales in groups, or looked-up codes, on a GPU, by Triton.

The arithmetic is that of the kernel for TPUs. A program processes a part of the contracted axis for
a tile of rows and columns. If there are few rows, there are several parts, whose sums are added.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..numerics._shared import E8M0
from ._codes import Table, numbers, scales
from ._operands import Operands
from ._pallas import pl, triton
from ._programs_gpu import Program, Tiles, in_programs, read, tiles_of


def weights_gpu(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    group: jax.Array | None = None,
    *,
    step: jax.Array | None = None,
    table: Table = None,
    precision: lax.PrecisionLike = None,
    dtype: DTypeLike = jnp.float32,
    interpret: bool = False,
) -> jax.Array:
    """Returns `x @ ((codes - zero) * scale)`, the weight rounded to the dtype of `x`.

    Args:
      x: [M, K], float16, bfloat16 or float32.
      codes: [K, N], of any dtype of 4 or 8 bits; for 4 bits, K and N are multiples of 16.
      scale: [G, N]; each row is shared by K / G rows of codes; floats, or E8M0.
      zero: [G, N], integers, or `None`.
      group: int32 [T], if codes, scale and zero are stacks [E, ..., N]: the index of the matrix of
        each of T tiles of M / T rows, a power of two from 16 to 128; `~group` for unused tiles.
      step: int32 [], if codes have one more leading axis: the index along it.
      table: the numbers that codes represent, if they are looked up.
      precision: the precision of float32 products.
      dtype: the dtype of the result, to which float32 sums are rounded.
      interpret: whether to run on any platform, step by step.

    Returns:
      [M, N].
    """
    (m, k), n, size = x.shape, codes.shape[-1], x.shape[1] // scale.shape[-2]
    each = m if group is None else m // group.shape[0]
    tiles = tiles_of(each, k, n, size, codes.dtype in (jnp.int4, jnp.uint4), all_rows=m)
    scale = scale if scale.dtype != E8M0 else lax.bitcast_convert_type(scale, jnp.uint8)
    parameters = [scale] if zero is None else [scale, zero.astype(jnp.float32)]
    kernel = functools.partial(
        _kernel, tiles=tiles, shape=(k, size), table=table, precision=precision
    )
    parts = in_programs(
        kernel,
        "jqx_weights",
        tiles,
        Operands(x, codes, parameters, None, group, step),
        dtype=jnp.float32 if tiles.parts > 1 else dtype,
        multiplies=x.dtype,
        interpret=interpret,
    )
    return jnp.sum(parts, axis=0).astype(dtype) if tiles.parts > 1 else parts[0]


def _kernel(
    program: Program,
    x: Any,
    codes: Any,
    scale: Any,
    *rest: Any,
    tiles: Tiles,
    shape: tuple[int, int],
    table: Table,
    precision: lax.PrecisionLike,
) -> None:
    *zeros, result = rest
    (k, size), ds = shape, pl().ds
    matrix, whole, is_column = program.matrix, program.whole, program.is_column

    def of_rows(parameter: Any, start: Any) -> jax.Array:
        """Returns the parameters of a tile of codes: repeated for each group, or one row."""
        first = lax.div(start, size)
        if size == k or size % tiles.k == 0:
            inside = None if whole else is_column
            return scales(read(parameter, (*matrix, ds(first, 1), slice(None)), inside))
        if tiles.k % size == 0:
            count = tiles.k // size
            is_group = (first + jnp.arange(count) < k // size)[:, None]
            inside = None if whole else is_group & is_column
            own = scales(read(parameter, (*matrix, ds(first, count), slice(None)), inside))
            spread = jnp.broadcast_to(own[:, None, :], (count, size, tiles.n))
            return spread.reshape(tiles.k, tiles.n)
        group = lax.div(start + jnp.arange(tiles.k), size)[:, None]
        all_columns = jnp.arange(tiles.n)[None, :]
        inside = (group < k // size) & is_column
        return scales(read(parameter, (*matrix, group, all_columns), inside))

    def add(step: Any, total: jax.Array) -> jax.Array:
        start = step * tiles.k
        place, here = start + jnp.arange(tiles.k), ds(start, tiles.k)
        rows = read(x, (slice(None), here), program.is_row & (place < k)[None, :])
        known = None if whole else (place < k)[:, None] & is_column
        real = numbers(read(codes, (*program.codes, here, slice(None)), known), table)
        for zero in zeros:
            real = real - of_rows(zero, start)
        real = (real * of_rows(scale, start)).astype(rows.dtype)
        return total + jnp.dot(rows, real, precision=precision, preferred_element_type=jnp.float32)

    none = jnp.zeros((tiles.m, tiles.n), jnp.float32)
    total = lax.fori_loop(program.first, program.last, add, none)
    triton().store(result, total.astype(result.dtype), mask=program.is_row & is_column)
