"""Scales and zero points: those of a range, and how arrays broadcast with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx import RoundMode, numerics
from jqx._src.numerics.qtype import INTEGERS
from jqx._src.ops.affine import affine_dequantize, affine_fake_quantize, affine_quantize
from jqx.gradients import ste

from ..arrays import on_device
from ..oracles.calibrators import affine
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
from ..strategies import law

SHAPE = (4, 5, 6)
EVEN = RoundMode.NEAREST_TOWARD_EVEN
MIXED = [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")]


def operands(shape, dtype="float32", scale_dtype="float32", qtype="int8"):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=SHAPE) * 40).astype(jnp.dtype(dtype))
    scale = rng.uniform(0.2, 1, shape).astype(jnp.dtype(scale_dtype))
    return x, scale, codes_of(rng.integers(-40, 40, shape), qtype)


@pytest.mark.parametrize("dtype, scale_dtype", MIXED)
def test_mixed_floats_are_computed_in_the_wider_and_returned_in_the_dtype_of_x(dtype, scale_dtype):
    x, scale, z = operands((1, 5, 1), dtype, scale_dtype)
    codes = affine_quantize(x, scale, z, qtype=jnp.int8, round_mode=EVEN)
    assert_codes(codes, quantized(x, scale, z, "int8"), "int8")
    difference = (as_int64(codes) - as_int64(z)) * as_float64(scale)
    expected = nearest(nearest(difference, np.float32), dtype)
    y = affine_fake_quantize(x, scale, z, qtype=jnp.int8, round_mode=EVEN, gradient=ste)
    assert_floats(y, expected, dtype)
    back = affine_dequantize(codes, scale, z, qtype=jnp.int8, dtype=dtype)
    assert_floats(back, expected, dtype)


@pytest.mark.parametrize("dtype, scale_dtype", MIXED)
def test_each_operand_has_a_gradient_of_its_own_dtype_and_shape(dtype, scale_dtype):
    x, scale, z = operands((1, 5, 1), dtype, scale_dtype)

    def loss(x, scale):
        y = affine_fake_quantize(x, scale, z, qtype=jnp.int4, round_mode=EVEN, gradient=ste)
        return y.astype(jnp.float32).sum()

    z = codes_of(as_int64(z) % 8, "int4")
    dx, dscale = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, scale)
    assert dx.dtype == x.dtype and dx.shape == x.shape
    assert dscale.dtype == scale.dtype and dscale.shape == scale.shape
    low, high = (-8 - as_float64(z)) * as_float64(scale), (7 - as_float64(z)) * as_float64(scale)
    wide = as_float64(x)
    assert_floats(dx, (low <= wide) & (wide <= high), dtype)
    clipped = np.where(wide < low, -8 - as_float64(z), np.where(wide > high, 7 - as_float64(z), 0))
    assert_floats(dscale, nearest(clipped.sum((0, 2), keepdims=True), scale_dtype), scale_dtype)


def test_scale_and_zero_point_may_broadcast_differently():
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(4, 6)) * 100).astype(np.float32)
    scale = rng.uniform(0.2, 1, (1, 6)).astype(np.float32)
    z = np.int8([[-3], [0], [5], [100]])

    def f(x, scale, z):
        return affine_fake_quantize(x, scale, z, qtype=jnp.int8, round_mode=EVEN, gradient=ste)

    spread = np.broadcast_to(scale, x.shape), np.broadcast_to(z, x.shape)
    np.testing.assert_array_equal(f(x, scale, z), f(x, *spread))
    narrow = jax.grad(lambda s: (f(x, s, z) * 2).sum())(scale)
    wide = jax.grad(lambda s: (f(x, s, spread[1]) * 2).sum())(np.array(spread[0]))
    assert np.any(np.asarray(wide) != 0)
    np.testing.assert_array_equal(narrow, np.asarray(wide).sum(0, keepdims=True))


def test_one_trace_serves_every_call_of_a_shape():
    x, scale, z = operands((1, 1, 6))
    before = affine_quantize._cache_size()
    for factor in (1, 2, 3):
        affine_quantize(
            on_device(x * factor),
            on_device(scale),
            on_device(z),
            qtype=jnp.dtype("int8"),
            round_mode=RoundMode.TOWARD_INFINITY,
        )
    assert affine_quantize._cache_size() - before <= 1


ADDENDS = {"array": lambda b: b, "scalar": lambda b: b[0]}


@pytest.mark.parametrize("zero_point", [None, np.int8(3)])
@pytest.mark.parametrize("addend", ADDENDS)
@pytest.mark.parametrize("constant", [True, False], ids=["constant scale", "traced scale"])
def test_a_dequantized_value_is_rounded_before_it_is_added_to(constant, addend, zero_point):
    """The sum is no fused multiply-add."""
    generator = np.random.default_rng(0)
    q = generator.integers(-128, 128, 100_000).astype(np.int8)
    b = ADDENDS[addend](generator.standard_normal(100_000).astype(np.float32))
    scale = np.float32(0.1234)

    def f(q, scale, b):
        scale = jnp.asarray(0.1234, jnp.float32) if constant else scale
        return jqx.dequantize(q, scale, zero_point) + b

    product = (q.astype(np.float32) - np.float32(zero_point or 0)) * scale
    assert np.array_equal(jax.jit(f)(q, scale, b), product + b)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_16_bit_operand_is_rounded_before_it_is_read(dtype):
    a, b = (on_device(np.random.default_rng(i).standard_normal(50_000), dtype) for i in (0, 1))

    def f(a, b):
        return jqx.quantize(a * b * 100, jnp.asarray(0.5, dtype), qtype=jnp.int8)

    assert jnp.array_equal(jax.jit(f)(a, b), jqx.quantize(a * b * 100, 0.5, qtype=jnp.int8))


E8M0 = jnp.float8_e8m0fnu


@pytest.mark.parametrize("qtype", [jnp.int8, jnp.float4_e2m1fn, jnp.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_power_of_two_scale_is_exact_at_every_exponent(qtype, dtype):
    """From 2**-126 on, 2**126 included, where its reciprocal is no normal float32."""
    exponents = np.arange(-100, 101)
    scale = np.ldexp(np.float32(1), exponents)[None].astype(E8M0)
    units = np.array([[1.5], [-3], [0.25], [0], [1e3]])
    x = np.ldexp(units, exponents[None]).astype(jnp.dtype(dtype))
    at_one = affine_quantize(
        units.astype(np.float32), np.ones((1, 1), np.float32), None, qtype=qtype, round_mode=EVEN
    )
    codes = affine_quantize(x, scale, None, qtype=qtype, round_mode=EVEN)
    expected = np.broadcast_to(as_float64(at_one), x.shape)
    np.testing.assert_array_equal(as_float64(codes), expected)
    back = affine_dequantize(codes, scale, None, qtype=qtype, dtype=dtype)
    assert_floats(back, nearest(np.ldexp(expected, exponents[None]), dtype), dtype)
    y = affine_fake_quantize(x, scale, None, qtype=qtype, round_mode=EVEN, gradient=ste)
    assert_floats(y, np.asarray(back).astype(np.float64), dtype)


@pytest.mark.parametrize("qtype", [jnp.int8, jnp.float4_e2m1fn], ids=str)
def test_a_power_of_two_scale_of_nan_gives_nan(qtype):
    scale = np.array([[np.nan, 1]], E8M0)
    codes = affine_quantize(np.ones((2, 2), np.float32), scale, None, qtype=qtype, round_mode=EVEN)
    back = affine_dequantize(codes, scale, None, qtype=qtype, dtype=jnp.float32)
    assert_floats(back, np.array([[np.nan, 1]] * 2), np.float32)


def test_the_least_and_the_largest_power_of_two_scale():
    """2**-127 is a subnormal float32, which XLA flushes; so is the reciprocal of 2**127."""
    exponents = np.array([[-127, 127]])
    x, scale = np.ldexp(np.float32(1), [[-126, 127]]), np.ldexp(1.0, exponents).astype(E8M0)
    codes = affine_quantize(x, scale, None, qtype=jnp.int8, round_mode=EVEN)
    assert_codes(codes, np.array([[2, 1]]), "int8")
    back = affine_dequantize(codes, scale, None, qtype=jnp.int8, dtype=jnp.float32)
    assert_floats(back, x, np.float32)


def test_a_negative_scale_swaps_the_ends_of_the_range_of_the_gradient():
    """int4 from -8 to 7 at scale -1 covers [-7, 8]."""
    x, scale = np.float32([[-7.5, -6, 7.5, 8.5]]), -np.ones((1, 1), np.float32)

    def f(x, s):
        return affine_fake_quantize(x, s, None, qtype=jnp.int4, round_mode=EVEN, gradient=ste).sum()

    dx, dscale = jax.grad(f, (0, 1))(x, scale)
    assert_floats(dx, np.array([[0, 1, 1, 0]]), np.float32)
    assert_floats(dscale, np.array([[7 - 8]]), np.float32)


SIGNED = [qtype for qtype in INTEGERS if not qtype.startswith("u")]
INF, NAN = np.inf, np.nan


def ranges(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    ends = rng.normal(size=(2, 5000)) * 2.0 ** rng.integers(-6, 6, 5000)
    ends[:, :4] = [[0, 1, -3, 0], [0, 5, -1, 7]]
    return np.min(ends, axis=0).astype(dtype), np.max(ends, axis=0).astype(dtype)


def assert_affine(result, expected, qtype, dtype):
    scale, zero_point = result
    assert_floats(scale, expected[0], dtype)
    if expected[1] is None:
        assert zero_point is None
    else:
        assert_codes(zero_point, expected[1], qtype)


@pytest.mark.many
@pytest.mark.parametrize(
    "qtype, symmetric", [(qtype, False) for qtype in INTEGERS] + [(q, True) for q in SIGNED]
)
def test_scale_and_zero_point_follow_the_formula_in_every_format(qtype, symmetric):
    low, high = ranges(0)
    expected = affine(low, high, qtype, symmetric)
    f = functools.partial(jqx.affine_from_range, qtype=qtype, symmetric=symmetric)
    assert_affine(f(low, high), expected, qtype, np.float32)
    assert_affine(jax.jit(f)(low, high), expected, qtype, np.float32)
    assert_affine(jax.jit(jax.vmap(f))(low, high), expected, qtype, np.float32)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_scale_keeps_the_dtype_of_the_limits(dtype, symmetric):
    low, high = ranges(1, jnp.dtype(dtype))
    with jax.enable_x64(dtype == "float64"):
        result = jqx.affine_from_range(low, high, qtype="int8", symmetric=symmetric)
        jitted = jax.jit(
            lambda a, b: jqx.affine_from_range(a, b, qtype="int8", symmetric=symmetric)
        )(low, high)
    expected = affine(low, high, "int8", symmetric)
    assert_affine(result, expected, "int8", dtype)
    assert_affine(jitted, expected, "int8", dtype)


limit = st.floats(-1000, 1000, width=32).map(lambda v: 0.0 if abs(v) < 2.0**-20 else v)


@law
@given(hnp.arrays(np.float32, (2, 6), elements=limit), st.sampled_from(["int4", "int8", "uint8"]))
def test_zero_and_every_value_of_the_range_are_represented(ends, qtype):
    """Clipping costs what rounding the zero point cost: half a step, and at most ten roundings."""
    low, high = np.sort(ends, axis=0)
    scale, zero_point = jqx.affine_from_range(low, high, qtype=qtype)
    assert np.all(np.asarray(scale) > 0)
    for x in (low, high, np.zeros_like(low), (low + high) / 2):
        y = jqx.quantize_dequantize(x, scale, zero_point, qtype=qtype, axes=0)
        error = np.abs(as_float64(y) - x)
        slack = 10 * 2.0**-24 * np.maximum(np.abs(low), np.abs(high))
        assert np.all(error <= as_float64(scale) / 2 + slack)
    zero = jqx.quantize_dequantize(np.zeros(6, np.float32), scale, zero_point, qtype=qtype, axes=0)
    np.testing.assert_array_equal(zero, np.zeros(6))


@law
@given(hnp.arrays(np.float32, (2, 6), elements=limit), st.sampled_from(["int4", "int8", "int16"]))
def test_a_symmetric_range_represents_its_larger_limit_and_zero(ends, qtype):
    low, high = np.sort(ends, axis=0)
    scale, zero_point = jqx.affine_from_range(low, high, qtype=qtype, symmetric=True)
    assert zero_point is None
    larger = np.maximum(np.abs(low), np.abs(high))
    codes = jqx.quantize(np.stack([larger, -larger]), scale, qtype=qtype, axes=1)
    top = code_range(qtype)[1] * (larger > 0)
    np.testing.assert_array_equal(as_int64(codes), [top, -top])


@pytest.mark.parametrize("symmetric", [False, True])
def test_nan_and_infinity_stay_in_their_own_element(symmetric):
    low, high = np.float32([-1, NAN, -1, -INF, -1]), np.float32([1, 1, NAN, 1, INF])
    scale, _ = jqx.affine_from_range(low, high, qtype="int8", symmetric=symmetric)
    expected = np.float32([1, NAN, NAN, INF, INF])
    expected[0] = np.float32(1) / np.float32(127) if symmetric else np.float32(2) / np.float32(255)
    np.testing.assert_array_equal(scale, expected)


def test_python_numbers_are_float32_and_take_the_dtype_of_low():
    scale, zero_point = jqx.affine_from_range(-1, 3.0, qtype=jnp.uint8)
    assert scale.dtype == jnp.float32 and zero_point == 64
    scale, _ = jqx.affine_from_range(jnp.bfloat16(-1), 3.0, qtype=jnp.uint8)
    assert scale.dtype == jnp.bfloat16


def test_the_scale_has_the_gradient_of_its_formula():
    def f(low, high, symmetric):
        return jqx.affine_from_range(low, high, qtype="int8", symmetric=symmetric)[0]

    gradient = jax.jit(jax.grad(f, argnums=(0, 1)), static_argnums=2)
    low, high = np.float32(-1), np.float32(3)
    step = np.float32(1) / np.float32(255)
    np.testing.assert_array_equal(gradient(low, high, False), [-step, step])
    np.testing.assert_array_equal(gradient(low, high, True), [0, np.float32(1) / np.float32(127)])


F32 = np.ones(3, np.float32)


WRONG_TYPES = [
    refusal("Output element type (float32) must be a quantized type", qtype="float32"),
    refusal(("(int64)", "quantized type"), qtype="int64"),
    refusal("`qtype` is not a dtype", qtype="int9"),
    refusal(
        "`low` element type (int8) must be a floating point number",
        np.ones(3, np.int8),
        np.ones(3, np.int8),
    ),
    refusal(
        "`high` element type (float16) must match `low` element type (float32)",
        F32,
        np.ones(3, np.float16),
    ),
]
WRONG_VALUES = [
    refusal(
        ("`low` and `high` must have the same shape", "low.shape == (3,), high.shape == ()"),
        F32,
        np.ones((), np.float32),
    ),
    refusal(
        ("unsigned format (uint4) cannot be symmetric", "such as int4"),
        qtype="uint4",
        symmetric=True,
    ),
    refusal(("float8_e4m3fn has no zero point", "symmetric=True"), qtype="float8_e4m3fn"),
]


def test_affine_from_range_refuses_with_the_facts():
    assert_refusals("affine_from_range", TypeError, WRONG_TYPES, F32, F32, qtype="int8")
    assert_refusals("affine_from_range", ValueError, WRONG_VALUES, F32, F32, qtype="int8")


FLOAT_FORMATS = {
    "float8_e4m3fn": (jnp.float8_e4m3fn, 448),
    "float8_e5m2": (jnp.float8_e5m2, 57344),
    "float6_e2m3fn": (numerics.float6_e2m3fn, 7.5),
    "float4_e2m1fn": (jnp.float4_e2m1fn, 6),
    "nf4": (numerics.nf4, 1),
    "int3": (numerics.int3, 3),
    "ternary": (numerics.ternary, 1),
}


@pytest.mark.parametrize("name", FLOAT_FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_number_of_any_format_stands_for_the_larger_limit(name, dtype):
    qtype, top = FLOAT_FORMATS[name]
    low, high = ranges(2, jnp.dtype(dtype))
    f = functools.partial(jqx.affine_from_range, qtype=qtype, symmetric=True)
    scale, zero_point = jax.jit(f)(low, high)
    larger = np.maximum(np.abs(low), np.abs(high)).astype(np.float32)
    expected = (larger / np.float32(top)).astype(jnp.dtype(dtype))
    assert zero_point is None
    assert_floats(scale, np.where(expected == 0, expected.dtype.type(1), expected), dtype)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxint8"])
def test_mx_scales_are_those_of_the_format(name):
    """Which are powers of two by the rule of OCP."""
    qtype, powers = getattr(numerics, name), np.ldexp(np.float32(1), np.arange(-100, 127))
    largest = np.concatenate([powers, np.nextafter(powers, 0), np.float32([0, NAN])])
    scale, _ = jqx.affine_from_range(-largest, largest / 2, qtype=qtype, symmetric=True)
    assert_floats(scale, as_float64(qtype.scale_of(on_device(largest))), "float8_e8m0fnu")


def test_the_scale_of_an_nvfp4_block_is_a_float_and_zero_for_zeros():
    largest = np.float32([0, 3, 12])
    scale, _ = jqx.affine_from_range(-largest, largest, qtype=numerics.nvfp4, symmetric=True)
    assert_floats(scale, np.float32([0, 0.5, 2]), np.float32)
