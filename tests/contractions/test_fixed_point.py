"""Products in fixed point are TFLite's and gemmlowp's, bit by bit, where JAX has no int64."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jqx._src.contractions.requantize import (
    FixedPointRounding,
    Requantization,
    multiply_fixed_point,
    quantize_multiplier,
)

from ..oracles.refusals import assert_refused
from . import tflite

LOWEST, LARGEST = -(2**31), 2**31 - 1
SHIFTS = range(-31, 31)
POWERS = [sign * 2**k + d for k in range(31) for sign in (1, -1) for d in (-1, 0, 1)]
ACCUMULATORS = np.unique([*POWERS, LOWEST, LOWEST + 1, LARGEST - 1, LARGEST, 3, 5, 1000003])
FACTORS = [2**30, 2**30 + 1, 2**31 - 1, 2**31 - 2, 1431655765, 1518500250, 1717986918]
MULTIPLIERS = np.array([0, 1, 2, 3, 2**16 - 1, 2**16, 2**29, *FACTORS, *(-m for m in FACTORS)])
MULTIPLIERS = np.append(MULTIPLIERS, [-1, LOWEST])
both_roundings = pytest.mark.parametrize("rounding", FixedPointRounding, ids=lambda r: r.value)


@functools.partial(jax.jit, static_argnames="rounding")
def product(x, multiplier, shift, rounding):
    return multiply_fixed_point(x, multiplier, shift, rounding)


def assert_as_tflite(x, multiplier, shift, rounding):
    x, multiplier, shift = (np.asarray(v, np.int32) for v in (x, multiplier, shift))
    result = np.asarray(product(x, multiplier, shift, rounding))
    assert result.dtype == np.int32
    expected = tflite.MULTIPLY[rounding.value](x, multiplier, shift)
    np.testing.assert_array_equal(result.astype(np.int64), expected, strict=True)


@both_roundings
def test_every_shift_of_extreme_accumulators_and_multipliers(rounding):
    """All triples: both ends, powers of two and their neighbours, ties of every shift among them;
    INT32_MIN * INT32_MIN, which saturates; left shifts that wrap around.
    """
    grid = np.array(list(itertools.product(ACCUMULATORS, MULTIPLIERS, SHIFTS)), np.int32)
    assert_as_tflite(*grid.T, rounding)


@both_roundings
def test_random_triples(rounding):
    rng = np.random.default_rng(0)
    n = 1_000_000
    x = rng.integers(LOWEST, LARGEST, n, endpoint=True) >> rng.integers(0, 31, n)
    multiplier = rng.integers(2**30, 2**31, n) * rng.choice([1, 1, 1, -1], n)
    assert_as_tflite(x, multiplier, rng.integers(-31, 31, n), rounding)


@both_roundings
def test_ties_and_their_neighbours(rounding):
    """Odd multiples of half a unit, times factors that are powers of two."""
    rng = np.random.default_rng(1)
    odd = 2 * rng.integers(-500, 500, (1000, 1)) + 1
    shift = np.arange(0, -21, -1)
    near = rng.integers(-1, 2, (1000, 1))
    x = odd * 2**-shift + near
    assert_as_tflite(x, np.full_like(x, 2**30), np.broadcast_to(shift, x.shape), rounding)


def test_what_the_two_roundings_do_with_ties():
    """-2.5, -1.5, -0.5, 0.5, 1.5 and 2.5, as eighths."""
    x = np.array([-20, -12, -4, 4, 12, 20], np.int32)
    args = x, np.full_like(x, 2**30), np.full_like(x, -2)
    away = product(*args, FixedPointRounding.DOUBLE)
    up = product(*args, FixedPointRounding.SINGLE)
    np.testing.assert_array_equal(away, [-3, -2, -1, 1, 2, 3])
    np.testing.assert_array_equal(up, [-2, -1, 0, 1, 2, 3])


def test_the_roundings_are_as_near_as_their_number_allows():
    """Without wrapping, one rounding is within a half; the first of two adds half a unit of the
    last bit that the shift leaves: 2**(shift - 1). In units of 2**(shift - 31), all is exact.
    """
    rng = np.random.default_rng(2)
    n = 100_000
    x = rng.integers(LOWEST, LARGEST, n, endpoint=True)
    multiplier, shift = rng.integers(2**30, 2**31, n), rng.integers(-31, 1, n)
    half = np.int64(1) << (30 - shift)
    for rounding, most in (
        (FixedPointRounding.SINGLE, half),
        (FixedPointRounding.DOUBLE, half + 2**30),
    ):
        narrow = (v.astype(np.int32) for v in (x, multiplier, shift))
        y = np.asarray(product(*narrow, rounding)).astype(np.int64)
        error = np.abs((y << (31 - shift)) - x * multiplier)
        assert (error <= most).all()
        assert (error > half // 2).any()


def known_cases():
    """Factors, multipliers and shifts that can be told by hand."""
    carried = math.nextafter(1.0, 0.0)  # its mantissa rounds to 2**31
    return [
        (1.0, 2**30, 1),
        (0.5, 2**30, 0),
        (0.75, 3 * 2**29, 0),
        (carried, 2**30, 1),
        (1 - 2.0**-32, 2**30, 1),  # half-way between 2**31 - 1 and 2**31
        (1 - 2.0**-31, 2**31 - 1, 0),
        (0.5 + 2.0**-32, 2**30 + 1, 0),  # half-way between 2**30 and 2**30 + 1
        (-0.5 - 2.0**-32, -(2**30) - 1, 0),
        (-carried, -(2**31), 0),
        (2.0**-32, 2**30, -31),
        (math.nextafter(2.0**-32, 0), 2**30, -31),  # the carry comes before the test of the shift
        (2.0**-32 * (1 - 2.0**-31), 0, 0),
        (2.0**-33, 0, 0),
        (5e-324, 0, 0),
        (0.0, 0, 0),
        (2.0**30 - 0.5, 2**31 - 1, 30),
    ]


@pytest.mark.parametrize("factor, multiplier, shift", known_cases())
def test_multipliers_of_known_factors(factor, multiplier, shift):
    assert tflite.quantize_multiplier(factor) == (multiplier, shift)
    result = quantize_multiplier(np.float64(factor))
    assert [(v.dtype, int(v)) for v in result] == [(np.int32, multiplier), (np.int32, shift)]


def test_multipliers_of_quotients_of_scales():
    rng = np.random.default_rng(3)
    scales = np.exp(rng.uniform(-12, 3, (3, 20_000))).astype(np.float32).astype(np.float64)
    factor = scales[0] * scales[1] / scales[2]
    multiplier, shift = quantize_multiplier(factor)
    expected = [tflite.quantize_multiplier(f) for f in factor]
    np.testing.assert_array_equal(np.stack([multiplier, shift], 1), np.array(expected))


@given(st.floats(2.0**-32, 2.0**30 - 1))
def test_a_multiplier_is_within_half_a_unit_of_its_factor(factor):
    multiplier, shift = (int(v) for v in quantize_multiplier(np.float64(factor)))
    assert 2**30 <= multiplier < 2**31
    unit = 2.0 ** (shift - 31)
    assert abs(multiplier * unit - factor) <= unit / 2  # exact in float64: factors of 53 bits


def test_the_scales_are_multiplied_before_they_are_divided():
    """In another order, the last bit of float64 would change the last bit of these multipliers."""
    lhs = np.array([0.006316084880381823, 0.04889353737235069], np.float32)
    rhs = np.array([0.10945133119821548, 0.02831926941871643], np.float32)
    output = np.array([0.15596702694892883, 0.007344854064285755], np.float32)
    r = Requantization.of(lhs, rhs, output, qtype=jnp.int8)
    np.testing.assert_array_equal(r.multiplier, [1218361165, 1619348003])


ONE = np.float32(1)


@pytest.mark.parametrize(
    "scales, error, facts",
    [
        ((ONE, ONE, np.float32(0)), ValueError, ("`output_scale` is zero",)),
        ((np.float32(np.nan), ONE, ONE), ValueError, ("not finite",)),
        ((ONE, np.float32(np.inf), ONE), ValueError, ("not finite",)),
        (
            (ONE, ONE, np.array([1, -np.inf], np.float32)),
            ValueError,
            ("output_scale.shape == (2,)",),
        ),
        ((np.ones(3, np.float32), np.ones(2, np.float32), ONE), ValueError, ("do not broadcast",)),
        ((ONE, np.float32(2**30), ONE), ValueError, ("too large", "not below 2**30")),
        ((ONE, np.float32(-(2**30)), ONE), ValueError, ("too large", "1.07e+09")),
        ((np.int32(1), ONE, ONE), TypeError, ("`lhs_scale` element type", "int32")),
        ((ONE, "1", ONE), TypeError, ("`rhs_scale` is not an array",)),
        ((ONE, ONE, None), TypeError, ("`output_scale` is not an array",)),
    ],
)
def test_of_refuses_scales_without_a_multiplier(scales, error, facts):
    of = functools.partial(Requantization.of, *scales, qtype=jnp.int8)
    assert_refused(of, (), error, "tflite.Requantization.of", *facts)


@pytest.mark.parametrize("argument", ["lhs_scale", "rhs_scale", "output_scale"])
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad], ids=lambda t: t.__name__)
def test_a_traced_scale_is_an_error_that_says_where_to_compute(argument, transform):
    def f(traced):
        given = {"lhs_scale": 1.0, "rhs_scale": 1.0, "output_scale": 1.0, argument: traced}
        return Requantization.of(**given, qtype=jnp.int8).scale

    x = jnp.ones((2,)) if transform is jax.vmap else jnp.float32(1)
    with pytest.raises(TypeError) as refusal:
        transform(f)(x)
    assert str(refusal.value) == (
        f"jqx.tflite.Requantization.of: `{argument}` is traced and has no value, but multipliers "
        "are computed on the host.\n"
        "  fix:      create the Requantization outside and pass it in (it is a pytree), or "
        "quantize the float result with a QSpec."
    )
