"""DoReFa-Net's f_w^k, forward and backward, against equations 5 and 9."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.gradients import dorefa, dorefa_weights

from ..oracles.refusals import assert_refused


def weights(shape=(5, 7)):
    return np.random.default_rng(5).normal(size=shape)


def quantized(w, k):
    return jqx.fake_quantize(dorefa_weights(w), -1.0, 1.0, -1.0, 1.0, levels=2**k, gradient=dorefa)


@pytest.mark.many
@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_are_quantized_as_in_the_paper_forward_and_backward(k, dtype):
    w, c = weights().astype(dtype), np.random.default_rng(6).normal(size=(5, 7))
    with jax.enable_x64(dtype == np.float64):
        y, vjp = jax.vjp(lambda w: quantized(w, k), w)
        (dw,) = vjp(c.astype(dtype))
    assert y.dtype == dw.dtype == dtype
    t = np.tanh(w.astype(np.float64))
    m, at = np.abs(t).max(), np.abs(t) == np.abs(t).max()
    n = 2**k - 1
    expected = 2 * np.rint(n * (t / (2 * m) + 0.5)) / n - 1
    dt = c / m - at * np.sign(t) * np.sum(c * t) / m**2
    np.testing.assert_allclose(y, expected, atol=1e-6)
    np.testing.assert_allclose(dw, dt * (1 - t**2), atol=1e-5)


def test_the_rule_passes_inside_the_limits_included_and_gives_the_limits_nothing():
    x = np.float32([-2, -1, 0.3, 1, 2, np.nan])
    dx, dlow, dhigh = dorefa.bwd(x, -np.ones(1), np.ones(1), 4, np.full(6, 3, np.float32))
    np.testing.assert_array_equal(dx, [0, 3, 3, 3, 0, 0])
    np.testing.assert_array_equal(dlow, np.zeros(6))
    np.testing.assert_array_equal(dhigh, np.zeros(6))


def test_the_largest_weight_becomes_one_and_zeros_stay_finite():
    w = jnp.array([0.1, -30.0, 2.0])
    assert dorefa_weights(w)[1] == -1 and jnp.abs(dorefa_weights(w)).max() == 1
    for zeros in (jnp.zeros((2, 3)), jnp.zeros(0)):
        np.testing.assert_array_equal(dorefa_weights(zeros), zeros)
        gradient = jax.grad(lambda w: dorefa_weights(w).sum())(zeros)
        np.testing.assert_array_equal(gradient, np.ones(zeros.shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_stay_16_bit(dtype):
    w = weights().astype(jnp.dtype(dtype))
    y = dorefa_weights(w)
    assert y.dtype == jnp.dtype(dtype) and jnp.abs(y).max() == 1


def test_integer_weights_are_refused():
    assert_refused(
        dorefa_weights, (np.arange(3),), TypeError, "gradients.dorefa_weights", "int32", "`w`"
    )
