"""Additive noise: its distribution, and the exact derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.gradients.estimators import AdditiveNoise
from jqx.gradients import additive_noise

KEY = jax.random.key(10)
N = 40_000


def noise(x, low, high, levels, y):
    """Recovers u from the result."""
    return (np.float64(y) - np.clip(np.float64(x), low, high)) * (levels - 1) / (high - low)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("levels", [2, 4, 256])
def test_the_noise_has_mean_zero_the_width_of_a_step_and_its_variance(levels, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = np.linspace(-2, 3, N).astype(dtype)
        y = additive_noise.surrogate(x, -np.ones(1, dtype), np.full(1, 2, dtype), levels, KEY)
    assert y.dtype == jnp.dtype(dtype)
    u = noise(x, -1, 2, levels, y)
    assert u.min() >= -0.5 - 1e-4 and u.max() <= 0.5 + 1e-4
    assert u.min() < -0.49 and u.max() > 0.49
    # 5 sigma: var u = 1/12; var u**2 = 1/80 - 1/144.
    assert abs(u.mean()) < 5 * np.sqrt(1 / 12 / N)
    assert abs((u**2).mean() - 1 / 12) < 5 * np.sqrt((1 / 80 - 1 / 144) / N)
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 5 / np.sqrt(N)


def test_the_derivative_is_exact_for_the_limits_as_well():
    x, levels = np.linspace(-3, 3, 40), 5
    low, high = np.float64([[-1.1]]), np.float64([[1.7]])
    with jax.enable_x64(True):
        x = x.reshape(8, 5)
        y, vjp = jax.vjp(lambda *a: additive_noise.surrogate(*a, levels, KEY), x, low, high)
        c = np.random.default_rng(11).normal(size=x.shape)
        dx, dlow, dhigh = vjp(c)
    u = noise(x, -1.1, 1.7, levels, y)
    np.testing.assert_array_equal(dx, np.where((x >= low) & (x <= high), c, 0))
    np.testing.assert_allclose(dlow, [[np.sum(c * ((x < low) - u / 4))]], rtol=1e-9)
    np.testing.assert_allclose(dhigh, [[np.sum(c * ((x > high) + u / 4))]], rtol=1e-9)


def test_a_scale_learns_the_noise_that_it_makes():
    """y = clip(x, -8 s, 7 s) + s * u."""
    x = np.float32([-9, -1, 0.3, 2, 9])
    y, vjp = jax.vjp(
        lambda s: jqx.quantize_dequantize(x, s, qtype=jnp.int4, gradient=additive_noise, key=KEY),
        np.float32(0.5),
    )
    u = (np.float64(y) - np.clip(x, -4, 3.5)) / 0.5
    np.testing.assert_allclose(vjp(np.ones_like(y))[0], u.sum() - 8 + 7, rtol=1e-5)


def test_additive_noise_is_a_value():
    assert additive_noise == AdditiveNoise() and additive_noise.needs_key
