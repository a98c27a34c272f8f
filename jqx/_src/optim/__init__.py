"""Optimizers of optax whose states are codes, and parameters in bfloat16."""
