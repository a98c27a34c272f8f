import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.statistics.calibrators import Rms
from jqx.calibrators import rms

from ..arrays import on_device
from ..oracles.calibrators import BLOCKED, SHAPE, blocks
from ..oracles.refusals import assert_refused


@pytest.mark.parametrize("granularity, sizes", BLOCKED, ids=str)
def test_the_range_is_the_multiple_of_the_root_mean_square(granularity, sizes):
    """To the rounding of float32 sums of up to 42 squares. A tail has fewer elements."""
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    spec = jqx.QSpec(jnp.int8, granularity, calibrator=rms(2.5))
    found = jax.jit(lambda x: spec.calibrator.fit(x, spec))(x)
    for place, block in blocks(x, sizes):
        expected = 2.5 * np.sqrt(np.mean(np.square(np.float64(block)))) / 127
        np.testing.assert_allclose(found.scale[place], expected, rtol=3e-6)


def test_batches_are_weighted_by_their_elements():
    spec = jqx.QSpec(jnp.int8, calibrator=rms(127.0))
    parts = [spec.calibrator.observe(on_device(x), spec) for x in ([3.0], [1.0, 1.0, 1.0])]
    scale = spec.calibrator.affine(spec.calibrator.merge(*parts), spec).scale
    np.testing.assert_allclose(scale, [np.sqrt(3)], rtol=1e-6)


def test_an_asymmetric_range_is_that_of_both_signs():
    spec = jqx.QSpec(jnp.uint8, symmetric=False, calibrator=rms(1.0))
    found = spec.calibrator.fit(jnp.full((4,), 3.0), spec)
    np.testing.assert_allclose(found.scale, [6 / 255], rtol=1e-6)
    assert found.zero_point[0] == 128


def test_nan_is_no_part_of_the_mean():
    stats = rms(1.0).observe(jnp.array([jnp.nan, 2.0]), jqx.QSpec(jnp.int8))
    assert (stats.squares[0], stats.elements[0]) == (4, 1)


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_a_multiplier_that_is_not_positive_is_refused(value):
    assert_refused(lambda: rms(value), (), ValueError, "calibrators.rms", "multiplier", "above 0")


def test_a_multiplier_that_is_no_number_is_refused():
    assert_refused(lambda: rms("3"), (), TypeError, "calibrators.rms", "multiplier")


def test_the_function_makes_the_value():
    assert rms(3) == Rms(3.0)
