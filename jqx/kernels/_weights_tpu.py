"""Products of floats and codes with scales in groups, or looked-up codes, on a TPU.

A step reads a tile of codes in their stored dtype, converts them to numbers in registers, scales
them in float32, rounds them to the dtype of the rows, and multiplies. This is the arithmetic of a
weight that is dequantized first, without storing that weight. Sums are float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ._codes import Table, numbers, scales
from ._operands import Operands
from ._pallas import pl
from ._steps_tpu import in_steps
from ._tiles_tpu import Tiles, columns_of, tiles_of

SUBLANES = 8
"""Rows of float32 in a register; reshaping a group of whole registers is free."""


def weights_tpu(
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
      x: [M, K], bfloat16 or float32.
      codes: [K, N], of any dtype of 8 bits or fewer.
      scale: [G, N]; each row is shared by K / G rows of codes; floats, or E8M0.
      zero: [G, N], integers, or `None`.
      group: int32 [T], if codes, scale and zero are stacks [E, ..., N]: the index of the matrix of
        each of T tiles of M / T rows, a multiple of 8; `~group` for unused tiles.
      step: int32 [], if codes have one more leading axis: the index along it.
      table: the numbers that codes represent, if they are looked up.
      precision: the precision of float32 products.
      dtype: the dtype of the result, to which float32 sums are rounded.
      interpret: whether to run on any platform, step by step.

    Returns:
      [M, N].
    """
    (m, k), n, groups = x.shape, codes.shape[-1], scale.shape[-2]
    size, parameters = k // groups, [scale]
    if zero is not None:
        parameters.append(zero.astype(jnp.bfloat16))
    rows = None if group is None else m // group.shape[0]
    tiles = tiles_of(m, k, n, size, [p.dtype for p in parameters], x.dtype.itemsize, rows)
    if not tiles.moves and groups > 1:  # rows of float32 can be read at any index
        parameters = [scales(p) for p in parameters]
    kernel = functools.partial(
        _kernel, tiles=tiles, shape=(k, size), table=table, precision=precision
    )
    return in_steps(
        kernel,
        "jqx_weights",
        tiles,
        Operands(x, codes, parameters, None, group, step),
        sums=jnp.float32,
        dtype=dtype,
        multiplies=x.dtype,
        interpret=interpret,
    )


def _kernel(
    _: Any,
    step: Any,
    x: Any,
    codes: Any,
    scale: Any,
    *rest: Any,
    tiles: Tiles,
    shape: tuple[int, int],
    table: Table,
    precision: lax.PrecisionLike,
) -> None:
    *zeros, result, total = rest
    k, size = shape

    @pl().when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    for start in range(0, tiles.k, tiles.chunk):
        chunk = pl().ds(start, tiles.chunk)
        real = numbers(codes[chunk, :], table)
        of_rows = functools.partial(
            _spread, step=step, start=start, tiles=tiles, groups=k // size, size=size
        )
        for zero in zeros:
            real = real - of_rows(zero)
        real = real * of_rows(scale)
        rows = x[:, columns_of(tiles, k, step, start, tiles.chunk)]
        if k % tiles.k:  # memory beyond the end is not zero
            left = k - step * tiles.k - start
            real = jnp.where(lax.broadcasted_iota(jnp.int32, real.shape, 0) < left, real, 0)
            rows = jnp.where(lax.broadcasted_iota(jnp.int32, rows.shape, 1) < left, rows, 0)
        total[...] += jnp.dot(
            rows, real.astype(rows.dtype), precision=precision, preferred_element_type=jnp.float32
        )

    @pl().when(step == -(-k // tiles.k) - 1)
    def _() -> None:
        result[...] = total[...].astype(result.dtype)


def _spread(
    parameter: Any, *, step: Any, start: int, tiles: Tiles, groups: int, size: int
) -> jax.Array:
    """Returns the parameters of a chunk of rows: repeated for each group, or one row."""
    if groups == 1:
        return scales(parameter[...])
    count = tiles.chunk // size
    if count == 0:  # a part of a group
        row = lax.div(step * tiles.k + start, size)  # `//` would query the local chip
        return scales(parameter[pl().ds(row, 1), :])
    first = start // size
    own = scales(parameter[first : first + count, :])
    if count == 1:
        return own
    if size % SUBLANES == 0:
        spread = jnp.broadcast_to(own[:, None, :], (count, size, own.shape[1]))
        return spread.reshape(count * size, own.shape[1])
    # For any other size, each row uses the parameters of its group.
    group = lax.div(lax.broadcasted_iota(jnp.int32, (count * size, own.shape[1]), 0), size)
    spread = jnp.broadcast_to(own[:1, :], group.shape)
    for i in range(1, count):
        spread = jnp.where(group == i, own[i : i + 1, :], spread)
    return spread
