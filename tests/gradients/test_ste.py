"""The straight-through estimator against finite differences of the ops with `round` deleted."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.gradients.estimators import (
    StraightThrough,
    StraightThroughUnclipped,
    clamp,
    straight_through,
)
from jqx.gradients import ste, ste_unclipped

from ..oracles.numerics import as_float64, code_range, codes_of

SHAPE = (2, 3, 4)
STEP = 2.0**-18
# Central differences of sums of at most 24 terms of magnitude below 16 err by at most
# 24 * 16 * 2**-52 / STEP from rounding, and by STEP**2 / 6 times a third derivative below 2**14
# (spans are 1 or more) from truncation: less than 1e-7 together.
DIFFERENCES = 1e-7
# A float32 gradient sums at most 24 terms of magnitude below 16, each after at most 16 roundings.
ROUNDINGS = 24 * 16 * 40 * 2.0**-24


def f32(*values):
    return np.float32(values)


def fake_quantize_sum(levels, operands=5):
    """The gradients of a sum of results by the first operands."""

    def loss(*args):
        return jqx.fake_quantize(*args, levels=levels).sum()

    return jax.grad(loss, argnums=tuple(range(operands)))


def affine_sum(qtype, **options):
    """The gradients of a sum of results by x and the scale."""

    def loss(x, scale, zero_point=None):
        return jqx.quantize_dequantize(x, scale, zero_point, qtype=qtype, **options).sum()

    return jax.grad(loss, argnums=(0, 1))


def numerical_gradients(f, operands):
    """Central differences of the scalar function `f` in every element of every operand."""
    gradients = []
    for i, operand in enumerate(operands):
        gradient = np.zeros(operand.shape)
        for index in np.ndindex(operand.shape):
            ends = []
            for step in (STEP, -STEP):
                moved = [np.array(v) for v in operands]
                moved[i][index] += step
                ends.append(f(*moved))
            gradient[index] = (ends[0] - ends[1]) / (2 * STEP)
        gradients.append(gradient)
    return gradients


def relaxed_fake_quantize(x, il, ih, ol, oh):
    """FakeQuantize-1 with `round` deleted, where no operand is NaN."""
    y = (x - il) / (ih - il) * (oh - ol) + ol
    return np.where(x <= np.minimum(il, ih), ol, np.where(x > np.maximum(il, ih), oh, y))


def relaxed_affine(x, scale, zero_point, qtype):
    """dequantize(quantize(x)) with `round` deleted."""
    low, high = code_range(qtype)
    return (np.clip(x / scale + zero_point, low, high) - zero_point) * scale


def points_beside_kinks(low, high, shape, seed):
    """Values below, inside and above [low, high], a twentieth of its width away from its ends."""
    rng = np.random.default_rng(seed)
    inside, outside = rng.uniform(0.05, 0.95, shape), rng.uniform(0.05, 0.9, shape)
    region = rng.permutation(np.arange(np.prod(shape)) % 4).reshape(shape)
    t = np.select([region == 0, region == 1], [-outside, 1 + outside], inside)
    return low + (high - low) * t


BROADCASTS = {  # shapes of the four limits, the same lined up with x, and the options
    "per_tensor": ([()] * 4, [(1, 1, 1)] * 4, {}),
    "per_channel": ([(3, 1)] * 4, [(1, 3, 1)] * 4, {}),
    "last_axis": ([(4,)] * 4, [(1, 1, 4)] * 4, {}),
    "none": ([SHAPE] * 4, [SHAPE] * 4, {"auto_broadcast": "none"}),
    "mixed": (
        [(), (3, 1), (2, 1, 4), (4,)],
        [(1, 1, 1), (1, 3, 1), (2, 1, 4), (1, 1, 4)],
        {},
    ),
    "pdpd_middle": ([(3,)] * 4, [(1, 3, 1)] * 4, {"auto_broadcast": "pdpd", "axis": 1}),
    "pdpd_pair": ([(2, 3)] * 4, [(2, 3, 1)] * 4, {"auto_broadcast": "pdpd", "axis": 0}),
    "pdpd_right": ([(3, 4)] * 4, [(1, 3, 4)] * 4, {"auto_broadcast": "pdpd"}),
}


def fake_quantize_case(name, inputs_inverted, outputs_inverted):
    """Returns float64 operands, exact in float32, the shapes lined up with x, and a cotangent."""
    shapes, lined_up, _ = BROADCASTS[name]
    rng = np.random.default_rng(list(BROADCASTS).index(name))
    bounds = [(-1.5, -0.5), (0.5, 1.5), (-3, -1), (1, 3)]
    il, ih, ol, oh = (
        np.asarray(rng.uniform(*bound, shape)) for bound, shape in zip(bounds, shapes, strict=True)
    )
    il, ih = (-il, -ih) if inputs_inverted else (il, ih)
    ol, oh = (-ol, -oh) if outputs_inverted else (ol, oh)
    limits = [np.float64(np.float32(v)) for v in (il, ih, ol, oh)]
    il, ih = (v.reshape(s) for v, s in zip(limits[:2], lined_up[:2], strict=True))
    x = points_beside_kinks(np.minimum(il, ih), np.maximum(il, ih), SHAPE, 7)
    cotangent = np.float32(rng.uniform(-1, 1, SHAPE))
    return [np.float64(np.float32(x)), *limits], lined_up, cotangent


@functools.cache
def fake_quantize_gradients(name, form):
    def loss(cotangent, *operands):
        y = jqx.fake_quantize(*operands, levels=5, **BROADCASTS[name][2])
        return jnp.vdot(y, cotangent)

    f = jax.grad(loss, argnums=(1, 2, 3, 4, 5))
    if form == "vmap":
        f = jax.vmap(f)
    return f if form == "eager" else jax.jit(f)


INVERSIONS = list(itertools.product([False, True], repeat=2))


@pytest.mark.many
@pytest.mark.parametrize("inputs_inverted, outputs_inverted", INVERSIONS)
@pytest.mark.parametrize("name", BROADCASTS)
def test_fake_quantize_has_the_derivative_of_its_formula_without_round(
    name, inputs_inverted, outputs_inverted
):
    operands, lined_up, cotangent = fake_quantize_case(name, inputs_inverted, outputs_inverted)

    def relaxed(x, *limits):
        limits = [v.reshape(s) for v, s in zip(limits, lined_up, strict=True)]
        return np.sum(relaxed_fake_quantize(x, *limits) * np.float64(cotangent))

    expected = numerical_gradients(relaxed, operands)
    assert all(np.any(gradient != 0) for gradient in expected)
    with jax.enable_x64(True):
        exact = fake_quantize_gradients(name, "jit")(np.float64(cotangent), *operands)
    for got, want in zip(exact, expected, strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=DIFFERENCES, strict=True)
    rounded = fake_quantize_gradients(name, "jit")(cotangent, *map(np.float32, operands))
    for got, want in zip(rounded, expected, strict=True):
        assert got.dtype == jnp.float32 and got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDINGS + DIFFERENCES)


@pytest.mark.parametrize("name", ["per_tensor", "mixed", "pdpd_middle"])
def test_fake_quantize_has_the_same_gradients_eagerly_and_under_vmap(name):
    cases = [fake_quantize_case(name, *inverted) for inverted in INVERSIONS]
    stacked = [np.float32(np.stack(v)) for v in zip(*(c[0] for c in cases), strict=True)]
    cotangents = np.stack([c[2] for c in cases])
    mapped = fake_quantize_gradients(name, "vmap")(cotangents, *stacked)
    for i, (operands, _, cotangent) in enumerate(cases):
        operands = [np.float32(v) for v in operands]
        eager = fake_quantize_gradients(name, "eager")(cotangent, *operands)
        jitted = fake_quantize_gradients(name, "jit")(cotangent, *operands)
        for a, b, c in zip(eager, jitted, mapped, strict=True):
            assert a.shape == b.shape == c[i].shape
            np.testing.assert_allclose(a, b, rtol=0, atol=2 * ROUNDINGS)
            np.testing.assert_allclose(c[i], b, rtol=0, atol=2 * ROUNDINGS)


def test_vmap_over_x_alone_gives_each_copy_its_own_limit_gradient():
    x = f32(-2, 0.5, 3)[:, None]
    f = jax.vmap(fake_quantize_sum(3, 3), in_axes=(0, *[None] * 4))
    _, d_il, d_ih = f(x, *f32(0, 1, 0, 1))
    np.testing.assert_array_equal(d_il, [0, -0.5, 0])
    np.testing.assert_array_equal(d_ih, [0, -0.5, 0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_operands_have_16_bit_gradients_narrowed_once(dtype):
    dtype = jnp.dtype(dtype)
    for name, inverted in itertools.product(["mixed", "pdpd_pair"], INVERSIONS):
        operands, _, cotangent = fake_quantize_case(name, *inverted)
        operands = [v.astype(dtype) for v in operands]
        cotangent = cotangent.astype(dtype)
        got = fake_quantize_gradients(name, "jit")(cotangent, *operands)
        wide = fake_quantize_gradients(name, "jit")(*map(np.float32, (cotangent, *operands)))
        half_ulp = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-11
        for g, w, operand in zip(got, wide, operands, strict=True):
            assert g.dtype == dtype and g.shape == operand.shape
            np.testing.assert_allclose(
                as_float64(g), as_float64(w), rtol=half_ulp, atol=2 * ROUNDINGS
            )


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("form", ["scalar", "per_channel"])
def test_equal_input_limits_have_no_gradient_and_leave_x_none(form, jit):
    x = np.float32([[-1, 0.5, 0.5, 2], [-1, 0.25, 0.5, 2]]).T
    shape = () if form == "scalar" else (2,)
    limits = [np.full(shape, v, np.float32) for v in (0.5, 0.5, -1, 3)]
    f = fake_quantize_sum(4)
    dx, d_il, d_ih, d_ol, d_oh = (jax.jit(f) if jit else f)(x, *limits)
    np.testing.assert_array_equal(dx, np.zeros((4, 2)))
    np.testing.assert_array_equal(d_il, np.zeros(shape))
    np.testing.assert_array_equal(d_ih, np.zeros(shape))
    assert np.sum(d_ol) == 6 and np.sum(d_oh) == 2


def test_equal_limits_in_one_channel_leave_the_other_channels_alone():
    x = np.float32([[0.25, 0.25], [0.75, 0.75]])
    il, ih = f32(0.5, 0), f32(0.5, 1)
    dx, d_il, d_ih = fake_quantize_sum(5, 3)(x, il, ih, *f32(0, 1))
    np.testing.assert_array_equal(dx, [[0, 1], [0, 1]])
    np.testing.assert_array_equal(d_il, [0, -1])
    np.testing.assert_array_equal(d_ih, [0, -1])


def test_infinite_x_has_finite_gradients():
    x = f32(-np.inf, 0.5, np.inf)
    dx, d_il, d_ih, d_ol, d_oh = fake_quantize_sum(5)(x, *f32(0, 1, 0, 4))
    np.testing.assert_array_equal(dx, [0, 4, 0])
    assert (d_il, d_ih, d_ol, d_oh) == (-2, -2, 1.5, 1.5)


AXES = {"per_tensor": (), "per_channel": (1,), "pair": (0, 2), "elementwise": (0, 1, 2)}


def affine_case(qtype, axes, sign, seed):
    rng = np.random.default_rng(seed)
    low, high = code_range(qtype)
    shape = tuple(SHAPE[axis] for axis in axes)
    lined_up = tuple(n if axis in axes else 1 for axis, n in enumerate(SHAPE))
    width = 2 / (high - low)  # so that the real range has a width from 1 to 2
    scale = np.float64(np.float32(sign * rng.uniform(0.5 * width, width, shape)))
    zero_point = rng.integers(low, high, shape, endpoint=True)
    s, z = scale.reshape(lined_up), zero_point.reshape(lined_up)
    x = points_beside_kinks((low - z) * s, (high - z) * s, SHAPE, seed)
    cotangent = np.float32(rng.uniform(-1, 1, SHAPE))
    return np.float64(np.float32(x)), scale, zero_point, lined_up, cotangent


@functools.cache
def affine_gradients(qtype, axes, form):
    def loss(x, scale, zero_point, cotangent):
        y = jqx.quantize_dequantize(x, scale, zero_point, qtype=qtype, axes=axes)
        return (y * cotangent).sum()

    f = jax.grad(loss, argnums=(0, 1))
    if form == "vmap":
        f = jax.vmap(f)
    return f if form == "eager" else jax.jit(f)


@pytest.mark.many
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("qtype", ["int8", "uint4", "int2"])
def test_quantize_dequantize_has_the_derivative_of_its_formula_without_round(qtype, axes, sign):
    x, scale, zero_point, lined_up, cotangent = affine_case(qtype, axes, sign, 11)

    def relaxed(x, scale):
        y = relaxed_affine(x, scale.reshape(lined_up), zero_point.reshape(lined_up), qtype)
        return np.sum(y * np.float64(cotangent))

    # The scale moves by a share of itself, or a step could cross a kink. Clipped values are linear
    # in it, so that truncation costs nothing and 24 * 16 * 2**-52 / (STEP * |scale|) remains.
    expected_dx = numerical_gradients(lambda v: relaxed(v, scale), [x])[0]
    expected_ds = numerical_gradients(lambda v: relaxed(x, scale * v), [np.ones(scale.shape)])[0]
    z = codes_of(zero_point, qtype)
    with jax.enable_x64(True):
        dx, ds = affine_gradients(qtype, axes, "jit")(x, scale, z, np.float64(cotangent))
    assert dx.dtype == ds.dtype == np.float64
    np.testing.assert_allclose(dx, expected_dx, rtol=0, atol=DIFFERENCES, strict=True)
    ds = as_float64(ds) * scale
    np.testing.assert_allclose(ds, expected_ds, rtol=0, atol=DIFFERENCES, strict=True)
    operands = np.float32(x), np.float32(scale), z, cotangent
    for form in ("eager", "jit"):
        dx, ds = affine_gradients(qtype, axes, form)(*operands)
        assert dx.dtype == ds.dtype == jnp.float32
        np.testing.assert_allclose(dx, expected_dx, rtol=0, atol=DIFFERENCES)
        assert ds.shape == scale.shape
        np.testing.assert_allclose(
            as_float64(ds) * scale, expected_ds, rtol=0, atol=ROUNDINGS + DIFFERENCES
        )


def test_quantize_dequantize_has_the_same_gradients_under_vmap():
    cases = [affine_case("int8", (1,), sign, seed) for sign in (1, -1) for seed in (12, 13)]
    operands = [(np.float32(x), np.float32(s), codes_of(z, "int8"), c) for x, s, z, _, c in cases]
    stacked = [np.stack(v) for v in zip(*operands, strict=True)]
    mapped = affine_gradients("int8", (1,), "vmap")(*stacked)
    for i, one in enumerate(operands):
        dx, ds = affine_gradients("int8", (1,), "jit")(*one)
        np.testing.assert_array_equal(mapped[0][i], dx)
        scale = as_float64(one[1])
        np.testing.assert_allclose(
            as_float64(mapped[1][i]) * scale, as_float64(ds) * scale, rtol=0, atol=2 * ROUNDINGS
        )


def test_a_clipped_value_pulls_the_scale_by_its_distance_from_the_zero_point():
    f = affine_sum(jnp.int8)
    x, scale = f32(-1000, 0.3, 1000), np.float32(0.5)
    for z in (-128, -3, 0, 100, 126):
        dx, ds = f(x, scale, np.int8(z))
        np.testing.assert_array_equal(dx, [0, 1, 0])
        assert ds == (-128 - z) + (127 - z)
    dx, ds = f(x, scale, None)
    assert ds == -1


@pytest.mark.parametrize("mode", [jqx.RoundMode.UP, jqx.RoundMode.NEAREST_DOWNWARD])
def test_the_round_mode_does_not_change_the_gradient(mode):
    x = np.linspace(-3, 3, 41, dtype=np.float32)
    dx, _ = affine_sum(jnp.int4, round_mode=mode)(x, np.float32(0.25))
    np.testing.assert_array_equal(dx, (x >= -2) & (x <= 1.75))


def test_nan_gets_no_gradient_and_gives_the_scale_none():
    x = f32(np.nan, 0.5, np.inf, -np.inf)
    dx, ds = affine_sum(jnp.int8)(x, np.float32(0.5))
    np.testing.assert_array_equal(dx, [0, 1, 0, 0])
    assert ds == 127 - 128


ONE_MORE = np.nextafter(np.float32(1), 2)
RULE = {  # x, limits, and the derivatives by x and by both limits
    "inside, and clipped": (
        *([-2, -1, 0, 1, 2, np.nan, -np.inf, np.inf], [-1] * 8, [1] * 8),
        *([0, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 0, 0, 1]),
    ),
    "one rounding beyond a limit is inside, a thousandth is not": (
        *([-(2.0**-24), ONE_MORE, -0.001, 1.001], [0] * 4, [1] * 4),
        *([1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]),
    ),
    "infinite limits": (
        *([-1, 5, 5], [-np.inf, -np.inf, 0], [np.inf, 1, np.inf]),
        *([1, 0, 1], [0, 0, 0], [0, 1, 0]),
    ),
}


@pytest.mark.parametrize("case", RULE)
def test_the_rule_passes_the_cotangent_to_x_inside_and_to_the_limit_that_clips_outside(case):
    x, low, high, *derivatives = map(np.float32, RULE[case])
    cotangent = np.arange(1, len(x) + 1, dtype=np.float32)
    for f in (ste.bwd, jax.jit(ste.bwd, static_argnums=3)):
        for actual, expected in zip(f(x, low, high, 256, cotangent), derivatives, strict=True):
            np.testing.assert_array_equal(actual, expected * cotangent)


def test_the_rule_without_the_clip_mask_passes_everything_but_nan_to_x():
    x = f32(-np.inf, -2, -1, 0, 1, 2, np.inf, np.nan)
    cotangent = np.arange(1, 9, dtype=np.float32)
    dx, dlow, dhigh = ste_unclipped.bwd(x, f32(-1), f32(1), 16, cotangent)
    np.testing.assert_array_equal(dx, [1, 2, 3, 4, 5, 6, 7, 0])
    np.testing.assert_array_equal(dlow, np.zeros(8))
    np.testing.assert_array_equal(dhigh, np.zeros(8))
    assert ste == StraightThrough() != StraightThroughUnclipped() == ste_unclipped
    assert hash(ste) == hash(StraightThrough())


def test_without_the_clip_mask_the_scale_has_no_gradient():
    f = affine_sum(jnp.int4, gradient=ste_unclipped)
    dx, ds = f(f32(-100, 0.3, 100), np.float32(0.5))
    np.testing.assert_array_equal(dx, [1, 1, 1])
    assert ds == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_clamp_has_the_gradient_of_the_rule_and_the_value_of_clip(dtype):

    @jax.jit
    def run(x, low, high, c):
        y, vjp = jax.vjp(clamp, x, low, high)
        return y, vjp(c), ste.bwd(x, low, high, 4, c)

    with jax.enable_x64(dtype == np.float64):
        x = dtype([[-3, -1 - 2.0**-24, -1, 0, 2, 2 + 2.0**-21, 4, -np.inf, np.inf, np.nan]])
        x = np.concatenate([x, x / 2])
        low, high = dtype([[-1], [-0.5]]), dtype([[2], [0.5]])
        c = np.random.default_rng(16).normal(size=x.shape).astype(dtype)
        y, got, (dx, dlow, dhigh) = run(x, low, high, c)
    np.testing.assert_array_equal(y, np.clip(x, low, high))
    np.testing.assert_array_equal(got[0], dx)
    for limit, summands in zip(got[1:], (dlow, dhigh), strict=True):
        np.testing.assert_allclose(limit, np.asarray(summands).sum(1, keepdims=True), rtol=1e-6)


def test_straight_through_has_the_derivative_of_its_second_argument_in_both_modes():
    def f(x):
        return straight_through(jnp.round(x), x**2)

    x, t = f32(0.4, 1.6), f32(1, 10)

    @jax.jit
    def run(x, t):
        return jax.jvp(f, (x,), (t,)), jax.grad(lambda x: f(x).sum())(x)

    (y, dy), dx = run(x, t)
    np.testing.assert_array_equal(y, [0, 2])
    np.testing.assert_allclose(dy, 2 * x * t)
    np.testing.assert_allclose(dx, 2 * x)


def test_the_extreme_that_sets_a_symmetric_scale_keeps_its_gradient():
    """One rounding puts the limit on either side of the extreme; it must not matter which."""
    rng = np.random.default_rng(14)
    x = (rng.normal(size=(300, 32)) * 2.0 ** rng.integers(-30, 30, (300, 1))).astype(np.float32)
    for qtype in ("int4", "int8", "int16"):
        limit = np.abs(x).max(1)
        scale, _ = jqx.affine_from_range(-limit, limit, qtype=qtype, symmetric=True)
        top = as_float64(scale) * code_range(qtype)[1]
        assert np.any(top < limit) and np.any(top > limit)
        f = jax.grad(
            lambda x, s=scale, q=qtype: jqx.quantize_dequantize(x, s, qtype=q, axes=0).sum()
        )
        np.testing.assert_array_equal(f(x), np.ones(x.shape))
        np.testing.assert_array_equal(jax.jit(f)(x), np.ones(x.shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_extremes_that_are_the_input_limits_keep_their_gradient(dtype):
    rng = np.random.default_rng(15)
    x = rng.normal(size=(50, 16)).astype(jnp.dtype(dtype))
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)

    def loss(x):
        return jqx.fake_quantize(x, low, high, low, high, levels=16).astype(jnp.float32).sum()

    np.testing.assert_array_equal(as_float64(jax.jit(jax.grad(loss))(x)), np.ones(x.shape))


def test_limits_taken_from_x_inside_the_graph_keep_the_gradient_of_the_extreme():
    """With output limits equal to the input limits, y follows the extremes one to one."""
    x = f32(-1.3, 0.2, 0.9, 2.7)

    def loss(x):
        low, high = x.min(), x.max()
        y = jqx.fake_quantize(x, low, high, low, high, levels=256)
        return y[0] + 10 * y[3]

    np.testing.assert_allclose(jax.grad(loss)(x), [1, 0, 0, 10], rtol=0, atol=ROUNDINGS)
