"""The gradient of an extreme that sets its own limit, a rounding away from it on either side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..oracles.numerics import as_float64, code_range
from .test_ste import ROUNDINGS, f32


def test_the_extreme_that_sets_a_symmetric_scale_keeps_its_gradient():
    """One rounding puts the limit on either side of the extreme; it must not matter which."""
    rng = np.random.default_rng(14)
    x = (rng.normal(size=(300, 32)) * 2.0 ** rng.integers(-30, 30, (300, 1))).astype(np.float32)
    for qtype in ("int4", "int8", "int16"):
        limit = np.abs(x).max(1)
        scale, _ = jqx.affine_from_range(-limit, limit, qtype=qtype, symmetric=True)
        top = as_float64(scale) * code_range(qtype)[1]
        assert np.any(top < limit) and np.any(top > limit)
        f = jax.grad(
            lambda x, s=scale, q=qtype: jqx.quantize_dequantize(x, s, qtype=q, axes=0).sum()
        )
        np.testing.assert_array_equal(f(x), np.ones(x.shape))
        np.testing.assert_array_equal(jax.jit(f)(x), np.ones(x.shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_extremes_that_are_the_input_limits_keep_their_gradient(dtype):
    rng = np.random.default_rng(15)
    x = rng.normal(size=(50, 16)).astype(jnp.dtype(dtype))
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)

    def loss(x):
        return jqx.fake_quantize(x, low, high, low, high, levels=16).astype(jnp.float32).sum()

    np.testing.assert_array_equal(as_float64(jax.jit(jax.grad(loss))(x)), np.ones(x.shape))


def test_limits_taken_from_x_inside_the_graph_keep_the_gradient_of_the_extreme():
    """With output limits equal to the input limits, y follows the extremes one to one."""
    x = f32(-1.3, 0.2, 0.9, 2.7)

    def loss(x):
        low, high = x.min(), x.max()
        y = jqx.fake_quantize(x, low, high, low, high, levels=256)
        return y[0] + 10 * y[3]

    np.testing.assert_allclose(jax.grad(loss)(x), [1, 0, 0, 10], rtol=0, atol=ROUNDINGS)
