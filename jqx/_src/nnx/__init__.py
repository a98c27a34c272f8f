"""Flax nnx: quantized layers and whole models."""
