"""Caches of keys and values in few bits."""

from ._decode_attention import decode_attention as decode_attention
from ._kv_cache import KVCache as KVCache
