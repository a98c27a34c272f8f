"""Statistics of each channel of an operand: over its rows, and by expert if rows have experts."""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from .._checks import as_count
from ._observer import ObservedSite


def shape_of(operand: jax.ShapeDtypeStruct, site: ObservedSite) -> tuple[int, ...]:
    """Returns the shape of a statistic of each channel: that of the operand with size 1 along the
    axes that are neither contracted nor stacked; for a `ragged_dot` `[experts, channels]`.
    """
    if site.experts is not None:
        return site.experts, operand.shape[1]
    reduced = site.reduced(len(operand.shape))
    return tuple(1 if axis in reduced else n for axis, n in enumerate(operand.shape))


def over_rows(x: jax.Array, site: ObservedSite, of: Literal["sum", "max"]) -> jax.Array:
    """Returns the weighted sum of each channel over its rows, or the largest value among rows whose
    weight is above 0 (0 if there is none); float32.
    """
    x = x.astype(jnp.float32)
    weights = _weights(site)
    if weights is not None:
        x = jnp.where(weights > 0, x * weights if of == "sum" else x, 0)
    if site.sizes is not None:
        segment = {"sum": jax.ops.segment_sum, "max": jax.ops.segment_max}[of]
        found = segment(x, site.expert_of_rows(len(x)), site.experts, indices_are_sorted=True)
        return jnp.maximum(found, 0) if of == "max" else found
    axes = site.reduced(x.ndim)
    if of == "max":
        return jnp.max(x, axis=axes, keepdims=True, initial=0)
    return jnp.sum(x, axis=axes, keepdims=True)


def no_rows(operand: jax.ShapeDtypeStruct, site: ObservedSite, is_weighted: bool) -> jax.Array:
    """Returns the result of `count_rows` for no rows."""
    if not is_weighted and site.experts is None:
        return jnp.zeros((), jnp.int32)
    sizes = enumerate(shape_of(operand, site))
    shape = tuple(1 if axis in site.contracted else n for axis, n in sizes)
    return jnp.zeros(shape, jnp.float32 if is_weighted else jnp.int32)


def count_rows(x: jax.Array, site: ObservedSite) -> jax.Array:
    """Returns the number of rows, int32: one number, or `[experts, 1]` for a `ragged_dot`. If rows
    have weights, it is the sum of the weights, float32, in the shape of a statistic of one channel.
    """
    if site.weights is not None:
        shape = tuple(1 if i in site.contracted else n for i, n in enumerate(x.shape))
        return over_rows(jnp.ones(shape, jnp.float32), site, "sum")
    if site.sizes is not None:
        return as_count(site.sizes, jnp.iinfo(jnp.int32).max)[:, None]
    rows = math.prod(x.shape[axis] for axis in site.reduced(x.ndim))
    return jnp.asarray(rows, jnp.int32)


def added(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the sum of counts; integers saturate."""
    total = a + b
    if jnp.issubdtype(total.dtype, jnp.floating):
        return total
    return jnp.where(total < a, jnp.full_like(total, jnp.iinfo(total.dtype).max), total)


def _weights(site: ObservedSite) -> jax.Array | None:
    """Returns the weights of the rows of an operand, with size 1 along its channels."""
    if site.weights is None:
        return None
    return site.weights.max(site.contracted, keepdims=True)
