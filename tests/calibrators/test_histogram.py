import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx._src.statistics import searches as histogram
from jqx.calibrators import percentile

from ..arrays import on_device
from ..oracles.calibrators import BLOCKED, SHAPE, blocks

law = settings(max_examples=12, deadline=None)

EDGES = np.array([2.0**e * (1 + k / 64) for e in range(-40, 24) for k in range(64)] + [2.0**24])
"""As the documentation has them; bin 0 is below the first, and one more is above the last."""

values = hnp.arrays(
    np.float32,
    SHAPE,
    elements=st.one_of(
        st.floats(width=32, allow_nan=False, allow_subnormal=False),
        st.floats(-100, 100, width=32, allow_subnormal=False),
        st.sampled_from(EDGES.tolist()),
        st.sampled_from((-EDGES).tolist()),
    ),
)


def counted(x):
    """The counts of `x` in NumPy."""
    place = np.searchsorted(EDGES, np.abs(np.float64(x)), side="right")
    return np.bincount(histogram.ZERO + np.where(x < 0, -place, place), minlength=histogram.LENGTH)


@pytest.mark.many
@pytest.mark.parametrize("granularity, sizes", BLOCKED, ids=str)
@law
@given(x=values)
def test_the_counts_are_those_of_numpy_with_the_documented_edges(granularity, sizes, x):
    spec = jqx.QSpec(jnp.int8, granularity, calibrator=percentile)
    stats = jax.jit(percentile.observe, static_argnums=1)(x, spec)
    assert stats.counts.dtype == jnp.uint32
    for place, block in blocks(x, sizes):
        np.testing.assert_array_equal(stats.counts[place], counted(block.ravel()))
        assert (stats.low[place], stats.high[place]) == (block.min(), block.max())


def test_the_edges_are_the_documented_ones_and_bins_are_narrow():
    np.testing.assert_array_equal(histogram.EDGES, EDGES)
    widths = np.diff(EDGES) / EDGES[:-1]
    assert 1 / 128 < widths.min() and widths.max() == 1 / 64
    np.testing.assert_array_equal(histogram.UPPER[histogram.ZERO :], [*EDGES, np.inf])
    np.testing.assert_array_equal(histogram.UPPER[: histogram.ZERO], -EDGES[::-1])


def test_nan_is_counted_apart():
    x = np.float32([[1, np.nan], [np.inf, np.nan], [-np.inf, 2]])
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(1), calibrator=percentile)
    stats = percentile.observe(on_device(x), spec)
    np.testing.assert_array_equal(stats.nans, [[0, 2]])
    np.testing.assert_array_equal(stats.counts.sum(-1), [[3, 1]])
    assert stats.counts[0, 0, 0] == stats.counts[0, 0, -1] == 1
    np.testing.assert_array_equal(stats.low, [[-np.inf, 2]])


def test_counts_saturate_and_still_merge_in_any_order():
    top = 2**32 - 1
    one, two, near = (np.uint32(n) for n in (1, 2, top - 2))

    def add(a, b):
        return np.asarray(histogram.saturating_add(on_device(a), on_device(b)))

    assert add(near, one) == top - 1
    assert add(near, two) == add(add(near, two), two) == add(near, near) == top
    for a, b, c in [(near, near, two), (one, near, two), (near, two, one)]:
        assert add(a, add(b, c)) == add(add(a, b), c) == add(c, add(b, a))


def test_magnitudes_count_both_signs_and_zero_once():
    x = np.float32([0, 0, 1, -1, 1, -3, 1e-20, np.inf, -np.inf])
    spec = jqx.QSpec(jnp.int8, calibrator=percentile)
    counts = histogram.magnitudes(percentile.observe(on_device(x), spec).counts)
    np.testing.assert_array_equal(counts[0], counted(np.abs(x))[histogram.ZERO :])


def test_no_elements_are_no_counts():
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(1), calibrator=percentile)
    stats, empty = percentile.observe(jnp.ones((0, 4)), spec), percentile.empty((1, 4))
    for a, b in zip(stats, empty, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, strict=True)
