"""`ragged_dot` in plain JAX: a scan over tiles of rows, each contracted with its matrix.

Every group is padded to whole tiles, and each row of the result is read from its place in them. So
neither all matrices nor all rows for each matrix are copied. A row never affects the result of
another one, not even as a zero: a NaN stays in its row.
"""

from typing import Any, NamedTuple

import jax
from jax import export, lax

from ..tensor import QTensor
from ._dot_general import contract
from ._how._blocks import with_own_scales
from ._how._formulation import PLATFORMS, formulation
from ._how._slices import item_at
from ._row_tiles import row_tiles, rows_in, rows_of_a_tile
from ._what._dimensions import Dimensions

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
      rhs: likewise, shape (g, k, n).
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
    tells_parts=True,
)
def ragged_tiles(lhs: Any, rhs: Any, sizes: jax.Array, how: Args) -> jax.Array:
    m = lhs.shape[0]
    rows_of_tile = rows_of_a_tile(m, rhs.shape[0], LEAST, MOST)
    tiles = row_tiles(sizes, m, rows_of_tile if export.is_symbolic_dim(m) else min(m, rows_of_tile))
    rows, matrices = rows_in(lhs, tiles), _one_by_one(rhs)

    def multiply(rows: Any, group: jax.Array) -> jax.Array:
        return contract(rows, _matrix(matrices, group), MATRICES, how.precision).astype(how.dtype)

    # Checkpointed, so that the backward pass does not store the matrix of each tile.
    multiply = jax.checkpoint(multiply, prevent_cse=False)
    _, y = lax.scan(lambda carry, tile: (carry, multiply(*tile)), None, (rows, tiles.group))
    return tiles.result(y.reshape(tiles.row.size, rhs.shape[2]))


def _one_by_one(x: Any) -> Any:
    """Returns matrices that can be sliced one by one."""
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
