"""Products of codes with scales in groups on a GPU, by Triton; the kernel may quantize the rows.

The arithmetic is that of the kernel for TPUs; as there, integer sums of a column with one scale are
exact. Two different formats of 8-bit floats are multiplied as bfloat16, which represents both.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..numerics.lookup import E8M0
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
    triton,
)

# The programs in which a GPU computes a product: tiles of rows and columns, and parts of the sum.
#
# If rows are in groups with a matrix each (experts), a tile of rows belongs to one group, whose
# number is the index of its matrix. A negative number `~group` marks an unused tile; its sum has no
# steps.


PROGRAMS = 264
"""Programs that keep a GPU busy: two for each multiprocessor of an H100."""

LEAST = 16
"""Rows and columns of the smallest tile that matrix units multiply."""


class Tiles(NamedTuple):
    """Sizes of the tiles of a product [M, K] x [K, N], powers of two, and the number of parts of K.

    Attributes:
      m: rows.
      k: elements of the contracted axis.
      n: columns.
      parts: parts of the contracted axis.
    """

    m: int
    k: int
    n: int
    parts: int


def tiles_of(
    m: int,
    k: int,
    n: int,
    size: int,
    narrow: bool,
    within: bool = False,
    all_rows: int | None = None,
) -> Tiles:
    """Returns the tiles of a product with scales for groups of `size`. Tiles of narrow codes divide
    their axes, and on request tiles lie within a group. `m` is the number of rows of one matrix,
    and `all_rows` that of all rows.
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


def in_programs(
    kernel: Callable[..., None],
    name: str,
    tiles: Tiles,
    operands: Operands,
    *,
    dtype: DTypeLike,
    multiplies: DTypeLike,
    interpret: bool,
) -> jax.Array:
    """Runs a kernel in programs. Its arguments are its `Program`, and references to x, codes, the
    scale of x (if there is one), the parameters, and the result.

    Args:
      kernel: the kernel.
      name: its name.
      tiles: the sizes of the tiles.
      operands: the operands, with scales of rows [M, 1], or [M, G] for their groups.
      dtype: the dtype of the result.
      multiplies: the dtype that matrix units multiply.
      interpret: whether to run on any platform, step by step.

    Returns:
      [parts, M, N], to be summed.
    """
    (m, k, n), space = operands.shape, pl()

    def of_rows(leaf: jax.Array) -> Any:
        return space.BlockSpec((tiles.m, leaf.shape[1]), lambda i, j, part: (i, 0))

    def of_columns(leaf: jax.Array) -> Any:
        lead = (0,) * (leaf.ndim - 1)
        return space.BlockSpec((*leaf.shape[:-1], tiles.n), lambda i, j, part: (*lead, j))

    def of_all(leaf: jax.Array) -> Any:
        return space.BlockSpec(leaf.shape, lambda i, j, part: (0,))

    along = space.cdiv(m, tiles.m), space.cdiv(n, tiles.n), tiles.parts
    numbers = {}
    if operands.group is not None:
        numbers["group"] = operands.group
    if operands.step is not None:  # repeated for each tile of rows, like groups
        numbers["which"] = jnp.broadcast_to(operands.step, along[:1])

    def run(*references: Any) -> None:
        *inputs, result = references
        count = len(inputs) - len(numbers)
        scalars = dict(zip(numbers, inputs[count:], strict=True))
        kernel(_program(tiles, (m, k, n), **scalars), *inputs[:count], result)

    return call(
        run,
        name,
        jax.ShapeDtypeStruct((tiles.parts, m, n), dtype),
        [operands.x, operands.codes, *operands.scales, *operands.parameters, *numbers.values()],
        multiplies=multiplies,
        interpret=interpret,
        grid=along,
        in_specs=[
            of_rows(operands.x),
            of_columns(operands.codes),
            *map(of_rows, operands.scales),
            *map(of_columns, operands.parameters),
            *map(of_all, numbers.values()),
        ],
        out_specs=space.BlockSpec((None, tiles.m, tiles.n), lambda i, j, part: (part, i, j)),
        compiler_params=triton().CompilerParams(num_warps=4 if tiles.m < 128 else 8, num_stages=3),
    )


class Program(NamedTuple):
    """What one program computes.

    Attributes:
      matrix: the index of its matrix in a stack, or an empty tuple.
      codes: the index of its codes, or an empty tuple.
      first_step: its first step along the sum.
      end_step: the step after its last one.
      is_row: which rows of its tile exist, [m, 1].
      is_column: which columns exist, [1, n].
      is_even: whether no tile of codes extends beyond the end of an axis.
    """

    matrix: tuple[Any, ...]
    codes: tuple[Any, ...]
    first_step: Any
    end_step: Any
    is_row: jax.Array
    is_column: jax.Array
    is_even: bool


def _program(
    tiles: Tiles, shape: tuple[int, int, int], group: Any = None, which: Any = None
) -> Program:
    (m, k, n), space = shape, pl()
    i, j, part = map(space.program_id, range(3))
    steps = -(-k // tiles.k)
    steps_per_part = -(-steps // tiles.parts)
    begin = part * steps_per_part
    end = jnp.minimum(begin + steps_per_part, steps)
    matrix = ()
    if group is not None:
        number = triton().load(group.at[i])
        matrix = (jnp.where(number < 0, ~number, number),)
        end = jnp.where(number < 0, begin, end)
    stack_index = () if which is None else (triton().load(which.at[i]),)
    is_row = (i * tiles.m + jnp.arange(tiles.m) < m)[:, None]
    is_column = (j * tiles.n + jnp.arange(tiles.n) < n)[None, :]
    is_even = k % tiles.k == 0 and n % tiles.n == 0
    return Program(matrix, (*stack_index, *matrix), begin, end, is_row, is_column, is_even)


def read(reference: Any, index: Any, inside: jax.Array | None) -> jax.Array:
    """Returns a part of an array, with zeros where `inside` is false; `None` means everywhere."""
    if inside is None:
        return triton().load(reference.at[index])
    zero = jnp.zeros((), reference.dtype)
    return triton().load(reference.at[index], mask=inside, other=zero)


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
    group_rows = m if group is None else m // group.shape[0]
    narrow = codes.dtype in (jnp.int4, jnp.uint4)
    tiles = tiles_of(group_rows, k, n, size, narrow, within=True, all_rows=m)
    scale = scale if scale.dtype != E8M0 else lax.bitcast_convert_type(scale, jnp.uint8)
    parameters = [scale] if zero is None else [scale, zero.astype(jnp.float32)]
    integers, qtype = isinstance(form, Integer), multiplied(form)
    sums = jnp.int32 if integers and groups == 1 else jnp.float32
    kernel = functools.partial(
        _products_kernel,
        tiles=tiles,
        shape=(k, size),
        form=form,
        arithmetic=arithmetic_on("gpu", interpret),
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
    factor = scales(scale)
    if group is not None:
        factor = jnp.repeat(factor[jnp.where(group < 0, ~group, group), 0], group_rows, axis=0)
    return (y * factor).astype(dtype)


def _products_kernel(
    program: Program,
    x: Any,
    codes: Any,
    x_scale: Any,
    scale: Any,
    *references: Any,
    tiles: Tiles,
    shape: tuple[int, int],
    form: QType,
    arithmetic: Arithmetic,
) -> None:
    *zeros, result = references
    (k, size), ds = shape, pl().ds
    matrix, is_even, is_column = program.matrix, program.is_even, program.is_column
    integers, by_group = isinstance(form, Integer), x_scale.shape[1] > 1
    qtype = multiplied(form)

    def of_group(parameter: Any, start: Any) -> jax.Array:
        row = (*matrix, ds(lax.div(start, size), 1), slice(None))
        return scales(read(parameter, row, None if is_even else is_column))

    def add(step: Any, total: jax.Array) -> jax.Array:
        start = step * tiles.k
        positions, elements = start + jnp.arange(tiles.k), ds(start, tiles.k)
        groups = ds(lax.div(start, size), 1) if by_group else slice(None)
        factor = read(x_scale, (slice(None), groups), program.is_row)
        inside = program.is_row & (positions < k)[None, :]
        rows = read(x, (slice(None), elements), inside)
        if rows.dtype != qtype:
            rows = codes_of(rows.astype(jnp.float32), factor, form, arithmetic)
            rows = jnp.where(inside, rows, jnp.zeros((), qtype))
        mask = None if is_even else (positions < k)[:, None] & is_column
        columns = read(codes, (*program.codes, elements, slice(None)), mask)
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
    total = lax.fori_loop(program.first_step, program.end_step, add, none)
    triton().store(result, total, mask=program.is_row & is_column)


# Products of floats and codes with scales in groups, or looked-up codes, on a GPU, by Triton.
#
# The arithmetic is that of the kernel for TPUs. A program processes a part of the contracted axis
# for a tile of rows and columns. If there are few rows, there are several parts, whose sums are
# added.


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
    group_rows = m if group is None else m // group.shape[0]
    tiles = tiles_of(group_rows, k, n, size, codes.dtype in (jnp.int4, jnp.uint4), all_rows=m)
    scale = scale if scale.dtype != E8M0 else lax.bitcast_convert_type(scale, jnp.uint8)
    parameters = [scale] if zero is None else [scale, zero.astype(jnp.float32)]
    kernel = functools.partial(
        _weights_kernel, tiles=tiles, shape=(k, size), table=table, precision=precision
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


def _weights_kernel(
    program: Program,
    x: Any,
    codes: Any,
    scale: Any,
    *references: Any,
    tiles: Tiles,
    shape: tuple[int, int],
    table: Table,
    precision: lax.PrecisionLike,
) -> None:
    *zeros, result = references
    (k, size), ds = shape, pl().ds
    matrix, is_even, is_column = program.matrix, program.is_even, program.is_column

    def of_rows(parameter: Any, start: Any) -> jax.Array:
        """Returns the parameters of a tile of codes: repeated for each group, or one row."""
        begin = lax.div(start, size)
        if size == k or size % tiles.k == 0:
            inside = None if is_even else is_column
            return scales(read(parameter, (*matrix, ds(begin, 1), slice(None)), inside))
        if tiles.k % size == 0:
            count = tiles.k // size
            is_group = (begin + jnp.arange(count) < k // size)[:, None]
            inside = None if is_even else is_group & is_column
            values = scales(read(parameter, (*matrix, ds(begin, count), slice(None)), inside))
            spread = jnp.broadcast_to(values[:, None, :], (count, size, tiles.n))
            return spread.reshape(tiles.k, tiles.n)
        group = lax.div(start + jnp.arange(tiles.k), size)[:, None]
        all_columns = jnp.arange(tiles.n)[None, :]
        inside = (group < k // size) & is_column
        return scales(read(parameter, (*matrix, group, all_columns), inside))

    def add(step: Any, total: jax.Array) -> jax.Array:
        start = step * tiles.k
        positions, elements = start + jnp.arange(tiles.k), ds(start, tiles.k)
        rows = read(x, (slice(None), elements), program.is_row & (positions < k)[None, :])
        mask = None if is_even else (positions < k)[:, None] & is_column
        real = numbers(read(codes, (*program.codes, elements, slice(None)), mask), table)
        for zero in zeros:
            real = real - of_rows(zero, start)
        real = (real * of_rows(scale, start)).astype(rows.dtype)
        return total + jnp.dot(rows, real, precision=precision, preferred_element_type=jnp.float32)

    none = jnp.zeros((tiles.m, tiles.n), jnp.float32)
    total = lax.fori_loop(program.first_step, program.end_step, add, none)
    triton().store(result, total.astype(result.dtype), mask=program.is_row & is_column)
