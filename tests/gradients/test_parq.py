"""PARQ against the proximal map as the paper draws it: midpoint, slope, clip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.gradients import parq

from ..arrays import on_device
from ..oracles.refusals import assert_refused
from .points import RANGES, SCALES, case

SLOPES = [1e-3, 0.1, 0.5, 0.75, 1.0]


def paper(v, r):
    """The map with levels at the integers, m and d = 1 of the interval that holds `v`."""
    m = np.floor(v) + 0.5
    return m + np.clip((v - m) / r, -0.5, 0.5)


@pytest.mark.many
@pytest.mark.parametrize("r", SLOPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("qmin, qmax", RANGES)
def test_the_surrogate_is_the_map_on_the_levels(qmin, qmax, scale, r):
    v, x, low, high, _ = case(qmin, qmax, scale)
    if r < 0.1:  # so steep about the midpoints that float32 cannot follow
        v, x = (a[np.abs(v % 1 - 0.5) > 0.02] for a in (v, x))
    y = parq(r).surrogate(x, low, high, qmax - qmin + 1, None)
    expected = paper(np.clip(v, qmin, qmax), r) * scale
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-4 * scale / r**0.5)
    assert np.all((y >= low) & (y <= high))


@pytest.mark.many
@pytest.mark.parametrize("scale", [0.25, 0.3, 0.0171])
@pytest.mark.parametrize("qtype, z", [("int2", None), ("int4", None), ("int8", None), ("uint4", 3)])
def test_inverse_slope_0_is_the_quantizer_and_1_the_clamp(qtype, z, scale):
    v = np.arange(-20, 20, 0.125)
    x = np.float32(v * scale)
    if scale != 0.25:
        x = x[v % 1 != 0.5]
    z = None if z is None else on_device(z, qtype)

    def y(**options):
        return jqx.quantize_dequantize(x, np.float32(scale), z, qtype=qtype, **options)

    hard, soft = y(gradient=parq(0.0)), y(gradient=parq(1.0))
    np.testing.assert_allclose(hard, y(), rtol=2.0**-22)
    np.testing.assert_array_equal(np.asarray(hard) == 0, np.asarray(y()) == 0)
    np.testing.assert_allclose(soft, np.clip(x, y().min(), y().max()), rtol=2.0**-22)


def test_the_gradient_of_the_surrogate_is_that_of_ste():
    x = np.float32(np.linspace(-3, 3, 50))

    def gradients(gradient):
        return jax.grad(
            lambda x, s: jqx.quantize_dequantize(x, s, qtype=jnp.int4, gradient=gradient).sum(),
            (0, 1),
        )(x, np.float32(0.25))

    for a, b in zip(gradients(parq(0.3)), gradients(jqx.gradients.ste), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("slope", [-0.1, 1.5, float("nan")])
def test_a_slope_out_of_range_is_refused(slope):
    assert_refused(lambda: parq(slope), (), ValueError, "gradients.parq", "inverse_slope")


def test_a_traced_slope_is_refused_and_points_to_a_number():
    with pytest.raises(TypeError, match="`inverse_slope` has the wrong type"):
        jax.jit(lambda r: parq(r).inverse_slope)(0.5)


def test_parq_is_a_value():
    assert parq(0.5) == parq(0.5) != parq(0.25) and not parq(0.5).needs_key
