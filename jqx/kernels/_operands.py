"""What a kernel of a product reads, the same on every platform."""

from collections.abc import Sequence
from typing import NamedTuple

import jax


class Operands(NamedTuple):
    """The arrays of a product [M, K] x [K, N].

    Attributes:
      x: rows, [M, K].
      codes: [K, N], or [E, K, N] with a `group`; with one more axis in front where there is a
        `step`.
      parameters: scales and zero points, [G, N] each, or [E, G, N].
      x_scale: of rows: [M, 1], or, for each of their groups, as a kernel reads them; or `None`.
      group: which matrix each tile of rows is multiplied by, int32; `~group` stands for a tile that
        nothing reads. `None`: there is one matrix.
      step: which codes of the axis in front are taken, int32 []; `None`: there is no such axis.
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
        """The scale of rows, where there is one."""
        return [] if self.x_scale is None else [self.x_scale]
