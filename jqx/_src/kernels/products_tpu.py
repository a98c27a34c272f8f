"""Products of codes with scales in groups on a TPU; the kernel may quantize the rows.

Each group is multiplied as codes: integers exactly, into int32, and 8-bit floats into float32. Its
sums are multiplied by the scales of the group in float32, and added. If a column has one scale,
integer sums are exact over the whole column, and are multiplied by both scales at the end.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..numerics.qtype import Integer, QType
from .pallas import (
    Arithmetic,
    Operands,
    Table,
    arithmetic_on,
    call,
    codes_of,
    multiplied,
    numbers,
    pl,
    scales,
    tpu,
)

# The part of a product that a TPU computes in a step: tiles that need no relayout in memory.


LANES = 128
"""The last axis of a tile is a multiple of this number of elements, or the whole axis."""

DEEP, WIDE = 1024, 512
"""Approximate number of elements of a tile of codes along the contracted axis and the other."""

DEEPEST = 2048
"""Elements along the contracted axis for which a tile may be larger, to hold whole rows of scales.
"""

WHOLE = 2**22
"""Elements of a tile that is as deep as the contracted axis."""

AT_ONCE = 256
"""Approximate number of rows of codes that are converted at once."""

BUDGET = 40 * 2**20
"""Bytes of memory on the chip for rows and results."""

LIMIT = 56 * 2**20
"""Bytes of memory on the chip in total; TPU7x has 64 MiB, TPU v5e and v6e 128 MiB."""


class Tiles(NamedTuple):
    """Sizes of the tiles of a product [M, K] x [K, N], and of their parts.

    Attributes:
      m: rows.
      k: elements of the contracted axis.
      n: columns.
      chunk: elements of the contracted axis that are converted at once.
      groups: rows of scales in a block of scales.
      moves: whether each tile of codes has its own block of scales; otherwise all scales of a
        column are one block.
      stay: whether rows are on the chip along the whole contracted axis, and are read once for all
        columns; otherwise a part of them is read for each tile of codes.
    """

    m: int
    k: int
    n: int
    chunk: int
    groups: int
    moves: bool
    stay: bool


def tiles_of(
    m: int,
    k: int,
    n: int,
    size: int,
    parameters: Sequence[Any],
    bytes_of_x: int,
    rows_per_matrix: int | None = None,
    stores: bool = False,
) -> Tiles:
    """Returns the tiles of a product with scales for groups of `size` along the contracted axis.

    `parameters` are the dtypes of scales and zero points [K / size, N]. `rows_per_matrix` is the
    number of rows for each of several matrices, which are read whole along the contracted axis.
    `stores` means that codes of rows are stored, one byte each.
    """
    if rows_per_matrix is not None:
        wide = max(LANES, min(2 * WIDE, WHOLE // k // LANES * LANES))
        return Tiles(rows_per_matrix, k, min(n, wide), _chunk(k, size), k // size, False, True)
    rows = max(32 // jnp.dtype(dtype).itemsize for dtype in parameters)
    scale_tile = math.lcm(LANES, size * rows)
    moves = False
    if k <= DEEP or (k <= DEEPEST and size < k):
        deep = k
    elif size == k:
        deep = DEEP
    elif scale_tile <= DEEPEST:
        deep, moves = min(k, scale_tile * max(1, DEEP // scale_tile)), k > scale_tile
    elif size % LANES == 0:
        deep = max(d for d in range(LANES, AT_ONCE * 2 + 1, LANES) if size % d == 0)
    else:
        deep = k
    wide = n if n <= WIDE else WIDE
    groups = deep // size if moves else k // size
    stay = k % deep == 0
    of_row = 2 * (k if stay else deep) * bytes_of_x + 16 * wide + (k if stores and stay else 0)
    row_limit = max(16, BUDGET // of_row // 16 * 16)
    return Tiles(_even(m, row_limit), deep, wide, _chunk(deep, size), groups, moves, stay)


def _even(m: int, limit: int) -> int:
    """Returns the number of rows of a tile, at most `limit`. The last tile has as many rows as the
    others, so that there is little padding.
    """
    count = -(-m // limit)
    return m if count < 2 else -(-m // (16 * count)) * 16


def columns_of(tiles: Tiles, k: int, step: Any, start: int, count: int) -> Any:
    """Returns the place of a part of the rows of a step in their block of `k` elements or fewer; it
    is a multiple of a register if there are several steps.
    """
    if not tiles.stay or tiles.k == k:
        return pl().ds(start, count)
    return pl().ds(pl().multiple_of(step * tiles.k + start, LANES), count)


def _chunk(deep: int, size: int) -> int:
    """Returns how many rows of a tile are converted at once: whole groups."""
    step = math.lcm(LANES, size)
    chunk = step * max(1, AT_ONCE // step)
    return chunk if deep % chunk == 0 else deep


# The steps in which a TPU computes a product: tiles of rows, then of columns, then along the sum.
#
# Rows stay on the chip for all columns, so both operands are read once if there is one tile of
# rows. If rows are in groups with a matrix each (experts), a tile of rows belongs to one group,
# whose number is the index of its matrix. Then tiles of columns are the outer loop, and a matrix
# is read whole along the sum, so that it stays on the chip for all tiles of its group. A negative
# number `~group` marks an unused tile, which is not computed.


def in_steps(
    kernel: Callable[..., None],
    name: str,
    tiles: Tiles,
    operands: Operands,
    *,
    sums: DTypeLike,
    dtype: DTypeLike,
    multiplies: DTypeLike,
    interpret: bool,
    stored_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Runs a kernel on tiles. Its arguments are the index of the tile of columns, the step along
    the sum, and references to x, codes, the scale of x (if there is one), the parameters, the
    result, the sums (which persist between steps), and a buffer for rows.

    Args:
      kernel: the kernel.
      name: its name.
      tiles: the sizes of the tiles.
      operands: the operands, with scales of rows [M, 1], or [steps along the sum, M, groups of a
        tile].
      sums: the dtype of the sums.
      dtype: the dtype of the result.
      multiplies: the dtype that matrix units multiply.
      interpret: whether to run on any platform, step by step.
      stored_dtype: the dtype of the buffer for rows, which has the shape of x and is kept for all
        columns; or `None`.

    Returns:
      [M, N].
    """
    (m, k, n), space = operands.shape, pl()
    is_ragged, is_stack = operands.group is not None, operands.step is not None
    prefetched = [] if operands.step is None else [operands.step[None]]
    prefetched += [] if operands.group is None else [operands.group]

    def block(shape: tuple[Any, ...], block_index: Callable[..., tuple[Any, ...]]) -> Any:
        """Returns the block at `block_index(i, j, step, *numbers)`."""

        def index(outer: Any, inner: Any, step: Any, *numbers: Any) -> tuple[Any, ...]:
            i, j = (inner, outer) if is_ragged else (outer, inner)
            return block_index(i, j, step, *numbers)

        return space.BlockSpec(shape, index, memory_space=tpu().VMEM)

    def of_matrix(rows: int, moves: bool, in_stack: bool = False) -> Any:
        def block_index(i: Any, j: Any, step: Any, *numbers: Any) -> tuple[Any, ...]:
            lead = [numbers[0][0]] if in_stack else []
            lead += [_matrix(numbers[-1][i])] if is_ragged else []
            return *lead, step if moves else 0, j

        return block((*(None,) * (in_stack + is_ragged), rows, tiles.n), block_index)

    rows = [
        block((None, tiles.m, scale.shape[2]), lambda i, j, step, *_: (step, i, 0))
        if scale.ndim == 3
        else block((tiles.m, 1), lambda i, j, step, *_: (i, 0))
        for scale in operands.scales
    ]

    def run(*references: Any) -> None:
        outer, inner, step = map(space.program_id, range(3))
        operand_references = references[len(prefetched) :]
        if not is_ragged:
            return kernel(inner, step, *operand_references)
        groups = references[len(prefetched) - 1]
        space.when(groups[inner] >= 0)(lambda: kernel(outer, step, *operand_references))

    whole_rows = block((tiles.m, k), lambda i, j, step, *_: (i, 0))
    part = block((tiles.m, tiles.k), lambda i, j, step, *_: (i, step))
    along = space.cdiv(m, tiles.m), space.cdiv(n, tiles.n)
    keeps = [] if stored_dtype is None else [tpu().VMEM((tiles.m, k), stored_dtype)]
    grid = tpu().PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched),
        grid=(*(along[::-1] if is_ragged else along), space.cdiv(k, tiles.k)),
        in_specs=[
            whole_rows if tiles.stay else part,
            of_matrix(tiles.k, True, is_stack),
            *rows,
            *[of_matrix(tiles.groups, tiles.moves)] * len(operands.parameters),
        ],
        out_specs=block((tiles.m, tiles.n), lambda i, j, step, *_: (i, j)),
        scratch_shapes=[tpu().VMEM((tiles.m, tiles.n), sums), *keeps],
    )
    return call(
        run,
        name,
        jax.ShapeDtypeStruct((m, n), dtype),
        [*prefetched, operands.x, operands.codes, *operands.scales, *operands.parameters],
        multiplies=multiplies,
        interpret=interpret,
        chips=("TPU7x",) if operands.codes.dtype == jnp.float4_e2m1fn else (),
        grid_spec=grid,
        compiler_params=tpu().CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=LIMIT
        ),
    )


def _matrix(group: Any) -> Any:
    """Returns the index of the matrix of a tile; for an unused tile, that of the tile before."""
    return jnp.where(group < 0, ~group, group)


def products_tpu(
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
      x: [M, K]: float32 or bfloat16, to be quantized, or codes of the format.
      x_scale: float32 [M, 1], one scale per row, or [M, G], one for each of its groups.
      codes: [K, N]: integers of 8 bits or fewer, or 8-bit floats if the rows are.
      scale: [G, N]; each row is shared by K / G rows of codes; floats, or E8M0.
      zero: [G, N], integers, for codes of 4 bits or fewer, or `None`.
      group: int32 [T], if codes, scale and zero are stacks [E, ..., N]: the index of the matrix of
        each of T tiles of M / T rows, a multiple of 8; `~group` for unused tiles.
      step: int32 [], if codes have one more leading axis: the index along it.
      form: the symmetric format of rows: signed integers of 8 bits or fewer, which are multiplied
        as int8, or 8-bit floats.
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
    dtypes, width, qtype = [p.dtype for p in parameters], x.dtype.itemsize, multiplied(form)
    quantizes = x.dtype != qtype
    tiles = tiles_of(m, k, n, size, dtypes, width, rows, stores=quantizes)
    keeps = quantizes and group is None and tiles.stay and n > tiles.n
    if not tiles.moves and groups > 1:  # rows of float32 can be read at any index
        parameters = [scales(p) for p in parameters]
    by_group = x_scale.shape[1] > 1
    kernel = functools.partial(
        _products_kernel,
        tiles=tiles,
        shape=(k, size),
        form=form,
        by_group=by_group,
        has_zero=zero is not None,
        arithmetic=arithmetic_on("tpu", interpret),
    )
    return in_steps(
        kernel,
        "jqx_products",
        tiles,
        Operands(
            x,
            codes,
            parameters,
            _in_tiles(x_scale, tiles, k, size) if by_group else x_scale,
            group,
            step,
        ),
        sums=jnp.int32 if isinstance(form, Integer) and groups == 1 else jnp.float32,
        dtype=dtype,
        multiplies=qtype,
        interpret=interpret,
        stored_dtype=qtype if keeps else None,
    )


def _in_tiles(x_scale: jax.Array, tiles: Tiles, k: int, size: int) -> jax.Array:
    """Returns scales [M, G] as [tiles along K, M, groups of a tile]."""
    groups_per_tile, steps = max(1, tiles.k // size), -(-k // tiles.k)
    if size > tiles.k:
        x_scale = jnp.repeat(x_scale, size // tiles.k, axis=1)
    padded = jnp.pad(x_scale, ((0, 0), (0, steps * groups_per_tile - x_scale.shape[1])))
    return jnp.moveaxis(padded.reshape(x_scale.shape[0], steps, groups_per_tile), 1, 0)


def _products_kernel(
    column: Any,
    step: Any,
    x: Any,
    codes: Any,
    x_scale: Any,
    scale: Any,
    *references: Any,
    tiles: Tiles,
    shape: tuple[int, int],
    form: QType,
    by_group: bool,
    has_zero: bool,
    arithmetic: Arithmetic,
) -> None:
    zeros, (result, total, *stored) = references[:has_zero], references[has_zero:]
    k, size = shape
    qtype = multiplied(form)
    integers = isinstance(form, Integer)
    part_size = min(size, tiles.k)
    is_single_group = k == size

    @pl().when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    parts = tiles.k // part_size
    by_row = [x_scale[:, i : i + 1] if by_group else x_scale[...] for i in range(parts)]
    where = columns_of(tiles, k, step, 0, tiles.k)
    all_rows = x[:, where]
    if x.dtype != qtype:
        all_rows = _codes(all_rows, by_row, stored, where, column, form, arithmetic)
    for part in range(parts):
        start, row_scale = part * part_size, by_row[part]
        rows, columns = all_rows[:, start : start + part_size], codes[pl().ds(start, part_size), :]
        of_group = functools.partial(
            _row, step=step, start=start, tiles=tiles, size=size, is_single_group=is_single_group
        )
        if zeros:
            difference = columns.astype(jnp.int32) - of_group(zeros[0]).astype(jnp.int32)
            columns = difference.astype(qtype)
        elif integers and columns.dtype != qtype:
            columns = columns.astype(jnp.int32).astype(qtype)
        left = k - step * tiles.k - start
        if k % tiles.k:  # memory beyond the end is not zero
            rows = _first(rows, left, axis=1)
            columns = columns if integers else _first(columns, left, 0)
        wide = jnp.int32 if integers else jnp.float32
        product = jnp.dot(rows, columns, preferred_element_type=wide)
        if is_single_group:
            total[...] += product
            continue
        product = product.astype(jnp.float32) * of_group(scale)
        product = product * row_scale if by_group else product
        total[...] += jnp.where(left > 0, product, 0.0) if k % tiles.k else product

    @pl().when(step == -(-k // tiles.k) - 1)
    def _() -> None:
        y = total[...].astype(jnp.float32)
        if not by_group:
            y = y * x_scale[...]
        y = y * scales(scale[...]) if is_single_group else y
        result[...] = y.astype(result.dtype)


def _codes(
    x: jax.Array,
    by_row: Sequence[jax.Array],
    stored: Sequence[Any],
    where: Any,
    column: Any,
    form: QType,
    arithmetic: Arithmetic,
) -> jax.Array:
    """Returns the codes of a part of rows, which are computed for the first tile of columns and
    stored for the others.
    """

    def made() -> jax.Array:
        part_size = x.shape[1] // len(by_row)
        spread = [jnp.broadcast_to(row_scale, (x.shape[0], part_size)) for row_scale in by_row]
        scale = spread[0] if len(spread) == 1 else jnp.concatenate(spread, axis=1)
        return codes_of(x.astype(jnp.float32), scale, form, arithmetic)

    if not stored:
        return made()

    @pl().when(column == 0)
    def _() -> None:
        stored[0][:, where] = made()

    return stored[0][:, where]


def _row(
    parameter: Any, *, step: Any, start: int, tiles: Tiles, size: int, is_single_group: bool
) -> jax.Array:
    """Returns the parameters of a group, or of a part of it, one row."""
    if is_single_group:
        return scales(parameter[...])
    if size > tiles.k or not tiles.moves:
        row = lax.div(step * tiles.k + start, size)  # `//` would query the local chip
        return scales(parameter[pl().ds(row, 1), :])
    return scales(parameter[start // size : start // size + 1, :])


def _first(codes: jax.Array, count: Any, axis: int) -> jax.Array:
    """Returns codes with zeros after the first `count` of an axis."""
    wide = codes.astype(jnp.float32)
    masked = jnp.where(lax.broadcasted_iota(jnp.int32, codes.shape, axis) < count, wide, 0.0)
    return masked.astype(codes.dtype)


# Products of floats and codes with scales in groups, or looked-up codes, on a TPU.
#
# A step reads a tile of codes in their stored dtype, converts them to numbers in registers, scales
# them in float32, rounds them to the dtype of the rows, and multiplies. This is the arithmetic of a
# weight that is dequantized first, without storing that weight. Sums are float32.


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
        _weights_kernel, tiles=tiles, shape=(k, size), table=table, precision=precision
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


def _weights_kernel(
    _: Any,
    step: Any,
    x: Any,
    codes: Any,
    scale: Any,
    *references: Any,
    tiles: Tiles,
    shape: tuple[int, int],
    table: Table,
    precision: lax.PrecisionLike,
) -> None:
    *zeros, result, total = references
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
    first_group = start // size
    group_scales = scales(parameter[first_group : first_group + count, :])
    if count == 1:
        return group_scales
    if size % SUBLANES == 0:
        spread = jnp.broadcast_to(group_scales[:, None, :], (count, size, group_scales.shape[1]))
        return spread.reshape(count * size, group_scales.shape[1])
    # For any other size, each row uses the parameters of its group.
    group = lax.div(lax.broadcasted_iota(jnp.int32, (count * size, group_scales.shape[1]), 0), size)
    spread = jnp.broadcast_to(group_scales[:1, :], group.shape)
    for i in range(1, count):
        spread = jnp.where(group == i, group_scales[i : i + 1, :], spread)
    return spread
