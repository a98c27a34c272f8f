"""Floats beside codes with scales in groups, or codes that are looked up, on a GPU, by Triton.

The arithmetic is that of the kernel for TPUs. A program goes through a part of the contracted axis
for a tile of rows and columns; where rows are few there are several parts, whose sums are added.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..numerics._shared import E8M0
from ._codes import Table, numbers, scales
from ._pallas import call, pl, triton

PROGRAMS = 264
"""Programs that keep a GPU busy: two for each multiprocessor of an H100."""

LEAST = 16
"""Rows and columns of the smallest tile that matrix units multiply."""


class Tiles(NamedTuple):
    """Sizes of the tiles of a product [M, K] x [K, N], powers of two, and in how many parts K is.

    Attributes:
      m: rows.
      k: elements of the contracted axis.
      n: columns.
      parts: of the contracted axis.
    """

    m: int
    k: int
    n: int
    parts: int


def weights_gpu(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    group: jax.Array | None = None,
    *,
    table: Table = None,
    precision: lax.PrecisionLike = None,
    dtype: DTypeLike = jnp.float32,
    interpret: bool = False,
) -> jax.Array:
    """Returns `x @ ((codes - zero) * scale)`, the weight rounded to the dtype of `x`.

    Args:
      x: [M, K], float16, bfloat16 or float32.
      codes: [K, N], of any dtype of 4 or 8 bits; of 4 bits, K and N are multiples of 16.
      scale: [G, N], of which each row is shared by K / G rows of codes; floats, or E8M0.
      zero: [G, N], integers, or `None`.
      group: int32 [T], where codes, scale and zero are stacks [E, ..., N]: which matrix each of T
        tiles of M / T rows, a power of two from 16 to 128, is multiplied by; `~group` where nothing
        reads it.
      table: what codes stand for, where they are looked up.
      precision: of float32 products.
      dtype: of the result, to which float32 sums are rounded.
      interpret: whether to run on any platform, step by step.

    Returns:
      [M, N].
    """
    (m, k), n, size = x.shape, codes.shape[-1], x.shape[1] // scale.shape[-2]
    each = m if group is None else m // group.shape[0]
    tiles = tiles_of(each, k, n, size, codes.dtype in (jnp.int4, jnp.uint4), all_rows=m)
    scale = scale if scale.dtype != E8M0 else lax.bitcast_convert_type(scale, jnp.uint8)
    parameters = [scale] if zero is None else [scale, zero.astype(jnp.float32)]
    space = pl()

    stack = codes.shape[:-2]

    def columns(rows: int) -> Any:
        zeros = (0,) * (len(stack) + 1)
        return space.BlockSpec((*stack, rows, tiles.n), lambda i, j, part: (*zeros, j))

    parts = call(
        functools.partial(
            _kernel,
            tiles=tiles,
            shape=(m, k, n, size),
            has_zero=zero is not None,
            table=table,
            precision=precision,
        ),
        "jqx_weights",
        jax.ShapeDtypeStruct((tiles.parts, m, n), jnp.float32 if tiles.parts > 1 else dtype),
        [x, codes, *parameters, *([] if group is None else [group])],
        multiplies=x.dtype,
        interpret=interpret,
        grid=(space.cdiv(m, tiles.m), space.cdiv(n, tiles.n), tiles.parts),
        in_specs=[
            space.BlockSpec((tiles.m, k), lambda i, j, part: (i, 0)),
            columns(k),
            *[columns(k // size)] * len(parameters),
            *[space.BlockSpec(g.shape, lambda i, j, part: (0,)) for g in (group,) if g is not None],
        ],
        out_specs=space.BlockSpec((None, tiles.m, tiles.n), lambda i, j, part: (part, i, j)),
        compiler_params=triton().CompilerParams(num_warps=4 if tiles.m < 128 else 8, num_stages=3),
    )
    return jnp.sum(parts, axis=0).astype(dtype) if tiles.parts > 1 else parts[0]


def tiles_of(
    m: int,
    k: int,
    n: int,
    size: int,
    narrow: bool,
    within: bool = False,
    all_rows: int | None = None,
) -> Tiles:
    """Returns the tiles of a product with scales for groups of `size`; those of narrow codes divide
    their axes, and where asked for they lie within a group. `m` are the rows of one matrix, of
    `all_rows` in all.
    """
    rows = min(128, max(LEAST, _power_above(m)))
    wide = 64 if rows < 128 else 128
    deep = 128 if rows < 64 else 64
    if narrow:
        wide, deep = math.gcd(n, wide), math.gcd(k, deep)
    power = size & -size  # the largest that divides a group
    if size < k and LEAST <= power and (within or power < size):
        deep = min(deep, power)
    deep = min(deep, max(LEAST, _power_above(k)))
    wide = min(wide, max(LEAST, _power_above(n)))
    programs = -(-(all_rows or m) // rows) * -(-n // wide)
    parts = min(max(1, PROGRAMS // programs), max(1, k // (4 * deep)))
    return Tiles(rows, deep, wide, parts)


def _power_above(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _kernel(
    x: Any,
    codes: Any,
    scale: Any,
    *rest: Any,
    tiles: Tiles,
    shape: tuple[int, int, int, int],
    has_zero: bool,
    table: Table,
    precision: lax.PrecisionLike,
) -> None:
    *more, result = rest
    zeros, groups = more[:has_zero], more[has_zero:]
    m, k, n, size = shape
    space, load = pl(), triton().load
    number = [load(group.at[space.program_id(0)]) for group in groups]
    matrix = tuple(jnp.where(group < 0, ~group, group) for group in number)
    steps = -(-k // tiles.k)
    each = -(-steps // tiles.parts)
    first = space.program_id(2) * each
    is_row = space.program_id(0) * tiles.m + jnp.arange(tiles.m) < m
    is_column = (space.program_id(1) * tiles.n + jnp.arange(tiles.n) < n)[None, :]
    whole = k % tiles.k == 0 and n % tiles.n == 0

    def of_rows(parameter: Any, start: Any) -> jax.Array:
        """Returns the parameters of a tile of codes, each repeated for its group, or one row."""
        if size == k or size % tiles.k == 0:
            row = parameter.at[(*matrix, space.ds(lax.div(start, size), 1), slice(None))]
            inside = None if whole else is_column
            return scales(load(row, mask=inside, other=_zero(parameter, whole)))
        if tiles.k % size == 0:
            count = tiles.k // size
            group = lax.div(start, size) + jnp.arange(count)
            rows = parameter.at[(*matrix, space.ds(lax.div(start, size), count), slice(None))]
            inside = None if whole else (group < k // size)[:, None] & is_column
            own = scales(load(rows, mask=inside, other=_zero(parameter, whole)))
            spread = jnp.broadcast_to(own[:, None, :], (count, size, tiles.n))
            return spread.reshape(tiles.k, tiles.n)
        group = lax.div(start + jnp.arange(tiles.k), size)
        all_columns = jnp.arange(tiles.n)[None, :]
        rows = parameter.at[(*matrix, group[:, None], all_columns)]
        inside = (group < k // size)[:, None] & is_column
        return scales(load(rows, mask=inside, other=_zero(parameter, False)))

    def add(step: Any, total: jax.Array) -> jax.Array:
        start = step * tiles.k
        place = start + jnp.arange(tiles.k)
        here = space.ds(start, tiles.k)
        inside = is_row[:, None] & (place < k)[None, :]
        rows = load(x.at[:, here], mask=inside, other=jnp.zeros((), x.dtype))
        known = None if whole else (place < k)[:, None] & is_column
        tile = load(codes.at[(*matrix, here, slice(None))], mask=known, other=_zero(codes, whole))
        real = numbers(tile, table)
        for zero in zeros:
            real = real - of_rows(zero, start)
        real = (real * of_rows(scale, start)).astype(rows.dtype)
        return total + jnp.dot(rows, real, precision=precision, preferred_element_type=jnp.float32)

    last = jnp.minimum(first + each, steps)
    for group in number:
        last = jnp.where(group < 0, first, last)
    total = lax.fori_loop(first, last, add, jnp.zeros((tiles.m, tiles.n), jnp.float32))
    triton().store(result, total.astype(result.dtype), mask=is_row[:, None] & is_column)


def _zero(reference: Any, whole: bool) -> Any:
    return None if whole else jnp.zeros((), reference.dtype)
