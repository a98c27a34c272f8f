"""`quantize`, `dequantize` and their composition, against the specification in NumPy."""

import dataclasses
import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jqx
from jqx import RoundMode
from jqx._src.numerics.qtype import INTEGERS

from ..arrays import on_device
from ..oracles.formats import jitted
from ..oracles.numerics import (
    as_float64,
    as_int64,
    assert_codes,
    assert_floats,
    code_range,
    codes_of,
    nearest,
    quantized,
)
from ..oracles.refusals import assert_refusals, refusal
from ..strategies import NEAREST, SHAPE, Affine, affines, law, permutations

FLOATS = ("float16", "bfloat16", "float32", "float64")
SMALL = [qtype for qtype in INTEGERS if not qtype.endswith("32")]
BYTES = [qtype for qtype in INTEGERS if qtype.endswith(("int2", "int4", "int8"))]


def quantize(case: Affine, **options):
    f = jitted(jqx.quantize, qtype=case.qtype, axes=case.axes, **options)
    return f(case.x, case.scale, case.zero_point)


AXES = [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
COMBINATIONS = [
    (INTEGERS[(3 * i + j) % len(INTEGERS)], AXES[(i + 3 * j) % len(AXES)], mode)
    for i, mode in enumerate(RoundMode)
    for j in range(3)
]
"""Formats, axes and round modes: each of them with two or three of the others. Each combination
is a program, which the laws share.
"""


@st.composite
def combined(draw, qtypes=INTEGERS, modes=tuple(RoundMode)):
    """A case of a combination of these formats and modes, and its mode."""
    among = [some for some in COMBINATIONS if some[0] in qtypes and some[2] in modes]
    qtype, axes, mode = draw(st.sampled_from(among))
    return draw(affines(st.just(qtype), st.just(axes))), mode


def specified(case: Affine, mode=RoundMode.NEAREST_TOWARD_EVEN):
    return quantized(case.x, case.scale_along_x, case.zero_point_along_x, case.qtype, mode.value)


@law
@given(combined())
def test_quantize_gives_the_specified_code_in_every_format_and_mode(case_and_mode):
    case, mode = case_and_mode
    assert_codes(quantize(case, round_mode=mode), specified(case, mode), case.qtype)


@pytest.mark.parametrize("qtype", INTEGERS)
def test_quantize_saturates_to_the_whole_range_of_every_format(qtype):
    low, high = code_range(qtype)
    magnitudes = np.float32([0.5, 1, 2, 100, 2.0**15, 2.0**31, 2.0**32, 2.0**60, 3e38])
    odd = np.float32([2**24, 2**23 + 1])  # sums that float32 does not hold
    x = np.concatenate([magnitudes, -magnitudes, odd, -odd])
    zero_points = codes_of([low, low + 1, (low + high) // 3, high - 1, high], qtype)
    x, zero_points = (np.array(v) for v in np.broadcast_arrays(x[:, None], zero_points))
    codes = jitted(jqx.quantize, qtype=qtype, axes=1)(x, np.ones(5, np.float32), zero_points[0])
    assert_codes(codes, quantized(x, np.float32(1), zero_points, qtype), qtype)
    assert as_int64(codes).min() == low and as_int64(codes).max() == high


@functools.cache
def transformed(qtype, axes, mode):
    """Returns quantize under jit, of an array and under two maps of a pair, as one program."""

    def f(x, scale, zero_point):
        return jqx.quantize(x, scale, zero_point, qtype=qtype, axes=axes, round_mode=mode)

    def each(pair, scale, zero_point):
        twice = [jnp.stack([v, v]) for v in (scale, zero_point)]
        over_x = jax.vmap(f, in_axes=(0, None, None))(pair, scale, zero_point)
        return f(pair[0], scale, zero_point), jax.vmap(f)(pair, *twice), over_x

    return jax.jit(each)


FEW = [
    ("int4", (), RoundMode.UP),
    ("uint8", (1,), RoundMode.NEAREST_TOWARD_EVEN),
    ("uint8", (0, 2), RoundMode.UP),
    ("int32", (0, 2), RoundMode.NEAREST_TOWARD_EVEN),
]


@law
@given(st.sampled_from(FEW), st.data())
def test_jitted_and_vmapped_quantize_give_the_codes_of_the_eager_one(combination, data):
    qtype, axes, mode = combination
    case = data.draw(affines(st.just(qtype), st.just(axes)))
    flipped = dataclasses.replace(case, x=-case.x)
    eager = functools.partial(jqx.quantize, qtype=case.qtype, axes=case.axes, round_mode=mode)
    both = [eager(one.x, one.scale, one.zero_point) for one in (case, flipped)]
    both = np.stack(list(map(as_int64, both)))
    transform = transformed(case.qtype, case.axes, mode)
    jitted, mapped, over_x = transform(np.stack([case.x, -case.x]), case.scale, case.zero_point)
    assert_codes(jitted, both[0], case.qtype)
    assert_codes(mapped, both, case.qtype)
    assert_codes(over_x, both, case.qtype)


@law
@given(st.sampled_from(COMBINATIONS[::3]), st.data())
def test_codes_never_decrease_as_x_increases(combination, data):
    qtype, _, mode = combination
    case = data.draw(affines(st.just(qtype), st.just(())))
    case = dataclasses.replace(case, x=np.sort(case.x, axis=None).reshape(SHAPE))
    codes = as_int64(quantize(case, round_mode=mode)).reshape(-1)
    assert np.all(np.diff(codes) >= 0)
    negated = dataclasses.replace(case, scale=-case.scale)
    codes = as_int64(quantize(negated, round_mode=mode)).reshape(-1)
    assert np.all(np.diff(codes) <= 0)


@law
@given(combined(SMALL, NEAREST))
def test_a_value_that_is_not_clipped_comes_back_within_half_a_step(case_and_mode):
    """The quotient is rounded once, by at most 2**-24 of itself; nothing else may be lost."""
    case, mode = case_and_mode
    codes = quantize(case, round_mode=mode)
    low, high = code_range(case.qtype)
    d = as_int64(codes) - as_int64(case.zero_point_along_x)
    steps = np.broadcast_to(case.scale_along_x, SHAPE)
    inside = (low < as_int64(codes)) & (as_int64(codes) < high)
    for x, s, n in zip(case.x[inside], steps[inside], d[inside], strict=True):
        x, s = Fraction(float(x)), Fraction(float(s))
        assert abs(int(n) * s - x) <= s / 2 + abs(x) / 2**24
    back = jitted(jqx.dequantize, axes=case.axes)(codes, case.scale, case.zero_point)
    assert_floats(back, nearest(d * as_float64(steps), np.float32), np.float32)


@law
@given(combined(SMALL, NEAREST))
def test_fake_quantizing_twice_changes_nothing(case_and_mode):
    case, mode = case_and_mode
    options = {"qtype": case.qtype, "axes": case.axes, "round_mode": mode}
    f = jitted(jqx.quantize_dequantize, **options)
    once = f(case.x, case.scale, case.zero_point)
    np.testing.assert_array_equal(f(once, case.scale, case.zero_point), once)


@law
@given(affines(st.just("uint4"), st.sampled_from([(1,), (0, 2), (0, 1, 2)])), permutations)
def test_permuting_x_and_the_axes_permutes_the_codes(case, permutation):
    axes = tuple(sorted(permutation.index(axis) for axis in case.axes))
    kept = tuple(p for p in permutation if p in case.axes)  # old axes in their new order
    order = [case.axes.index(p) for p in kept]
    codes = jitted(jqx.quantize, qtype=case.qtype, axes=axes)(
        case.x.transpose(permutation), case.scale.transpose(order), case.zero_point.transpose(order)
    )
    assert_codes(codes, specified(case).transpose(permutation), case.qtype)


@law
@given(affines(st.just("int8"), st.sampled_from([(), (1,), (0, 2), (0, 1, 2)])), st.data())
def test_axes_are_a_set_whatever_their_order_and_sign(case, data):
    spelled = [axis - data.draw(st.sampled_from([0, len(SHAPE)])) for axis in case.axes]
    spelled += [a for a in case.axes if data.draw(st.booleans())]  # named twice
    spelled = data.draw(st.permutations(spelled))
    expected = specified(case)
    for axes in (tuple(spelled), list(spelled), tuple(map(np.int64, spelled))):
        codes = jqx.quantize(case.x, case.scale, case.zero_point, qtype="int8", axes=axes)
        assert_codes(codes, expected, "int8")
        back = jqx.dequantize(codes, case.scale, case.zero_point, axes=axes)
        difference = expected - as_int64(case.zero_point_along_x)
        assert_floats(
            back, nearest(difference * as_float64(case.scale_along_x), np.float32), np.float32
        )
        again = jqx.quantize_dequantize(
            case.x, case.scale, case.zero_point, qtype="int8", axes=axes
        )
        np.testing.assert_array_equal(again, back)


def test_one_axis_may_be_given_as_an_integer():
    x = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
    scale = np.float32([0.1, 0.2, 0.3, 0.4])
    expected = quantized(x, scale, 0, "int8")
    for axes in (1, -1, np.int32(1), (1,), [-1], {1}, range(1, 2)):
        assert_codes(jqx.quantize(x, scale, qtype=jnp.int8, axes=axes), expected, "int8")


SURVIVING = [("float32", mode) for mode in NEAREST]
SURVIVING += [(dtype, RoundMode.NEAREST_TOWARD_EVEN) for dtype in ("float16", "bfloat16")]


@pytest.mark.many
@pytest.mark.parametrize("dtype, mode", SURVIVING)
@pytest.mark.parametrize("qtype", BYTES)
def test_every_code_and_zero_point_survives_dequantize_and_quantize(qtype, dtype, mode):
    low, high = code_range(qtype)
    codes_in_order = codes_of(np.arange(low, high + 1), qtype)
    q, zero_points = np.broadcast_arrays(
        as_int64(codes_in_order)[:, None], as_int64(codes_in_order)
    )
    exponents = 6 if dtype == "float16" else 90
    rng = np.random.default_rng(0)
    scale = rng.uniform(1, 2, codes_in_order.size) * 2.0 ** rng.integers(
        -exponents, exponents, codes_in_order.size
    )
    scale = scale.astype(jnp.dtype(dtype))
    back = jitted(jqx.dequantize, axes=1)(codes_of(q, qtype), scale, codes_in_order)
    again = jitted(jqx.quantize, qtype=qtype, axes=1, round_mode=mode)(back, scale, codes_in_order)
    # A value is off by at most 1 / 257 of itself in bfloat16: half a step from 128 steps on.
    survives = np.abs(q - zero_points) <= (128 if dtype == "bfloat16" else 255)
    assert again.dtype == jnp.dtype(qtype)
    np.testing.assert_array_equal(as_int64(again)[survives], q[survives])


@pytest.mark.parametrize("exponent", [-100, -17, -1, 0, 3, 60, 100])
@pytest.mark.parametrize("qtype", ["int16", "uint16"])
def test_every_16_bit_code_survives_dequantize_and_quantize(qtype, exponent):
    low, high = code_range(qtype)
    q = np.arange(low, high + 1)
    scale = np.float32(1.2345 * 2.0**exponent)
    zero_point = codes_of((low + high) // 3, qtype)
    back = jitted(jqx.dequantize)(codes_of(q, qtype), scale, zero_point)
    assert_codes(jitted(jqx.quantize, qtype=qtype)(back, scale, zero_point), q, qtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_dtype_is_quantized_with_one_division(dtype):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(20000, 3)) * 40).astype(jnp.dtype(dtype))
    scale = np.array([0.1, 0.37, 3]).astype(jnp.dtype(dtype))
    zero_point = np.int8([0, -100, 100])
    for mode in (RoundMode.NEAREST_TOWARD_EVEN, RoundMode.DOWN):
        expected = quantized(x, scale, zero_point, "int8", mode.value)

        def f(x, scale, zero_point, mode=mode):
            return jqx.quantize(x, scale, zero_point, qtype="int8", axes=1, round_mode=mode)

        with jax.enable_x64(dtype == "float64"):
            operands = [on_device(operand) for operand in (x, scale, zero_point)]
            if mode == RoundMode.DOWN:
                assert_codes(f(*operands), expected, "int8")
            assert_codes(jax.jit(f)(*operands), expected, "int8")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_shapes_without_extent_keep_their_shape(shape):
    x = np.full(shape, 0.6, np.float32)
    codes = jqx.quantize(x, 0.5, 3, qtype=jnp.int8)
    assert codes.shape == shape and codes.dtype == jnp.int8
    back = jqx.dequantize(codes, 0.5, 3)
    assert back.shape == shape and back.dtype == jnp.float32
    assert jqx.quantize_dequantize(x, 0.5, 3, qtype=jnp.int8).shape == shape
    assert np.all(as_int64(codes) == 4)


def test_zero_size_arrays_take_zero_size_scales():
    x, scale = np.ones((3, 0), np.float32), np.ones(0, np.float32)
    assert jqx.quantize(x, scale, qtype=jnp.int8, axes=1).shape == (3, 0)
    assert jqx.dequantize(np.ones((3, 0), np.int8), scale, axes=1).shape == (3, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_python_numbers_take_the_dtypes_of_the_arrays(dtype):
    x = np.arange(-4, 5).astype(jnp.dtype(dtype))
    by_number = jqx.quantize(x, 0.3, -1, qtype=jnp.int4)
    by_array = jqx.quantize(x, np.asarray(0.3, x.dtype), codes_of(-1, "int4"), qtype=jnp.int4)
    np.testing.assert_array_equal(as_int64(by_number), as_int64(by_array))
    assert jqx.quantize_dequantize(x, 0.3, -1, qtype=jnp.int4).dtype == jnp.dtype(dtype)
    assert jqx.dequantize(by_number, 0.3, dtype=dtype).dtype == jnp.dtype(dtype)
    assert jqx.dequantize(by_number, 0.3).dtype == jnp.float32


INF, NAN = np.inf, np.nan
SPECIAL_BY_CODE = {  # pairs of x and scale, by the code that they give
    "max": [
        *((INF, 1.0), (INF, 0.0), (-INF, -2.0), (1e30, 1e-30)),
        *((1.0, 0.0), (1e-30, 0.0), (-1.0, -0.0)),
    ],
    "min": [(-INF, 1.0), (INF, -0.5), (1e30, -1e-30), (-1.0, 0.0), (1.0, -0.0)],
    "zero_point": [
        *((5.0, INF), (5.0, -INF), (-3e38, INF), (0.0, INF)),
        *((0.0, 1.0), (-0.0, -1.0), (0.0, 3e38)),
    ],
    "zero": [
        *((0.0, 0.0), (-0.0, 0.0), (0.0, -0.0), (INF, INF), (-INF, INF)),
        *((NAN, 1.0), (1.0, NAN), (NAN, 0.0), (NAN, INF)),
    ],
}
SPECIAL = [(x, scale, code) for code, pairs in SPECIAL_BY_CODE.items() for x, scale in pairs]


@pytest.mark.many
@pytest.mark.parametrize("qtype", ["int8", "uint8", "int32", "int4"])
@pytest.mark.parametrize("mode", RoundMode)
def test_infinities_zero_scales_and_nan_follow_the_table(mode, qtype):
    low, high = code_range(qtype)
    zero_point = codes_of(1, qtype)
    meaning = {"max": high, "min": low, "zero_point": 1}
    x, scale = np.float32([row[:2] for row in SPECIAL]).T
    expected = np.array([meaning.get(row[2], 0) for row in SPECIAL])
    f = functools.partial(jqx.quantize, qtype=qtype, round_mode=mode)

    @jax.jit
    def codes(x, scale, zero_points):
        per_element = f(x, scale, zero_points, axes=0)
        return per_element, jax.vmap(f, in_axes=(0, 0, None))(x, scale, zero_points[0])

    for actual in codes(x, scale, np.full(len(x), zero_point)):
        assert_codes(actual, expected, qtype)


def test_a_special_scalar_scale_follows_the_table_when_it_is_a_constant():
    meaning = {"max": 127, "min": -128, "zero_point": 1}

    @jax.jit
    def codes(xs):
        scales = [np.float32(scale) for _, scale, _ in SPECIAL]
        return [
            jqx.quantize(x, scale, np.int8(1), qtype=jnp.int8)
            for x, scale in zip(xs, scales, strict=True)
        ]

    actual = codes([np.float32([x]) for x, *_ in SPECIAL])
    for row, code in zip(SPECIAL, actual, strict=True):
        assert (code.dtype, code.tolist()) == (jnp.int8, [meaning.get(row[2], 0)]), row


@pytest.mark.parametrize("mode", RoundMode)
def test_negative_scales_follow_the_formula(mode):
    x = (np.arange(-400, 401) / 8).astype(np.float32)
    f = jitted(jqx.quantize, qtype=jnp.int8, round_mode=mode)
    codes = f(x, np.float32(-0.5), np.int8(3))
    assert_codes(codes, quantized(x, np.float32(-0.5), 3, "int8", mode.value), "int8")
    back = jqx.dequantize(codes, np.float32(-0.5), np.int8(3))
    assert_floats(back, (as_float64(codes) - 3) * -0.5, np.float32)


@pytest.mark.many
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("qtype", BYTES)
def test_dequantize_multiplies_the_exact_difference_once(qtype, dtype):
    low, high = code_range(qtype)
    codes_in_order = codes_of(np.arange(low, high + 1), qtype)
    q, z = np.broadcast_arrays(as_int64(codes_in_order)[:, None], as_int64(codes_in_order))
    rng = np.random.default_rng(2)
    scale = (
        rng.uniform(1, 2, codes_in_order.size) * 2.0 ** rng.integers(-4, 8, codes_in_order.size)
    ).astype(jnp.dtype(dtype))
    expected = nearest((q - z) * as_float64(scale), dtype)
    operands = (codes_of(q, qtype), scale, codes_in_order)
    f = functools.partial(jqx.dequantize, axes=1)
    if dtype == "float32":
        assert_floats(f(*map(on_device, operands)), expected, dtype)
    assert_floats(jitted(jqx.dequantize, axes=1)(*operands), expected, dtype)
    assert_floats(jax.jit(lambda: f(*map(jnp.asarray, operands)))(), expected, dtype)


def test_dequantize_in_float64_is_exact():
    q = np.int32([2**31 - 1, -(2**31), 0, 7])
    z = np.int32([-(2**31), 2**31 - 1, 5, 7])
    with jax.enable_x64(True):
        y = jqx.dequantize(q, np.full(4, 0.1), z, axes=0)
    assert_floats(y, (q.astype(np.int64) - z) * 0.1, np.float64)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("qtype", ["int16", "uint16", "int32", "uint32"])
def test_dequantize_rounds_a_wide_difference_once_and_then_the_product(qtype, dtype):
    low, high = code_range(qtype)
    rng = np.random.default_rng(3)
    q, z = rng.integers(low, high, (2, 5000), endpoint=True)
    q[:2], z[:2] = (low, high), (high, low)  # 33 bits, where int32 would wrap around
    q[2:2000] = np.clip(z[2:2000] + rng.integers(-3000, 3000, 1998), low, high)
    scale = rng.uniform(0.5, 1, 5000).astype(jnp.dtype(dtype))
    with np.errstate(over="ignore"):
        expected = nearest(nearest((q - z).astype(np.float64), dtype) * as_float64(scale), dtype)
    f = jax.jit(functools.partial(jqx.dequantize, axes=0))
    assert_floats(f(codes_of(q, qtype), scale, codes_of(z, qtype)), expected, dtype)


def test_dequantize_follows_ieee_for_infinite_and_nan_scales():
    q = np.int8([-1, 0, 1])[:, None] * np.ones(3, np.int8)
    y = jqx.dequantize(q, np.float32([INF, -INF, NAN]), axes=1)
    np.testing.assert_array_equal(y, [[-INF, INF, NAN], [NAN, NAN, NAN], [INF, -INF, NAN]])


def test_dequantize_overflows_to_infinity_and_does_not_saturate():
    y = jqx.dequantize(np.int8([127, -128]), np.float32(1e38))
    np.testing.assert_array_equal(y, [INF, -INF])


def test_vmapped_dequantize_is_dequantize():
    rng = np.random.default_rng(4)
    q = rng.integers(-128, 128, (3, 4, 5)).astype(np.int8)
    scale = rng.uniform(0.1, 1, (3, 5)).astype(np.float32)
    z = rng.integers(-128, 128, (3, 5)).astype(np.int8)
    f = functools.partial(jqx.dequantize, axes=1)
    stacked = np.stack([f(*operands) for operands in zip(q, scale, z, strict=True)])
    np.testing.assert_array_equal(jax.vmap(f)(q, scale, z), stacked)
    shared = np.stack([f(one, scale[0], z[0]) for one in q])
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(f, in_axes=(0, None, None)))(q, scale[0], z[0]), shared
    )


def test_the_gradient_of_dequantize_in_the_scale_is_the_difference():
    q, z = np.int8([[1, -2], [3, 100]]), np.int8([4, -28])
    gradient = jax.jit(jax.grad(lambda s: jqx.dequantize(q, s, z, axes=1).sum()))(
        np.float32([0.3, 0.7])
    )
    np.testing.assert_array_equal(gradient, [1 + 3 - 2 * 4, -2 + 100 + 2 * 28])


@pytest.mark.many
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", [RoundMode.NEAREST_TOWARD_EVEN, RoundMode.TOWARD_ZERO])
def test_quantize_dequantize_is_the_composition(mode, dtype):
    rng = np.random.default_rng(5)
    x = (rng.normal(size=(500, 3)) * 30).astype(jnp.dtype(dtype))
    x[:3, 0] = [NAN, INF, -INF]
    scale = np.array([0.1, 0.37, -3]).astype(jnp.dtype(dtype))
    z = np.int8([0, -100, 100])
    with jax.enable_x64(dtype == "float64"):
        q = jqx.quantize(x, scale, z, qtype="int8", axes=-1, round_mode=mode)
        expected = jqx.dequantize(q, scale, z, axes=-1)
        f = functools.partial(jqx.quantize_dequantize, qtype="int8", axes=-1, round_mode=mode)
        assert_floats(f(x, scale, z), expected, dtype)
        assert_floats(jax.jit(f)(x, scale, z), expected, dtype)
        assert_floats(jax.vmap(f, in_axes=(0, None, None))(x, scale, z), expected, dtype)


F32, F16, I8, U8 = (
    np.ones((2, 3), np.float32),
    np.ones((2, 3), np.float16),
    np.ones((2, 3), np.int8),
    np.ones((2, 3), np.uint8),
)


def f32(*shape):
    return np.ones(shape, np.float32)


def i8(*shape):
    return np.ones(shape, np.int8)


WRONG_TYPES_TO_QUANTIZE = [
    refusal(
        ("Output element type (float32) must be a quantized type", "int4", "uint32"),
        qtype=jnp.float32,
    ),
    refusal("Output element type (int64) must be a quantized type", qtype="int64"),
    refusal("Output element type (bool) must be a quantized type", qtype=bool),
    refusal(("`qtype` is not a dtype", "'int9'"), qtype="int9"),
    refusal(
        "`scale` element type (float16) must match input element type (float32)",
        F32,
        np.ones((), np.float16),
    ),
    refusal("`scale` element type (float32) must match input element type (float16)", F16, f32()),
    refusal(
        ("element type (int8) must be a floating point number", "float16, bfloat16, float32"),
        I8,
        i8(),
    ),
    refusal(
        "`zero_point` element type (uint8) must match output element type (int8)",
        F32,
        f32(),
        np.ones((), np.uint8),
    ),
    refusal(("`axes` must hold integers", "(1.0,)"), F32, f32(3), axes=(1.0,)),
    refusal(("`axes` must hold integers", "True"), F32, f32(3), axes=True),
    refusal(
        ("`round_mode` is not a RoundMode", "'ROUND_UP'", "TOWARD_INFINITY"), round_mode="ROUND_UP"
    ),
]
WRONG_VALUES_TO_QUANTIZE = [
    refusal(
        ("Quantization axis (4) must be less than input shape rank (4)", "[-4, 3]"),
        np.ones((2, 3, 1, 1), np.float32),
        f32(1),
        axes=4,
    ),
    refusal(
        ("Quantization axis (-3) must be less than input shape rank (2)", "[-2, 1]"),
        F32,
        f32(1),
        axes=(0, -3),
    ),
    refusal(
        ("Quantization axis (0) must be less than input shape rank (0)", "no axes"),
        f32(),
        f32(1),
        axes=0,
    ),
    refusal("Scale shape (3,) and zero point shape (2,) must match", F32, f32(3), i8(2), axes=1),
    refusal("Scale shape (3,) and zero point shape () must match", F32, f32(3), i8(), axes=1),
    refusal("shape (3,) must match input shape (2, 3) at the quantization axes ()", F32, f32(3)),
    refusal(
        "must match input shape (2, 3) at the quantization axes (0, 1)",
        F32,
        f32(3),
        i8(3),
        axes=(0, 1),
    ),
    refusal(
        (
            "Scale / zero point shape (4,) must match input shape (2, 3) at the quantization axes "
            "(1,)",
            "scale.shape == (3,)",
        ),
        F32,
        f32(4),
        axes=1,
    ),
    refusal(
        "shape (1,) must match input shape (2, 3) at the quantization axes (1,)",
        F32,
        f32(1),
        i8(1),
        axes=-1,
    ),
    refusal(
        "shape (3, 2) must match input shape (2, 3) at the quantization axes (0, 1)",
        F32,
        f32(3, 2),
        axes=(1, 0),
    ),
    refusal(
        ("`zero_point` is not a code of int8", "zero_point == 128", "[-128, 127]"), zero_point=128
    ),
    refusal(("`zero_point` is not a code of uint4", "[0, 15]"), qtype="uint4", zero_point=-1),
    refusal(("`zero_point` is not a code of int8", "3.0"), zero_point=3.0),
]


@pytest.mark.parametrize("function", ["quantize", "quantize_dequantize"])
def test_quantize_refuses_with_the_facts(function):
    assert_refusals(function, TypeError, WRONG_TYPES_TO_QUANTIZE, F32, f32(), qtype=jnp.int8)
    assert_refusals(function, ValueError, WRONG_VALUES_TO_QUANTIZE, F32, f32(), qtype=jnp.int8)


WRONG_TYPES_TO_DEQUANTIZE = [
    refusal("element type (int32) must be a floating point number", dtype=jnp.int32),
    refusal("`scale` element type (int8) must be a floating point number", I8, i8()),
    refusal("`dtype` is not a dtype", dtype="f7"),
    refusal("Input element type (float32) must be a quantized type", F32, f32()),
    refusal("Input element type (bool) must be a quantized type", np.ones(3, bool), f32()),
    refusal(
        "`zero_point` element type (uint8) must match input element type (int8)",
        I8,
        f32(),
        np.ones((), np.uint8),
    ),
    refusal(
        "`scale` element type (float32) must match output element type (bfloat16)",
        dtype=jnp.bfloat16,
    ),
]
WRONG_VALUES_TO_DEQUANTIZE = [
    refusal("Quantization axis (2) must be less than input shape rank (2)", I8, f32(3), axes=2),
    refusal("Scale shape (3,) and zero point shape () must match", I8, f32(3), i8(), axes=1),
    refusal(
        "must match input shape (2, 3) at the quantization axes (0, 1)", U8, f32(3), axes=(0, 1)
    ),
    refusal(
        "shape (1,) must match input shape (2, 3) at the quantization axes (1,)", I8, f32(1), axes=1
    ),
    refusal(("`zero_point` is not a code of int8", "-129"), zero_point=-129),
]


def test_dequantize_refuses_with_the_facts():
    assert_refusals("dequantize", TypeError, WRONG_TYPES_TO_DEQUANTIZE, I8, f32())
    assert_refusals("dequantize", ValueError, WRONG_VALUES_TO_DEQUANTIZE, I8, f32())


def test_the_first_fault_in_the_order_of_the_specification_is_named():
    """Each call has every later fault as well."""
    faults = [
        ("Output element type", {"qtype": jnp.float32}),
        ("must match input element type", {"x": F32.astype(np.float16)}),
        ("floating point", {"x": I8, "scale": i8(2)}),
        ("`zero_point` element type", {"zero_point": np.ones(4, np.uint8)}),
        ("Quantization axis", {"axes": (0, 7)}),
        ("Scale shape", {"zero_point": i8(4)}),
        ("quantization axes (0, 1)", {"axes": (0, 1)}),
        ("must match input shape", {"scale": f32(3), "zero_point": i8(3)}),
        ("`round_mode`", {"round_mode": "UP"}),
    ]
    good = {"x": F32, "scale": f32(2), "zero_point": i8(2), "qtype": jnp.int8, "axes": 0}
    assert jqx.quantize(**good).shape == (2, 3)
    for i, (fact, _) in enumerate(faults):
        call = dict(good)
        for _, fault in reversed(faults[i:]):
            call |= fault
        with pytest.raises((TypeError, ValueError)) as refusal:
            jqx.quantize(**call)
        assert fact in str(refusal.value).splitlines()[0], (fact, str(refusal.value))
