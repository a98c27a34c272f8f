"""Strict promotion everywhere: a silent upcast or rank change fails a test."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
