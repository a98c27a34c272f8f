"""Quantized results: of accumulators by integers alone, as TFLite's and gemmlowp's, bit by bit,
where JAX has no int64; of floats by a spec.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jqx
from jqx._src.contractions.requantize import (
    FixedPointRounding,
    Requantization,
    as_asked,
    multiply_fixed_point,
    quantize_multiplier,
    requantize,
)
from jqx.calibrators import Affine
from jqx.numerics import Integer, format_of

from ..arrays import assert_same, on_device
from ..oracles import tflite
from ..oracles.numerics import as_int64, codes_of
from ..oracles.refusals import assert_refused

FORMATS = [jnp.int8, jnp.uint8, jnp.int16, jnp.int4, Integer(8, narrow=True), Integer(5)]
LOWEST, LARGEST = -(2**31), 2**31 - 1
both_roundings = pytest.mark.parametrize("rounding", FixedPointRounding, ids=lambda r: r.value)
requantized = jax.jit(requantize)


"""Products in fixed point are TFLite's and gemmlowp's, bit by bit, where JAX has no int64."""


SHIFTS = range(-31, 31)


POWERS = [sign * 2**k + d for k in range(31) for sign in (1, -1) for d in (-1, 0, 1)]


ACCUMULATORS = np.unique([*POWERS, LOWEST, LOWEST + 1, LARGEST - 1, LARGEST, 3, 5, 1000003])


FACTORS = [2**30, 2**30 + 1, 2**31 - 1, 2**31 - 2, 1431655765, 1518500250, 1717986918]


MULTIPLIERS = np.array([0, 1, 2, 3, 2**16 - 1, 2**16, 2**29, *FACTORS, *(-m for m in FACTORS)])
MULTIPLIERS = np.append(MULTIPLIERS, [-1, LOWEST])


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
    for rounding, bound in (
        (FixedPointRounding.SINGLE, half),
        (FixedPointRounding.DOUBLE, half + 2**30),
    ):
        narrow = (v.astype(np.int32) for v in (x, multiplier, shift))
        y = np.asarray(product(*narrow, rounding)).astype(np.int64)
        error = np.abs((y << (31 - shift)) - x * multiplier)
        assert (error <= bound).all()
        assert (error > half // 2).any()


CARRIED = math.nextafter(1.0, 0.0)
"""Its mantissa rounds to 2**31."""
MULTIPLIERS_BY_HAND = [
    (1.0, 2**30, 1),
    (0.5, 2**30, 0),
    (0.75, 3 * 2**29, 0),
    (CARRIED, 2**30, 1),
    (1 - 2.0**-32, 2**30, 1),  # half-way between 2**31 - 1 and 2**31
    (1 - 2.0**-31, 2**31 - 1, 0),
    (0.5 + 2.0**-32, 2**30 + 1, 0),  # half-way between 2**30 and 2**30 + 1
    (-0.5 - 2.0**-32, -(2**30) - 1, 0),
    (-CARRIED, -(2**31), 0),
    (2.0**-32, 2**30, -31),
    (math.nextafter(2.0**-32, 0), 2**30, -31),  # the carry comes before the test of the shift
    (2.0**-32 * (1 - 2.0**-31), 0, 0),
    (2.0**-33, 0, 0),
    (5e-324, 0, 0),
    (0.0, 0, 0),
    (2.0**30 - 0.5, 2**31 - 1, 30),
]


def test_multipliers_of_factors_that_can_be_told_by_hand():
    for factor, multiplier, shift in MULTIPLIERS_BY_HAND:
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


"""Quantized results: of accumulators by integers alone, as TFLite's; of floats by a spec."""


def limits(qtype):
    form = format_of(qtype)
    return int(form.low), int(form.high)


def scales(rng, *shape):
    return np.exp(rng.uniform(-2, 0, shape)).astype(np.float32)


def factor_of(*scales):
    """In float64, in the order of PopulateConvolutionQuantizationParams."""
    lhs, rhs, output = (np.asarray(scale, np.float32).astype(np.float64) for scale in scales)
    return lhs * rhs / output


def accumulators(rng, shape, width):
    """Of all magnitudes up to 2**width."""
    largest = 2.0 ** rng.uniform(0, width, shape)
    return rng.uniform(-largest, largest).astype(np.int32)


def assert_requantized(q, codes, scale, zero_point, qtype):
    """Asserts codes, scale, zero point, and that they fit the array that they are for."""
    assert q.qtype == qtype and q.values.dtype == format_of(qtype).storage
    np.testing.assert_array_equal(as_int64(q.values), codes, strict=True)
    assert q.scale.ndim == codes.ndim
    np.testing.assert_array_equal(np.ravel(q.scale), np.ravel(scale))
    if zero_point is None:
        assert q.zero_point is None
    else:
        assert q.zero_point.dtype == q.values.dtype
        np.testing.assert_array_equal(as_int64(q.zero_point).ravel(), np.ravel(zero_point))


SHAPES = [
    ((), (), ()),
    ((), (5,), ()),
    ((8, 1), (1, 5), (1, 1)),
    ((8, 1), (5,), (1, 5)),
]
"""Of the scales: numbers; of each column; of each row and column; of each column of the result."""


CASES = [(jnp.int8, shapes, extras) for shapes in SHAPES for extras in (False, True)]
CASES += [(qtype, SHAPES[3], True) for qtype in FORMATS[1:]]


@pytest.mark.many
@both_roundings
@pytest.mark.parametrize("qtype, shapes, extras", CASES)
def test_codes_are_those_of_tflite(qtype, shapes, extras, rounding):
    """Wherever scales, zero points and biases vary, with the latter two and without."""
    rng = np.random.default_rng(0)
    low, high = limits(qtype)
    accumulator = accumulators(rng, (8, 5), format_of(qtype).bits + 6)
    lhs, rhs, output = (scales(rng, *shape) for shape in shapes)
    zero = rng.integers(low, high + 1, output.shape) if extras else 0
    bias = rng.integers(-100, 100, (5,)) if extras else 0
    r = Requantization.of(
        lhs,
        rhs,
        output,
        qtype=qtype,
        zero_point=codes_of(zero, format_of(qtype).storage) if extras else None,
        bias=bias.astype(np.int32) if extras else None,
        rounding=rounding,
    )
    factor = factor_of(lhs, rhs, output)
    expected = tflite.requantize(accumulator, factor, zero, low, high, bias, rounding.value)
    assert_requantized(
        requantized(accumulator, r), expected, output, zero if extras else None, r.qtype
    )
    assert np.mean((expected > low) & (expected < high)) > 0.2
    assert {low, high} <= set(expected.ravel())


@both_roundings
@pytest.mark.parametrize("qtype", [jnp.int8, jnp.uint8, jnp.int16])
def test_every_code_and_both_ends_are_reached(qtype, rounding):
    low, high = limits(qtype)
    span = np.arange(low - 300, high + 301)
    zero = (low + high) // 2
    for factor in (1 / 8, 1 / 3, 1.0, 1.5):
        r = Requantization.of(factor, 1.0, 1.0, qtype=qtype, zero_point=zero, rounding=rounding)
        x = np.rint((span - zero) / factor).astype(np.int32)
        parts = (x, factor_of(factor, 1, 1), zero, low, high, 0, rounding.value)
        expected = tflite.requantize(*parts)
        assert_requantized(requantized(x, r), expected, 1.0, zero, r.qtype)
        if factor < 1:
            np.testing.assert_array_equal(np.unique(expected), np.arange(low, high + 1))


@both_roundings
def test_sums_wrap_around_where_those_of_tflite_do(rounding):
    """With the bias, with the zero point, and under a left shift (or past the right one)."""
    ends = np.array([LOWEST, LOWEST + 1, LARGEST - 1, LARGEST, 2**30, -(2**30), 2**29], np.int32)
    wrapped = 0
    for bias, zero, factor in itertools.product((-2, 0, 1), (-3, 0, 5), (0.25, 0.9999, 1.0, 6.0)):
        r = Requantization.of(
            factor, 1.0, 1.0, qtype=jnp.int8, zero_point=zero, bias=bias, rounding=rounding
        )
        parts = (ends, factor_of(factor, 1, 1), zero, -128, 127, bias, rounding.value)
        expected = tflite.requantize(*parts)
        np.testing.assert_array_equal(as_int64(requantized(ends, r).values), expected)
        unwrapped = np.clip((ends.astype(np.float64) + bias) * factor + zero, -128, 127)
        wrapped += int(np.sum(np.abs(unwrapped - expected) > 1))
    assert wrapped > 50


def test_the_result_stands_for_the_sum_of_real_products():
    """Of quantized matrices with zero points and a bias, to within the roundings that are made:
    half a code, half a unit of what the shift leaves, and half a unit of the multiplier.
    """
    rng = np.random.default_rng(1)
    x, w = rng.integers(-128, 128, (16, 24)), rng.integers(-127, 128, (24, 8))
    x_scale, w_scale, zero = scales(rng, 1, 1), scales(rng, 1, 8), 17
    bias = rng.integers(-5000, 5000, 8)
    accumulator = (x - zero) @ w
    real = (accumulator + bias) * (x_scale.astype(np.float64) * w_scale.astype(np.float64))
    output_scale = np.float32(np.abs(real).max() / 100)
    r = Requantization.of(
        x_scale, w_scale, output_scale, qtype=jnp.int8, zero_point=-9, bias=bias.astype(np.int32)
    )
    q = requantized(accumulator.astype(np.int32), r)
    assert q.dtype == jnp.float32 and q.shape == (16, 8)
    codes = as_int64(q.values)
    assert codes.min() > -128 and codes.max() < 127
    exact = real / output_scale.astype(np.float64)
    unit = 2.0 ** as_int64(r.shift)
    bound = 0.5 + unit / 2 + np.abs(accumulator + bias) * unit / 2**32
    bound += 4 * 2.0**-53 * np.abs(exact)  # of this test's own arithmetic
    error = np.abs(codes + 9 - exact)
    assert (error <= bound).all() and error.max() > 0.4
    np.testing.assert_allclose(q.dequantize(), (codes + 9) * output_scale, rtol=2.0**-23)


def test_the_real_result_has_the_dtype_asked_for_and_the_shape_of_the_accumulators():
    for dtype in (jnp.bfloat16, jnp.float32):
        r = Requantization.of(0.5, 0.5, 2.0, qtype=jnp.int8, zero_point=1, dtype=dtype)
        assert requantized(jnp.arange(3, dtype=jnp.int32), r).dequantize().dtype == dtype
        assert int(requantized(jnp.int32(16), r).values) == 3
        assert requantized(jnp.zeros((0, 3), jnp.int32), r).shape == (0, 3)


def test_low_and_high_clamp_as_an_activation():
    rng = np.random.default_rng(2)
    x = accumulators(rng, (200,), 20)
    for low, high in ((-5, None), (None, 40), (-5, 40), (7, 7)):
        r = Requantization.of(0.1, 0.1, 0.5, qtype=jnp.int8, zero_point=-5, low=low, high=high)
        bounds = (-128 if low is None else low, 127 if high is None else high)
        expected = tflite.requantize(x, factor_of(0.1, 0.1, 0.5), -5, *bounds)
        np.testing.assert_array_equal(as_int64(requantized(x, r).values), expected)
        assert (r.low, r.high) == bounds
        assert {bounds[0], bounds[1]} <= set(expected)


def test_a_scale_of_zero_and_a_negative_one():
    x = np.array([-1000, -7, 0, 7, 1000], np.int32)
    r = Requantization.of(np.array([0.0, -0.05], np.float32)[:, None], 1.0, 1.0, qtype=jnp.int8)
    grid = np.broadcast_to(x, (2, 5))
    expected = tflite.requantize(grid, factor_of([[0.0], [-0.05]], 1, 1), 0, -128, 127)
    np.testing.assert_array_equal(as_int64(requantized(grid, r).values), expected)
    np.testing.assert_array_equal(expected, [[0] * 5, [50, 0, 0, 0, -50]])


def test_no_float_and_no_int64_touches_the_codes():
    r = Requantization.of(0.5, np.ones(3, np.float32), 2.0, qtype=jnp.int8, zero_point=1, bias=4)
    jaxpr = jax.make_jaxpr(lambda x: requantize(x, r).values)(jnp.ones((2, 3), jnp.int32))
    dtypes = {v.aval.dtype.name for e in jaxpr.jaxpr.eqns for v in (*e.invars, *e.outvars)}
    feeds = {e.primitive.name for e in jaxpr.jaxpr.eqns if e.outvars[0].aval.dtype.kind == "f"}
    assert dtypes - {"float32"} <= {"int32", "uint32", "int8", "bool"}
    assert feeds <= {"reshape", "broadcast_in_dim"}  # of the scale, which the codes do not read


def stack_of(count):
    rng = np.random.default_rng(3)
    separate = [
        Requantization.of(
            scales(rng, 1), scales(rng, 4), 0.5, qtype=jnp.int8, zero_point=i, bias=10 * i
        )
        for i in range(count)
    ]
    return separate, jax.tree.map(lambda *leaves: jnp.stack(leaves), *separate)


def test_vmap_and_scan_give_what_each_gives_alone():
    """Over accumulators, over requantizations, and over both in step."""
    separate, stacked = stack_of(3)
    x = accumulators(np.random.default_rng(4), (3, 2, 4), 12)
    expected = np.array([[requantized(x[i], r).values for i in range(3)] for r in separate])
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(requantize, in_axes=(0, None)))(x, separate[1]).values, expected[1]
    )
    over = jax.jit(jax.vmap(requantize, in_axes=(None, 0)))(x[1], stacked)
    np.testing.assert_array_equal(over.values, expected[:, 1])
    in_step = jax.jit(jax.vmap(requantize))(x, stacked)
    _, scanned = jax.lax.scan(lambda _, xs: (None, requantize(*xs)), None, (on_device(x), stacked))
    for result in (in_step, scanned):
        np.testing.assert_array_equal(result.values, expected[np.arange(3), np.arange(3)])
        assert isinstance(result, jqx.QTensor) and result.shape == (3, 2, 4)
        assert result.scale.shape == result.zero_point.shape == (3, 1, 1)
        np.testing.assert_array_equal(
            result[2].dequantize(), requantized(x[2], separate[2]).dequantize()
        )


def test_jit_and_eager_give_the_same_and_trees_keep_every_field():
    separate, _ = stack_of(1)
    r = dataclasses.replace(separate[0], low=-7, high=9, rounding=FixedPointRounding.SINGLE)
    x = accumulators(np.random.default_rng(5), (6, 4), 12)
    eager = requantize(x, r)
    closed = jax.jit(lambda x: requantize(x, r))(x)
    for result in (requantized(x, r), closed):
        assert_same(result, eager)
    leaves, tree = jax.tree.flatten(r)
    again = jax.tree.unflatten(tree, leaves)
    for field in dataclasses.fields(r):
        assert getattr(again, field.name) is getattr(r, field.name)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(r)]
    assert paths == [".multiplier", ".shift", ".scale", ".zero_point", ".bias"]


def test_of_works_inside_jit_where_its_scales_have_values():
    """Zero point and bias may be traced: they enter no multiplier."""
    scale = jnp.float32(0.3)

    @jax.jit
    def f(x, zero, bias):
        r = Requantization.of(scale, 0.5, 2.0, qtype=jnp.int8, zero_point=zero, bias=bias)
        return requantize(x, r)

    x = accumulators(np.random.default_rng(6), (50,), 12)
    expected = tflite.requantize(x, factor_of(0.3, 0.5, 2.0), 3, -128, 127, 8)
    result = f(x, jnp.int8(3), jnp.int32(8))
    assert_requantized(result, expected, 2.0, 3, jnp.dtype("int8"))


def test_gradients_flow_through_the_scale_alone():
    r = Requantization.of(0.5, 0.5, 2.0, qtype=jnp.int8, zero_point=1)
    x = jnp.array([16, -8, 100], jnp.int32)

    def total(scale):
        return jnp.sum(requantize(x, dataclasses.replace(r, scale=scale)).dequantize())

    codes = as_int64(requantized(x, r).values)
    assert float(jax.jit(jax.grad(total))(jnp.float32(2.0))) == np.sum(codes - 1)


def test_a_float_result_is_quantized_by_its_spec():
    y = np.random.default_rng(7).normal(size=(4, 6)).astype(np.float32)
    spec = jqx.QSpec(jnp.uint8, jqx.per_axis(1), symmetric=False)
    affine = Affine(jnp.full((1, 6), 0.03, jnp.float32), jnp.full((1, 6), 90, jnp.uint8))
    for output, expected in (
        (spec, jqx.QTensor.quantize(y, spec)),
        ((spec, affine), jqx.QTensor.quantize(y, spec, affine)),
    ):
        result = as_asked("dot_general", y, output)
        assert_same(result, expected)
    for wrong in (affine, (spec, affine, spec), jnp.int8):
        with pytest.raises(TypeError, match=r"jqx.dot_general: `output` is not a QSpec"):
            as_asked("dot_general", y, wrong)


ONE = np.float32(1)
SCALES = {
    "zero": ((ONE, ONE, np.float32(0)), ValueError, "`output_scale` is zero"),
    "NaN": ((np.float32(np.nan), ONE, ONE), ValueError, "not finite"),
    "infinite": ((ONE, np.float32(np.inf), ONE), ValueError, "not finite"),
    "one infinite": (
        (ONE, ONE, np.float32([1, -np.inf])),
        ValueError,
        "output_scale.shape == (2,)",
    ),
    "shapes": ((np.ones(3, "f4"), np.ones(2, "f4"), ONE), ValueError, "do not broadcast"),
    "large": ((ONE, np.float32(2**30), ONE), ValueError, "too large", "not below 2**30"),
    "negative": ((ONE, np.float32(-(2**30)), ONE), ValueError, "too large", "1.07e+09"),
    "integer": ((np.int32(1), ONE, ONE), TypeError, "`lhs_scale` element type", "int32"),
    "string": ((ONE, "1", ONE), TypeError, "`rhs_scale` is not an array"),
    "nothing": ((ONE, ONE, None), TypeError, "`output_scale` is not an array"),
}


@pytest.mark.parametrize("case", SCALES)
def test_scales_without_a_multiplier_are_refused(case):
    scales, error, *facts = SCALES[case]
    of = functools.partial(Requantization.of, *scales, qtype=jnp.int8)
    assert_refused(of, (), error, "tflite.Requantization.of", *facts)


@pytest.mark.parametrize("argument", ["lhs_scale", "rhs_scale", "output_scale"])
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad], ids=lambda t: t.__name__)
def test_a_traced_scale_is_an_error_that_says_where_to_compute(argument, transform):
    def f(traced):
        scales = {"lhs_scale": 1.0, "rhs_scale": 1.0, "output_scale": 1.0, argument: traced}
        return Requantization.of(**scales, qtype=jnp.int8).scale

    x = jnp.ones((2,)) if transform is jax.vmap else jnp.float32(1)
    with pytest.raises(TypeError) as refusal:
        transform(f)(x)
    assert str(refusal.value) == (
        f"jqx.tflite.Requantization.of: `{argument}` is traced and has no value, but multipliers "
        "are computed on the host.\n"
        "  fix:      create the Requantization outside and pass it in (it is a pytree), or "
        "quantize the float result with a QSpec."
    )


def fields(**changes):
    """Fields of a Requantization, all in order but those that are changed."""
    multiplier, shift = jnp.full((3,), 2**30, jnp.int32), jnp.zeros((3,), jnp.int32)
    valid = {"multiplier": multiplier, "shift": shift, "scale": jnp.float32(1), "qtype": jnp.int8}
    return {**valid, **changes}


FLOATS, INTEGERS = jnp.ones((3,), jnp.float32), jnp.ones((3,), jnp.int32)
FIELDS = [
    ({"multiplier": FLOATS}, TypeError, "multiplier"),
    ({"shift": jnp.ones((3,), jnp.int8)}, TypeError, "shift"),
    ({"scale": INTEGERS}, TypeError, "scale"),
    ({"zero_point": INTEGERS}, TypeError, "zero_point"),
    ({"bias": FLOATS}, TypeError, "bias"),
    ({"qtype": jnp.float8_e4m3fn}, TypeError, "float8_e4m3fn"),
    ({"dtype": jnp.int32}, TypeError, "Real element type"),
    ({"rounding": "single"}, TypeError, "rounding"),
    ({"low": 1.5}, TypeError, "low"),
    ({"high": jnp.zeros(())}, TypeError, "high"),
    ({"qtype": jnp.int32}, TypeError, "int32", "16 bits or less"),
    ({"multiplier": None}, TypeError, "`multiplier` is not an array"),
    ({"bias": 1.5}, TypeError, "`bias` must be an integer"),
    ({"zero_point": True}, TypeError, "`zero_point` must be an integer"),
    ({"zero_point": 128}, ValueError, "`zero_point` == 128", "[-128, 127]"),
    ({"qtype": jnp.uint8, "zero_point": -1}, ValueError, "`zero_point` == -1", "[0, 255]"),
    ({"bias": 2**31}, ValueError, f"`bias` == {2**31}", f"[{LOWEST}, {LARGEST}]"),
    ({"low": -129}, ValueError, "`low` == -129 and `high` == 127", "from -128 to 127"),
    ({"high": 128}, ValueError, "`low` == -128 and `high` == 128"),
    ({"low": 5, "high": 4}, ValueError, "`low` == 5 and `high` == 4"),
]


def test_fields_of_another_kind_or_out_of_range_are_refused():
    Requantization(**fields())
    for change, error, *facts in FIELDS:
        build = functools.partial(Requantization, **fields(**change))
        assert_refused(build, (), error, "tflite.Requantization", *facts)


def test_a_shift_out_of_range_is_refused_where_it_has_values():
    for shift in (-32, 31):
        values = on_device(np.array([0, 3, shift], np.int32))
        build = functools.partial(Requantization, **fields(shift=values))
        assert_refused(build, (), ValueError, "tflite.Requantization", str(shift), "[-31, 30]")
    for shift in (-31, 30):
        Requantization(**fields(shift=jnp.full((3,), shift, jnp.int32)))
    jax.jit(lambda s: Requantization(**fields(shift=s)).shift)(jnp.full((3,), 40, jnp.int32))


@pytest.mark.parametrize("field", ["multiplier", "shift", "scale", "zero_point", "bias"])
def test_an_array_that_does_not_fit_the_accumulators_is_named(field):
    arrays = {
        "multiplier": jnp.int32(2**30),
        "shift": jnp.int32(0),
        "scale": jnp.ones((1, 1)),
        "zero_point": jnp.int8(0),
        "bias": jnp.int32(0),
    }
    for shape in ((2,), (2, 1), (1, 4, 3)):
        wide = {**arrays, field: jnp.broadcast_to(jnp.ravel(arrays[field])[0], shape)}
        f = functools.partial(requantize, requantization=Requantization(**wide, qtype=jnp.int8))
        x = jnp.zeros((4, 3), jnp.int32)
        facts = (f"`{field}` of shape {shape} does not fit", "(4, 3)")
        assert_refused(f, (x,), ValueError, "tflite.requantize", *facts)


def test_requantize_refuses_other_accumulators_and_other_values():
    r = Requantization.of(0.5, 0.5, 2.0, qtype=jnp.int8)
    f = functools.partial(requantize, requantization=r)
    for x in (jnp.ones(3), jnp.ones(3, jnp.int8), jnp.ones(3, jnp.uint32)):
        assert_refused(f, (x,), TypeError, "tflite.requantize", f"({x.dtype.name})", "int32")
    g = functools.partial(requantize, requantization=jqx.QSpec(jnp.int8))
    assert_refused(g, (jnp.ones(3, jnp.int32),), TypeError, "tflite.requantize", "Requantization")
    zeros = Requantization(**fields(zero_point=jnp.zeros((3,), jnp.int8)))
    h = functools.partial(requantize, requantization=zeros)
    assert_refused(h, (jnp.ones(3, jnp.int32),), ValueError, "QTensor", "does not fit `scale`")
