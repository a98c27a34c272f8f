"""Flax linen: quantized layers and whole modules."""
