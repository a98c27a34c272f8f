import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import RoundMode, numerics
from jqx._src.ops.affine import affine_dequantize, affine_fake_quantize, affine_quantize
from jqx.gradients import ste

from ..arrays import on_device
from ..oracles.numerics import (
    as_float64,
    as_int64,
    assert_codes,
    assert_floats,
    codes_of,
    nearest,
    quantized,
)

SHAPE = (4, 5, 6)
EVEN = RoundMode.NEAREST_TOWARD_EVEN
PLACEMENTS = [(1, 1, 1), (4, 1, 1), (1, 5, 1), (1, 1, 6), (4, 1, 6), SHAPE]
MIXED = [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")]


def operands(shape, dtype="float32", scale_dtype="float32", qtype="int8"):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=SHAPE) * 40).astype(jnp.dtype(dtype))
    scale = rng.uniform(0.2, 1, shape).astype(jnp.dtype(scale_dtype))
    return x, scale, codes_of(rng.integers(-40, 40, shape), qtype)


@pytest.mark.parametrize("shape", PLACEMENTS)
def test_scales_broadcast_axis_by_axis(shape):
    x, scale, z = operands(shape)
    f = functools.partial(affine_quantize, qtype=jnp.int8, round_mode=EVEN)
    codes = f(x, scale, z)
    assert_codes(codes, quantized(x, scale, z, "int8"), "int8")
    mapped = jax.vmap(f)(np.stack([x, -x]), np.stack([scale, scale]), np.stack([z, z]))
    np.testing.assert_array_equal(mapped[0], codes)
    np.testing.assert_array_equal(mapped[1], f(-x, scale, z))
    back = affine_dequantize(codes, scale, z, qtype=jnp.int8, dtype=jnp.float32)
    difference = as_int64(codes) - as_int64(z)
    assert_floats(back, nearest(difference * as_float64(scale), np.float32), np.float32)


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


@pytest.mark.parametrize("addend", ADDENDS)
@pytest.mark.parametrize("constant", [True, False], ids=["constant scale", "traced scale"])
def test_a_dequantized_value_is_rounded_before_it_is_added_to(constant, addend):
    generator = np.random.default_rng(0)
    q = generator.integers(-128, 128, 100_000).astype(np.int8)
    b = ADDENDS[addend](generator.standard_normal(100_000).astype(np.float32))
    scale = np.float32(0.1234)

    def f(q, scale, b):
        return jqx.dequantize(q, jnp.asarray(0.1234, jnp.float32) if constant else scale) + b

    product = q.astype(np.float32) * scale
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


@pytest.mark.parametrize("qtype", [jnp.int4, numerics.int3, numerics.nf4, jnp.float4_e2m1fn])
def test_codes_come_as_bits_where_they_are_to_be_packed(qtype):
    x = np.linspace(-9, 9, 64, dtype=np.float32).reshape(4, 16)
    scale = np.full((4, 1), 0.75, np.float32)
    f = functools.partial(affine_quantize, x, scale, None, qtype=qtype, round_mode=EVEN)
    form = numerics.format_of(qtype)
    bits = f(as_bits=True)
    assert bits.dtype == jnp.uint8 and int(bits.max()) < 2**form.bits
    codes = f()
    np.testing.assert_array_equal(as_float64(form.from_bits(bits)), as_float64(codes))
    np.testing.assert_array_equal(form.decode(form.widen_bits(bits)), form.decode(codes))


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
