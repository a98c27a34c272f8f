"""Products of codes with scales in groups on a GPU, by Triton; the kernel may quantize the rows.

The arithmetic is that of the kernel for TPUs; as there, integer sums of a column with one scale are
exact. Two different formats of 8-bit floats are multiplied as bfloat16, which represents both.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..numerics import Integer, QType
from ..numerics._shared import E8M0
from ._codes import scales
from ._operands import Operands
from ._pallas import pl, triton
from ._programs_gpu import Program, Tiles, in_programs, read, tiles_of
from ._rows import Arithmetic, arithmetic_on, codes_of, multiplied


def products_gpu(
    x: jax.Array,
    x_scale: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    group: jax.Array | None = None,
    *,
    step: jax.Array | None = None,
    form: QType,
    dtype: DTypeLike = jnp.float32,
    interpret: bool = False,
) -> jax.Array:
    """Returns the product of real rows and a weight, both multiplied as codes.

    Args:
      x: [M, K]: floats of 16 or 32 bits, to be quantized, or codes of the format.
      x_scale: float32 [M, 1], one scale per row, or [M, G], one for each of its groups.
      codes: [K, N]: integers of 4 or 8 bits, or 8-bit floats if the rows are. For 4 bits, K and N
        are multiples of 16.
      scale: [G, N]; each row is shared by K / G rows of codes, a multiple of 16; floats, or E8M0.
      zero: [G, N], integers, for codes of 4 bits or fewer, or `None`.
      group: int32 [T], if codes, scale and zero are stacks [E, ..., N]: the index of the matrix of
        each of T tiles of M / T rows, a power of two from 16 to 128; `~group` for unused tiles.
      step: int32 [], if codes have one more leading axis: the index along it.
      form: the symmetric format of rows: signed integers of 8 bits or fewer, which are multiplied
        as int8, or 8-bit floats.
      dtype: the dtype of the result, to which float32 sums are rounded.
      interpret: whether to run on any platform, step by step.

    Returns:
      [M, N].
    """
    (m, k), n, groups = x.shape, codes.shape[-1], scale.shape[-2]
    size = k // groups
    each = m if group is None else m // group.shape[0]
    narrow = codes.dtype in (jnp.int4, jnp.uint4)
    tiles = tiles_of(each, k, n, size, narrow, within=True, all_rows=m)
    scale = scale if scale.dtype != E8M0 else lax.bitcast_convert_type(scale, jnp.uint8)
    parameters = [scale] if zero is None else [scale, zero.astype(jnp.float32)]
    integers, qtype = isinstance(form, Integer), multiplied(form)
    sums = jnp.int32 if integers and groups == 1 else jnp.float32
    kernel = functools.partial(
        _kernel, tiles=tiles, shape=(k, size), form=form, by=arithmetic_on("gpu", interpret)
    )
    parts = in_programs(
        kernel,
        "jqx_products",
        tiles,
        Operands(x, codes, parameters, x_scale, group, step),
        dtype=sums,
        multiplies=qtype if integers or codes.dtype == qtype else jnp.bfloat16,
        interpret=interpret,
    )
    y = jnp.sum(parts, axis=0).astype(jnp.float32)
    y = y if x_scale.shape[1] > 1 else y * x_scale
    if groups > 1:
        return y.astype(dtype)
    own = scales(scale)
    if group is not None:
        own = jnp.repeat(own[jnp.where(group < 0, ~group, group), 0], each, axis=0)
    return (y * own).astype(dtype)


def _kernel(
    program: Program,
    x: Any,
    codes: Any,
    x_scale: Any,
    scale: Any,
    *rest: Any,
    tiles: Tiles,
    shape: tuple[int, int],
    form: QType,
    by: Arithmetic,
) -> None:
    *zeros, result = rest
    (k, size), ds = shape, pl().ds
    matrix, whole, is_column = program.matrix, program.whole, program.is_column
    integers, by_group = isinstance(form, Integer), x_scale.shape[1] > 1
    qtype = multiplied(form)

    def of_group(parameter: Any, start: Any) -> jax.Array:
        row = (*matrix, ds(lax.div(start, size), 1), slice(None))
        return scales(read(parameter, row, None if whole else is_column))

    def add(step: Any, total: jax.Array) -> jax.Array:
        start = step * tiles.k
        place, here = start + jnp.arange(tiles.k), ds(start, tiles.k)
        own = ds(lax.div(start, size), 1) if by_group else slice(None)
        factor = read(x_scale, (slice(None), own), program.is_row)
        inside = program.is_row & (place < k)[None, :]
        rows = read(x, (slice(None), here), inside)
        if rows.dtype != qtype:
            rows = codes_of(rows.astype(jnp.float32), factor, form, by)
            rows = jnp.where(inside, rows, jnp.zeros((), qtype))
        known = None if whole else (place < k)[:, None] & is_column
        columns = read(codes, (*program.codes, here, slice(None)), known)
        if zeros:
            difference = columns.astype(jnp.int32) - of_group(zeros[0], start).astype(jnp.int32)
            columns = difference.astype(qtype)
        elif integers and columns.dtype != qtype:
            columns = columns.astype(jnp.int32).astype(qtype)
        wide = jnp.int32 if integers else jnp.float32
        if rows.dtype != columns.dtype:
            rows, columns = rows.astype(jnp.bfloat16), columns.astype(jnp.bfloat16)
        product = jnp.dot(rows, columns, preferred_element_type=wide)
        if size == k:
            return total + product
        product = product.astype(jnp.float32) * of_group(scale, start)
        return total + (product * factor if by_group else product)

    none = jnp.zeros((tiles.m, tiles.n), result.dtype)
    total = lax.fori_loop(program.first, program.last, add, none)
    triton().store(result, total, mask=program.is_row & is_column)
