"""The ways to compute attention of one query: plain JAX, or a kernel with the plain derivative."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..kernels._shared import decode_attention_gpu, decode_attention_tpu, fits_gpu, fits_tpu
from ._cached import Cached
from ._decode_plain import plain_attention

KERNELS = {"tpu": decode_attention_tpu, "gpu": decode_attention_gpu}
_PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
_FITS = {"tpu": fits_tpu, "gpu": fits_gpu}
_DTYPES = (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4, jnp.float8_e4m3fn, jnp.float8_e5m2)
"""The dtypes that kernels read."""


def is_taken(kernel: str, keys: Cached, values: Cached) -> bool:
    """Whether a kernel supports such a cache."""
    return (
        kernel in KERNELS
        and all(x.codes.dtype in _DTYPES for x in (keys, values))
        and _FITS[kernel](keys.codes, values.codes)
    )


@functools.cache
def attention(kernel: str, scale: float, window: int | None) -> Callable[..., jax.Array]:
    """Returns attention of queries over the keys and values from starts to stops."""
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
    """Adds a rule for `vmap`: it adds sequences to the batch, or loops over queries if the cache is
    shared.
    """
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
    """Runs a kernel. Applies scales for each channel before and after it.

    Zero points of channels of keys are ignored: they add the same number to the products with all
    keys, which does not change the softmax.
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
        key_zero=keys.zero_of_token,
        value_zero=values.zero_of_token,
        window=window,
        precise=q.dtype != jnp.bfloat16,
        interpret=interpret,
    )
    if values.zero_of_channel is not None:
        zero = _of_queries(values.zero_of_channel, values.codes, q.shape[1])
        mixed = jnp.where((starts < stops)[:, None, None], mixed - zero, 0)
    if values.of_channel is not None:
        mixed = mixed * _of_queries(values.of_channel, values.codes, q.shape[1])
    return mixed.astype(q.dtype)


def _of_queries(parameter: jax.Array, codes: jax.Array, queries: int) -> jax.Array:
    """Returns parameters of the channels of a cache for each query, [B, queries, W or 1]."""
    heads = codes.shape[2]
    own = jnp.broadcast_to(parameter[:, 0], (codes.shape[0], heads, parameter.shape[3]))
    return jnp.repeat(own, queries // heads, axis=1)
