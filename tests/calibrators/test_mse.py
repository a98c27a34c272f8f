import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.calibrators import Mse, absmax, minmax, mse
from jqx.numerics import mxfp4, nf4

from ..oracles.calibrators import BLOCKED, SHAPE, blocks, decide, dequantized, draw, fit, quantized
from ..oracles.refusals import assert_refused

FORMATS = [
    ("int4", True),
    ("int8", True),
    ("int4", False),
    ("uint8", False),
    (jnp.float8_e4m3fn, True),
    (nf4, True),
]
of_formats = pytest.mark.parametrize("qtype, symmetric", FORMATS, ids=str)


def extremes(x, symmetric):
    low, high = np.minimum(x.min(), np.float32(0)), np.maximum(x.max(), np.float32(0))
    m = np.maximum(high, -low)
    return (-m, m) if symmetric else (low, high)


def brute_force(x, qtype, symmetric, candidates, least, norm=2):
    """The error of every factor, in float64, for float32 ranges."""
    low, high = extremes(x, symmetric)
    factors = np.linspace(1, least, candidates).astype(np.float32)
    ranges = [(x, low * f, high * f, qtype, symmetric) for f in factors]
    return factors, np.array([error_of(x, dequantized(*of), norm) for of in ranges])


def error_of(x, real, norm=2):
    return np.mean(np.abs(np.float64(x) - np.float64(real)) ** norm)


@of_formats
def test_no_factor_of_a_brute_force_search_is_better(qtype, symmetric):
    """To the rounding of a float32 sum; the candidates are those of the oracle."""
    x = draw((200,))
    spec = jqx.QSpec(qtype, symmetric=symmetric, calibrator=Mse(40, 0.2))
    _, errors = brute_force(x, qtype, symmetric, 40, 0.2)
    assert error_of(x, quantized(x, fit, spec)) <= errors.min() * (1 + 1e-4)


def test_the_error_may_be_of_another_power():
    """One that is higher clips less."""
    x, factors = draw((200,), seed=5), []
    for norm in (1, 2.4, 6.0):
        spec = jqx.QSpec("int4", calibrator=Mse(40, 0.2, norm))
        _, errors = brute_force(x, "int4", True, 40, 0.2, norm)
        assert error_of(x, quantized(x, fit, spec), norm) <= errors.min() * (1 + 1e-4)
        assert errors.min() < 0.97 * errors[0] or norm == 6
        factors.append(float(fit(x, spec).scale[0]))
    assert factors == sorted(factors) and factors[0] < factors[-1]


@pytest.mark.parametrize("qtype", ["int4", "int2", nf4, mxfp4], ids=str)
def test_a_signed_scale_lets_the_larger_end_take_the_code_that_has_no_opposite(qtype):
    """By enumeration of factors and signs; formats of even ranges have the scales they had."""
    x = draw((64, 32), seed=7)
    spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: 32}), calibrator=Mse(20, 0.5, signed=True))
    plain = jqx.QSpec(qtype, spec.granularity, calibrator=Mse(20, 0.5))
    found, before = (np.float64(fit(x, own).scale.astype(np.float32)) for own in (spec, plain))
    if qtype in (nf4, mxfp4):
        np.testing.assert_array_equal(found, before)
        return
    low, high = {"int4": (-8, 7), "int2": (-2, 1)}[qtype]
    wide = np.float64(x)
    largest = np.abs(wide).max(1, keepdims=True)
    sizes = [*np.linspace(1, 0.5, 20), high / -low]
    every = np.array([sign * size * largest / high for sign in (1, -1) for size in sizes])
    error = [((np.clip(np.rint(wide / s), low, high) * s - wide) ** 2).sum(1) for s in every]
    real = np.float64(quantized(x, fit, spec))
    own = ((real - wide) ** 2).sum(1)
    np.testing.assert_allclose(own, np.min(error, 0), rtol=1e-4)
    assert (found < 0).sum() > 10 and (found > 0).sum() > 10
    q = jqx.QTensor.quantize(jnp.asarray(x), spec)
    assert own.sum() < 0.95 * ((np.float64(quantized(x, fit, plain)) - wide) ** 2).sum()
    y = draw((5, 32), seed=8)
    for laid_out in (q, jqx.pack_for(q, "cpu")):
        product = jqx.einsum("bk,nk->bn", jnp.asarray(y), laid_out)
        np.testing.assert_allclose(product, np.float64(y) @ real.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("qtype, symmetric", [("int4", True), ("uint4", False), (nf4, True)])
def test_each_scale_is_searched_by_itself(qtype, symmetric):
    x = draw(SHAPE, seed=1)
    specs = [jqx.QSpec(qtype, granularity, symmetric, Mse(20, 0.3)) for granularity, _ in BLOCKED]
    found = jax.jit(lambda x: [quantized(x, fit, spec) for spec in specs])(x)
    for (_, sizes), real in zip(BLOCKED, jax.device_get(found), strict=True):
        for (_, block), (_, theirs) in zip(blocks(x, sizes), blocks(real, sizes), strict=True):
            _, errors = brute_force(block, qtype, symmetric, 20, 0.3)
            assert error_of(block, theirs) <= errors.min() * (1 + 1e-4) + 1e-12


@of_formats
def test_it_is_never_worse_than_covering_everything(qtype, symmetric):
    """Also where squares of the values would be too small or too large for a float32."""
    spec = jqx.QSpec(qtype, jqx.per_axis(0), symmetric, mse)
    whole = (absmax if symmetric else minmax).fit

    @jax.jit
    def both(x, unit):
        return [quantized(x, find, spec) * unit for find in (fit, whole)]

    for c in (1.0, 1e-20, 1e25):
        unit = np.float32(1 / c)
        x = draw((4, 30), seed=2) * np.float32(c)
        ours, theirs = both(x, unit)
        for row, a, b in zip(x * unit, ours, theirs, strict=True):
            assert error_of(row, a) <= error_of(row, b) * (1 + 1e-5)


@of_formats
def test_of_a_histogram_the_error_is_near_the_least(qtype, symmetric):
    """The bins are as wide as steps of int8, and the error is within 3 % of the best one."""
    x = draw((20_000,), seed=3)
    spec = jqx.QSpec(qtype, symmetric=symmetric, calibrator=Mse(40, 0.025))
    _, errors = brute_force(x, qtype, symmetric, 40, 0.025)
    assert error_of(x, quantized(x, decide, spec)) <= errors.min() * 1.03
    assert errors.min() < errors[0] * 0.97 or qtype in (jnp.float8_e4m3fn,)


def test_a_range_that_is_exact_is_kept():
    """Every value is a number of the grid, and a smaller range has an error."""
    x = jnp.arange(-7.0, 8.0)
    spec = jqx.QSpec(jnp.int4, calibrator=mse)
    assert fit(x, spec).scale[0] == 1
    assert decide(x, spec).scale[0] == 1


def test_a_scale_that_is_a_power_of_two_may_be_rounded_up():
    """The rule of MX covers 4.0 of 7.9 by 6 with scale 1, which clips; 2 is better here."""
    spec = jqx.QSpec(mxfp4, jqx.per_block({0: 32}), calibrator=mse)
    x = jnp.full((32,), 7.9)
    assert float(absmax.fit(x, spec).scale[0]) == 1
    assert float(fit(x, spec).scale[0]) == 2
    assert float(decide(x, spec).scale[0]) == 2


def test_an_outlier_is_clipped():
    x = np.append(draw((1000,), seed=4).clip(-3, 3), np.float32(30))
    spec = jqx.QSpec(jnp.int4, calibrator=mse)
    for find in (fit, decide):
        assert find(x, spec).scale[0] * 7 < 15


@pytest.mark.parametrize(
    "make, error, fact",
    [
        (lambda: Mse(0), ValueError, "candidates"),
        (lambda: Mse(2.0), TypeError, "candidates"),
        (lambda: Mse(True), TypeError, "candidates"),
        (lambda: Mse(least=0.0), ValueError, "least"),
        (lambda: Mse(least=1.5), ValueError, "least"),
        (lambda: Mse(least="a"), TypeError, "least"),
        (lambda: Mse(norm=0.5), ValueError, "norm"),
        (lambda: Mse(norm="2"), TypeError, "norm"),
    ],
)
def test_what_is_no_grid_is_refused(make, error, fact):
    assert_refused(make, (), error, "calibrators.Mse", fact)


def test_one_candidate_is_the_whole_range():
    x = draw((30,))
    spec = jqx.QSpec(jnp.int4, calibrator=Mse(1))
    assert fit(x, spec).scale == absmax.fit(x, spec).scale


def test_it_prints_as_it_is_written():
    written = {mse: "mse", Mse(20, 0.5): "mse(20, 0.5)", Mse(norm=3): "mse(100, 0.1, norm=3.0)"}
    assert {calibrator: str(calibrator) for calibrator in written} == written
