"""EWGS against the paper's equation 4, and the chain rule through the normalisation."""

import jax
import numpy as np
import pytest

from jqx.gradients import ElementwiseGradientScaling, LearnedStep, ewgs

from ..oracles.refusals import assert_refused
from .points import RANGES, SCALES, case


def paper(x, low, high, levels, g, delta):
    """Returns (dx, dlow, dhigh) for x inside the range."""
    span = high - low
    x_n = (x - low) / span
    x_q = np.rint((levels - 1) * x_n) / (levels - 1)
    g_xq = g * span  # y = low + span * x_q
    g_xn = g_xq * (1 + delta * np.sign(g_xq) * (x_n - x_q))
    dlow = g * (1 - x_q) + g_xn * (x - high) / span**2
    dhigh = g * x_q - g_xn * (x - low) / span**2
    return g_xn / span, dlow, dhigh


@pytest.mark.many
@pytest.mark.parametrize(
    "delta, dtype", [(0, np.float32), (1e-3, np.float64), (0.2, np.float64), (3.0, np.float32)]
)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("qmin, qmax", RANGES)
def test_the_rule_is_that_of_the_paper(qmin, qmax, scale, delta, dtype):
    levels = qmax - qmin + 1
    with jax.enable_x64(dtype == np.float64):
        v, x, low, high, g = case(qmin, qmax, scale, dtype)
        if qmin % 2:  # a tie goes to the even code, where the paper counts from low
            v, x, g = (a[v % 1 != 0.5] for a in (v, x, g))
        got = ElementwiseGradientScaling(delta).bwd(x, low, high, levels, g)
    assert all(a.dtype == dtype for a in got)
    s, g = np.float64(dtype(scale)), np.float64(g)
    inside = (v >= qmin) & (v <= qmax)
    expected = paper(v * s, qmin * s, qmax * s, levels, g, delta)
    outside = (np.zeros_like(g), np.where(v < qmin, g, 0), np.where(v > qmax, g, 0))
    atol = 1e-5 if dtype == np.float32 else 1e-12
    for a, b, c in zip(got, expected, outside, strict=True):
        np.testing.assert_allclose(a, np.where(inside, b, c), rtol=0, atol=atol * (1 + delta))


def test_a_range_of_one_number_has_finite_gradients():
    one = np.ones(3, np.float32)
    for found in ewgs.bwd(np.float32([0, 1, 2]), one, one, 256, one):
        assert np.isfinite(found).all()


def test_without_a_delta_it_is_lsq_without_its_gradient_scale():
    _, x, low, high, g = case(-3, 12, 0.25)
    got = ElementwiseGradientScaling(0.0).bwd(x, low, high, 16, g)
    for a, b in zip(got, LearnedStep(False).bwd(x, low, high, 16, g), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)


def test_a_tie_scales_as_the_rounding_of_the_forward_pass_goes():
    """Code 0.5 with zero point 3 is rounded down to 0, so that x_n - x_q is positive."""
    gradient = ElementwiseGradientScaling(1.0)
    dx, _, _ = gradient.bwd(
        np.float32([0.5]), np.float32([-3]), np.float32([12]), 16, np.ones(1, np.float32)
    )
    np.testing.assert_allclose(dx, [1 + 0.5 / 15], rtol=1e-6)


@pytest.mark.parametrize("delta, error", [(-1.0, ValueError), (np.inf, ValueError)])
def test_a_delta_out_of_range_is_refused(delta, error):
    assert_refused(
        lambda: ElementwiseGradientScaling(delta), (), error, "ElementwiseGradientScaling", "delta"
    )


def test_a_delta_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="`delta` is out of range"):
        ElementwiseGradientScaling("small")


def test_the_default_is_that_of_the_authors():
    assert ewgs == ElementwiseGradientScaling(1e-3) and ewgs.uniform_only
