import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import RoundMode
from jqx.gradients import ste
from jqx.ops import affine_dequantize, affine_fake_quantize, affine_quantize

from ..numerics.oracles import (
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
    back = affine_dequantize(codes, scale, z, dtype=jnp.float32)
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
    assert_floats(affine_dequantize(codes, scale, z, dtype=dtype), expected, dtype)


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
            jnp.asarray(x * factor),
            jnp.asarray(scale),
            jnp.asarray(z),
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
    a, b = (jnp.asarray(np.random.default_rng(i).standard_normal(50_000), dtype) for i in (0, 1))

    def f(a, b):
        return jqx.quantize(a * b * 100, jnp.asarray(0.5, dtype), qtype=jnp.int8)

    assert jnp.array_equal(jax.jit(f)(a, b), jqx.quantize(a * b * 100, 0.5, qtype=jnp.int8))
