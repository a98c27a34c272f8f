"""LSQ+ against the paper's equations 5 and 6, in float64, element by element."""

import jax
import numpy as np
import pytest

import jqx
from jqx.gradients import LearnedStep, LearnedStepAndOffset, lsq_plus

from .points import positions

UNSCALED = LearnedStepAndOffset(gradient_scale=False)
CODES = [(-2, 1), (0, 3), (-8, 7), (0, 255)]


def paper(v, n, p):
    """Returns the derivatives by x, s and beta, `v = (x - beta) / s`."""
    inside = (v >= n) & (v <= p)
    ds = np.where(v < n, n, np.where(v > p, p, np.rint(v) - v))
    return inside * 1.0, ds, ~inside * 1.0


@pytest.mark.parametrize("beta", [0.0, 0.6, -3.171875])
@pytest.mark.parametrize("n, p", CODES)
def test_the_rule_is_that_of_the_paper(n, p, beta):
    s = 0.5
    v = positions(n, p, s)
    if beta * 2 % 1:
        v = v[v % 1 != 0.5]  # a tie survives an offset only where the sum is exact
    v = v[np.abs(v) < 1e5]  # the offset is lost in the largest
    x = np.float32(v * s + beta)
    low, high = (np.float32([q * s + beta]) for q in (n, p))
    cotangent = np.random.default_rng(3).normal(size=v.shape).astype(np.float32)
    dx, dlow, dhigh = map(np.float64, UNSCALED.bwd(x, low, high, p - n + 1, cotangent))
    passes, ds, dbeta = paper(v, n, p)
    np.testing.assert_array_equal(dx, passes * cotangent)
    # One rounding of x or a bound is 2**-24 * 256 * 0.5, in steps twice that.
    np.testing.assert_allclose(n * dlow + p * dhigh, ds * cotangent, rtol=1e-6, atol=1e-3)
    np.testing.assert_allclose(dlow + dhigh, dbeta * cotangent, atol=1e-6)


def test_step_and_offset_learn_through_the_limits_of_fake_quantize():
    n, p, s, beta = -8, 7, 0.3, 0.11
    v = positions(n, p, s)
    with jax.enable_x64(True):

        def loss(s, beta):
            low, high = n * s + beta, p * s + beta
            x = v * 0.3 + 0.11
            return jqx.fake_quantize(x, low, high, low, high, levels=16, gradient=UNSCALED).sum()

        got = jax.grad(loss, (0, 1))(np.float64(s), np.float64(beta))
    _, ds, dbeta = paper(v, n, p)
    np.testing.assert_allclose(got, (ds.sum(), dbeta.sum()), rtol=1e-9)


@pytest.mark.parametrize("levels, p", [(2, 1), (3, 1), (4, 1), (16, 7), (255, 126), (256, 127)])
def test_the_gradient_scale_takes_the_largest_signed_code_wherever_the_range_lies(levels, p):
    x = np.linspace(-2, 5, 24, dtype=np.float32).reshape(4, 6)
    low, high = np.float32([[0.3], [-9], [1], [0]]), np.float32([[1], [-8], [3], [4]])
    scaled = lsq_plus.bwd(x, low, high, levels, np.ones_like(x))
    plain = UNSCALED.bwd(x, low, high, levels, np.ones_like(x))
    np.testing.assert_array_equal(scaled[0], plain[0])
    for a, b in zip(scaled[1:], plain[1:], strict=True):
        np.testing.assert_allclose(a, np.asarray(b) / np.sqrt(6 * p), rtol=1e-6)


def test_it_is_the_rule_of_lsq_but_another_value():
    assert lsq_plus == LearnedStepAndOffset() != LearnedStep()
    assert lsq_plus.uniform_only
