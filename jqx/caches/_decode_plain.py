"""Attention of one query over a cache, on any platform: on CPU in tiles of tokens.

XLA on CPU converts codes to floats in memory before it multiplies, so it gets one tile at a time.
Elsewhere XLA converts codes as it reads them, but would copy the cache for a loop. The softmax uses
a running maximum: sums are scaled down when a later tile has a larger product. Neither the result
nor its derivative depends on that maximum.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from ._cached import LENGTH, Cached

TOKENS = 1024
"""Number of tokens of a tile."""


class _Sums(NamedTuple):
    """Partial results over some tokens, for each query: [B, H, G, 1], `mixed` [B, H, G, V].

    Attributes:
      most: the largest product.
      total: the sum of all weights, which are exponentials of products minus the largest.
      mixed: the weighted sum of values.
    """

    most: jax.Array
    total: jax.Array
    mixed: jax.Array


def plain_attention(
    q: jax.Array,
    keys: Cached,
    values: Cached,
    starts: jax.Array,
    stops: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Returns attention over tokens `starts[b]` to `stops[b] - 1`, in float32 or float64."""
    run = functools.partial(_attention, scale=scale)
    args, length = (q, keys, values, starts, stops), keys.codes.shape[1]
    if length <= TOKENS:
        return run(*args, size=length)
    tiled, whole = (functools.partial(run, size=size) for size in (TOKENS, length))
    return lax.platform_dependent(*args, cpu=tiled, default=whole)


def _attention(
    q: jax.Array,
    keys: Cached,
    values: Cached,
    starts: jax.Array,
    stops: jax.Array,
    *,
    scale: float,
    size: int,
) -> jax.Array:
    """Processes a cache in tiles of tokens."""
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    batch, length, heads, _ = keys.codes.shape
    rows = q.astype(wide).reshape(batch, heads, -1, q.shape[2]) * scale
    if keys.of_channel is not None:
        rows = rows * _for_queries(keys.of_channel, wide)
    tiles = -(-length // size)

    def add(sums: _Sums, first: Any) -> tuple[_Sums, None]:
        """Adds a tile. The last tile is shifted back so that it is whole; tokens that were added
        before are masked.
        """
        begin = jnp.minimum(first, length - size)
        place = (begin + jnp.arange(size, dtype=jnp.int32))[None]
        counts = (jnp.maximum(starts, first)[:, None] <= place) & (place < stops[:, None])
        tile = functools.partial(_tile, begin=begin, size=size)
        has_begun = (starts < jnp.minimum(first + size, stops))[:, None, None, None]

        def added(sums: _Sums) -> _Sums:
            return _added(tile(keys), tile(values), rows, counts, has_begun, sums)

        return lax.cond(jnp.any(counts), added, lambda sums: sums, sums), None

    shape = (*rows.shape[:3], values.codes.shape[3])
    none = jnp.zeros((*shape[:3], 1), wide)
    sums = _Sums(jnp.full_like(none, -jnp.inf), none, jnp.zeros(shape, wide))
    along = map(_compat.varies_along, jax.tree.leaves((q, keys, values, starts, stops)))
    sums = _compat.vary(sums, frozenset().union(*along))
    if tiles == 1:
        sums, _ = add(sums, jnp.int32(0))
    else:
        firsts = jnp.arange(tiles, dtype=jnp.int32) * size
        sums, _ = lax.scan(jax.checkpoint(add), sums, firsts)
    mixed = sums.mixed / jnp.where(sums.total == 0, 1, sums.total)
    if values.zero_of_channel is not None:
        zero = _for_queries(values.zero_of_channel, wide)
        mixed = jnp.where((starts < stops)[:, None, None, None], mixed - zero, 0)
    if values.of_channel is not None:
        mixed = mixed * _for_queries(values.of_channel, wide)
    return mixed.reshape(*q.shape[:2], -1).astype(q.dtype)


def _added(
    keys: Cached,
    values: Cached,
    rows: jax.Array,
    counts: jax.Array,
    has_begun: jax.Array,
    sums: _Sums,
) -> _Sums:
    """Adds a tile; only tokens of a mask [B, T] count."""
    wide = rows.dtype
    einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

    def real(codes: jax.Array) -> jax.Array:
        if not jnp.issubdtype(codes.dtype, jnp.integer):
            codes = jnp.where(counts[:, :, None, None], codes, jnp.zeros((), codes.dtype))
        return codes.astype(wide)

    def of_tokens(parameter: jax.Array) -> jax.Array:  # [B, H or 1, 1, T]
        known = jnp.where(counts[:, :, None], parameter[..., 0].astype(wide), 0)
        return known.transpose(0, 2, 1)[:, :, None]

    products = einsum("bhgw,blhw->bhgl", rows, real(keys.codes))
    if keys.zero_of_token is not None:
        products = products - rows.sum(3, keepdims=True) * of_tokens(keys.zero_of_token)
    if keys.zero_of_channel is not None:
        zero = _for_queries(keys.zero_of_channel, wide)
        products = products - (rows * zero).sum(3, keepdims=True)
    if keys.of_token is not None:
        products = products * of_tokens(keys.of_token)
    products = jnp.where(counts[:, None, None], products, -jnp.inf)
    most = jnp.maximum(sums.most, lax.stop_gradient(products.max(3, keepdims=True)))
    known = jnp.where(has_begun, most, 0)
    decay, weights = jnp.exp(sums.most - known), jnp.exp(products - known)
    total = sums.total * decay + weights.sum(3, keepdims=True)
    if values.of_token is not None:
        weights = weights * of_tokens(values.of_token)
    mixed = sums.mixed * decay + einsum("bhgl,blhw->bhgw", weights, real(values.codes))
    if values.zero_of_token is not None:
        mixed = mixed - (weights * of_tokens(values.zero_of_token)).sum(3, keepdims=True)
    return _Sums(most, total, mixed)


def _tile(x: Cached, begin: Any, size: int) -> Cached:
    """Returns some tokens of a cache."""

    def of(leaf: jax.Array) -> jax.Array:
        if leaf.shape[LENGTH] == 1 or leaf.shape[LENGTH] == size:
            return leaf
        return lax.dynamic_slice_in_dim(leaf, begin, size, axis=LENGTH)

    return jax.tree.map(of, x)


def _for_queries(parameter: jax.Array, dtype: Any) -> jax.Array:
    """Returns parameters of channels, [B, 1, H, W], as [B, H, 1, W]."""
    return parameter[:, 0, :, None].astype(dtype)
