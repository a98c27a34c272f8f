"""The operands of a kernel of a product, the same on every platform."""

from collections.abc import Sequence
from typing import NamedTuple

import jax


class Operands(NamedTuple):
    """The arrays of a product [M, K] x [K, N].

    Attributes:
      x: rows, [M, K].
      codes: [K, N], or [E, K, N] with a `group`; with one more leading axis if `step` is given.
      parameters: scales and zero points, [G, N] each, or [E, G, N].
      x_scale: scales of rows: [M, 1], or one per group in the layout of a kernel; or `None`.
      group: the index of the matrix of each tile of rows, int32; `~group` means that the tile is
        not used. `None`: there is only one matrix.
      step: the index along the leading axis of the codes, int32 []; `None`: there is no such axis.
    """

    x: jax.Array
    codes: jax.Array
    parameters: Sequence[jax.Array]
    x_scale: jax.Array | None = None
    group: jax.Array | None = None
    step: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, K and N."""
        m, k = self.x.shape
        return m, k, self.codes.shape[-1]

    @property
    def scales(self) -> list[jax.Array]:
        """The scale of rows in a list, or an empty list."""
        return [] if self.x_scale is None else [self.x_scale]
