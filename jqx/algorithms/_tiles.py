"""Parts of weights whose rounding is learned, and their grids."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..calibrators import Affine, Groups
from ..gradients import straight_through
from ..numerics import Integer, QType, format_of
from ..numerics._shared import E8M0, RoundMode
from ..tensor import QSpec
from ._grids import Grids, Part

Array = np.ndarray


class Given(NamedTuple):
    """The numbers of a tile.

    Attributes:
      x: the float values, float32.
      scale: scale of each group, dequantized, float32.
      zero_point: likewise, or `None`.
      own: which of the numbers are learned; `None` for all.
      fixed: which of the numbers, and of the scales, stay as they are, because few rows reached
        their matrix; `None` for none.
    """

    x: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    own: jax.Array | None
    fixed: tuple[jax.Array, jax.Array] | None = None


class InSteps(NamedTuple):
    """Numbers of a tile in units of their scales, in groups: see `Groups.split`.

    Attributes:
      x: the numbers.
      zero: the zero points, which broadcast to the numbers.
      scale: the scales, likewise.
    """

    x: jax.Array
    zero: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How a tile is rounded.

    Attributes:
      spec: spec of the weight.
      groups: which of its numbers share a scale.
      scale: the dtype in which scales are stored.
      ranges: whether scales and zero points may change. That requires that no other tile shares
        them, and that scales are floats and zero points integers.
    """

    spec: QSpec
    groups: Groups
    scale: Any
    ranges: bool

    @property
    def form(self) -> QType:
        """The format of its codes."""
        return format_of(self.spec.qtype)

    def in_steps(self, x: jax.Array, affine: Affine) -> InSteps:
        """Returns numbers in units of their scales. Numbers with scale 0 are 0."""
        scale = self.groups.split_scale(affine.scale)
        zero = jnp.zeros_like(scale)
        if affine.zero_point is not None:
            zero = self.groups.split_scale(affine.zero_point)
        exact = jnp.where(scale != 0, self.groups.split(x) / jnp.where(scale != 0, scale, 1), 0)
        return InSteps(exact, zero, scale)

    def clipped(self, x: jax.Array, zero: jax.Array) -> jax.Array:
        """Clips numbers, in units of their scales, to the range of the format."""
        return jnp.clip(x, self.form.low - zero, self.form.high - zero)

    def on_grid(self, x: jax.Array, zero: jax.Array, mode: RoundMode | None = None) -> jax.Array:
        """Rounds numbers, in units of their scales and within the range."""
        return self.form.round(x + zero, mode or self.spec.rounding) - zero

    def step(self, x: jax.Array, zero: jax.Array) -> jax.Array:
        """Returns the distance of the two grid points around each number; 0 for numbers on a grid
        with uneven steps.
        """
        if isinstance(self.form, Integer):
            return jnp.ones_like(x)
        fixed = jax.lax.stop_gradient(self.clipped(x, zero))
        up, down = (self.on_grid(fixed, zero, mode) for mode in (RoundMode.UP, RoundMode.DOWN))
        return up - down

    def kept(self, scale: jax.Array) -> jax.Array:
        """Returns scales as they are stored, with the gradient of the identity."""
        return straight_through(scale.astype(self.scale).astype(np.float32), scale)


@dataclasses.dataclass(frozen=True, eq=False)
class Tile:
    """The part of a weight that a block multiplies by: all of it, or one index of its first axes.

    Attributes:
      place: the index of the weight among the operands of the function.
      index: the index of its first axes.
      numbers: the numbers of its learned elements within their group of weights.
      labels: the indices of its scales, likewise.
      grids: the grids of that group.
      given: its numbers.
      rounding: how it is rounded.
    """

    place: int
    index: tuple[int, ...]
    numbers: Array
    labels: Array
    grids: Grids
    given: Given
    rounding: Rounding

    @classmethod
    def of(
        cls, place: int, grids: Grids, part: Part, numbers: Array, fixed: Array | None = None
    ) -> "Tile":
        """Returns the smallest tile that holds some elements of a weight; some are `fixed`."""
        kind = part.nearest
        shape, groups = tuple(kind.shape), kind.groups
        local = np.unique(numbers) - part.start
        ends = np.transpose(np.unravel_index(local[[0, -1]], shape))
        depth = next((i for i, (a, b) in enumerate(ends.T) if a != b), len(shape))
        index, sizes = tuple(map(int, ends[0, :depth])), groups.sizes[:depth]
        elements = np.arange(kind.size).reshape(shape)[index]
        mask = np.isin(elements, local)
        scales = np.arange(np.prod(groups.scale_shape, dtype=int)).reshape(groups.scale_shape)
        labels = scales[tuple(np.floor_divide(index, sizes))] + part.first
        alone = all(1 in (size, count) for size, count in zip(sizes, shape, strict=False))
        scale, zero_point = grids.at(labels)
        is_whole = zero_point is None or jnp.issubdtype(zero_point.dtype, jnp.integer)
        is_real = part.scale is None and kind.scale.dtype != E8M0
        own = Groups(shape[depth:], groups.sizes[depth:])
        ranges = bool(alone and is_whole and is_real and mask.all())
        given = Given(
            jnp.asarray(part.x)[index].astype(np.float32),
            jnp.asarray(scale),
            None if zero_point is None else jnp.asarray(zero_point.astype(np.float32)),
            None if mask.all() else jnp.asarray(mask),
            _fixed(grids, elements + part.start, labels, fixed),
        )
        rounding = Rounding(grids.spec, own, kind.scale.dtype, ranges)
        return cls(place, index, elements[mask] + part.start, labels, grids, given, rounding)

    def write(self, values: Array, affine: Affine) -> None:
        """Writes numbers on the grid with given scales to the grids of the weight."""
        if self.rounding.ranges:
            self.grids.put(self.labels, affine)
        own = self.given.own
        self.grids.write(self.numbers, values.ravel() if own is None else values[np.asarray(own)])


def _fixed(
    grids: Grids, elements: Array, labels: Array, fixed: Array | None
) -> tuple[jax.Array, jax.Array] | None:
    """Returns which elements of a tile and which of its scales are fixed, if any."""
    own = np.isin(elements, [] if fixed is None else fixed)
    if not own.any():
        return None
    return jnp.asarray(own), jnp.asarray(np.isin(labels, grids.label(elements[own])))
