"""Flax's attention, with an optional decode cache that is a `jqx.KVCache`. The classes have Flax's
names, since these names are in the paths of plans.
"""

import dataclasses
import functools
from typing import Any

from flax import linen as nn

from ..modules._shared import check_cache, empty_cache, with_cache

_NAME = "kv_cache"
"""Name of the cache in the collection `cache`."""


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` with one more field.

    Attributes:
      cache: format of the `jqx.KVCache` that holds keys and values if `decode` is set; `None` keeps
        arrays, as Flax does.
    """

    cache: str | None = None

    def __post_init__(self) -> None:
        check_cache(type(self).__name__, self.cache)
        super().__post_init__()

    @nn.nowrap  # one scope of names, as in Flax
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.decode or self.cache is None:
            return super().__call__(*args, **kwargs)
        kind = self._flax()
        own = [x.name for x in dataclasses.fields(kind) if x.init and x.name != "name"]
        fields = {name: getattr(self, name) for name in own}
        fields |= {"decode": False, "attention_fn": self._attention(), "parent": self.scope}
        return kind(**fields)(*args, **kwargs)

    @nn.nowrap
    def _flax(self) -> type[nn.MultiHeadDotProductAttention]:
        """Returns the class of Flax that this one extends."""
        return nn.MultiHeadDotProductAttention

    @nn.nowrap
    def _attention(self) -> Any:
        """Returns attention over the cache, or over keys and values as given at its creation."""
        assert self.cache is not None and self.scope is not None
        scope, format, name = self.scope, self.cache, type(self).__name__
        plain: Any = self.attention_fn
        if scope.has_variable("cache", _NAME) and not self.is_initializing():
            read = functools.partial(scope.get_variable, "cache", _NAME)
            write = functools.partial(scope.put_variable, "cache", _NAME)
            return with_cache(name, plain, format, read, write)

        @functools.wraps(plain)
        def attend(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
            scope.put_variable("cache", _NAME, empty_cache(name, format, key.shape, key.dtype))
            return plain(query, key, value, **kwargs)

        return attend


class MultiHeadAttention(MultiHeadDotProductAttention, nn.MultiHeadAttention):
    """`flax.linen.MultiHeadAttention` with one more field, `cache`."""

    @nn.nowrap
    def _flax(self) -> type[nn.MultiHeadDotProductAttention]:
        return nn.MultiHeadAttention
