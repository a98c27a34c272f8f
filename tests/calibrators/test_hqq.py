import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.calibrators import Hqq, absmax, hqq, minmax
from jqx.numerics import mxfp4, nf4

from ..oracles.calibrators import decide, dequantized, draw, fit, quantized
from ..oracles.refusals import assert_refused


def lp(x, real, p=0.7):
    return np.sum(np.abs(np.float64(x) - np.float64(real)) ** p)


def shrink(e, beta, p):
    with np.errstate(divide="ignore"):
        return np.sign(e) * np.maximum(np.abs(e) - np.abs(e) ** (p - 1) / beta, 0)


def ranges(x, calibrator, high):
    """The iterates of the symmetric form, in float64: the largest magnitude of each."""
    x, limit, beta = np.float64(x), np.abs(np.float64(x)).max(), calibrator.beta
    yield limit
    for _ in range(calibrator.iterations):
        y = x / (limit / high)
        q = np.clip(np.rint(y), -high - 1, high)
        w = shrink(y - q, beta, calibrator.p)
        limit *= np.sum((y - w) * q) / np.sum(q * q)
        beta *= calibrator.kappa
        yield limit


def zero_points(x, scale, zero, calibrator, high):
    """The iterates of the asymmetric form, rounded."""
    y, beta = np.float64(x) / scale, calibrator.beta
    zero = np.float64(zero)
    yield zero
    for _ in range(calibrator.iterations):
        q = np.clip(np.rint(y + zero), 0, high)
        w = shrink(y - (q - zero), beta, calibrator.p)
        zero = np.mean(q - (y - w))
        beta *= calibrator.kappa
        yield np.clip(np.rint(zero), 0, high)


@pytest.mark.parametrize("seed", range(3))
def test_the_scale_is_the_best_iterate(seed):
    """Against float64; the iterates differ by rounding, so the errors are compared."""
    x, calibrator = draw((300,), seed), Hqq(10)
    spec = jqx.QSpec(jnp.int4, calibrator=calibrator)
    found = quantized(x, fit, spec)
    limits = np.float32(list(ranges(x, calibrator, 7)))
    errors = [lp(x, dequantized(x, -m, m, "int4", True)) for m in limits]
    assert lp(x, found) == pytest.approx(min(errors), rel=0.01)
    assert min(errors) < 0.99 * errors[0], "the start is the best, so nothing was tested"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [1.0, 10.0])
def test_the_zero_point_is_the_best_iterate(seed, beta):
    x, calibrator = np.exp(draw((300,), seed) / 2), Hqq(10, beta=beta)
    spec = jqx.QSpec(jnp.uint4, symmetric=False, calibrator=calibrator)
    start, found = jax.jit(lambda x: (minmax.fit(x, spec), fit(x, spec)))(x)
    assert found.scale == start.scale
    scale = np.float64(start.scale[0])

    def error(zero):
        return lp(x, (np.clip(np.rint(x / scale) + zero, 0, 15) - zero) * scale)

    zeros = list(zero_points(x, scale, int(start.zero_point[0]), calibrator, 15))
    assert error(int(found.zero_point[0])) == pytest.approx(min(map(error, zeros)), rel=1e-3)


@pytest.mark.parametrize(
    "qtype, symmetric",
    [
        ("int4", True),
        ("int8", True),
        ("uint4", False),
        ("int8", False),
        (jnp.float8_e4m3fn, True),
        (nf4, True),
    ],
    ids=str,
)
def test_it_is_never_worse_than_covering_everything(qtype, symmetric):
    """By the lp error, on the array, for every scale."""
    x = draw((5, 40), seed=4)
    spec = jqx.QSpec(qtype, jqx.per_axis(0), symmetric, hqq)
    whole = (absmax if symmetric else minmax).fit
    both = jax.jit(lambda x: [quantized(x, find, spec) for find in (fit, whole)])(x)
    for row, ours, theirs in zip(x, *jax.device_get(both), strict=True):
        assert lp(row, ours) <= lp(row, theirs) * (1 + 1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_result_follows_the_units_of_the_values(symmetric):
    x = draw((200,), seed=5)
    spec = jqx.QSpec("int4", symmetric=symmetric, calibrator=hqq)
    one, other = fit(x, spec), fit(x * np.float32(2.0**-9), spec)
    np.testing.assert_allclose(one.scale, other.scale * 2.0**9, rtol=1e-6)
    assert symmetric or one.zero_point == other.zero_point


def test_of_a_histogram_the_error_is_near_that_of_the_array():
    x = draw((20_000,), seed=6)
    spec = jqx.QSpec(jnp.int4, calibrator=hqq)
    errors = [lp(x, quantized(x, find, spec)) for find in (fit, decide, absmax.fit)]
    assert errors[1] <= errors[0] * 1.02 < errors[2]


def test_scales_that_are_powers_of_two_stay_so():
    x = draw((64,), seed=7)
    spec = jqx.QSpec(mxfp4, jqx.per_block({0: 32}), calibrator=hqq)
    found = fit(x, spec).scale
    assert found.dtype == jnp.float8_e8m0fnu
    assert (np.frexp(np.float32(found))[0] == 0.5).all()


@pytest.mark.parametrize(
    "make, error, fact",
    [
        (lambda: Hqq(0), ValueError, "iterations"),
        (lambda: Hqq(1.5), TypeError, "iterations"),
        (lambda: Hqq(p=0.0), ValueError, "p == 0.0"),
        (lambda: Hqq(p=1.1), ValueError, "p == 1.1"),
        (lambda: Hqq(beta=0.0), ValueError, "beta"),
        (lambda: Hqq(kappa=0.9), ValueError, "kappa"),
        (lambda: Hqq(kappa="1"), TypeError, "kappa"),
    ],
)
def test_what_is_out_of_range_is_refused(make, error, fact):
    assert_refused(make, (), error, "calibrators.Hqq", fact)


def test_it_prints_as_it_is_written():
    assert (str(hqq), str(Hqq(5))) == ("hqq", "hqq(5, 0.7, 10.0, 1.01)")
