"""The levels found from bounds alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqx._src.gradients.estimators import grid, rounding_error

from .points import RANGES

EPS = 2.0**-23


@pytest.mark.parametrize("qmin, qmax", [*RANGES, (-(2**15), 2**15 - 1), (0, 2**16 - 1)])
def test_bounds_that_are_multiples_of_a_scale_give_the_scale_and_the_origin_zero(qmin, qmax):
    s = np.random.default_rng(1).uniform(1e-3, 1e3, 2000).astype(np.float32)
    low, high = np.float32(qmin) * s, np.float32(qmax) * s
    for f in (grid, jax.jit(grid, static_argnums=2)):
        origin, step = f(low, high, qmax - qmin + 1)
        np.testing.assert_array_equal(origin, np.zeros(2000))
        np.testing.assert_allclose(step, s, rtol=EPS)
        if -qmin >= qmax and np.log2(-qmin) % 1 == 0:
            np.testing.assert_array_equal(step, s)


def test_bounds_between_multiples_give_the_origin_low():
    low, high = np.float32([-1, 0.1, 2.5]), np.float32([1, 0.9, 3.5])
    origin, step = grid(low, high, 4)
    np.testing.assert_array_equal(origin, low)
    np.testing.assert_allclose(step, (high - low) / 3, rtol=EPS)


def test_an_empty_range_has_its_one_level_as_origin():
    low = np.float32([-1, 0, 0.3, 2])
    origin, step = grid(low, low, 16)
    np.testing.assert_array_equal(origin, low)
    np.testing.assert_array_equal(step, np.ones(4))


def test_the_error_of_a_tie_is_that_of_the_even_code():
    """With the zero point 3, half a step is 3.5 steps above low, but rounds to code 0, not to 1."""
    x = np.float32([0.5, 1.5, -0.5, -1.5])
    error = rounding_error(x, np.float32([-3]), np.float32([12]), 16)
    np.testing.assert_array_equal(error, [-0.5, 0.5, 0.5, -0.5])


def test_the_error_of_a_tie_counts_from_low_where_zero_is_no_level():
    x = np.float32([-2, 0, 2])
    error = rounding_error(x, np.float32([-3]), np.float32([3]), 4)
    np.testing.assert_array_equal(error, [-0.5, 0.5, -0.5])


def test_the_error_is_zero_where_x_is_not_finite():
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf])
    error = rounding_error(x, jnp.zeros(1), jnp.ones(1), 4)
    np.testing.assert_array_equal(error, np.zeros(3))
