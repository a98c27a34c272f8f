import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx import numerics
from jqx._src.numerics.qtype import INTEGERS

from ..oracles.numerics import (
    as_float64,
    as_int64,
    assert_codes,
    assert_floats,
    code_range,
    saturated,
)
from ..oracles.refusals import assert_refused
from ..strategies import law

SIGNED = [qtype for qtype in INTEGERS if not qtype.startswith("u")]
INF, NAN = np.inf, np.nan


def specified(low, high, qtype, symmetric):
    """The documented formula in NumPy, float32 for the small floats."""
    dtype = low.dtype
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    low, high = low.astype(wide), high.astype(wide)
    q_low, q_high = code_range(qtype)
    with np.errstate(all="ignore"):
        if symmetric:
            scale = np.maximum(np.abs(low), np.abs(high)) / wide.type(q_high)
        else:
            low, high = np.minimum(low, wide.type(0)), np.maximum(high, wide.type(0))
            scale = (high - low) / wide.type(q_high - q_low)
        scale = scale.astype(dtype)
        scale = np.where(scale == 0, dtype.type(1), scale)
        if symmetric:
            return scale, None
        r = np.rint(wide.type(q_low) - low / scale.astype(wide))
    return scale, saturated(r, 0, qtype)


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
    expected = specified(low, high, qtype, symmetric)
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
    expected = specified(low, high, "int8", symmetric)
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


def test_a_range_on_one_side_of_zero_is_stretched_to_it():
    scale, zero_point = jqx.affine_from_range(
        np.float32([2, -6]), np.float32([5.1, -5]), qtype="uint8"
    )
    np.testing.assert_array_equal(scale, np.float32([5.1, 6]) / np.float32(255))
    assert zero_point.tolist() == [0, 255]


def test_a_range_without_extent_has_scale_one():
    zero = np.zeros(2, np.float32)
    for symmetric in (False, True):
        scale, zero_point = jqx.affine_from_range(zero, -zero, qtype="int8", symmetric=symmetric)
        np.testing.assert_array_equal(scale, [1, 1])
        assert symmetric or zero_point.tolist() == [-128, -128]


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
REFUSED = {
    "qtype_real": (
        (F32, F32),
        {"qtype": "float32"},
        TypeError,
        ("Output element type (float32) must be a quantized type",),
    ),
    "qtype_of_64_bits": ((F32, F32), {"qtype": "int64"}, TypeError, ("(int64)", "quantized type")),
    "qtype_not_a_dtype": ((F32, F32), {"qtype": "int9"}, TypeError, ("`qtype` is not a dtype",)),
    "limits_of_integers": (
        (np.ones(3, np.int8), np.ones(3, np.int8)),
        {},
        TypeError,
        ("`low` element type (int8) must be a floating point number",),
    ),
    "limits_of_two_dtypes": (
        (F32, np.ones(3, np.float16)),
        {},
        TypeError,
        ("`high` element type (float16) must match `low` element type (float32)",),
    ),
    "limits_of_two_shapes": (
        (F32, np.ones((), np.float32)),
        {},
        ValueError,
        ("`low` and `high` must have the same shape", "low.shape == (3,), high.shape == ()"),
    ),
    "unsigned_and_symmetric": (
        (F32, F32),
        {"qtype": "uint4", "symmetric": True},
        ValueError,
        ("unsigned format (uint4) cannot be symmetric", "such as int4"),
    ),
    "float_format_and_not_symmetric": (
        (F32, F32),
        {"qtype": "float8_e4m3fn"},
        ValueError,
        ("float8_e4m3fn has no zero point", "symmetric=True"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_affine_from_range_refuses_with_the_facts(case):
    operands, options, error, facts = REFUSED[case]
    f = functools.partial(jqx.affine_from_range, **({"qtype": "int8"} | options))
    assert_refused(f, operands, error, "affine_from_range", *facts)


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


MX = {  # the exponent of the largest number of the elements
    "mxfp4": (numerics.mxfp4, 2),
    "mxfp6_e2m3": (numerics.mxfp6_e2m3, 2),
    "mxfp6_e3m2": (numerics.mxfp6_e3m2, 4),
    "mxfp8_e4m3": (numerics.mxfp8_e4m3, 8),
    "mxfp8_e5m2": (numerics.mxfp8_e5m2, 15),
    "mxint8": (numerics.mxint8, 0),
}


@pytest.mark.parametrize("name", MX)
def test_mx_scales_are_powers_of_two_by_the_rule_of_ocp(name):
    """floor(log2(largest)) less the exponent of the largest element, from 2**-127 on; NaN stays."""
    qtype, emax = MX[name]
    exponents = np.arange(-100, 127)
    powers = np.ldexp(np.float32(1), exponents)
    largest = np.concatenate([powers, np.nextafter(powers, 0), np.float32(1.7) * powers])
    floors = np.concatenate([exponents, exponents - 1, exponents])
    scale, _ = jqx.affine_from_range(-largest, largest / 2, qtype=qtype, symmetric=True)
    assert scale.dtype == jnp.float8_e8m0fnu
    assert_floats(scale, np.ldexp(1.0, np.maximum(floors - emax, -127)), "float8_e8m0fnu")
    special = np.float32([0, np.nan, 1])
    scale, _ = jqx.affine_from_range(-special, special, qtype=qtype, symmetric=True)
    assert_floats(scale, np.array([2.0**-127, np.nan, 2.0**-emax]), "float8_e8m0fnu")


def test_the_scale_of_an_nvfp4_block_is_a_float_and_zero_for_zeros():
    largest = np.float32([0, 3, 12])
    scale, _ = jqx.affine_from_range(-largest, largest, qtype=numerics.nvfp4, symmetric=True)
    assert_floats(scale, np.float32([0, 0.5, 2]), np.float32)
