"""PACT against the paper's equations 1 and 3."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.gradients import pact

ALPHA = 1.5
X = np.float32([-np.inf, -2, -1e-3, 0, 1e-3, 0.25, 0.75, 1.499, 1.5, 1.501, 7, np.inf, np.nan])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_rule_is_that_of_the_paper(dtype):
    cotangent = np.random.default_rng(4).normal(size=X.shape).astype(dtype)
    with jax.enable_x64(dtype == np.float64):
        dx, dlow, dhigh = pact.bwd(
            X.astype(dtype), np.zeros(1, dtype), np.full(1, ALPHA, dtype), 4, cotangent
        )
    assert dx.dtype == dlow.dtype == dhigh.dtype == dtype
    np.testing.assert_array_equal(dx, np.where((X >= 0) & (X < ALPHA), cotangent, 0))
    np.testing.assert_array_equal(dlow, np.zeros_like(cotangent))
    np.testing.assert_array_equal(dhigh, np.where(X >= ALPHA, cotangent, 0))


def test_alpha_learns_through_fake_quantize():
    x = X[1:-1]

    def loss(x, alpha):
        return jqx.fake_quantize(x, 0.0, alpha, 0.0, alpha, levels=16, gradient=pact).sum()

    dx, dalpha = jax.grad(loss, (0, 1))(x, np.float32(ALPHA))
    np.testing.assert_array_equal(dx, (x >= 0) & (x < ALPHA))
    np.testing.assert_allclose(dalpha, np.sum(x >= ALPHA), atol=1e-6)


def test_alpha_learns_through_an_unsigned_scale():
    """alpha = 15 s."""
    f = jax.grad(
        lambda s: jqx.quantize_dequantize(X[1:-2], s, qtype=jnp.uint4, gradient=pact).sum()
    )
    np.testing.assert_allclose(f(np.float32(0.1)), 15 * np.sum(X[1:-2] >= ALPHA), rtol=1e-6)
