"""The rules of published estimators against their formulas, in float64, element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.gradients.estimators import grid, rounding_error
from jqx.gradients import (
    LearnedStep,
    LearnedStepAndOffset,
    StochasticRounding,
    lsq,
    lsq_plus,
    pact,
    parq,
    stochastic,
    stochastic_round,
)

from ..arrays import on_device
from ..oracles.refusals import assert_refused

RANGES = [(-2, 1), (0, 3), (-1, 1), (-8, 7), (-3, 12), (-5, 250), (-128, 127)]
"""Smallest and largest code, the zero point already subtracted: 2 bits, 8 bits, odd, asymmetric."""

SCALES = [0.25, 0.3]
"""A power of two, for which ties are exact, and one that is none, for which they are left out."""


def positions(qmin, qmax, scale):
    """Returns float64 values in steps: levels, both limits, between and (where exact) on ties.

    Repeated up to one length, so that each operation compiles once for all ranges.
    """
    v = np.arange(qmin - 3, qmax + 3, 0.125)
    off_ties = v[v % 1 != 0.5]
    v = v if np.log2(scale) % 1 == 0 else np.concatenate([off_ties, off_ties + 0.49])
    near = np.array([qmin, qmax], float)
    return np.resize(np.concatenate([v, near - 0.01, near + 0.01, [-1e6, 1e6]]), 4096)


def case(qmin, qmax, scale, dtype=np.float32):
    """Returns positions in steps (float64) and, in `dtype`, x, low, high and a cotangent."""
    v = positions(qmin, qmax, scale)
    s = dtype(scale)
    x = (v * np.float64(s)).astype(dtype)
    low, high = (np.array([q * s], dtype) for q in (qmin, qmax))
    cotangent = np.random.default_rng(0).normal(size=v.shape).astype(dtype)
    return v, x, low, high, cotangent


@pytest.mark.parametrize("qmin, qmax", [*RANGES, (-(2**15), 2**15 - 1), (0, 2**16 - 1)])
def test_bounds_that_are_multiples_of_a_scale_give_the_scale_and_the_origin_zero(qmin, qmax):
    s = np.random.default_rng(1).uniform(1e-3, 1e3, 2000).astype(np.float32)
    low, high = np.float32(qmin) * s, np.float32(qmax) * s
    for f in (grid, jax.jit(grid, static_argnums=2)):
        origin, step = f(low, high, qmax - qmin + 1)
        np.testing.assert_array_equal(origin, np.zeros(2000))
        np.testing.assert_allclose(step, s, rtol=2.0**-23)
        if -qmin >= qmax and np.log2(-qmin) % 1 == 0:
            np.testing.assert_array_equal(step, s)


def test_bounds_between_multiples_and_of_an_empty_range_give_the_origin_low():
    low, high = np.float32([-1, 0.1, 2.5]), np.float32([1, 0.9, 3.5])
    origin, step = grid(low, high, 4)
    np.testing.assert_array_equal(origin, low)
    np.testing.assert_allclose(step, (high - low) / 3, rtol=2.0**-23)
    empty = np.float32([-1, 0, 0.3, 2])
    origin, step = grid(empty, empty, 16)
    np.testing.assert_array_equal(origin, empty)
    np.testing.assert_array_equal(step, np.ones(4))


def test_the_error_of_a_tie_is_that_of_the_even_code_counted_from_low_without_a_zero():
    """With the zero point 3, half a step is 3.5 steps above low, but rounds to code 0, not to 1.
    What is not finite has no error.
    """
    for x, low, high, levels, expected in (
        ([0.5, 1.5, -0.5, -1.5], -3, 12, 16, [-0.5, 0.5, 0.5, -0.5]),
        ([-2, 0, 2], -3, 3, 4, [-0.5, 0.5, -0.5]),
        ([np.nan, np.inf, -np.inf], 0, 1, 4, [0, 0, 0]),
    ):
        error = rounding_error(*map(jnp.float32, (x, [low], [high])), levels)
        np.testing.assert_array_equal(error, expected)


def paper(v, n, p):
    """Returns the derivatives by x, s and beta, `v = (x - beta) / s`."""
    inside = (v >= n) & (v <= p)
    ds = np.where(v < n, n, np.where(v > p, p, np.rint(v) - v))
    return inside * 1.0, ds, ~inside * 1.0


LSQ = LearnedStep(gradient_scale=False)
# An error of rounding is v - round(v) with |v| < 2**8 in float32, from four operations on v; codes
# of at most 250 multiply it, after a division by the number of steps, 255 at most.
ROUNDINGS = 2.0**8 * 8 * 2.0**-24 * 4


@pytest.mark.many
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("qmin, qmax", RANGES)
def test_the_rule_of_lsq_has_equations_1_to_3_of_its_paper(qmin, qmax, scale, dtype):
    with jax.enable_x64(dtype == np.float64):
        v, x, low, high, cotangent = case(qmin, qmax, scale, dtype)
        dx, dlow, dhigh = LSQ.bwd(x, low, high, qmax - qmin + 1, cotangent)
    assert dx.dtype == dlow.dtype == dhigh.dtype == dtype
    passes, ds, _ = paper(v, qmin, qmax)
    np.testing.assert_array_equal(dx, passes * cotangent)
    got = qmin * np.float64(dlow) + qmax * np.float64(dhigh)
    atol = ROUNDINGS * 4 if dtype == np.float32 else 1e-9
    np.testing.assert_allclose(got, ds * cotangent, rtol=1e-6, atol=atol)
    inside = passes == 1
    np.testing.assert_allclose(dlow[inside], -dhigh[inside], atol=1e-12)
    np.testing.assert_array_equal(dlow[v > qmax], 0)
    np.testing.assert_array_equal(dhigh[v < qmin], 0)


@pytest.mark.parametrize("zero_point", [0, 3, 8])
def test_the_scale_sees_the_rounding_of_the_forward_pass_ties_included(zero_point):
    """ds = (y - x) / s inside: with one scale an element, autodiff gives each its own."""
    v = positions(-zero_point, 15 - zero_point, 0.25)
    x, s = np.float32(v * 0.25), np.full(v.shape, 0.25, np.float32)
    z = np.full(v.shape, zero_point, jnp.uint4)

    def forward(s):
        return jqx.quantize_dequantize(x, s, z, qtype=jnp.uint4, axes=0, gradient=LSQ)

    y, vjp = jax.vjp(forward, s)
    inside = (v >= -zero_point) & (v <= 15 - zero_point)
    expected = np.where(inside, (np.asarray(y) - x) / s, np.asarray(y) / s)
    np.testing.assert_allclose(vjp(np.ones_like(y))[0], expected, rtol=1e-6, atol=ROUNDINGS)


def test_limits_see_the_rounding_of_fake_quantize_ties_included():
    """dlow = (x - y) / (high - low) inside, where a limit is input and output limit at once."""
    x = np.float32(np.arange(-8, 8.25, 0.25))
    low, high = np.full(x.shape, -7.5, np.float32), np.full(x.shape, 7.5, np.float32)

    def forward(low, high):
        return jqx.fake_quantize(x, low, high, low, high, levels=16, gradient=LSQ)

    y, vjp = jax.vjp(forward, low, high)
    dlow, dhigh = vjp(np.ones_like(y))
    share = np.where(np.abs(x) <= 7.5, (x - np.asarray(y)) / 15, 0)
    np.testing.assert_allclose(dlow, share + (x < -7.5), atol=1e-6)
    np.testing.assert_allclose(dhigh, -share + (x > 7.5), atol=1e-6)


def test_ds_is_the_derivative_of_the_expression_whose_rounding_is_a_constant_offset():
    """s * (clip(v / s) + c), where c is what the rounding added, by central differences."""
    v, s, qmin, qmax = positions(-8, 7, 0.3) * 0.3, 0.3, -8, 7
    v = v[(np.abs(v / s - qmin) > 1e-3) & (np.abs(v / s - qmax) > 1e-3)]
    clipped = np.clip(v / s, qmin, qmax)
    c = np.rint(clipped) - clipped
    h = 2.0**-20
    ends = [(s + d) * (np.clip(v / (s + d), qmin, qmax) + c) for d in (h, -h)]
    expected = np.sum(ends[0] - ends[1]) / (2 * h)
    with jax.enable_x64(True):
        got = jax.grad(lambda s: jqx.quantize_dequantize(v, s, qtype=jnp.int4, gradient=LSQ).sum())(
            np.float64(s)
        )
    # Rounding: 4096 terms below 3 in 2**-53 over h; truncation: the expression is linear in s.
    np.testing.assert_allclose(got, expected, atol=4096 * 3 * 2.0**-53 / h)


@pytest.mark.many
@pytest.mark.parametrize(
    "axes, shape, n", [((), (), 24), (0, (2,), 12), ((0, 2), (2, 4), 3), ((0, 1, 2), (2, 3, 4), 1)]
)
@pytest.mark.parametrize("qtype, z, qp", [("int4", None, 7), ("uint4", 3, 12), ("uint4", 15, 1)])
def test_the_gradient_scale_counts_the_elements_that_share_a_scale(axes, shape, n, qtype, z, qp):
    x = np.random.default_rng(2).normal(size=(2, 3, 4)).astype(np.float32)
    scale = np.full(shape, 0.1, np.float32)
    zero_point = None if z is None else np.full(shape, z, jnp.dtype(qtype))

    def gradients(gradient):
        def loss(x, s):
            y = jqx.quantize_dequantize(x, s, zero_point, qtype=qtype, axes=axes, gradient=gradient)
            return y.sum()

        return jax.grad(loss, (0, 1))(x, scale)

    (dx, ds), (plain_dx, plain_ds) = gradients(lsq), gradients(LSQ)
    np.testing.assert_array_equal(dx, plain_dx)
    np.testing.assert_allclose(ds, plain_ds / np.sqrt(n * qp), rtol=1e-5, atol=1e-7)
    assert np.any(plain_ds != 0)


def test_no_elements_have_no_gradient():
    f = jax.grad(
        lambda s: jqx.quantize_dequantize(
            np.zeros((0, 3), np.float32), s, qtype=jnp.int8, axes=1, gradient=lsq
        ).sum()
    )
    np.testing.assert_array_equal(f(np.ones(3, np.float32)), np.zeros(3))
    dx, dlow, dhigh = lsq.bwd(*[jnp.zeros((0, 3))] * 3, 4, jnp.zeros((0, 3)))
    assert dx.shape == dlow.shape == dhigh.shape == (0, 3)


LSQ_PLUS = LearnedStepAndOffset(gradient_scale=False)
CODES = [(-2, 1), (0, 3), (-8, 7), (0, 255)]


@pytest.mark.parametrize("beta", [0.0, 0.6, -3.171875])
@pytest.mark.parametrize("n, p", CODES)
def test_the_rule_of_lsq_plus_has_equations_5_and_6_of_its_paper(n, p, beta):
    s = 0.5
    v = positions(n, p, s)
    if beta * 2 % 1:
        v = v[v % 1 != 0.5]  # a tie survives an offset only where the sum is exact
    v = v[np.abs(v) < 1e5]  # the offset is lost in the largest
    x = np.float32(v * s + beta)
    low, high = (np.float32([q * s + beta]) for q in (n, p))
    cotangent = np.random.default_rng(3).normal(size=v.shape).astype(np.float32)
    dx, dlow, dhigh = map(np.float64, LSQ_PLUS.bwd(x, low, high, p - n + 1, cotangent))
    passes, ds, dbeta = paper(v, n, p)
    np.testing.assert_array_equal(dx, passes * cotangent)
    # One rounding of x or a bound is 2**-24 * 256 * 0.5, in steps twice that.
    np.testing.assert_allclose(n * dlow + p * dhigh, ds * cotangent, rtol=1e-6, atol=1e-3)
    np.testing.assert_allclose(dlow + dhigh, dbeta * cotangent, atol=1e-6)


def test_step_and_offset_learn_through_the_limits_of_fake_quantize():
    n, p, s, beta = -8, 7, 0.3, 0.11
    v = positions(n, p, s)
    with jax.enable_x64(True):

        def loss(s, beta):
            low, high = n * s + beta, p * s + beta
            x = v * 0.3 + 0.11
            return jqx.fake_quantize(x, low, high, low, high, levels=16, gradient=LSQ_PLUS).sum()

        got = jax.grad(loss, (0, 1))(np.float64(s), np.float64(beta))
    _, ds, dbeta = paper(v, n, p)
    np.testing.assert_allclose(got, (ds.sum(), dbeta.sum()), rtol=1e-9)


@pytest.mark.parametrize("levels, p", [(2, 1), (3, 1), (4, 1), (16, 7), (255, 126), (256, 127)])
def test_the_gradient_scale_takes_the_largest_signed_code_wherever_the_range_lies(levels, p):
    x = np.linspace(-2, 5, 24, dtype=np.float32).reshape(4, 6)
    low, high = np.float32([[0.3], [-9], [1], [0]]), np.float32([[1], [-8], [3], [4]])
    scaled = lsq_plus.bwd(x, low, high, levels, np.ones_like(x))
    plain = LSQ_PLUS.bwd(x, low, high, levels, np.ones_like(x))
    np.testing.assert_array_equal(scaled[0], plain[0])
    for a, b in zip(scaled[1:], plain[1:], strict=True):
        np.testing.assert_allclose(a, np.asarray(b) / np.sqrt(6 * p), rtol=1e-6)


ALPHA = 1.5
PACT_X = np.float32([-np.inf, -2, -1e-3, 0, 1e-3, 0.25, 0.75, 1.499, 1.5, 1.501, 7, np.inf, np.nan])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_rule_of_pact_has_equations_1_and_3_of_its_paper(dtype):
    cotangent = np.random.default_rng(4).normal(size=PACT_X.shape).astype(dtype)
    with jax.enable_x64(dtype == np.float64):
        dx, dlow, dhigh = pact.bwd(
            PACT_X.astype(dtype), np.zeros(1, dtype), np.full(1, ALPHA, dtype), 4, cotangent
        )
    assert dx.dtype == dlow.dtype == dhigh.dtype == dtype
    np.testing.assert_array_equal(dx, np.where((PACT_X >= 0) & (PACT_X < ALPHA), cotangent, 0))
    np.testing.assert_array_equal(dlow, np.zeros_like(cotangent))
    np.testing.assert_array_equal(dhigh, np.where(PACT_X >= ALPHA, cotangent, 0))


def test_alpha_learns_through_fake_quantize():
    x = PACT_X[1:-1]

    def loss(x, alpha):
        return jqx.fake_quantize(x, 0.0, alpha, 0.0, alpha, levels=16, gradient=pact).sum()

    dx, dalpha = jax.grad(loss, (0, 1))(x, np.float32(ALPHA))
    np.testing.assert_array_equal(dx, (x >= 0) & (x < ALPHA))
    np.testing.assert_allclose(dalpha, np.sum(x >= ALPHA), atol=1e-6)


def test_alpha_learns_through_an_unsigned_scale():
    """alpha = 15 s."""
    f = jax.grad(
        lambda s: jqx.quantize_dequantize(PACT_X[1:-2], s, qtype=jnp.uint4, gradient=pact).sum()
    )
    np.testing.assert_allclose(f(np.float32(0.1)), 15 * np.sum(PACT_X[1:-2] >= ALPHA), rtol=1e-6)


SLOPES = [1e-3, 0.1, 0.5, 0.75, 1.0]


def proximal_map(v, r):
    """The map with levels at the integers, m and d = 1 of the interval that holds `v`."""
    m = np.floor(v) + 0.5
    return m + np.clip((v - m) / r, -0.5, 0.5)


@pytest.mark.many
@pytest.mark.parametrize("r", SLOPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("qmin, qmax", RANGES)
def test_the_surrogate_is_the_map_on_the_levels(qmin, qmax, scale, r):
    v, x, low, high, _ = case(qmin, qmax, scale)
    if r < 0.1:  # so steep about the midpoints that float32 cannot follow
        v, x = (a[np.abs(v % 1 - 0.5) > 0.02] for a in (v, x))
    y = parq(r).surrogate(x, low, high, qmax - qmin + 1, None)
    expected = proximal_map(np.clip(v, qmin, qmax), r) * scale
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-4 * scale / r**0.5)
    assert np.all((y >= low) & (y <= high))


@pytest.mark.many
@pytest.mark.parametrize("scale", [0.25, 0.3, 0.0171])
@pytest.mark.parametrize("qtype, z", [("int2", None), ("int4", None), ("int8", None), ("uint4", 3)])
def test_inverse_slope_0_is_the_quantizer_and_1_the_clamp(qtype, z, scale):
    v = np.arange(-20, 20, 0.125)
    x = np.float32(v * scale)
    if scale != 0.25:
        x = x[v % 1 != 0.5]
    z = None if z is None else on_device(z, qtype)

    def y(**options):
        return jqx.quantize_dequantize(x, np.float32(scale), z, qtype=qtype, **options)

    hard, soft = y(gradient=parq(0.0)), y(gradient=parq(1.0))
    np.testing.assert_allclose(hard, y(), rtol=2.0**-22)
    np.testing.assert_array_equal(np.asarray(hard) == 0, np.asarray(y()) == 0)
    np.testing.assert_allclose(soft, np.clip(x, y().min(), y().max()), rtol=2.0**-22)


def test_the_gradient_of_the_surrogate_is_that_of_ste():
    x = np.float32(np.linspace(-3, 3, 50))

    def gradients(gradient):
        return jax.grad(
            lambda x, s: jqx.quantize_dequantize(x, s, qtype=jnp.int4, gradient=gradient).sum(),
            (0, 1),
        )(x, np.float32(0.25))

    for a, b in zip(gradients(parq(0.3)), gradients(jqx.gradients.ste), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_traced_slope_is_refused_and_points_to_a_number():
    with pytest.raises(TypeError, match="`inverse_slope` has the wrong type"):
        jax.jit(lambda r: parq(r).inverse_slope)(0.5)


KEY = jax.random.key(7)
DRAWS = 40_000
# The mean of n draws of variance p * (1 - p) <= 1/4 lies within 5 sigma of p but for 6e-7.
SIGMA = 0.5 / np.sqrt(DRAWS)
rounded = jax.jit(stochastic_round, static_argnames="shared_axes")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_results_are_the_two_neighbouring_integers_of_x_in_its_dtype(dtype):
    rng = np.random.default_rng(8)
    values = np.concatenate([rng.uniform(-3, 3, 500), rng.normal(size=500) * 2.0**20, [1 - 1e-7]])
    with jax.enable_x64(dtype == "float64"):
        x = np.clip(values, -6e4, 6e4).astype(jnp.dtype(dtype))
        y = rounded(x, KEY)
    assert y.dtype == jnp.dtype(dtype) and y.shape == x.shape
    x, y = np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64)
    assert np.all((y == np.floor(x)) | (y == np.ceil(x)))
    assert np.any(y[:500] > x[:500]) and np.any(y[:500] < x[:500])


def test_integers_of_any_magnitude_nan_and_infinities_stay():
    x = np.float32([0, 1, -3, 255, 2**23 - 1, 2**23, 2**24, -(2**31), 3e38, np.inf, -np.inf])
    for key in jax.random.split(KEY, 20):
        np.testing.assert_array_equal(rounded(x, key), x)
    assert jnp.isnan(stochastic_round(jnp.nan, KEY))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_the_mean_over_many_keys_is_x(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = np.array([0.5, 0.25, -0.25, 0.01, -7.9, 100.5, 1 / 3, -1e-4]).astype(jnp.dtype(dtype))
        keys = jax.random.split(KEY, DRAWS)
        y = jax.jit(jax.vmap(stochastic_round, (None, 0)))(x, keys)
    mean = np.asarray(y).astype(np.float64).mean(0)
    np.testing.assert_allclose(mean, np.asarray(x).astype(np.float64), rtol=0, atol=5 * SIGMA)


def test_the_mean_is_right_where_a_float_has_no_room_for_a_fraction_and_a_draw():
    """x + u would round to even here: half of all draws would be lost."""
    x = np.full(DRAWS, 2.0**22 + 0.5, np.float32)
    mean = np.mean(np.asarray(rounded(x, KEY)) - 2.0**22)
    np.testing.assert_allclose(mean, 0.5, atol=5 * SIGMA)


@pytest.mark.parametrize("draw", [0, 1, 100, 2**31, 2**32 - 1])
def test_an_element_moves_where_a_draw_of_32_bits_is_below_its_fraction(draw, monkeypatch):
    """The 23 bits of `jax.random.uniform` would move 2**-26 eight times too often."""
    monkeypatch.setattr(jax.random, "bits", lambda _, shape, dtype: jnp.full(shape, draw, dtype))
    fraction = np.float32([0, *np.ldexp(1.0, -np.arange(1, 33)), 0.3, 1 - 2.0**-24])
    moves = draw / 2.0**32 < fraction
    np.testing.assert_array_equal(stochastic_round(fraction, KEY), moves)
    np.testing.assert_array_equal(stochastic_round(-fraction, KEY), -1.0 * moves)
    integers = np.float32([-2, 1, 2**24])
    np.testing.assert_array_equal(stochastic_round(integers, KEY), integers)


@pytest.mark.parametrize("axes, same", [((0,), (0,)), (1, (1,)), ((-1, 0), (0, 1)), ((), ())])
def test_a_shared_axis_sees_one_draw(axes, same):
    x = np.full((50, 60), 0.5, np.float32)
    y = np.asarray(rounded(x, KEY, shared_axes=axes))
    for axis in (0, 1):
        assert np.all(y == y.take([0], axis)) == (axis in same)
    surrogate = jax.jit(StochasticRounding(axes).surrogate, static_argnums=3)
    surrogate = surrogate(x, *np.float32([[[0]], [[3]]]), 4, KEY)
    np.testing.assert_array_equal(surrogate, y)


def test_a_shared_draw_is_still_compared_with_each_element():
    x = np.float32(np.linspace(0, 1, 101))
    y = np.asarray(rounded(x, KEY, shared_axes=0))
    assert y[0] == 0 and y[-1] == 1 and np.all(np.diff(y) >= 0)


def test_the_gradient_is_that_of_the_identity():
    x = np.float32([-1.3, 0, 0.2, 5])
    f = jax.jit(jax.grad(lambda x: (stochastic_round(x, KEY) * jnp.arange(4.0)).sum()))
    np.testing.assert_array_equal(f(x), np.arange(4))


def test_the_surrogate_is_right_on_average_and_stays_on_levels_and_between_limits():
    """float32 steps of 0.3 are exact to a 1e-5 of a step, less than the noise of the mean."""
    s = np.float32(0.3)
    x = np.float32([-5, -0.9, -0.77, -0.3, 0, 0.1, 0.45, 1.0, 3.6, 3.7])
    low, high = np.float32([-3]) * s, np.float32([12]) * s
    keys = jax.random.split(KEY, DRAWS)
    draw = jax.vmap(lambda key: stochastic.surrogate(x, low, high, 16, key))
    y = np.asarray(jax.jit(draw)(keys))
    codes = y / s
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-5)
    assert np.abs(codes - np.clip(x / s, -3, 12)).max() < 1
    assert y.min() >= low[0] and y.max() <= high[0]
    clipped = np.clip(x, low, high)
    np.testing.assert_allclose(y.mean(0), clipped, atol=5 * SIGMA * s)
    assert np.all(y[:, 4] == 0)


def test_levels_without_zero_are_those_from_the_lower_limit_on():
    """Steps of 1 from 0.25 on: all numbers of it are exact in float32."""
    low, high, levels = np.float32([0.25]), np.float32([4.25]), 5
    x = np.float32([0, 0.25, 0.5, 1.75, 3.875, 4.25, 9])
    draw = jax.vmap(lambda key: stochastic.surrogate(x, low, high, levels, key))
    y = np.asarray(jax.jit(draw)(jax.random.split(KEY, DRAWS)))
    assert np.all((y - 0.25) % 1 == 0) and y.min() == 0.25 and y.max() == 4.25
    np.testing.assert_allclose(y.mean(0), np.clip(x, 0.25, 4.25), rtol=0, atol=5 * SIGMA)


def test_a_limit_that_is_a_rounding_off_its_level_is_not_left(monkeypatch):
    """The draw 0 moves whatever has a fraction, away from zero, by a whole step."""
    monkeypatch.setattr(jax.random, "bits", lambda _, shape, dtype: jnp.zeros(shape, dtype))
    a, b = np.random.default_rng(17).uniform(0.1, 1, (2, 500, 1)).astype(np.float32)
    draw = jax.jit(lambda x, low, high: stochastic.surrogate(x, low, high, 256, KEY))
    for low, high in [(-a, b), (a, a + b), (-5 * a, 250 * a)]:
        x = np.concatenate([low, high], 1)
        y = np.asarray(draw(x, low, high))
        assert np.all((y >= low) & (y <= high))


def test_levels_stay_where_they_are():
    s = np.random.default_rng(9).uniform(0.1, 1, (500, 1)).astype(np.float32)
    x = np.arange(-128, 128, dtype=np.float32) * s
    y = jqx.quantize_dequantize(x, s[:, 0], qtype=jnp.int8, axes=0, gradient=stochastic, key=KEY)
    np.testing.assert_allclose(y, x, atol=0, rtol=1e-6)


def test_estimators_are_values():
    """Shared axes are kept as a tuple."""
    assert lsq == LearnedStep() != LSQ
    assert lsq_plus == LearnedStepAndOffset() != LearnedStep()
    assert lsq.uniform_only and lsq_plus.uniform_only
    assert parq(0.5) == parq(0.5) != parq(0.25) and not parq(0.5).needs_key
    assert StochasticRounding([0, 1]) == StochasticRounding((0, 1))
    assert StochasticRounding(1) == StochasticRounding((1,))
    assert stochastic == StochasticRounding() and stochastic.needs_key


def test_options_that_have_no_meaning_are_refused():
    x, slope = np.zeros((2, 2), np.float32), ("gradients.parq", "inverse_slope")
    rounding, elements = "gradients.stochastic_round", ("LearnedStep", "`elements`")
    for call, operands, error, *words in (
        (lambda: LearnedStep(gradient_scale=0.1), (), TypeError, "LearnedStep", "gradient_scale"),
        (lambda: LearnedStep(elements=1.5), (), TypeError, *elements, "has the wrong type"),
        (lambda: LearnedStep(elements=0), (), ValueError, *elements, "is out of range"),
        (lambda: LearnedStep(False, elements=8), (), ValueError, *elements, "has no effect"),
        (lambda: parq(-0.1), (), ValueError, *slope),
        (lambda: parq(1.5), (), ValueError, *slope),
        (lambda: parq(float("nan")), (), ValueError, *slope),
        (lambda: StochasticRounding((0.5,)), (), TypeError, "StochasticRounding", "shared_axes"),
        (lambda x: stochastic_round(x, KEY, shared_axes=2), (x,), ValueError, rounding,
         "shared_axes == 2"),
        (lambda x: stochastic_round(x, KEY), (np.arange(3),), TypeError, rounding, "`x`"),
    ):  # fmt: skip
        assert_refused(call, operands, error, *words)
