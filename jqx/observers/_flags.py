"""Flags of an operand: how many of its rows are not finite, and how many hold a value besides 0,
for each matrix that the operand is multiplied by at once.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import is_at_least
from ._channels import added
from ._observer import Axes, ObservedSite, Observer


@dataclasses.dataclass(frozen=True)
class Flags(Observer):
    """Counts rows, int32 [4]: those with a NaN, those with an infinity but no NaN, those with a
    value besides 0, and all. Rows of weight 0 are not counted. If the weight is a stack of
    matrices, such as experts, these are the leading axes. Rows of a `ragged_dot` count for the
    expert that they reach, but the last number is that of all rows.
    """

    def looks_at(self, site: ObservedSite) -> bool:
        return True

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> jax.Array:
        stack = [operand.shape[axis] for axis in _stack_of(site)]
        stack += [site.experts] if _has_experts(site) else []
        return jnp.zeros((*stack, 4), jnp.int32)

    def observe(self, x: jax.Array, site: ObservedSite) -> jax.Array:
        found = _counted(x, site.weights, row_axes(site), _stack_of(site))
        if not _has_experts(site):
            return jnp.sum(found, -2, dtype=jnp.int32)
        assert site.experts is not None
        own = jax.ops.segment_sum(found, site.expert_of_rows(len(x)), site.experts + 1)
        own = own.at[-2, :2].add(own[-1, :2])  # a NaN in a row of no expert is not lost
        return own[:-1].at[:, 3].set(jnp.sum(own[:, 3], dtype=jnp.int32))

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return added(a, b)


flags: Flags = Flags()


def _stack_of(site: ObservedSite) -> Axes:
    """Returns the axes of an operand, or of a result, along which the weight is a stack."""
    return site.batch if site.has_weight and site.op == "dot_general" else ()


def _has_experts(site: ObservedSite) -> bool:
    return site.experts is not None and site.role == "activation"


@partial(jax.jit, static_argnames=("axes", "stack"))  # traced once for all operands of one shape
def _counted(x: jax.Array, weights: jax.Array | None, axes: Axes, stack: Axes) -> jax.Array:
    """Returns the flags of each row, int32 [*stack, rows, 4]."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = (x != 0).astype(jnp.float32)
    elif x.dtype not in _WITH_INFINITY:
        x = x.astype(jnp.float32)
    # The bits of magnitudes have the order of magnitudes, with infinity and then NaN at the end.
    integer = jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
    infinity = np.asarray(np.inf, x.dtype).view(integer)[()]
    bits = lax.bitcast_convert_type(x, integer) & jnp.iinfo(integer).max
    most = jnp.max(_in_parts(bits, axes), axes, keepdims=True, initial=0)
    kinds = most > infinity, most == infinity, most > 0, most >= 0
    if weights is not None:
        some = jnp.any(weights != 0, axes, keepdims=True)
        kept = jnp.max(weights, axes, keepdims=True) > 0
        kinds = tuple(kind & own for kind, own in zip(kinds, (some, some, kept, kept), strict=True))
    found = jnp.stack(kinds, -1).astype(jnp.int32)
    found = jnp.moveaxis(found, stack, range(len(stack)))
    return found.reshape(*found.shape[: len(stack)], -1, 4)


def _in_parts(bits: jax.Array, axes: Axes) -> jax.Array:
    """Returns maxima along the last axis, where it is long: XLA on CPU takes those of 64 parts in
    vectors, and those of neighbours one by one.
    """
    size = bits.shape[-1] if bits.ndim - 1 in axes else 0
    if size % 64 != 0 or not is_at_least(size, 128):
        return bits
    parts = bits.reshape(*bits.shape[:-1], size // 64, 64)
    return lax.optimization_barrier(jnp.max(parts, -2))


_WITH_INFINITY = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))


def row_axes(site: ObservedSite) -> Axes:
    """Returns the axes along which a row of an operand, or of a result, extends."""
    return site.contracted or site.channels


def kept_rows(site: ObservedSite) -> jax.Array:
    """Returns which rows count, with size 1 along the axes of a row."""
    assert site.weights is not None
    return jnp.max(site.weights, row_axes(site), keepdims=True) > 0


def without_nonfinite(x: jax.Array, site: ObservedSite) -> tuple[jax.Array, ObservedSite]:
    """Returns an operand with zeros in place of the rows that are not finite, and the site with the
    weight -1 for them.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x, site
    bad = jnp.any(~jnp.isfinite(x), row_axes(site), keepdims=True)
    weights = jnp.ones((1,) * x.ndim, jnp.float32) if site.weights is None else site.weights
    weights = jnp.where(bad, jnp.float32(-1), weights)
    return jnp.where(bad, jnp.zeros_like(x), x), dataclasses.replace(site, weights=weights)


def in_total(found: Any) -> jax.Array:
    """Returns how many rows of some flags are not finite, int32."""
    every = [jnp.sum(x[..., :2], dtype=jnp.int32) for x in found]
    return jnp.sum(jnp.stack(every)) if every else jnp.int32(0)
