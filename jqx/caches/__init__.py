"""Caches of keys and values in few bits."""

from ._kv_cache import KVCache as KVCache
