"""`ragged_dot` on arrays and QTensors: groups of rows, each multiplied by its own matrix."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.typing import ArrayLike, DTypeLike

from ..checks import as_count, as_integers, called
from ..compat_kernels import alone_or_in_parts
from ..errors import fail
from ..kernels.products_cpu import product_cpu
from ..tensor.qtensor import QTensor
from ..tensor.segments import codes_and_index
from ..tensor.targets import kernel_of
from .blocks import item_at, with_own_scales
from .cache import take_along
from .dot_general import Operand, as_operand, check_operand, contract, result_dtype
from .formulation import CPU, PLATFORMS, Planner, formulation, formulation_of_kernels
from .integer_products import as_int8
from .kernels import (
    Rows,
    derived_as,
    is_laid_out_for,
    is_looked_up,
    multiplies_codes,
    parameters_of,
    precision_of,
    products_on,
    rows_on,
    table_of,
    weights_on,
)
from .kernels_cpu import (
    as_output,
    decoded,
    floats,
    left_of,
    multiplies_bytes,
    multiplies_decoded,
    multiplies_floats,
    right_of,
)
from .problem import Dimensions, HowTo, OperandAxes, Pending, find_block, quantize_pending

# Rows in groups, split into tiles that each hold rows of one group only.


class RowTiles(NamedTuple):
    """Rows in tiles; each tile holds rows of one group only.

    Attributes:
      group: the group of each tile, shape (tiles,); for unused tiles, the group of the last row.
      row: the row at each place of the tiles, shape (tiles, rows of a tile); unused places repeat
        the last row of the group.
      is_row: whether a place is used, of the same shape.
      position: the place of each row in the flattened tiles, shape (m,).
      is_used: whether each row has a place, shape (m,).
    """

    group: jax.Array
    row: jax.Array
    is_row: jax.Array
    position: jax.Array
    is_used: jax.Array

    def result(self, y: jax.Array) -> jax.Array:
        """Returns the rows [m, n] of a result of tiles [rows of all tiles, n], in their places."""
        y = jnp.take(y, self.position, axis=0, mode="clip")
        return jnp.where(self.is_used[:, None], y, jnp.zeros((), y.dtype))


_SYMBOLIC = 64
"""Rows of a tile if the number of rows is not known: in an exported program of any size."""


def rows_of_a_tile(m: int, groups: int, low: int, high: int) -> int:
    """Returns a power of two, up to twice as many rows as groups have on average."""
    if export.is_symbolic_dim(m):
        return min(high, max(low, _SYMBOLIC))
    mean = -(-m // groups)
    return min(high, max(low, 1 << (mean - 1).bit_length()))


def row_tiles(group_sizes: jax.Array, m: int, tile: int) -> RowTiles:
    """Returns tiles of `tile` rows that hold `m` rows in groups."""
    g = group_sizes.shape[0]
    # sum ceil(size / tile) = sum 1 + floor((size - 1) / tile), over `begun` groups with rows.
    # If the number of rows is symbolic, it is not known whether all groups begin.
    rows_in_all: Any = m
    if export.is_symbolic_dim(m):
        count = g + m // tile
    else:
        begun = min(m, g)
        count = begun + (m - begun) // tile
    sizes = as_count(group_sizes, m)
    ends = jnp.minimum(jnp.cumsum(sizes), rows_in_all)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    padded = -(-(ends - starts) // tile) * tile
    padded_ends = jnp.cumsum(padded)
    shifts = padded_ends - padded - starts

    position = jnp.arange(count * tile, dtype=ends.dtype).reshape(count, tile)
    group = _group_of(jnp.minimum(position[:, 0], padded_ends[-1] - 1), padded_ends)
    last_row = ends[group][:, None] - 1
    row = position - shifts[group][:, None]
    rows = jnp.arange(m, dtype=ends.dtype)
    return RowTiles(
        group,
        jnp.clip(row, 0, jnp.maximum(last_row, 0)),
        row <= last_row,
        rows + shifts[_group_of(rows, ends)],
        rows < ends[-1],
    )


def _group_of(positions: jax.Array, ends: jax.Array) -> jax.Array:
    """Returns the group of each place; the last group for places beyond all of them."""
    group = jnp.searchsorted(ends, positions, side="right", method="compare_all")
    return jnp.minimum(group, ends.shape[0] - 1)


def rows_in(x: Any, tiles: RowTiles) -> Any:
    """Returns the rows of an array or QTensor in tiles, along a new first axis. Unused places of an
    array are zeros, because a NaN there would reach gradients.
    """
    count, tile = tiles.row.shape
    if not isinstance(x, QTensor):
        rows = jnp.take(x, tiles.row, axis=0, mode="clip")
        return jnp.where(tiles.is_row[:, :, None], rows, jnp.zeros((), x.dtype))
    rows = take_along(x.unpack(), tiles.row.reshape(-1), 0)

    def split(leaf: jax.Array) -> jax.Array:
        if leaf.shape[0] == count * tile:
            return leaf.reshape(count, tile, *leaf.shape[1:])
        return jnp.broadcast_to(leaf, (count, *leaf.shape))

    return jax.tree.map(split, rows)


# `ragged_dot` in plain JAX: a scan over tiles of rows, each contracted with its matrix.
#
# Every group is padded to whole tiles, and each row of the result is read from its place in them.
# So neither all matrices nor all rows for each matrix are copied. A row never affects the result
# of another one, not even as a zero: a NaN stays in its row.


LEAST, MOST = 8, 512
"""Rows of a tile: fewer cost as much as these, and more hardly reduce the cost per row."""

MATRICES = Dimensions(2, 2, (1,), (0,), (), ())


class Args(NamedTuple):
    """The static arguments of a product of groups.

    Attributes:
      precision: of float products.
      dtype: of the result.
    """

    precision: lax.PrecisionLike
    dtype: Any


class Groups(NamedTuple):
    """Rows in groups and their matrices, as the planner sees them; at least one is a QTensor.

    Attributes:
      lhs: an array or a QTensor, shape (m, k).
      rhs: an array or a QTensor, shape (g, k, n).
      how: the static arguments of the product.
    """

    lhs: Any
    rhs: Any
    how: Args


@formulation(
    "rows in groups: each group padded to whole tiles, a scan contracts one tile after another",
    PLATFORMS,
    lambda case: True,
    op="ragged_dot",
    is_composite=True,
)
def ragged_tiles(lhs: Any, rhs: Any, sizes: jax.Array, how: Args) -> jax.Array:
    m = lhs.shape[0]
    rows_of_tile = rows_of_a_tile(m, rhs.shape[0], LEAST, MOST)
    tiles = row_tiles(sizes, m, rows_of_tile if export.is_symbolic_dim(m) else min(m, rows_of_tile))
    rows, matrices = rows_in(lhs, tiles), rhs
    if isinstance(rhs, QTensor):  # matrices that can be sliced one by one
        packing = None if rhs.layout is None else rhs.layout.packing
        is_packed = packing is not None and packing.axis == -3
        matrices = with_own_scales(rhs.unpack() if is_packed else rhs, (0,))

    def multiply(rows: Any, group: jax.Array) -> jax.Array:
        def of_group(leaf: jax.Array) -> jax.Array:
            return leaf[0] if leaf.shape[0] == 1 else item_at(leaf, group)

        matrix = jax.tree.map(of_group, matrices)
        return contract(rows, matrix, MATRICES, how.precision).astype(how.dtype)

    # Checkpointed, so that the backward pass does not store the matrix of each tile.
    multiply = jax.checkpoint(multiply, prevent_cse=False)
    _, y = lax.scan(lambda carry, tile: (carry, multiply(*tile)), None, (rows, tiles.group))
    return tiles.result(y.reshape(tiles.row.size, rhs.shape[2]))


# `ragged_dot` by jqx-cpu: its kernels multiply one group of rows after another, without copies.


STACK_SWAPPED = Dimensions(2, 3, (1,), (2,), (), (0,))
"""Rows and a stack of matrices [G, N, K]; the rows do not have the axis of the stack."""


def _how_of_groups(lhs: Any, rhs: QTensor, args: Args) -> HowTo:
    return HowTo(STACK_SWAPPED, args.precision, find_block(lhs, rhs, STACK_SWAPPED))


def _is_for_package(case: Groups) -> bool:
    x, q = case.lhs, case.rhs
    if kernel_of(q) != "cpu" or not q.layout.swapped or q.offset is not None or q.order is not None:
        return False
    q = q.in_memory_order
    conditions = multiplies_bytes, multiplies_floats, multiplies_decoded
    return any(multiplies(x, q, _how_of_groups(x, q, case.how)) for multiplies in conditions)


@formulation(
    "rows in groups, and matrices that are laid out for jqx-cpu: its kernel multiplies one group "
    "after another by its matrix, which is not copied",
    CPU,
    _is_for_package,
    op="ragged_dot",
)
def ragged_package(lhs: Any, rhs: QTensor, sizes: jax.Array, how: Args) -> jax.Array:
    def kernel(lhs: Any, rhs: QTensor, sizes: jax.Array) -> jax.Array:
        q = rhs.in_memory_order
        inner = _how_of_groups(lhs, q, how)
        if not isinstance(lhs, QTensor):
            multiply = floats if multiplies_floats(lhs, q, inner) else decoded
            return multiply(lhs, q, how=inner, sizes=sizes).astype(how.dtype)
        weight, _ = right_of(as_int8(q), inner)
        rows = left_of(as_int8(lhs), inner)
        y = product_cpu(*rows, *weight, dtype=jnp.float32, sizes=sizes)
        return as_output(y, lhs, inner).astype(how.dtype)

    plain = functools.partial(ragged_tiles.compute, how=how)
    return derived_as(functools.partial(alone_or_in_parts, kernel, plain), plain)(lhs, rhs, sizes)


# `ragged_dot` by kernels: each tile of rows has the index of its matrix in the stack.
#
# Rows are floats, codes, or floats that the kernel quantizes, as in `dot_general`. The matrices are
# laid out for a kernel, and are not copied.


STACK = Dimensions(2, 3, (1,), (1,), (), (0,))
"""The product of rows with each matrix; the rows do not have the axis of the stack."""

LEAST_ROWS, MOST_ROWS = 16, 128
"""Rows of a tile that matrix units multiply at once; more do not fit the registers of a GPU."""


def _has_kernel(target: str, case: Groups) -> bool:
    """Whether a kernel of a target multiplies rows by the matrices of a stack."""
    x, q = case.lhs, case.rhs
    if not isinstance(q, QTensor) or precision_of(case.how.precision) is NotImplemented:
        return False
    plain = q.offset is None and q.order is None and q.layout and not q.layout.swapped
    how = HowTo(STACK, block=find_block(x, q, STACK))
    if not plain or not is_laid_out_for(target, x, q, how):
        return False
    if isinstance(x, QTensor):
        return multiplies_codes(target, x, q, how)
    return how.block is not None or is_looked_up(q)


REASON = (
    "rows in groups, and matrices that are laid out for a kernel: a tile of rows is multiplied by "
    "the matrix of its group, which is not copied"
)


@formulation_of_kernels(REASON, _has_kernel, op="ragged_dot")
def ragged_kernel(target: str, lhs: Any, rhs: QTensor, sizes: jax.Array, how: Args) -> jax.Array:
    plain = functools.partial(ragged_tiles.compute, how=how)
    return derived_as(functools.partial(_by_kernel, target, how), plain)(lhs, rhs, sizes)


def _by_kernel(target: str, how: Args, lhs: Any, rhs: QTensor, sizes: jax.Array) -> jax.Array:
    """Multiplies rows, floats or codes or floats to be quantized, in tiles by a kernel."""
    m = lhs.shape[0]
    tiles = tiles_for_kernel(sizes, m)
    if isinstance(lhs, (QTensor, Pending)):
        x, scale, form = Rows.of(target, lhs)
        rows = [x, jnp.broadcast_to(scale.astype(jnp.float32), (m, scale.shape[1]))]
        kernel, dtype = functools.partial(products_on(target), form=form), jnp.dtype(jnp.float32)
    else:
        rows = [rows_on(target, lhs)]
        options = {"table": table_of(rhs), "precision": precision_of(how.precision)}
        kernel, dtype = functools.partial(weights_on(target), **options), rows[0].dtype
    rows = [rows_in(leaf, tiles).reshape(-1, leaf.shape[1]) for leaf in rows]
    codes, step = codes_and_index(rhs)
    rhs = with_own_scales(rhs, (0, 2))
    weight, count = parameters_of(rhs, dtype), rhs.shape[0]

    def of_all(leaf: jax.Array | None) -> jax.Array | None:
        return None if leaf is None else jnp.broadcast_to(leaf, (count, *leaf.shape[1:]))

    group = tiles.group.astype(jnp.int32)
    number = jnp.where(tiles.is_row[:, 0], group, ~group)
    result = how.dtype if weight.factor is None else jnp.float32
    parameters = of_all(weight.scale), of_all(weight.zero)
    y = kernel(*rows, codes, *parameters, number, step=step, dtype=result)
    if weight.factor is not None:
        factor = weight.factor if weight.factor.shape[0] == 1 else weight.factor[group]
        y = (y.reshape(len(group), -1, rhs.shape[2]) * factor).reshape(y.shape)
    return tiles.result(y).astype(how.dtype)


def tiles_for_kernel(sizes: jax.Array, m: int) -> RowTiles:
    """Returns the tiles of `m` rows in groups."""
    return row_tiles(sizes, m, rows_of_a_tile(m, sizes.shape[0], LEAST_ROWS, MOST_ROWS))


ROWS_OF_GROUPS = OperandAxes((1,), (0,)), OperandAxes((1,), (0, 2), (0,))
"""The roles of the axes of rows and matrices."""

GROUPS = Planner("ragged_dot", ragged_package, *ragged_kernel, ragged_tiles)


# `ragged_dot` of rows that are still to be quantized.


@formulation(
    "rows in groups to be quantized, and matrices that no kernel reads here: the rows are "
    "quantized first",
    PLATFORMS,
    lambda case: True,
    op="ragged_dot:quantized",
)
def ragged_quantize_first(lhs: Pending, rhs: QTensor, sizes: jax.Array, how: Args) -> jax.Array:
    options = {"precision": how.precision, "preferred_element_type": how.dtype}
    return ragged_dot(lhs.quantized(), rhs, sizes, **options)


def _quantizes(target: str, case: Groups) -> bool:
    rows: Pending = case.lhs
    is_suited = rows.suits(target, rows.shape[0])
    return is_suited and _has_kernel(target, case._replace(lhs=rows.codes))


@formulation_of_kernels(
    "rows in groups to be quantized, and matrices that are laid out for a kernel: the kernel "
    "quantizes a tile of rows, and multiplies codes",
    _quantizes,
    op="ragged_dot:quantized",
)
def ragged_kernel_quantizing(
    target: str, lhs: Pending, rhs: QTensor, sizes: jax.Array, how: Args
) -> jax.Array:
    plain = functools.partial(ragged_quantize_first.compute, how=how)
    return derived_as(functools.partial(_by_kernel, target, how), plain)(lhs, rhs, sizes)


QUANTIZED = Planner("ragged_dot:quantized", *ragged_kernel_quantizing, ragged_quantize_first)


@called("ragged_dot")
def ragged_dot(
    lhs: Operand,
    rhs: Operand,
    group_sizes: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: None = None,
) -> jax.Array:
    """Multiplies groups of rows by matrices, one per group; both sides may be quantized. Otherwise
    it is `jax.lax.ragged_dot`.

    The first `group_sizes[0]` rows are multiplied by `rhs[0]`, the next by `rhs[1]`, and so on
    (a mixture of experts, with tokens sorted by expert). Each product is that of `jqx.dot_general`:
    exact for two integer formats. Rows are contracted one tile at a time with the codes of one
    matrix. Tiles have at most twice as many rows as groups have on average (between 8 and 512), and
    each group has at most one tile that is not full. Two arrays are passed to `lax.ragged_dot`.
    `jqx.formulations` shows how tiles are contracted, and how many there are.

    Args:
      lhs: array or QTensor, shape (m, k), with rows sorted by group.
      rhs: array or QTensor, shape (g, k, n). The scales of both operands must not vary along `k`,
        except in blocks. Codes packed along `g` are all unpacked first.
      group_sizes: integers, shape (g,): the number of rows of each group. Rows beyond their sum are
        zero in the result; groups beyond the last row are truncated. A negative size counts as 0.
      precision: as in `jqx.dot_general`.
      preferred_element_type: floating point dtype of the result; `None` takes the promoted dtype of
        the operands.
      group_offset: `None`: `lax.ragged_dot` does not implement it either.

    Returns:
      Array of `preferred_element_type`, shape (m, n).

    Raises:
      ValueError: as in `dot_general`; ranks or sizes do not fit.
      TypeError: as in `dot_general`; `group_sizes` are not integers.
      NotImplementedError: a `group_offset` is given.

    Gradient: JAX differentiates it with respect to float operands and scales; codes have no
      gradient.
    NaN and infinities: as in `jqx.dot_general`; those of a row or a matrix only affect rows of
      the same group.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> experts = jnp.stack([jnp.eye(2), jnp.eye(2) * 3.0])
      >>> w = jqx.QTensor.quantize(experts, jqx.QSpec(jnp.int8, jqx.per_axis(0, 2)))
      >>> jqx.ragged_dot(jnp.ones((4, 2)), w, jnp.array([1, 2]))
      Array([[1., 1.],
             [3., 3.],
             [3., 3.],
             [0., 0.]], dtype=float32)
    """
    if group_offset is not None:
        problem = "`group_offset` is not supported."
        fix = "pass only the matrices, sizes and rows of the groups to compute."
        raise fail("ragged_dot", problem, fix=fix, error=NotImplementedError)
    left, right = as_operand(lhs), as_operand(rhs)
    sizes = as_integers("ragged_dot", "group_sizes", group_sizes)
    if not isinstance(right, QTensor):
        left = quantize_pending(left)
    if not isinstance(left, (QTensor, Pending)) and not isinstance(right, QTensor):
        return lax.ragged_dot(
            left,
            right,
            sizes,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
    _check_shapes(left, right, sizes)
    check_operand("ragged_dot", "lhs", left, (1,))
    check_operand("ragged_dot", "rhs", right, (1,))
    dtype = result_dtype("ragged_dot", left, right, preferred_element_type)
    if left.shape[0] == 0 or right.shape[0] == 0:
        return jnp.zeros((left.shape[0], right.shape[2]), dtype)
    planner = QUANTIZED if isinstance(left, Pending) else GROUPS
    return planner.compute(Groups(left, right, Args(precision, dtype)), left, right, sizes)


def _check_shapes(lhs: Any, rhs: Any, sizes: jax.Array) -> None:
    problem = fix = ""
    if (lhs.ndim, rhs.ndim, sizes.ndim) != (2, 3, 1):
        problem = "an operand has the wrong rank"
        fix = "pass lhs (m, k), rhs (g, k, n), group_sizes (g,); map over batches with jax.vmap."
    elif lhs.shape[1] != rhs.shape[1]:
        problem = "the contracted axes have different sizes"
        fix = "give rhs its axes in the order (g, k, n)."
    elif sizes.shape[0] != rhs.shape[0]:
        problem = "the numbers of group sizes and matrices differ"
        fix = "pass one size for each matrix of rhs, 0 for a group without rows."
    if problem:
        shapes = f"lhs {lhs.shape}, rhs {rhs.shape}, group_sizes {sizes.shape}"
        raise fail("ragged_dot", f"{problem}: {shapes}.", fix=fix)
