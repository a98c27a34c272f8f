"""The programs in which a GPU computes a product: tiles of rows and columns, and parts of the sum.

If rows are in groups with a matrix each (experts), a tile of rows belongs to one group, whose
number is the index of its matrix. A negative number `~group` marks an unused tile; its sum has no
steps.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._operands import Operands
from ._pallas import call, pl, triton

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
        before = (0,) * (leaf.ndim - 1)
        return space.BlockSpec((*leaf.shape[:-1], tiles.n), lambda i, j, part: (*before, j))

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
        given = dict(zip(numbers, inputs[count:], strict=True))
        kernel(_program(tiles, (m, k, n), **given), *inputs[:count], result)

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
      first: its first step along the sum.
      last: the step after its last one.
      is_row: which rows of its tile exist, [m, 1].
      is_column: which columns exist, [1, n].
      whole: whether all tiles of codes are whole.
    """

    matrix: tuple[Any, ...]
    codes: tuple[Any, ...]
    first: Any
    last: Any
    is_row: jax.Array
    is_column: jax.Array
    whole: bool


def _program(
    tiles: Tiles, shape: tuple[int, int, int], group: Any = None, which: Any = None
) -> Program:
    (m, k, n), space = shape, pl()
    i, j, part = map(space.program_id, range(3))
    steps = -(-k // tiles.k)
    each = -(-steps // tiles.parts)
    first = part * each
    last = jnp.minimum(first + each, steps)
    matrix = ()
    if group is not None:
        number = triton().load(group.at[i])
        matrix = (jnp.where(number < 0, ~number, number),)
        last = jnp.where(number < 0, first, last)
    before = () if which is None else (triton().load(which.at[i]),)
    is_row = (i * tiles.m + jnp.arange(tiles.m) < m)[:, None]
    is_column = (j * tiles.n + jnp.arange(tiles.n) < n)[None, :]
    whole = k % tiles.k == 0 and n % tiles.n == 0
    return Program(matrix, (*before, *matrix), first, last, is_row, is_column, whole)


def read(reference: Any, index: Any, inside: jax.Array | None) -> jax.Array:
    """Returns a part of an array, with zeros where `inside` is false; `None` means everywhere."""
    if inside is None:
        return triton().load(reference.at[index])
    zero = jnp.zeros((), reference.dtype)
    return triton().load(reference.at[index], mask=inside, other=zero)
