import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx

from ..arrays import on_device
from ..oracles.numerics import (
    as_float64,
    as_int64,
    assert_codes,
    assert_floats,
    code_range,
    codes_of,
    saturated,
)
from ..oracles.refusals import assert_refused
from ..strategies import law, scales

INF, NAN = np.inf, np.nan
FLOAT8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def specified(x, scales, zps, qtype):
    """DynamicQuantize in NumPy; `scales` and `zps` broadcast to `x`."""
    with np.errstate(all="ignore"):
        y = x / scales + np.asarray(zps).astype(np.float32)
    assert y.dtype == np.float32
    return saturated(np.rint(y), 0, qtype)


def f32(*values):
    return np.float32(values)


def values(seed, shape=(60, 2000)):
    rng = np.random.default_rng(seed)
    halves = rng.integers(-600, 600, shape) / 2
    return np.where(rng.random(shape) < 0.5, halves, rng.normal(size=shape) * 100).astype(
        np.float32
    )


def test_the_zero_point_is_added_before_the_one_rounding():
    x = f32(0.5, 1.5, 2.5, -0.5, -1.5)
    codes = jqx.dynamic_quantize(x, f32(1), np.int8([3]))
    assert codes.tolist() == [4, 4, 6, 2, 2]
    assert jqx.onednn.onednn_quantize(x, [1.0], [3]).tolist() == [4, 4, 6, 2, 2]


@pytest.mark.many
@pytest.mark.parametrize("zps", ["int8", "uint8", "int32", None])
@pytest.mark.parametrize("qtype", ["int8", "uint8"])
def test_dynamic_quantize_gives_the_specified_codes_per_tensor(qtype, zps):
    x, scale = values(0), f32(0.37)
    z = None if zps is None else codes_of([100], zps)
    expected = specified(x, scale, 0 if z is None else z, qtype)
    f = functools.partial(jqx.dynamic_quantize, qtype=qtype)
    assert_codes(f(x, scale, z), expected, qtype)
    assert_codes(jax.jit(f)(x, scale, z), expected, qtype)
    assert_codes(jax.jit(lambda: f(on_device(x), scale, z))(), expected, qtype)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_dynamic_quantize_gives_the_specified_codes_per_channel(axis):
    x = values(1, (30, 20, 50))
    rng = np.random.default_rng(2)
    scale = rng.uniform(-2, 2, x.shape[axis]).astype(np.float32)
    z = rng.integers(-300, 300, x.shape[axis]).astype(np.int32)
    shape = [1, 1, 1]
    shape[axis] = x.shape[axis]
    f = functools.partial(jqx.dynamic_quantize, granularity="per_channel", axis=axis)
    expected = specified(x, scale.reshape(shape), z.reshape(shape), "int8")
    assert_codes(f(x, scale, z), expected, "int8")
    assert_codes(jax.jit(f)(x, scale, z), expected, "int8")
    static = jqx.onednn.onednn_quantize(x, scale, z, granularity="per_channel", axis=axis)
    assert_codes(static, expected, "int8")


def test_the_default_axis_is_1():
    x, scale = values(3, (4, 5, 6)), np.arange(1, 6, dtype=np.float32)
    codes = jqx.dynamic_quantize(x, scale, granularity="per_channel")
    assert_codes(codes, specified(x, scale[:, None], 0, "int8"), "int8")


def test_per_tensor_reads_no_axis():
    codes = jqx.dynamic_quantize(f32(1.0, 2.0), f32(1), axis=7)
    assert codes.tolist() == [1, 2]


finite = st.floats(-1000, 1000, width=32).map(lambda v: 0.0 if abs(v) < 2.0**-60 else v)


@functools.cache
def transformed(granularity):
    f = functools.partial(jqx.dynamic_quantize, granularity=granularity, axis=-1)
    return jax.jit(f), jax.vmap(f), jax.jit(jax.vmap(f, in_axes=(0, None, None)))


@law
@given(st.data(), st.sampled_from(["per_tensor", "per_channel"]))
def test_jitted_and_vmapped_dynamic_quantize_give_the_codes_of_the_eager_one(data, granularity):
    length = {"per_tensor": 1, "per_channel": 4}[granularity]
    x = data.draw(hnp.arrays(np.float32, (3, 4), elements=finite))
    scale = data.draw(scales((length,), exponents=10))
    z = data.draw(hnp.arrays(np.int32, (length,), elements=st.integers(-1000, 1000)))
    expected = specified(x, scale, z, "int8")
    eager = jqx.dynamic_quantize(x, scale, z, granularity=granularity, axis=-1)
    assert_codes(eager, expected, "int8")
    jitted, mapped, mapped_over_x = transformed(granularity)
    assert_codes(jitted(x, scale, z), expected, "int8")
    assert_codes(mapped_over_x(x, scale, z), expected, "int8")
    stacked = [np.stack([v] * 3) for v in (scale, z)]
    assert_codes(mapped(x, *stacked), expected, "int8")


SPECIAL = [  # x, scale, zero point, and "max", "min" or the code
    (NAN, 1, 5, 0),
    (1, NAN, 5, 0),
    (0, 0, 5, 0),
    (0, -0.0, 5, 0),
    (INF, INF, 5, 0),
    (-INF, INF, 5, 0),
    (INF, 1, 5, "max"),
    (-INF, 1, 5, "min"),
    (1e30, 1, 5, "max"),
    (-1e30, 1, 5, "min"),
    (1e30, 1e-30, 5, "max"),
    (-1e30, 1e-30, 5, "min"),
    (2, 0, 5, "max"),
    (-2, 0, 5, "min"),
    (2, -0.0, 5, "min"),
    (-2, -0.0, 5, "max"),
    (2, INF, 5, 5),
    (-2, INF, 5, 5),
    (2, -INF, 5, 5),
    (2, -1, 5, 3),
    (-2, -1, 5, 7),
    (0.49999997, 1, 0, 0),
    (0.49999997, 1, 101, 102),  # the float32 sum is 101.5, and then goes to even
    (-990, 1, 1000, 10),  # a zero point beyond the range of qtype
    (-16777216, 1, 2**24 + 1, 0),  # float32(zp) is 2**24
    (INF, 1, -(2**31), "max"),
]


@pytest.mark.parametrize("qtype", ["int8", "uint8"])
def test_special_values_follow_the_table(qtype):
    low, high = code_range(qtype)
    x, scale = f32(*[row[0] for row in SPECIAL]), f32(*[row[1] for row in SPECIAL])
    z = np.int32([row[2] for row in SPECIAL])
    expected = np.array([{"max": high, "min": low}.get(row[3], row[3]) for row in SPECIAL])
    per_channel = functools.partial(
        jqx.dynamic_quantize, qtype=qtype, granularity="per_channel", axis=0
    )
    assert_codes(per_channel(x, scale, z), expected, qtype)
    per_tensor = jax.jit(jax.vmap(functools.partial(jqx.dynamic_quantize, qtype=qtype)))
    assert_codes(per_tensor(x, scale[:, None], z[:, None]), expected, qtype)
    static = jqx.onednn.onednn_quantize(x, scale, z, qtype=qtype, granularity="per_channel", axis=0)
    assert_codes(static, expected, qtype)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)])
def test_shapes_without_extent_keep_their_shape(shape):
    codes = jqx.dynamic_quantize(np.full(shape, 1.2, np.float32), f32(0.5), np.int8([1]))
    assert codes.shape == shape and codes.dtype == jnp.int8
    assert np.all(as_int64(codes) == 3)


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_is_the_quotient_rounded_once_and_never_saturated(name):
    dtype = FLOAT8[name]
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    ties = (codes[1:] + codes[:-1]) / 2
    beyond = f32(448, 464, 465, 480, 1e6, 57344, 61440, 65536, INF, NAN)
    y = np.concatenate([codes, ties, ties * (1 + 2.0**-20), ties * (1 - 2.0**-20), beyond, -beyond])
    x = np.float32(y)
    expected = x.astype(dtype).astype(np.float32)
    f = functools.partial(jqx.onednn.onednn_quantize, scales=[1.0], qtype=dtype)
    for codes in (f(x), jax.jit(f)(x)):
        assert codes.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(codes).astype(np.float32), expected)
    widened = jax.jit(lambda x: jqx.onednn.onednn_dequantize(f(x), [3.0]))(x)
    assert_floats(widened, expected * np.float32(3), np.float32)


def test_float8_takes_channels():
    x = values(4, (6, 3))
    y = jqx.onednn.onednn_quantize(
        x, [0.1, 1, 10], qtype=jnp.float8_e5m2, granularity="per_channel", axis=-1
    )
    expected = (x / f32(0.1, 1, 10)).astype(ml_dtypes.float8_e5m2)
    np.testing.assert_array_equal(as_float64(y), expected.astype(np.float64))


X, ONE = np.ones((2, 3), np.float32), np.ones(1, np.float32)
WRONG_TYPE = "has an element type that is not supported"


def ones(shape, dtype=np.float32):
    return np.ones(shape, dtype)


REFUSED_BY_DYNAMIC_QUANTIZE = {
    "x_of_16_bits": (
        (X.astype(np.float16), ONE),
        {},
        TypeError,
        (f"`x` {WRONG_TYPE}", "float16", "float32"),
    ),
    "x_of_integers": ((ones(3, np.int32), ONE), {}, TypeError, (f"`x` {WRONG_TYPE}", "int32")),
    "scales_of_16_bits": (
        (X, ones(1, np.float16)),
        {},
        TypeError,
        (f"`scales` {WRONG_TYPE}", "float16"),
    ),
    "zps_of_16_bits": (
        (X, ONE, ones(1, np.int16)),
        {},
        TypeError,
        (f"`zps` {WRONG_TYPE}", "int16", "int8, uint8, int32"),
    ),
    "zps_real": ((X, ONE, ONE), {}, TypeError, (f"`zps` {WRONG_TYPE}", "float32")),
    "qtype_of_32_bits": (
        (X, ONE),
        {"qtype": jnp.int32},
        TypeError,
        (f"`qtype` {WRONG_TYPE}", "int32", "int8, uint8"),
    ),
    "qtype_of_4_bits": (
        (X, ONE),
        {"qtype": jnp.int4},
        TypeError,
        (f"`qtype` {WRONG_TYPE}", "int4"),
    ),
    "qtype_float8": (
        (X, ONE),
        {"qtype": jnp.float8_e5m2},
        TypeError,
        (f"`qtype` {WRONG_TYPE}", "float8_e5m2"),
    ),
    "qtype_not_a_dtype": ((X, ONE), {"qtype": "s8"}, TypeError, ("`qtype` is not a dtype", "s8")),
    "scales_of_rank_0": (
        (X, np.float32(1)),
        {},
        ValueError,
        ("`scales` must be 1-D", "scales.shape == ()", "scales.shape == (1,)"),
    ),
    "scales_of_rank_2": ((X, ones((1, 1))), {}, ValueError, ("`scales` must be 1-D", "(1, 1)")),
    "zps_of_rank_0": (
        (X, ONE, np.int8(1)),
        {},
        ValueError,
        ("`zps` must be 1-D", "zps.shape == ()"),
    ),
    "two_scales_per_tensor": (
        (X, ones(2)),
        {},
        ValueError,
        ("`scales` must be 1-D with one element per tensor", "(2,)"),
    ),
    "one_scale_per_channel": (
        (X, ONE),
        {"granularity": "per_channel"},
        ValueError,
        ("`scales` must be 1-D with one element per channel", "(1,)", "scales.shape == (3,)"),
    ),
    "scales_of_the_other_axis": (
        (X, ones(3)),
        {"granularity": "per_channel", "axis": 0},
        ValueError,
        ("`scales` must", "scales.shape == (3,), x.shape == (2, 3)", "axis == 0", "(2,)"),
    ),
    "one_zero_point_per_channel": (
        (X, ones(3), ones(1, np.int8)),
        {"granularity": "per_channel"},
        ValueError,
        ("`zps` must be 1-D with one element per channel", "zps.shape == (3,)"),
    ),
    "axis_too_large": (
        (X, ones(3)),
        {"granularity": "per_channel", "axis": 2},
        ValueError,
        ("axis (2) must be less than input shape rank (2)", "[-2, 1]"),
    ),
    "axis_too_small": (
        (X, ones(3)),
        {"granularity": "per_channel", "axis": -3},
        ValueError,
        ("axis (-3)", "[-2, 1]"),
    ),
    "default_axis_of_rank_1": (
        (ones(3), ones(3)),
        {"granularity": "per_channel"},
        ValueError,
        ("axis (1) must be less than input shape rank (1)",),
    ),
    "unknown_granularity": (
        (X, ONE),
        {"granularity": "per_group"},
        ValueError,
        ("`granularity` 'per_group' is unknown", "per_tensor, per_channel"),
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_DYNAMIC_QUANTIZE)
def test_dynamic_quantize_refuses_with_the_facts(case):
    operands, options, error, facts = REFUSED_BY_DYNAMIC_QUANTIZE[case]
    f = functools.partial(jqx.dynamic_quantize, **options)
    assert_refused(f, operands, error, "dynamic_quantize", *facts)


REFUSED_BY_ONEDNN_QUANTIZE = {
    "quantize_x_of_16_bits": (
        (X.astype(np.float16),),
        {"scales": [1.0]},
        TypeError,
        (f"`x` {WRONG_TYPE}", "float16"),
    ),
    "quantize_to_int4": (
        (X,),
        {"scales": [1.0], "qtype": "int4"},
        TypeError,
        (f"`qtype` {WRONG_TYPE}", "int4", "float8_e4m3fn"),
    ),
    "quantize_to_float8_with_zps": (
        (X,),
        {"scales": [1.0], "zps": [0], "qtype": jnp.float8_e4m3fn},
        ValueError,
        ("`zps` must be absent for float8", "float8_e4m3fn", "drop zps"),
    ),
    "quantize_with_two_scales": (
        (X,),
        {"scales": [1.0, 2.0]},
        ValueError,
        ("`scales` must be 1-D with one element per tensor",),
    ),
    "quantize_with_a_scalar_scale": (
        (X,),
        {"scales": 0.5},
        ValueError,
        ("`scales` must be 1-D", "scales.shape == ()"),
    ),
    "quantize_with_two_zps": (
        (X,),
        {"scales": [1.0], "zps": [1, 2]},
        ValueError,
        ("`zps` must be 1-D with one element per tensor",),
    ),
    "quantize_per_row": (
        (X,),
        {"scales": [1.0], "granularity": "per_row"},
        ValueError,
        ("`granularity` 'per_row' is unknown",),
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_ONEDNN_QUANTIZE)
def test_onednn_quantize_refuses_with_the_facts(case):
    operands, options, error, facts = REFUSED_BY_ONEDNN_QUANTIZE[case]
    f = functools.partial(jqx.onednn.onednn_quantize, **options)
    assert_refused(f, operands, error, "onednn.onednn_quantize", *facts)


@pytest.mark.parametrize("zps", [[2.7], [2**31], [True]])
def test_zero_points_that_are_no_int32_are_refused(zps):
    with pytest.raises(ValueError, match="`zps` must hold 32-bit integers"):
        jqx.onednn.onednn_quantize(jnp.ones(3), [1.0], zps)


@pytest.mark.parametrize("axis", [(0, 1), (0,), 1.5, True])
def test_an_axis_that_is_no_integer_is_refused(axis):
    with pytest.raises(TypeError, match="`axis` must be an integer"):
        jqx.dynamic_quantize(jnp.ones((2, 2)), jnp.ones(2), granularity="per_channel", axis=axis)
