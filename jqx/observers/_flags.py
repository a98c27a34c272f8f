"""Flags of an operand: how many of its rows are not finite, and how many hold a value besides 0."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ._channels import added
from ._observer import Axes, ObservedSite, Observer


@dataclasses.dataclass(frozen=True)
class Flags(Observer):
    """Counts rows, int32 [3]: those with a NaN, those with an infinity but no NaN, and those with a
    value besides 0. Rows of weight 0 are not counted.
    """

    def looks_at(self, site: ObservedSite) -> bool:
        return True

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> jax.Array:
        return jnp.zeros(3, jnp.int32)

    def observe(self, x: jax.Array, site: ObservedSite) -> jax.Array:
        axes = row_axes(site)
        own = jnp.any(x != 0, axes, keepdims=True)
        some = True
        if site.weights is not None:
            own, some = own & kept_rows(site), jnp.any(site.weights != 0, axes, keepdims=True)
        kinds = [jnp.zeros_like(own)] * 2
        if jnp.issubdtype(x.dtype, jnp.inexact):
            nan, bad = (
                jnp.any(f(x), axes, keepdims=True) for f in (jnp.isnan, lambda x: ~jnp.isfinite(x))
            )
            kinds = [nan & some, bad & ~nan & some]
        return jnp.stack([jnp.sum(kind, dtype=jnp.int32) for kind in (*kinds, own)])

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return added(a, b)


flags: Flags = Flags()


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
