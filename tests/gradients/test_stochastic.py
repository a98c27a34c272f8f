"""Stochastic rounding: neighbours, probabilities, shared draws, and its use as a surrogate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.gradients import StochasticRounding, stochastic, stochastic_round

from ..oracles.refusals import assert_refused

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


def test_a_shared_axis_that_is_no_integer_or_out_of_range_is_refused():
    assert_refused(
        lambda: StochasticRounding((0.5,)), (), TypeError, "StochasticRounding", "shared_axes"
    )
    assert_refused(
        lambda x: stochastic_round(x, KEY, shared_axes=2),
        (np.zeros((2, 2), np.float32),),
        ValueError,
        "gradients.stochastic_round",
        "shared_axes == 2",
    )
    assert_refused(
        lambda x: stochastic_round(x, KEY),
        (np.arange(3),),
        TypeError,
        "gradients.stochastic_round",
        "`x`",
    )


def test_shared_axes_are_kept_as_a_tuple():
    assert StochasticRounding([0, 1]) == StochasticRounding((0, 1))
    assert StochasticRounding(1) == StochasticRounding((1,))
    assert stochastic == StochasticRounding() and stochastic.needs_key
