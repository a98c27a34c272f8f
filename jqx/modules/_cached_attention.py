"""Attention of a module library over keys and values in a `jqx.KVCache`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._checks import check_instance
from .._errors import fail
from ..caches import KVCache
from ..caches._shared import check_format

Attention = Callable[..., Any]
"""`attention(query, key, value, mask=mask, ...)`, as in Flax."""


def check_cache(function: str, cache: Any) -> None:
    """Checks a field `cache`: a format, or `None`."""
    if cache is not None:
        check_format(function, "cache", cache)


def empty_cache(function: str, format: str, shape: tuple[int, ...], dtype: DTypeLike) -> KVCache:
    """Returns an empty cache for keys and values of a shape."""
    if len(shape) != 4:
        raise fail(
            function,
            "a KVCache has one sequence axis.",
            given=f"keys of shape {tuple(shape)}",
            expected="[batch, tokens, heads, width]",
            fix="merge the leading axes of the inputs, or jax.vmap the layer.",
        )
    batch, length, heads, width = shape
    return KVCache.empty(
        batch=batch, length=length, heads=heads, width=width, format=format, dtype=dtype
    )


def with_cache(
    function: str,
    attention: Attention,
    format: str,
    read: Callable[[], Any],
    write: Callable[[KVCache], None],
) -> Attention:
    """Returns attention that appends keys and values to a cache, and then uses those of the cache.
    Each query attends to the tokens up to its own that a mask allows.
    """

    @functools.wraps(attention)
    def attend(query: Any, key: Any, value: Any, *, mask: Any = None, **kwargs: Any) -> Any:
        cache = read()
        fix = "make it with KVCache.empty, or leave it to the layer."
        check_instance(function, "the cache", cache, KVCache, fix=fix)
        if cache.format != format:
            raise fail(
                function,
                "the cache has another format than the layer.",
                given=f"a cache of {cache.format!r}",
                expected=f"cache={format!r}, as in the layer",
                fix="initialize the cache again, or make the layer with the format of the cache.",
            )
        cache = cache.append(key, value)
        write(cache)
        seen = _seen(cache, key.shape[1])
        mask = seen if mask is None else jnp.logical_and(jnp.asarray(mask).astype(bool), seen)
        keys, values = cache.keys.astype(key.dtype), cache.values.astype(value.dtype)
        return attention(query, keys, values, mask=mask, **kwargs)

    return attend


def _seen(cache: KVCache, count: int) -> jax.Array:
    """Returns which tokens the last `count` ones attend to, [1, 1, count, capacity]."""
    last = cache.length - count + jnp.arange(count, dtype=jnp.int32)
    return (jnp.arange(cache.capacity, dtype=jnp.int32)[None] <= last[:, None])[None, None]
