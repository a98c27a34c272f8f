"""Quantized caches of the keys and values of attention."""

from ._decode_attention import decode_attention as decode_attention
from ._kv_cache import KVCache as KVCache
