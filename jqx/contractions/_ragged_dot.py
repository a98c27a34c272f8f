"""`ragged_dot` on arrays and QTensors: rows in groups, each multiplied by a matrix of its own.

Every group is padded to whole tiles of rows; a scan contracts one tile after another with the
matrix of its group, and each row of the result is read from where it stands. So no copy is made of
all matrices, nor of all rows for each; and a row has no part in the result of another, not even as
a zero: a NaN stays where it is.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._calls import called
from .._checks import as_array, as_dtype, as_real, check_real, name_of, require_that
from ..tensor import QTensor
from ._dot_general import Operand, as_operand, contract
from ._how._blocks import can_leave_sum, with_own_scales
from ._how._formulation import PLATFORMS, Planner, formulation
from ._how._slices import item_at
from ._take import as_signed, take_along
from ._what._axes import OperandAxes
from ._what._dimensions import Dimensions

LEAST, MOST = 8, 512
"""Rows of a tile: fewer cost as much as these; of more, the matrix hardly costs less each."""

ROWS_OF_GROUPS = OperandAxes((1,), (0,)), OperandAxes((1,), (0, 2), (0,))
"""What becomes of the axes of rows and matrices."""

MATRICES = Dimensions(2, 2, (1,), (0,), (), ())


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
    """Multiplies groups of rows by matrices, one a group, either side quantized; as
    `jax.lax.ragged_dot` otherwise.

    The first `group_sizes[0]` rows are multiplied by `rhs[0]`, the next by `rhs[1]`, and so on
    (a mixture of experts, with tokens sorted by expert). Each product is that of `jqx.dot_general`:
    exact for two integer formats. Rows are contracted a tile at a time with the codes of one
    matrix; tiles have at most twice as many rows as groups have on average (8 at least, 512 at
    most), and no group has more than one that is not full. Two arrays go to `lax.ragged_dot`.
    `jqx.formulations` tells how tiles are contracted, and how many there are.

    Args:
      lhs: array or QTensor, shape (m, k), its rows sorted by group.
      rhs: array or QTensor, shape (g, k, n). A scale must not vary along `k` but in blocks; nor one
        of `lhs`. Codes packed along `g` are unpacked first, all of them.
      group_sizes: integers, shape (g,): rows of each group. Rows beyond their sum are zero in the
        result; groups beyond the rows are cut. A negative size counts as 0.
      precision: as in `jqx.dot_general`.
      preferred_element_type: floating point dtype of the result; `None` takes the promoted dtype of
        the operands.
      group_offset: `None`: `lax.ragged_dot` does not implement it either.

    Returns:
      Array of `preferred_element_type`, shape (m, n).

    Raises:
      ValueError: as `dot_general`; ranks or sizes do not fit.
      TypeError: as `dot_general`; `group_sizes` are not integers.
      NotImplementedError: a `group_offset` is given.

    Gradient: by JAX, of float operands and of scales; none of codes.
    NaN and infinities: as in `jqx.dot_general`; those of a row or a matrix reach the rows of its
      own group alone.

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
    _check_offset(group_offset)
    left, right = as_operand(lhs), as_operand(rhs)
    sizes = as_array("ragged_dot", "group_sizes", group_sizes)
    if not isinstance(left, QTensor) and not isinstance(right, QTensor):
        return lax.ragged_dot(
            left,
            right,
            sizes,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
    _check_shapes(left, right, sizes)
    _check_operand("lhs", left)
    _check_operand("rhs", right)
    if preferred_element_type is None:
        dtype = jnp.promote_types(left.dtype, right.dtype)
    else:
        dtype = as_dtype("ragged_dot", "preferred_element_type", preferred_element_type)
        check_real("ragged_dot", "`preferred_element_type`", dtype)
    if left.shape[0] == 0 or right.shape[0] == 0:
        return jnp.zeros((left.shape[0], right.shape[2]), dtype)
    return GROUPS.compute(Groups(left, right, Told(precision, dtype)), left, right, sizes)


class Told(NamedTuple):
    """The static arguments of a product of groups.

    Attributes:
      precision: of float products.
      dtype: of the result.
    """

    precision: lax.PrecisionLike
    dtype: Any


class Groups(NamedTuple):
    """Rows in groups and their matrices, as planning sees them, of which one is a QTensor.

    Attributes:
      lhs: an array or a QTensor, shape (m, k).
      rhs: likewise, shape (g, k, n).
      how: what else the product is told.
    """

    lhs: Any
    rhs: Any
    how: Told


@formulation(
    "rows in groups: each group padded to whole tiles, a scan contracts one tile after another",
    PLATFORMS,
    lambda case: True,
    op="ragged_dot",
    tells_parts=True,
)
def ragged_tiles(lhs: Any, rhs: Any, sizes: jax.Array, how: Told) -> jax.Array:
    tiles = _tiles(sizes, lhs.shape[0])
    rows, matrices = _rows(lhs, tiles), _one_by_one(rhs)

    def multiply(rows: Any, group: jax.Array) -> jax.Array:
        return contract(rows, _matrix(matrices, group), MATRICES, how.precision).astype(how.dtype)

    # Checkpointed: else the backward pass would keep the matrix of each tile.
    multiply = jax.checkpoint(multiply, prevent_cse=False)
    _, y = lax.scan(lambda carry, tile: (carry, multiply(*tile)), None, (rows, tiles.group))
    y = y.reshape(tiles.row.size, rhs.shape[2])
    y = jnp.take(y, tiles.place, axis=0, mode="clip")
    return jnp.where(tiles.is_used[:, None], y, jnp.zeros((), how.dtype))


GROUPS = Planner("ragged_dot", ragged_tiles)


class _Tiles(NamedTuple):
    """Rows in tiles, none of which holds rows of two groups.

    Attributes:
      group: of each tile, shape (tiles,); of tiles that are left over, that of the last row.
      row: what stands where in the tiles, shape (tiles, rows of a tile); a place that is left over
        repeats the last row of the group.
      is_row: whether it is not left over, of the same shape.
      place: where each row stands in the flattened tiles, shape (m,).
      is_used: whether it stands there at all, shape (m,).
    """

    group: jax.Array
    row: jax.Array
    is_row: jax.Array
    place: jax.Array
    is_used: jax.Array


def _tiles(group_sizes: jax.Array, m: int) -> _Tiles:
    g = group_sizes.shape[0]
    mean = -(-m // g)
    tile = min(m, MOST, max(LEAST, 1 << (mean - 1).bit_length()))
    # sum ceil(size / tile) = sum 1 + floor((size - 1) / tile), over `begun` groups with rows.
    begun = min(m, g)
    count = begun + (m - begun) // tile
    sizes = jnp.clip(as_signed(group_sizes, m), 0, m)
    ends = jnp.minimum(jnp.cumsum(sizes), m)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    padded = -(-(ends - starts) // tile) * tile
    padded_ends = jnp.cumsum(padded)
    shifts = padded_ends - padded - starts

    place = jnp.arange(count * tile, dtype=ends.dtype).reshape(count, tile)
    group = _group_of(jnp.minimum(place[:, 0], padded_ends[-1] - 1), padded_ends)
    last = ends[group][:, None] - 1
    row = place - shifts[group][:, None]
    rows = jnp.arange(m, dtype=ends.dtype)
    return _Tiles(
        group,
        jnp.clip(row, 0, jnp.maximum(last, 0)),
        row <= last,
        rows + shifts[_group_of(rows, ends)],
        rows < ends[-1],
    )


def _group_of(places: jax.Array, ends: jax.Array) -> jax.Array:
    """Returns the group in which each place lies; the last one for those beyond them all."""
    group = jnp.searchsorted(ends, places, side="right", method="compare_all")
    return jnp.minimum(group, ends.shape[0] - 1)


def _rows(x: Any, tiles: _Tiles) -> Any:
    """Returns the rows of an array or QTensor in tiles, along a new first axis. Places that are
    left over are zeros in an array: a NaN there would reach gradients.
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


def _one_by_one(x: Any) -> Any:
    """Returns matrices of which each can be taken without the others."""
    if not isinstance(x, QTensor):
        return x
    packing = None if x.layout is None else x.layout.packing
    if packing is not None and packing.axis == -3:
        x = x.unpack()
    return with_own_scales(x, (0,))


def _matrix(x: Any, group: jax.Array) -> Any:
    """Returns the matrix of a group."""

    def taken(leaf: jax.Array) -> jax.Array:
        return leaf[0] if leaf.shape[0] == 1 else item_at(leaf, group)

    return jax.tree.map(taken, x)


def _check_offset(group_offset: Any) -> None:
    require_that(
        group_offset is None,
        error=NotImplementedError,
        function="ragged_dot",
        problem="`group_offset` is not supported.",
        given="a group_offset",
        expected="group_offset=None",
        mend="pass the matrices and sizes of the groups to compute alone, and their rows of lhs.",
    )


def _check_shapes(lhs: Any, rhs: Any, sizes: jax.Array) -> None:
    given = (
        f"lhs.shape == {lhs.shape}, rhs.shape == {rhs.shape}, group_sizes.shape == {sizes.shape}"
    )
    require_that(
        (lhs.ndim, rhs.ndim, sizes.ndim) == (2, 3, 1),
        error=ValueError,
        function="ragged_dot",
        problem="an operand has the wrong rank.",
        given=given,
        expected="lhs (m, k), rhs (g, k, n), group_sizes (g,)",
        mend="reshape it, or map over batch axes with jax.vmap.",
    )
    require_that(
        lhs.shape[1] == rhs.shape[1],
        error=ValueError,
        function="ragged_dot",
        problem="the contracted axes have different sizes.",
        given=given,
        expected=f"lhs.shape[1] == rhs.shape[1], that is {lhs.shape[1]} == {rhs.shape[1]}",
        mend="give rhs its axes in the order (g, k, n).",
    )
    require_that(
        sizes.shape[0] == rhs.shape[0],
        error=ValueError,
        function="ragged_dot",
        problem="there are not as many group sizes as matrices.",
        given=given,
        expected=f"group_sizes.shape == ({rhs.shape[0]},)",
        mend="pass one size for each matrix of rhs, 0 for a group without rows.",
    )
    require_that(
        jnp.issubdtype(sizes.dtype, jnp.integer),
        error=TypeError,
        function="ragged_dot",
        problem="`group_sizes` are not integers.",
        given=f"group_sizes.dtype == {name_of(sizes.dtype)}",
        expected="an integer dtype",
        mend="convert them: group_sizes.astype(jnp.int32).",
    )


def _check_operand(name: str, operand: Any) -> None:
    if not isinstance(operand, QTensor):
        as_real("ragged_dot", name, operand)
        return
    require_that(
        can_leave_sum(operand.groups, (1,)),
        error=ValueError,
        function="ragged_dot",
        problem=f"the scale of `{name}` varies along the contracted axis: it cannot leave the sum.",
        given=f"{name}.shape == {operand.shape}, scale {operand.scale.shape}",
        expected="a scale of size 1, or of blocks, along axis 1",
        mend="quantize with per_axis of the other axes, or with per_block({..., 1: size}).",
    )
