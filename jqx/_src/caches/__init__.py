"""Quantized caches of the keys and values of attention."""
