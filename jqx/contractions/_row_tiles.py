"""Rows in groups, split into tiles that each hold rows of one group only."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from .._checks import as_count
from ..tensor import QTensor
from ._take import take_along


class RowTiles(NamedTuple):
    """Rows in tiles; each tile holds rows of one group only.

    Attributes:
      group: the group of each tile, shape (tiles,); for unused tiles, the group of the last row.
      row: the row at each place of the tiles, shape (tiles, rows of a tile); unused places repeat
        the last row of the group.
      is_row: whether a place is used, of the same shape.
      place: the place of each row in the flattened tiles, shape (m,).
      is_used: whether each row has a place, shape (m,).
    """

    group: jax.Array
    row: jax.Array
    is_row: jax.Array
    place: jax.Array
    is_used: jax.Array

    def result(self, y: jax.Array) -> jax.Array:
        """Returns the rows [m, n] of a result of tiles [rows of all tiles, n], in their places."""
        y = jnp.take(y, self.place, axis=0, mode="clip")
        return jnp.where(self.is_used[:, None], y, jnp.zeros((), y.dtype))


_SYMBOLIC = 64
"""Rows of a tile if the number of rows is not known: in an exported program of any size."""


def rows_of_a_tile(m: int, groups: int, least: int, most: int) -> int:
    """Returns a power of two, up to twice as many rows as groups have on average."""
    if export.is_symbolic_dim(m):
        return min(most, max(least, _SYMBOLIC))
    mean = -(-m // groups)
    return min(most, max(least, 1 << (mean - 1).bit_length()))


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

    place = jnp.arange(count * tile, dtype=ends.dtype).reshape(count, tile)
    group = _group_of(jnp.minimum(place[:, 0], padded_ends[-1] - 1), padded_ends)
    last = ends[group][:, None] - 1
    row = place - shifts[group][:, None]
    rows = jnp.arange(m, dtype=ends.dtype)
    return RowTiles(
        group,
        jnp.clip(row, 0, jnp.maximum(last, 0)),
        row <= last,
        rows + shifts[_group_of(rows, ends)],
        rows < ends[-1],
    )


def _group_of(places: jax.Array, ends: jax.Array) -> jax.Array:
    """Returns the group of each place; the last group for places beyond all of them."""
    group = jnp.searchsorted(ends, places, side="right", method="compare_all")
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
