"""Arrays on the device, without a program that puts them there: `jnp.asarray` of a NumPy array
compiles one for each shape, and `jax.random` a larger one. And how trees of them are compared.
"""

from typing import Any

import jax
import numpy as np


def on_device(x: Any, dtype: Any = None) -> jax.Array:
    """`jnp.asarray(x, dtype)` of what NumPy knows."""
    return jax.device_put(np.asarray(x, dtype))


def assert_same(actual: Any, expected: Any) -> None:
    """Asserts that trees have one structure, and leaves of equal dtypes, shapes and values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


def normal(seed: int, *shape: int) -> jax.Array:
    """Random float32 values of unit variance."""
    return on_device(np.random.default_rng(seed).standard_normal(shape, np.float32))


def filled(shapes: Any) -> Any:
    """Small random float32 values in place of the shapes in a tree, as of `jax.eval_shape`."""
    rng = np.random.default_rng(0)

    def values(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return on_device(rng.standard_normal(x.shape) / 3, x.dtype)

    return jax.tree.map(values, shapes)
