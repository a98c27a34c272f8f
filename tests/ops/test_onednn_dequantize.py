import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..oracles.numerics import as_float64, as_int64, assert_floats, code_range, codes_of, nearest
from ..oracles.refusals import assert_refused

INF, NAN = np.inf, np.nan


def f32(*values):
    return np.float32(values)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)])
def test_shapes_without_extent_keep_their_shape(shape):
    y = jqx.onednn.dynamic_dequantize(np.full(shape, 3, np.int8), f32(0.5), np.int8([1]))
    assert y.shape == shape and y.dtype == jnp.float32
    assert np.all(np.asarray(y) == 1)


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


Q, ONE = np.ones((2, 4), np.int8), np.ones(1, np.float32)
WRONG_TYPE = "has an element type that is not supported"


def ones(shape, dtype=np.float32):
    return np.ones(shape, dtype)


REFUSED = {
    "dequantize_int32": (
        jqx.onednn.onednn_dequantize,
        (ones(3, np.int32),),
        {"scales": [1.0]},
        TypeError,
        (f"`q` {WRONG_TYPE}", "int32"),
    ),
    "dequantize_with_three_scales": (
        jqx.onednn.onednn_dequantize,
        (Q,),
        {"scales": [1.0, 2.0, 3.0], "granularity": "per_channel"},
        ValueError,
        ("`scales` must be 1-D with one element per channel", "scales.shape == (4,)"),
    ),
    "dequantize_axis": (
        jqx.onednn.onednn_dequantize,
        (Q,),
        {"scales": [1.0], "granularity": "per_channel", "axis": 5},
        ValueError,
        ("axis (5) must be less than input shape rank (2)",),
    ),
    "dynamic_dequantize_int16": (
        jqx.onednn.dynamic_dequantize,
        (ones(3, np.int16), ONE),
        {},
        TypeError,
        (f"`q` {WRONG_TYPE}", "int16", "int4"),
    ),
    "dynamic_dequantize_scales": (
        jqx.onednn.dynamic_dequantize,
        (Q, ones(1, np.int32)),
        {},
        TypeError,
        (f"`scales` {WRONG_TYPE}", "int32", "bfloat16"),
    ),
    "dynamic_dequantize_zps": (
        jqx.onednn.dynamic_dequantize,
        (Q, ONE, ones(1, np.uint16)),
        {},
        TypeError,
        (f"`zps` {WRONG_TYPE}", "uint16"),
    ),
    "dynamic_dequantize_granularity": (
        jqx.onednn.dynamic_dequantize,
        (Q, ONE),
        {"granularity": "per_row"},
        ValueError,
        ("`granularity` 'per_row' is unknown", "per_group"),
    ),
    "group_shape_without_groups": (
        jqx.onednn.dynamic_dequantize,
        (Q, ONE),
        {"group_shape": (1, 2)},
        ValueError,
        ("`group_shape` has no meaning", "per_tensor", "drop group_shape"),
    ),
    "no_group_shape": (
        jqx.onednn.dynamic_dequantize,
        (Q, ones((2, 2))),
        {"granularity": "per_group"},
        ValueError,
        ("`group_shape` does not divide the shape of `q`", "None", "(2, 4)"),
    ),
    "group_shape_that_does_not_divide": (
        jqx.onednn.dynamic_dequantize,
        (Q, ones((2, 2))),
        {"granularity": "per_group", "group_shape": (1, 3)},
        ValueError,
        ("`group_shape` does not divide", "group_shape == (1, 3), q.shape == (2, 4)"),
    ),
    "group_shape_of_another_rank": (
        jqx.onednn.dynamic_dequantize,
        (Q, ones((2, 2))),
        {"granularity": "per_group", "group_shape": (2,)},
        ValueError,
        ("`group_shape` does not divide",),
    ),
    "group_of_zero": (
        jqx.onednn.dynamic_dequantize,
        (Q, ones((2, 2))),
        {"granularity": "per_group", "group_shape": (1, 0)},
        ValueError,
        ("`group_shape` does not divide",),
    ),
    "scales_not_one_per_group": (
        jqx.onednn.dynamic_dequantize,
        (Q, ones((2, 4))),
        {"granularity": "per_group", "group_shape": (1, 2)},
        ValueError,
        ("`scales` must hold one element per group", "(2, 4)", "scales.shape == (2, 2)"),
    ),
    "zps_not_one_per_group": (
        jqx.onednn.dynamic_dequantize,
        (Q, ones((2, 2)), ones((1, 2), np.int8)),
        {"granularity": "per_group", "group_shape": (1, 2)},
        ValueError,
        ("`zps` must hold one element per group", "(1, 2)", "zps.shape == (2, 2)"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_dequantizing_is_refused_with_the_facts(case):
    function, operands, options, error, facts = REFUSED[case]
    f = functools.partial(function, **options)
    assert_refused(f, operands, error, f"onednn.{function.__name__}", *facts)
