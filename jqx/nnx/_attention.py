"""Flax's attention, with an optional decode cache that is a `jqx.KVCache`."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .._errors import fail
from ..modules._shared import check_cache, empty_cache, with_cache


class CachedAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with one more argument: `cache`, the format of a `jqx.KVCache`.

    Attributes:
      cache: the format, or `None`.
      kv_cache: the cache, set by `init_cache` if `cache` is given.
    """

    attention_fn: Any
    cache: str | None
    kv_cache: nnx.Cache[Any] | None

    def __init__(self, *args: Any, cache: str | None = None, **kwargs: Any) -> None:
        check_cache(type(self).__name__, cache)
        super().__init__(*args, **kwargs)
        self.cache, self.kv_cache = cache, nnx.data(None)

    def init_cache(self, input_shape: Any, dtype: DTypeLike = jnp.float32) -> None:
        """Makes an empty cache for inputs [batch, whole length, features]."""
        if self.cache is None:
            super().init_cache(input_shape, dtype)
            return
        shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
        self.kv_cache = nnx.Cache(empty_cache(type(self).__name__, self.cache, shape, dtype))

    def __call__(
        self, *args: Any, decode: bool | None = None, is_causal: bool = False, **kwargs: Any
    ) -> Any:
        decodes = self.decode if decode is None else decode
        if not decodes or self.cache is None:
            return super().__call__(*args, decode=decode, is_causal=is_causal, **kwargs)
        name, held, own = type(self).__name__, self.kv_cache, self.attention_fn
        if held is None:
            raise fail(
                name,
                "the cache is not initialized.",
                given=f"decode=True and cache={self.cache!r}",
                expected="an empty cache for inputs of the whole length",
                fix="call layer.init_cache((batch, length, features)) first.",
            )
        assert held is not None
        self.attention_fn = with_cache(name, own, self.cache, held.get_value, held.set_value)
        try:  # attention over a cache is causal
            return super().__call__(*args, decode=False, **kwargs)
        finally:
            self.attention_fn = own
