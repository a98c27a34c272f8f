import jax.numpy as jnp
import numpy as np

import jqx
from jqx._src.statistics.searches import LENGTH, ZERO, bin_of, points_in, points_of
from jqx.calibrators import percentile

from ..arrays import on_device
from ..oracles.calibrators import dequantized

SPEC = jqx.QSpec(jnp.int8, calibrator=percentile)


def test_the_points_of_a_bin_lie_in_it_on_no_grid():
    everywhere = percentile.empty((1,))._replace(
        low=jnp.float32([-jnp.inf]), high=jnp.float32([jnp.inf])
    )
    values = np.asarray(points_in(everywhere).values[0])
    np.testing.assert_array_equal(bin_of(on_device(values)), np.repeat(np.arange(LENGTH), 4))
    of_one_bin = values.reshape(LENGTH, 4)[ZERO + 1 : -1]
    widths = of_one_bin.max(1) - of_one_bin.min(1)
    assert (widths > 0).all()
    octave = np.float64(of_one_bin[40 * 64 :][:64])  # from 1 to 2, in bins of 1/64
    assert octave.min() >= 1 and octave.max() < 2
    assert len(np.unique(octave[:, 0] % (1 / 256))) == 64


def test_points_are_weighted_by_counts_and_moved_into_the_range():
    x = jnp.float32([3.0, 3.0, 3.0, -1.0, 0.0])
    points = points_in(percentile.observe(x, SPEC))
    weights, values = np.asarray(points.weights[0]), np.asarray(points.values[0])
    for low, high, count in [(-1, -0.98, 1), (0, 0, 1), (2.95, 3, 3), (-1, 3, 5)]:
        assert weights[(values >= low) & (values <= high)].sum() == 4 * count
    constant = points_in(percentile.observe(jnp.full((4,), 2.7), SPEC))
    assert set(np.asarray(constant.values[0])[np.asarray(constant.weights[0]) > 0]) == {
        np.float32(2.7)
    }


def test_the_range_holds_zero():
    for x, low, high in [([2.0, 3.0], 0, 3), ([-2.0, -3.0], -3, 0)]:
        x = jnp.float32(x)
        for points in (points_of(x, SPEC), points_in(percentile.observe(x, SPEC))):
            assert (points.low[0], points.high[0]) == (low, high)


def test_the_loss_is_that_of_every_value_in_units_of_the_largest():
    x = np.random.default_rng(0).normal(size=50).astype(np.float32)
    x[3] = np.nan
    spec = jqx.QSpec(jnp.int4)
    m = np.nanmax(np.abs(x))
    affine = jqx.calibrators.Affine(jnp.float32([m / np.float32(7)]))
    known = x[~np.isnan(x)]
    error = (known - dequantized(known, -m, m, "int4", True)) / m
    found = points_of(on_device(x), spec).loss(affine, spec, jnp.square)
    np.testing.assert_allclose(found[0], np.sum(error**2), rtol=1e-5)


def test_the_expected_loss_is_near_that_of_the_array_where_bins_are_wider_than_steps():
    x = np.random.default_rng(1).normal(size=20_000).astype(np.float32)
    for qtype in ("int4", "int8", "int16"):
        spec = jqx.QSpec(qtype, calibrator=percentile)
        affine = jqx.calibrators.absmax.fit(on_device(x), spec)
        exact = points_of(on_device(x), spec).loss(affine, spec, jnp.square)
        points = points_in(percentile.observe(on_device(x), spec))
        np.testing.assert_allclose(points.loss(affine, spec, jnp.square) / 4, exact, rtol=0.03)
