"""Shifts before rounding, and factors of ranges, which are learned by signed gradient descent."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..calibrators import Affine
from ..gradients import straight_through
from ._tiles import Given, Rounding

_LEAST = 0.05
"""The smallest range, relative to the initial one."""


class Shifts(NamedTuple):
    """The learned values of a tile.

    Attributes:
      shift: what is added to each number before it is rounded, in steps of the grid.
      low: factor of the lower end of each range; `None` if both ends share one scale, or ranges are
        not learned.
      high: factor of the upper end, or of both; `None` if ranges are not learned.
    """

    shift: jax.Array
    low: jax.Array | None
    high: jax.Array | None


def nearest(rounding: Rounding, given: Given, ranges: bool) -> Shifts:
    """Returns the values that round to nearest; `ranges` says whether ranges may be learned."""
    high = jnp.ones_like(given.scale) if ranges and rounding.ranges else None
    low = None if given.zero_point is None else high
    return Shifts(jnp.zeros_like(given.x), low, high)


def rounded(rounding: Rounding, given: Given, found: Shifts) -> tuple[jax.Array, Affine]:
    """Returns the rounded numbers of a tile, with the gradient of the identity for rounding, and
    their scales and zero points.
    """
    affine = _affine(rounding, given, found)
    exact = rounding.in_steps(given.x, affine)
    moved = rounding.groups.split(found.shift) * rounding.step(exact.x, exact.zero)
    moved = rounding.clipped(exact.x + moved, exact.zero)
    whole = rounding.on_grid(moved, exact.zero)
    return rounding.groups.join(straight_through(whole, moved) * exact.scale), affine


def moved(
    found: list[Shifts], slope: list[Shifts], rate: jax.Array, given: list[Given]
) -> list[Shifts]:
    """Returns learned values after a step of a given length against the signs of a gradient."""

    def limited(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.clip(x, _LEAST, 1)

    slope = [_free(x, d) for x, d in zip(given, slope, strict=True)]
    steps = jax.tree.map(lambda x, d: x - rate * jnp.sign(d), found, slope)
    return [x._replace(low=limited(x.low), high=limited(x.high)) for x in steps]


def _free(given: Given, slope: Shifts) -> Shifts:
    """Returns a gradient that is 0 for what is fixed."""
    if given.fixed is None:
        return slope
    shift, scale = given.fixed
    low, high = (None if x is None else jnp.where(scale, 0, x) for x in (slope.low, slope.high))
    return Shifts(jnp.where(shift, 0, slope.shift), low, high)


def _affine(rounding: Rounding, given: Given, found: Shifts) -> Affine:
    """Returns scales and zero points, float32; differentiable."""
    scale, zero_point, form = given.scale, given.zero_point, rounding.form
    if found.high is None:
        return Affine(scale, zero_point)  # pyright: ignore
    if found.low is None:
        return Affine(rounding.kept(scale * found.high), None)
    assert zero_point is not None
    low, high = (
        scale * (end - zero_point) * factor
        for end, factor in ((form.low, found.low), (form.high, found.high))
    )
    scale = rounding.kept((high - low) / (form.high - form.low))
    place = form.low - low / jnp.where(scale != 0, scale, 1)
    whole = jnp.clip(jnp.round(place), form.low, form.high)
    return Affine(scale, straight_through(whole, place))
