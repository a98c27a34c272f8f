"""The backward pass of products against that of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jqx._src.contractions.dot_general import dot_gradients

from ..arrays import on_device

CASES = {  # shapes of both operands, dimension numbers
    "matrices": ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "both transposed": ((4, 3), (5, 4), (((0,), (1,)), ((), ()))),
    "no free axis": ((4,), (4,), (((0,), (0,)), ((), ()))),
    "no contracted axis": ((2, 3), (4,), (((), ()), ((), ()))),
    "batch": ((2, 3, 4), (5, 2, 4), (((2,), (2,)), ((0,), (1,)))),
    "two batch axes out of order": ((2, 3, 4, 6), (3, 2, 6, 5), (((3,), (2,)), ((0, 1), (1, 0)))),
    "two contracted axes out of order": ((4, 3, 6), (6, 5, 4), (((0, 2), (2, 0)), ((), ()))),
    "contracted axes that cross": ((3, 4, 6), (4, 5, 6), (((2, 1), (2, 0)), ((), ()))),
    "three axes in a ring": ((2, 3, 4, 7), (4, 2, 3), (((0, 1, 2), (1, 2, 0)), ((), ()))),
}


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_those_of_jax(name, dtype):
    """Of numbers that bfloat16 holds, in sums that float32 holds."""
    left, right, numbers = CASES[name]
    rng = np.random.default_rng(0)
    f = lambda x, w: lax.dot_general(x, w, numbers)  # noqa: E731
    x, w = (on_device(rng.integers(-8, 9, shape), jnp.float32) for shape in (left, right))
    y, pull = jax.vjp(f, x, w)
    g = on_device(rng.integers(-8, 9, y.shape), jnp.float32)
    for found, expected in zip(dot_gradients(x, w, numbers, g, dtype), pull(g), strict=True):
        np.testing.assert_array_equal(found, expected, strict=True)
