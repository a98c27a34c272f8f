"""The part of a product that a TPU computes in a step: tiles that need no relayout in memory."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from ._pallas import pl

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
    each: int | None = None,
    kept: bool = False,
) -> Tiles:
    """Returns the tiles of a product with scales for groups of `size` along the contracted axis.

    `parameters` are the dtypes of scales and zero points [K / size, N]. `each` is the number of
    rows for each of several matrices, which are read whole along the contracted axis. `kept` means
    that codes of rows are stored, one byte each.
    """
    if each is not None:
        wide = max(LANES, min(2 * WIDE, WHOLE // k // LANES * LANES))
        return Tiles(each, k, min(n, wide), _chunk(k, size), k // size, False, True)
    rows = max(32 // jnp.dtype(dtype).itemsize for dtype in parameters)
    whole = math.lcm(LANES, size * rows)
    moves = False
    if k <= DEEP or (k <= DEEPEST and size < k):
        deep = k
    elif size == k:
        deep = DEEP
    elif whole <= DEEPEST:
        deep, moves = min(k, whole * max(1, DEEP // whole)), k > whole
    elif size % LANES == 0:
        deep = max(d for d in range(LANES, AT_ONCE * 2 + 1, LANES) if size % d == 0)
    else:
        deep = k
    wide = n if n <= WIDE else WIDE
    groups = deep // size if moves else k // size
    stay = k % deep == 0
    of_row = 2 * (k if stay else deep) * bytes_of_x + 16 * wide + (k if kept and stay else 0)
    most = max(16, BUDGET // of_row // 16 * 16)
    return Tiles(_even(m, most), deep, wide, _chunk(deep, size), groups, moves, stay)


def _even(m: int, most: int) -> int:
    """Returns the number of rows of a tile, at most `most`. The last tile has as many rows as the
    others, so that there is little padding.
    """
    count = -(-m // most)
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
