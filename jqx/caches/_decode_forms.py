"""How the attention of one query is computed: plainly, or by a kernel with the derivative of that."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..kernels._shared import decode_attention_gpu, decode_attention_tpu, fits_gpu, fits_tpu
from ._cached import Cached

KERNELS = {"tpu": decode_attention_tpu, "gpu": decode_attention_gpu}
_PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
_FITS = {"tpu": fits_tpu, "gpu": fits_gpu}
_DTYPES = (jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2)
"""What kernels read."""


def is_taken(kernel: str, keys: Cached, values: Cached) -> bool:
    """Whether a kernel takes such a cache: codes of the dtypes it reads, without zero points that
    differ from token to token.
    """
    return (
        kernel in KERNELS
        and all(x.codes.dtype in _DTYPES and not x.has_zero_inside for x in (keys, values))
        and _FITS[kernel](keys.codes, values.codes)
    )


@functools.cache
def attention(kernel: str, scale: float, window: int | None) -> Callable[..., jax.Array]:
    """Returns attention of queries over keys and values, from starts to stops."""
    plain = functools.partial(plain_attention, scale=scale)
    if not kernel:
        return plain
    special = functools.partial(kernel_attention, KERNELS[kernel], scale=scale, window=window)

    def chosen(*args: Any) -> jax.Array:
        return lax.platform_dependent(*args, **{_PLATFORMS[kernel]: special}, default=plain)

    function = jax.custom_jvp(_over_batches(chosen))

    @function.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        return function(*primals), jax.jvp(jax.checkpoint(plain), primals, tangents)[1]

    return function


def _over_batches(attention: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns attention that `vmap` makes more sequences of, or, over one cache, a loop."""
    function = custom_vmap(attention)

    @function.def_vmap
    def _(size: int, batched: Any, *args: Any) -> tuple[jax.Array, bool]:
        leaves, structure = jax.tree.flatten(args)
        along = jax.tree.leaves(batched)
        if batched[1].codes and batched[2].codes:
            pairs = zip(leaves, along, strict=True)
            each = [x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in pairs]
            result = function(*structure.unflatten([x.reshape(-1, *x.shape[2:]) for x in each]))
            return result.reshape(size, -1, *result.shape[1:]), True

        def one(mapped: list[jax.Array]) -> jax.Array:
            rest = iter(mapped)
            pairs = zip(leaves, along, strict=True)
            return function(*structure.unflatten([next(rest) if own else x for x, own in pairs]))

        return lax.map(one, [x for x, own in zip(leaves, along, strict=True) if own]), True

    return function


def kernel_attention(
    kernel: Callable[..., jax.Array],
    q: jax.Array,
    keys: Cached,
    values: Cached,
    starts: jax.Array,
    stops: jax.Array,
    *,
    scale: float,
    window: int | None,
    interpret: bool = False,
) -> jax.Array:
    """Runs a kernel; scales for each channel are multiplied before and behind it. A zero point of a
    channel adds as much to the products with all keys, which a softmax does not see.
    """
    rows = q if q.dtype == jnp.bfloat16 else q.astype(jnp.float32)
    if keys.of_channel is not None:
        own = _of_queries(keys.of_channel, keys.codes, q.shape[1])
        rows = rows.astype(jnp.float32) * own.astype(jnp.float32)
    mixed = kernel(
        rows,
        keys.codes,
        keys.of_token,
        values.codes,
        values.of_token,
        starts,
        stops,
        scale=scale,
        window=window,
        precise=q.dtype != jnp.bfloat16,
        interpret=interpret,
    )
    if values.zero is not None:
        zero = _of_queries(values.zero, values.codes, q.shape[1])
        mixed = jnp.where((starts < stops)[:, None, None], mixed - zero, 0)
    if values.of_channel is not None:
        mixed = mixed * _of_queries(values.of_channel, values.codes, q.shape[1])
    return mixed.astype(q.dtype)


def _of_queries(parameter: jax.Array, codes: jax.Array, queries: int) -> jax.Array:
    """Returns what belongs to channels of a cache beside its queries, [B, queries, W or 1]."""
    heads = codes.shape[2]
    own = jnp.broadcast_to(parameter[:, 0], (codes.shape[0], heads, parameter.shape[3]))
    return jnp.repeat(own, queries // heads, axis=1)


def plain_attention(
    q: jax.Array,
    keys: Cached,
    values: Cached,
    starts: jax.Array,
    stops: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Computes it on any platform, in float32 or float64."""
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    batch, length, heads, _ = keys.codes.shape
    place = jnp.arange(length, dtype=jnp.int32)[None]
    counts = (starts[:, None] <= place) & (place < stops[:, None])  # [B, L]
    einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

    def real(codes: jax.Array) -> jax.Array:
        if not jnp.issubdtype(codes.dtype, jnp.integer):
            codes = jnp.where(counts[:, :, None, None], codes, jnp.zeros((), codes.dtype))
        return codes.astype(wide)

    def of_tokens(parameter: jax.Array) -> jax.Array:  # [B, H or 1, 1, L]
        known = jnp.where(counts[:, :, None], parameter[..., 0].astype(wide), 0)
        return known.transpose(0, 2, 1)[:, :, None]

    rows = q.astype(wide).reshape(batch, heads, -1, q.shape[2]) * scale
    if keys.of_channel is not None:
        rows = rows * keys.of_channel[:, 0, :, None].astype(wide)
    products = einsum("bhgw,blhw->bhgl", rows, real(keys.codes))
    if keys.zero is not None and keys.of_token is not None:
        products = products - rows.sum(3, keepdims=True) * of_tokens(keys.zero)
    elif keys.zero is not None:
        zero = keys.zero[:, 0, :, None].astype(wide)
        products = products - (rows * zero).sum(3, keepdims=True)
    if keys.of_token is not None:
        products = products * of_tokens(keys.of_token)
    is_seen = counts[:, None, None]
    products = jnp.where(is_seen, products, -jnp.inf)
    most = lax.stop_gradient(jnp.max(products, axis=3, keepdims=True))
    most = jnp.where(jnp.any(is_seen, axis=3, keepdims=True), most, 0)
    shares = jnp.exp(products - most)
    total = jnp.sum(shares, axis=3, keepdims=True)
    shares = shares / jnp.where(total == 0, 1, total)
    if values.of_token is not None:
        shares = shares * of_tokens(values.of_token)
    mixed = einsum("bhgl,blhw->bhgw", shares, real(values.codes))
    if values.zero is not None and values.of_token is not None:
        mixed = mixed - jnp.sum(shares * of_tokens(values.zero), axis=3, keepdims=True)
    elif values.zero is not None:
        zero = values.zero[:, 0, :, None].astype(wide)
        mixed = mixed - shares.sum(3, keepdims=True) * zero
    if values.of_channel is not None:
        mixed = mixed * values.of_channel[:, 0, :, None].astype(wide)
    return mixed.reshape(*q.shape[:2], -1).astype(q.dtype)
