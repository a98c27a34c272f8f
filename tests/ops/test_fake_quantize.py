"""`fake_quantize`, as the formula of OpenVINO in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx

from ..oracles.numerics import assert_floats, nearest
from ..oracles.refusals import assert_refusals, refusal
from ..strategies import SHAPE, law

INF, NAN = np.inf, np.nan


def formula(x, il, ih, ol, oh, levels):
    """FakeQuantize-1 left to right in NumPy; operands broadcast to `x`."""
    dtype = x.dtype
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    x, il, ih, ol, oh = (np.asarray(v).astype(wide) for v in (x, il, ih, ol, oh))
    steps = wide.type(levels - 1)
    with np.errstate(all="ignore"):
        y = np.rint((x - il) / (ih - il) * steps) / steps * (oh - ol) + ol
        low, high = np.where(ih < il, ih, il), np.where(ih > il, ih, il)
        y = np.where(x <= low, ol, np.where(x > high, oh, y))
        return y.astype(wide).astype(dtype)


def f32(*values):
    return np.float32(values)


def limits_like(shape, seed=0, dtype=np.float32):
    """Random limits: ordered, inverted and of several widths."""
    rng = np.random.default_rng(seed)
    il, ih, ol, oh = rng.normal(size=(4, *shape)).astype(dtype)
    return il, ih + np.sign(ih).astype(dtype) * dtype(0.25), ol, oh


BROADCASTS = {  # shapes of the four limits, the same lined up with x, and the options
    "scalars": ([()] * 4, [(1, 1, 1)] * 4, {}),
    "of_one_element": ([(1,)] * 4, [(1, 1, 1)] * 4, {}),
    "per_channel": ([(3, 1)] * 4, [(1, 3, 1)] * 4, {}),
    "last_axis": ([(4,)] * 4, [(1, 1, 4)] * 4, {}),
    "elementwise": ([SHAPE] * 4, [SHAPE] * 4, {}),
    "mixed": ([(), (3, 1), (2, 1, 4), (1, 4)], [(1, 1, 1), (1, 3, 1), (2, 1, 4), (1, 1, 4)], {}),
    "none": ([SHAPE] * 4, [SHAPE] * 4, {"auto_broadcast": "none"}),
    "pdpd_first": ([(2,)] * 4, [(2, 1, 1)] * 4, {"auto_broadcast": "pdpd", "axis": 0}),
    "pdpd_middle": ([(3,)] * 4, [(1, 3, 1)] * 4, {"auto_broadcast": "pdpd", "axis": 1}),
    "pdpd_pair": ([(2, 3)] * 4, [(2, 3, 1)] * 4, {"auto_broadcast": "pdpd", "axis": 0}),
    "pdpd_right": ([(3, 4)] * 4, [(1, 3, 4)] * 4, {"auto_broadcast": "pdpd"}),
    "pdpd_trailing_ones": (
        [(3, 1, 1), (3, 1), (3,), ()],
        [(1, 3, 1), (1, 3, 1), (1, 3, 1), (1, 1, 1)],
        {"auto_broadcast": "pdpd", "axis": 1},
    ),
    "pdpd_inner_one": ([(2, 1, 4)] * 4, [(2, 1, 4)] * 4, {"auto_broadcast": "pdpd", "axis": 0}),
    "pdpd_right_before_trimming": (
        [(3, 1)] * 4,
        [(1, 3, 1)] * 4,
        {"auto_broadcast": "pdpd", "axis": -1},
    ),
}


@pytest.mark.parametrize("name", BROADCASTS)
def test_limits_line_up_with_x_as_the_broadcast_says(name):
    shapes, lined_up, options = BROADCASTS[name]
    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    limits = [
        limits_like(shape, seed)[0] + np.float32(offset)
        for seed, (shape, offset) in enumerate(zip(shapes, (-1, 1, -2, 3), strict=True))
    ]
    expected = formula(x, *(v.reshape(s) for v, s in zip(limits, lined_up, strict=True)), 7)
    f = functools.partial(jqx.fake_quantize, levels=7, **options)
    assert_floats(f(x, *limits), expected, np.float32)
    assert_floats(jax.jit(f)(x, *limits), expected, np.float32)


@pytest.mark.many
@pytest.mark.parametrize("levels", [2, 3, 16, 255, 256, 65536, 2**24, 2**24 + 2, 2**31])
def test_every_level_is_the_formula_evaluated_left_to_right(levels):
    rng = np.random.default_rng(2)
    il, ih, ol, oh = limits_like((40, 1))
    middle = rng.uniform(-0.2, 1.2, (40, 2500)).astype(np.float32) * (ih - il) + il
    ties = ((rng.integers(0, 300, (40, 300)) + 0.5) / (levels - 1)).astype(np.float32)
    x = np.concatenate([middle, ties * (ih - il) + il, il, ih, np.nextafter(ih, il)], axis=1)
    f = functools.partial(jqx.fake_quantize, levels=levels)
    expected = formula(x, il, ih, ol, oh, levels)
    assert_floats(f(x, il, ih, ol, oh), expected, np.float32)
    assert_floats(jax.jit(f)(x, il, ih, ol, oh), expected, np.float32)
    scalars = [v[0, 0] for v in (il, ih, ol, oh)]
    assert_floats(f(x, *scalars), formula(x, *scalars, levels), np.float32)
    constant = jax.jit(lambda x: f(x, *scalars))(x)
    assert_floats(constant, formula(x, *scalars, levels), np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_dtype_is_the_formula_narrowed_once(dtype):
    rng = np.random.default_rng(3)
    dtype = jnp.dtype(dtype)
    x = rng.uniform(-3, 3, (3, 20000)).astype(dtype)
    limits = [v.astype(dtype) for v in limits_like((3, 1), 4)]
    expected = formula(x, *limits, 256)
    if dtype != np.float64:  # the narrowing itself, by another route than a cast
        wide = formula(*(v.astype(np.float32) for v in (x, *limits)), 256)
        np.testing.assert_array_equal(expected.astype(np.float64), nearest(wide, dtype))
    f = functools.partial(jqx.fake_quantize, levels=256)
    with jax.enable_x64(dtype == np.float64):
        assert_floats(f(x, *limits), expected, dtype)
        assert_floats(jax.jit(f)(x, *limits), expected, dtype)


finite = st.floats(-1000, 1000, width=32).map(lambda v: 0.0 if abs(v) < 2.0**-60 else v)


@functools.cache
def transformed(levels):
    f = functools.partial(jqx.fake_quantize, levels=levels)
    return jax.jit(f), jax.vmap(f), jax.jit(jax.vmap(f, in_axes=(0, None, None, None, None)))


@law
@given(
    hnp.arrays(np.float32, (3, 4), elements=finite),
    hnp.arrays(np.float32, (4, 3, 1), elements=finite),
    st.sampled_from([2, 4, 256]),
)
def test_jitted_and_vmapped_fake_quantize_give_the_bits_of_the_formula(x, limits, levels):
    jitted, mapped, mapped_over_x = transformed(levels)
    expected = formula(x, *limits, levels)
    assert_floats(jqx.fake_quantize(x, *limits, levels=levels), expected, np.float32)
    assert_floats(jitted(x, *limits), expected, np.float32)
    assert_floats(mapped(x, *limits), expected, np.float32)
    both = np.stack([expected, formula(-x, *limits, levels)])
    assert_floats(mapped_over_x(np.stack([x, -x]), *limits), both, np.float32)


@law
@given(
    hnp.arrays(np.float32, (24,), elements=finite),
    hnp.arrays(np.float32, (4,), elements=finite),
    st.sampled_from([2, 4, 256]),
)
def test_the_output_never_takes_more_than_levels_values_beside_the_limits(x, limits, levels):
    y = np.asarray(jqx.fake_quantize(x, *limits, levels=levels))
    _, _, ol, oh = limits
    steps = np.float32(levels - 1)
    grid = np.arange(levels, dtype=np.float32) / steps * (oh - ol) + ol
    assert set(y.tolist()) <= {*grid.tolist(), float(ol), float(oh)}


def one(x, il, ih, ol, oh, levels=256):
    return float(jqx.fake_quantize(*f32(x, il, ih, ol, oh), levels=levels))


SPECIAL = {  # x, il, ih, ol, oh, levels, result
    "nan": (NAN, 0, 1, 5, 6, 256, NAN),
    "nan_with_inverted_limits": (NAN, 1, 0, 5, 6, 256, NAN),
    "nan_with_equal_limits": (NAN, 1, 1, 5, 6, 256, NAN),
    "infinity": (INF, 0, 1, 5, 6, 256, 6),
    "minus_infinity": (-INF, 0, 1, 5, 6, 256, 5),
    "infinity_inverted": (INF, 1, 0, 5, 6, 256, 6),
    "minus_infinity_inverted": (-INF, 1, 0, 5, 6, 256, 5),
    "binarized_below": (0.5, 1, 1, -1, 1, 2, -1),
    "binarized_at": (1, 1, 1, -1, 1, 2, -1),
    "binarized_above": (1.0000001, 1, 1, -1, 1, 2, 1),
    "binarized_with_many_levels": (3, 1, 1, -1, 1, 256, 1),
    "binarized_infinity": (INF, 0.5, 0.5, -3, 4, 256, 4),
    "binarized_minus_infinity": (-INF, 0.5, 0.5, -3, 4, 2, -3),
    "binarized_at_zero": (-0.0, 0, 0, -1, 1, 256, -1),
    "inverted_below": (-0.5, 1, 0, 5, 6, 256, 5),
    "inverted_at_the_lower": (0, 1, 0, 5, 6, 256, 5),
    "inverted_above": (1.5, 1, 0, 5, 6, 256, 6),
    "inverted_between": (0.25, 1, 0, 0, 1, 256, 0.7490196),
    "inverted_at_the_upper": (1, 1, 0, 5, 6, 256, 5),  # the formula: x == il gives ol
    "output_inverted": (0.25, 0, 1, 1, 0, 5, 0.75),
    "output_inverted_below": (-3, 0, 1, 1, 0, 5, 1),
    "output_constant": (0.3, 0, 1, 2, 2, 256, 2),
    "at_input_low": (0.1, 0.1, 1, 5, 6, 256, 5),
    "tie_to_even_down": (2.5, 0, 255, 0, 255, 256, 2),
    "tie_to_even_up": (3.5, 0, 255, 0, 255, 256, 4),
    "below_a_half": (0.49999997, 0, 255, 0, 255, 256, 0),
    "two_levels_at_the_midpoint": (0.5, 0, 1, 5, 6, 2, 5),
    "two_levels_above_the_midpoint": (0.50000006, 0, 1, 5, 6, 2, 6),
    "nan_high_below": (0, 0.5, NAN, 5, 6, 256, 5),
    "nan_high_above": (0.6, 0.5, NAN, 5, 6, 256, 6),
    "nan_high_and_x": (NAN, 0.5, NAN, 5, 6, 256, NAN),
    "nan_low": (0.6, NAN, 1, 5, 6, 256, NAN),
    "nan_low_and_x_beyond": (INF, NAN, 1, 5, 6, 256, NAN),
    "nan_output_low_selected": (-1, 0, 1, NAN, 6, 256, NAN),
    "nan_output_low_not_selected": (2, 0, 1, NAN, 6, 256, 6),
    "nan_output_high_selected": (2, 0, 1, 5, NAN, 256, NAN),
    "nan_output_high_not_selected": (-1, 0, 1, 5, NAN, 256, 5),
    "infinite_limits": (0.5, -INF, INF, 0, 1, 256, NAN),
    "infinite_limits_at_minus_infinity": (-INF, -INF, INF, 0, 1, 256, 0),
    "infinite_high": (5, 0, INF, 5, 6, 256, 5),
    "overflowing_span": (0, -3e38, 3e38, 5, 6, 256, 5),  # 3e38 / inf * 255 is 0
    "overflowing_span_at_the_end": (3e38, -3e38, 3e38, 5, 6, 256, NAN),  # inf / inf
}


def test_special_values_follow_the_table():
    """Each by itself, and under jit all of the same number of levels."""
    for case, (*operands, levels, result) in SPECIAL.items():
        np.testing.assert_equal(one(*operands, levels), np.float32(result), case)
    for levels in (2, 5, 256):
        rows = [row for row in SPECIAL.values() if row[5] == levels]
        x, il, ih, ol, oh, _, result = np.float32(rows).T
        f = functools.partial(jqx.fake_quantize, levels=levels)
        assert_floats(jax.jit(f)(x, il, ih, ol, oh), result, np.float32)
        assert_floats(formula(x, il, ih, ol, oh, levels), result, np.float32)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_shapes_without_extent_keep_their_shape(shape):
    y = jqx.fake_quantize(np.full(shape, 0.3, np.float32), 0.0, 1.0, 0.0, 4.0, levels=5)
    assert y.shape == shape and y.dtype == jnp.float32
    assert np.all(np.asarray(y) == 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_python_limits_take_the_dtype_of_x(dtype):
    x = np.linspace(-1, 2, 31).astype(jnp.dtype(dtype))
    limits = [np.asarray(v, x.dtype) for v in (0.1, 0.9, -1, 7)]
    by_number = jqx.fake_quantize(x, 0.1, 0.9, -1, 7, levels=9)
    assert_floats(by_number, jqx.fake_quantize(x, *limits, levels=9), dtype)


def test_levels_may_be_a_numpy_integer():
    y = jqx.fake_quantize(f32(0.3), 0.0, 1.0, 0.0, 4.0, levels=np.int64(5))
    np.testing.assert_array_equal(y, [1])


X = np.ones(SHAPE, np.float32)
S = np.float32(1)
GOOD = (X, S, S, S, S)


def with_limit(name, value, x=X):
    names = ("input_low", "input_high", "output_low", "output_high")
    return (x, *(value if n == name else np.ones((), x.dtype) for n in names))


SHAPES = "Argument shapes are inconsistent"


WRONG_TYPES = [
    refusal(
        "`x` element type (int32) must be a floating point number",
        np.ones(3, np.int32),
        *[np.int32(1)] * 4,
    ),
    refusal(
        "`output_low` element type (float16) must match input element type (float32)",
        *with_limit("output_low", np.float16(1)),
    ),
    refusal(
        "`input_high` element type (int32) must match input element type (float32)",
        *with_limit("input_high", np.int32(1)),
    ),
    refusal(("`levels` must be an integer", "float"), levels=4.0),
    refusal("`levels` must be an integer", levels=True),
    refusal("`levels` must be an integer", levels=None),
    refusal(("not a gradient estimator", "bwd"), gradient=None),
]
WRONG_VALUES = [
    refusal("`levels` must be 2 or more, but is 1", levels=1),
    refusal("`levels` must be 2 or more", levels=0),
    refusal("2 or more, but is -1", levels=-1),
    refusal(
        ("'explicit' is not a member of AutoBroadcastType", "none, numpy, pdpd"),
        auto_broadcast="explicit",
    ),
    refusal("`axis` (1) has no meaning with auto_broadcast='numpy'", axis=1),
    refusal(
        (SHAPES, "`input_low`", "input_low.shape == (), x.shape == (2, 3, 4)"),
        X,
        S,
        X,
        X,
        X,
        auto_broadcast="none",
    ),
    refusal(
        (SHAPES, "`output_high`", "x.shape == (2, 3, 4)"),
        X,
        X,
        X,
        X,
        np.ones(1, np.float32),
        auto_broadcast="none",
    ),
    refusal(
        (SHAPES, "`input_high`", "(2, 1, 4)"),
        X,
        X,
        np.ones((2, 1, 4), np.float32),
        X,
        X,
        auto_broadcast="none",
    ),
    refusal(
        (SHAPES, "`input_low`", "input_low.shape == (3,), x.shape == (2, 3, 4)"),
        *with_limit("input_low", np.ones(3, np.float32)),
    ),
    refusal(
        (SHAPES, "`input_low`", "x.shape == (2, 1)"),
        *with_limit("input_low", np.ones((2, 3), np.float32), np.ones((2, 1), np.float32)),
    ),
    refusal(
        (SHAPES, "`output_low`"),
        *with_limit("output_low", np.ones((2, 3), np.float32), np.ones(3, np.float32)),
    ),
    refusal(
        (SHAPES, "`output_low`"),
        *with_limit("output_low", np.ones((1, 1), np.float32), np.ones(3, np.float32)),
    ),
    refusal(
        (SHAPES, "`input_low`"),
        *with_limit("input_low", np.ones((3, 1), np.float32), np.ones(3, np.float32)),
        auto_broadcast="pdpd",
        axis=0,
    ),
    refusal(
        (SHAPES, "`input_low`", "auto_broadcast == 'pdpd', axis == 0"),
        *with_limit("input_low", np.ones(3, np.float32)),
        auto_broadcast="pdpd",
        axis=0,
    ),
    refusal(
        (SHAPES, "`input_high`", "axis == 2"),
        *with_limit("input_high", np.ones((3, 4), np.float32)),
        auto_broadcast="pdpd",
        axis=2,
    ),
    refusal((SHAPES, "axis == 4"), auto_broadcast="pdpd", axis=4),
    refusal((SHAPES, "axis == -2", "-1"), auto_broadcast="pdpd", axis=-2),
    refusal((SHAPES, "axis == 1.0"), auto_broadcast="pdpd", axis=1.0),
]


def test_fake_quantize_refuses_with_the_facts():
    assert_refusals("fake_quantize", TypeError, WRONG_TYPES, *GOOD, levels=4)
    assert_refusals("fake_quantize", ValueError, WRONG_VALUES, *GOOD, levels=4)
