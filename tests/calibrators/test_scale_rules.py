"""Rules for the scales of 4-bit floats in blocks."""

import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import calibrators
from jqx.numerics import mxfp4, mxfp8_e4m3, nvfp4

from ..arrays import on_device

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GRID = np.concatenate([-E2M1[:0:-1], E2M1])


def rounded(x, scale):
    """To the nearest number of the format; ties do not matter for the error."""
    return GRID[np.abs((x / scale)[..., None] - GRID).argmin(-1)] * scale


@pytest.mark.parametrize(("qtype", "high"), [(mxfp4, 6), (mxfp8_e4m3, 448)], ids=str)
def test_ceil_is_the_least_power_of_two_that_clips_nothing(qtype, high):
    """For magnitudes beside every power of two and beside each of them times the largest number."""
    powers = 2.0 ** np.arange(-100, 100)
    ends = np.float32(np.concatenate([powers, powers * high]))
    inf = np.float32(np.inf)
    x = np.stack([np.nextafter(ends, -inf), ends, np.nextafter(ends, inf)]).ravel()[:, None]
    x = np.pad(x, ((0, 0), (0, 31)))
    spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: 32}), calibrator=calibrators.ceil)
    fitted = spec.calibrator.fit(on_device(x), spec).scale
    m, e = np.frexp(np.float64(np.abs(x).max(1)) / high)
    expected = np.where(m == 0.5, 2.0 ** (e - 1), 2.0**e)
    np.testing.assert_array_equal(np.float64(fitted.astype(jnp.float32))[:, 0], expected)
    seen = spec.calibrator.affine(spec.calibrator.observe(on_device(x), spec), spec)
    np.testing.assert_array_equal(*(np.float32(y) for y in (seen.scale, fitted)))
    real = jqx.QTensor.quantize(on_device(x), spec).dequantize()
    assert np.all(np.abs(real) <= high * expected[:, None])


def test_four_over_six_takes_what_loses_less():
    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    x[0] = [1, *[0.8] * 15]  # 6 and 4.8: four takes it
    x[1] = [1, *[0.5] * 15]  # 6 and 3: six does
    spec = jqx.QSpec(nvfp4, jqx.per_block({0: 1, 1: 16}), calibrator=calibrators.four_over_six)
    scale = np.float64(spec.calibrator.fit(on_device(x), spec).scale)
    largest = np.abs(np.float64(x)).max(1, keepdims=True)
    six, four = (((x - rounded(x, largest / n)) ** 2).sum(1) for n in (6, 4))
    apart = np.abs(six - four) > 1e-6 * six
    expected = np.where(four < six, largest[:, 0] / 4, largest[:, 0] / 6)
    assert apart.sum() > 60 and 10 < np.sum((four < six)[apart]) < 60
    np.testing.assert_allclose(scale[apart, 0], expected[apart], rtol=1e-6)
    losses = {}
    for calibrator in (calibrators.absmax, calibrators.four_over_six):
        of = jqx.QSpec(nvfp4, jqx.per_block({0: 1, 1: 16}), calibrator=calibrator)
        real = jqx.QTensor.quantize(on_device(x), of).dequantize()
        losses[str(calibrator)] = float(jnp.sum((real - x) ** 2))
    assert losses["four_over_six"] < 0.95 * losses["absmax"]


def test_they_are_of_formats_of_their_own():
    x = on_device(np.random.default_rng(1).normal(size=(4, 32)), jnp.float32)
    for qtype in (nvfp4, jnp.int4, jnp.float8_e4m3fn):  # nothing is clipped there anyway
        spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: 16}))
        same = (y.fit(x, spec).scale for y in (calibrators.ceil, calibrators.absmax))
        np.testing.assert_array_equal(*same)
    spec = jqx.QSpec(mxfp4, jqx.per_block({0: 1, 1: 32}))
    with pytest.raises(ValueError, match="four_over_six: mxfp4 has other elements or scales"):
        calibrators.four_over_six.fit(x, spec)
