"""The ops of oneDNN and of its graph API, against their formulas in NumPy."""

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
    nearest,
    saturated,
)
from ..oracles.refusals import assert_refusals, refusal
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


def test_shapes_without_extent_keep_their_shape():
    for shape in ((), (0,), (2, 0, 3), (1,)):
        codes = jqx.dynamic_quantize(np.full(shape, 1.2, np.float32), f32(0.5), np.int8([1]))
        assert codes.shape == shape and codes.dtype == jnp.int8
        assert np.all(as_int64(codes) == 3)
        y = jqx.onednn.dynamic_dequantize(np.full(shape, 3, np.int8), f32(0.5), np.int8([1]))
        assert y.shape == shape and y.dtype == jnp.float32
        assert np.all(np.asarray(y) == 1)


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
Q = np.ones((2, 4), np.int8)
WRONG_TYPE = "has an element type that is not supported"


def ones(shape, dtype=np.float32):
    return np.ones(shape, dtype)


WRONG_TYPES_TO_QUANTIZE = [
    refusal((f"`x` {WRONG_TYPE}", "float16", "float32"), X.astype(np.float16), ONE),
    refusal((f"`x` {WRONG_TYPE}", "int32"), ones(3, np.int32), ONE),
    refusal((f"`scales` {WRONG_TYPE}", "float16"), X, ones(1, np.float16)),
    refusal((f"`zps` {WRONG_TYPE}", "int16", "int8, uint8, int32"), X, ONE, ones(1, np.int16)),
    refusal((f"`zps` {WRONG_TYPE}", "float32"), X, ONE, ONE),
    refusal((f"`qtype` {WRONG_TYPE}", "int32", "int8, uint8"), qtype=jnp.int32),
    refusal((f"`qtype` {WRONG_TYPE}", "int4"), qtype=jnp.int4),
    refusal((f"`qtype` {WRONG_TYPE}", "float8_e5m2"), qtype=jnp.float8_e5m2),
    refusal(("`qtype` is not a dtype", "s8"), qtype="s8"),
]
WRONG_VALUES_TO_QUANTIZE = [
    refusal(
        ("`scales` must be 1-D", "scales.shape == ()", "scales.shape == (1,)"), X, np.float32(1)
    ),
    refusal(("`scales` must be 1-D", "(1, 1)"), X, ones((1, 1))),
    refusal(("`zps` must be 1-D", "zps.shape == ()"), X, ONE, np.int8(1)),
    refusal(("`scales` must be 1-D with one element per tensor", "(2,)"), X, ones(2)),
    refusal(
        ("`scales` must be 1-D with one element per channel", "(1,)", "scales.shape == (3,)"),
        granularity="per_channel",
    ),
    refusal(
        ("`scales` must", "scales.shape == (3,), x.shape == (2, 3)", "axis == 0", "(2,)"),
        X,
        ones(3),
        granularity="per_channel",
        axis=0,
    ),
    refusal(
        ("`zps` must be 1-D with one element per channel", "zps.shape == (3,)"),
        X,
        ones(3),
        ones(1, np.int8),
        granularity="per_channel",
    ),
    refusal(
        ("axis (2) must be less than input shape rank (2)", "[-2, 1]"),
        X,
        ones(3),
        granularity="per_channel",
        axis=2,
    ),
    refusal(("axis (-3)", "[-2, 1]"), X, ones(3), granularity="per_channel", axis=-3),
    refusal(
        "axis (1) must be less than input shape rank (1)",
        ones(3),
        ones(3),
        granularity="per_channel",
    ),
    refusal(
        ("`granularity` 'per_group' is unknown", "per_tensor, per_channel"), granularity="per_group"
    ),
]


def test_dynamic_quantize_refuses_with_the_facts():
    assert_refusals("dynamic_quantize", TypeError, WRONG_TYPES_TO_QUANTIZE, X, ONE)
    assert_refusals("dynamic_quantize", ValueError, WRONG_VALUES_TO_QUANTIZE, X, ONE)
    for axis in ((0, 1), (0,), 1.5, True):
        with pytest.raises(TypeError, match="`axis` must be an integer"):
            jqx.dynamic_quantize(X, ones(3), granularity="per_channel", axis=axis)


WRONG_TYPES_TO_QUANTIZE_BY_ATTRIBUTES = [
    refusal((f"`x` {WRONG_TYPE}", "float16"), X.astype(np.float16)),
    refusal((f"`qtype` {WRONG_TYPE}", "int4", "float8_e4m3fn"), qtype="int4"),
]
WRONG_VALUES_TO_QUANTIZE_BY_ATTRIBUTES = [
    refusal(
        ("`zps` must be absent for float8", "float8_e4m3fn", "drop zps"),
        zps=[0],
        qtype=jnp.float8_e4m3fn,
    ),
    refusal("`scales` must be 1-D with one element per tensor", scales=[1.0, 2.0]),
    refusal(("`scales` must be 1-D", "scales.shape == ()"), scales=0.5),
    refusal("`zps` must be 1-D with one element per tensor", zps=[1, 2]),
    refusal("`granularity` 'per_row' is unknown", granularity="per_row"),
]


def test_onednn_quantize_refuses_with_the_facts():
    function, scale = "onednn.onednn_quantize", {"scales": [1.0]}
    assert_refusals(function, TypeError, WRONG_TYPES_TO_QUANTIZE_BY_ATTRIBUTES, X, **scale)
    assert_refusals(function, ValueError, WRONG_VALUES_TO_QUANTIZE_BY_ATTRIBUTES, X, **scale)
    for zps in ([2.7], [2**31], [True]):
        with pytest.raises(ValueError, match="`zps` must hold 32-bit integers"):
            jqx.onednn.onednn_quantize(jnp.ones(3), [1.0], zps)


@pytest.mark.parametrize("qtype", ["int8", "uint8"])
def test_onednn_dequantize_gives_every_code_its_value(qtype):
    low, high = code_range(qtype)
    q = codes_of(np.arange(low, high + 1)[:, None] * np.ones(5, int), qtype)
    scale, z = f32(0.1, -3, 1e30, INF, NAN), np.int32([0, 1000, -7, low, 0])
    with np.errstate(all="ignore"):
        expected = (q.astype(np.float32) - z.astype(np.float32)) * scale
    f = functools.partial(
        jqx.onednn.onednn_dequantize, scales=scale, zps=z, granularity="per_channel"
    )
    assert_floats(f(q), expected, np.float32)
    assert_floats(jax.jit(f)(q), expected, np.float32)


@pytest.mark.many
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("qtype", ["int8", "uint8", "int4", "uint4"])
def test_dynamic_dequantize_multiplies_in_float32_and_narrows_once(qtype, dtype):
    low, high = code_range(qtype)
    rng = np.random.default_rng(5)
    q = codes_of(np.repeat(np.arange(low, high + 1)[:, None], 200, 1), qtype)
    scale = rng.uniform(0.5, 2, 200).astype(jnp.dtype(dtype))
    for zps in (qtype, "int32"):
        z = codes_of(rng.integers(0, 3000 if zps == "int32" else 8, 200), zps)
        exact = (as_int64(q) - as_int64(z)) * as_float64(scale)  # fits in float32 for 16 bits
        f = functools.partial(jqx.onednn.dynamic_dequantize, granularity="per_channel", axis=1)
        assert_floats(f(q, scale, z), nearest(exact, dtype), dtype)
        assert_floats(jax.jit(f)(q, scale, z), nearest(exact, dtype), dtype)


def test_a_sum_with_a_dequantized_value_is_no_fused_multiply_add():
    q = np.arange(-128, 128, dtype=np.int8)[:, None] * np.ones(400, np.int8)
    bias = np.random.default_rng(7).normal(size=q.shape).astype(np.float32)
    y = jax.jit(lambda q, s, bias: jqx.onednn.dynamic_dequantize(q, s) + bias)(q, f32(0.1234), bias)
    assert_floats(y, q.astype(np.float32) * np.float32(0.1234) + bias, np.float32)


def test_dynamic_dequantize_per_tensor_takes_one_scale():
    y = jqx.onednn.dynamic_dequantize(np.int8([[1, -2]]), f32(0.5), np.int32([1000]))
    assert_floats(y, np.array([[-499.5, -501.0]]), np.float32)


@pytest.mark.parametrize("group_shape", [(1, 1), (1, 4), (2, 2), (6, 8), (3, 1), (1, 8), [2, 4]])
def test_dynamic_dequantize_gives_each_group_its_scale(group_shape):
    rng = np.random.default_rng(6)
    q = codes_of(rng.integers(-8, 8, (6, 8)), "int4")
    groups = (6 // group_shape[0], 8 // group_shape[1])
    scale = rng.uniform(0.5, 2, groups).astype(np.float32)
    z = rng.integers(-128, 128, groups).astype(np.int8)
    spread = [np.kron(v, np.ones(group_shape, v.dtype)) for v in (scale, z)]
    expected = nearest((as_int64(q) - as_int64(spread[1])) * as_float64(spread[0]), np.float32)
    f = functools.partial(
        jqx.onednn.dynamic_dequantize, granularity="per_group", group_shape=group_shape
    )
    assert_floats(f(q, scale, z), expected, np.float32)
    assert_floats(jax.jit(f)(q, scale, z), expected, np.float32)
    without = nearest(as_int64(q) * as_float64(spread[0]), np.float32)
    assert_floats(f(q, scale), without, np.float32)


def test_the_gradient_of_dynamic_dequantize_in_the_scales_sums_the_differences():
    q = np.int8([[1, -2, 3, 4], [5, 6, -7, 8]])
    z = np.int8([[1, 2]])

    def f(scales):
        return jqx.onednn.dynamic_dequantize(
            q, scales, z, granularity="per_group", group_shape=(2, 2)
        ).sum()

    gradient = jax.jit(jax.grad(f))(f32(0.3, 0.7)[None])
    np.testing.assert_array_equal(gradient, [[1 - 2 + 5 + 6 - 4, 3 + 4 - 7 + 8 - 8]])


REFUSED_BY_DEQUANTIZE = {
    ("onednn.onednn_dequantize", TypeError): [
        refusal((f"`q` {WRONG_TYPE}", "int32"), ones(3, np.int32), scales=[1.0])
    ],
    ("onednn.onednn_dequantize", ValueError): [
        refusal(
            ("`scales` must be 1-D with one element per channel", "scales.shape == (4,)"),
            Q,
            scales=[1.0, 2.0, 3.0],
            granularity="per_channel",
        ),
        refusal(
            "axis (5) must be less than input shape rank (2)",
            Q,
            scales=[1.0],
            granularity="per_channel",
            axis=5,
        ),
    ],
    ("onednn.dynamic_dequantize", TypeError): [
        refusal((f"`q` {WRONG_TYPE}", "int16", "int4"), ones(3, np.int16), ONE),
        refusal((f"`scales` {WRONG_TYPE}", "int32", "bfloat16"), Q, ones(1, np.int32)),
        refusal((f"`zps` {WRONG_TYPE}", "uint16"), Q, ONE, ones(1, np.uint16)),
    ],
    ("onednn.dynamic_dequantize", ValueError): [
        refusal(("`granularity` 'per_row' is unknown", "per_group"), Q, ONE, granularity="per_row"),
        refusal(
            ("`group_shape` has no meaning", "per_tensor", "drop group_shape"),
            Q,
            ONE,
            group_shape=(1, 2),
        ),
        refusal(
            ("`group_shape` does not divide the shape of `q`", "None", "(2, 4)"),
            Q,
            ones((2, 2)),
            granularity="per_group",
        ),
        refusal(
            ("`group_shape` does not divide", "group_shape == (1, 3), q.shape == (2, 4)"),
            Q,
            ones((2, 2)),
            granularity="per_group",
            group_shape=(1, 3),
        ),
        refusal(
            "`group_shape` does not divide",
            Q,
            ones((2, 2)),
            granularity="per_group",
            group_shape=(2,),
        ),
        refusal(
            "`group_shape` does not divide",
            Q,
            ones((2, 2)),
            granularity="per_group",
            group_shape=(1, 0),
        ),
        refusal(
            ("`scales` must hold one element per group", "(2, 4)", "scales.shape == (2, 2)"),
            Q,
            ones((2, 4)),
            granularity="per_group",
            group_shape=(1, 2),
        ),
        refusal(
            ("`zps` must hold one element per group", "(1, 2)", "zps.shape == (2, 2)"),
            Q,
            ones((2, 2)),
            ones((1, 2), np.int8),
            granularity="per_group",
            group_shape=(1, 2),
        ),
    ],
}


def test_dequantizing_is_refused_with_the_facts():
    for (function, error), cases in REFUSED_BY_DEQUANTIZE.items():
        assert_refusals(function, error, cases)
