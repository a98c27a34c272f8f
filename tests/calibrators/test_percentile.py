import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jqx
from jqx.calibrators import Percentile, absmax, minmax, percentile

from ..arrays import on_device
from ..oracles.calibrators import BLOCKED, SHAPE, affine, blocks, decide, draw, fit, range_of
from ..oracles.refusals import assert_refused

law = settings(max_examples=25, deadline=None)

PER_TENSOR = jqx.per_tensor()
BIN = 1 + 1 / 64


def upper(x, percent):
    """NumPy's percentile that occurs among the values; the share is written in decimals."""
    return np.percentile(x, percent, method="inverted_cdf")


@functools.cache
def spec_of(percent, granularity=PER_TENSOR, symmetric=True):
    qtype = jnp.int8 if symmetric else jnp.uint8
    return jqx.QSpec(qtype, granularity, symmetric, Percentile(percent))


@functools.partial(jax.jit, static_argnums=1)
def of_every_granularity(x, specs):
    """What an array, and what the statistics of it, give for specs of one calibrator.

    Scales do not know of each other: those of all the statistics are decided as one array, as the
    cumulative sum of many bins takes long to compile.
    """
    found = [spec.calibrator.fit(x, spec) for spec in specs]
    stats = [spec.calibrator.observe(x, spec) for spec in specs]
    flat = [
        s._replace(
            counts=s.counts.reshape(-1, s.counts.shape[-1]),
            low=s.low.ravel(),
            high=s.high.ravel(),
            nans=s.nans.ravel(),
        )
        for s in stats
    ]
    together = jax.tree.map(lambda *a: jnp.concatenate([jnp.atleast_1d(v) for v in a]), *flat)
    near = specs[0].calibrator.affine(together, specs[0])
    parts = jnp.split(near.scale, np.cumsum([s.low.size for s in stats])[:-1])
    return found, [part.reshape(s.low.shape) for part, s in zip(parts, stats, strict=True)]


@pytest.mark.parametrize("percent", [50.0, 87.5, 100.0])
def test_fit_is_the_percentile_of_magnitudes_exactly(percent):
    x, specs = draw(SHAPE), tuple(spec_of(percent, granularity) for granularity, _ in BLOCKED)
    every = jax.device_get(of_every_granularity(x, specs))
    for (_, sizes), spec, found, near in zip(BLOCKED, specs, *every, strict=True):
        for place, block in blocks(x, sizes):
            limit = upper(np.abs(block), percent)
            assert found.scale[place] == affine(-limit, limit, "int8", True)[0]
            assert 1 <= near[place] / found.scale[place] <= BIN
        if percent == 100:
            np.testing.assert_array_equal(near, found.scale)
            assert near.shape == spec.granularity.scale_shape(SHAPE)


def test_fit_shares_the_clipped_values_between_both_ends():
    """Half at either end, rounded down: 20 % of 7 is one value, and none at either end."""
    x = draw(SHAPE) + np.float32(0.3)
    specs = tuple(spec_of(80.0, granularity, False) for granularity, _ in BLOCKED)
    every = jax.device_get(of_every_granularity(x, specs))
    for (_, sizes), found, near in zip(BLOCKED, *every, strict=True):
        for place, block in blocks(x, sizes):
            ordered, k = np.sort(block.ravel()), int(block.size * 0.2) // 2
            low, high = ordered[k], ordered[-1 - k]
            scale, zero = affine(low, high, "uint8", False)
            assert found.scale[place] == scale
            assert int(found.zero_point[place]) == int(zero)
            assert 1 <= near[place] / scale <= BIN


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_are_decided_where_they_lie(symmetric):
    """Of a blocked array, each scale is that of the array of its block alone."""
    granularity, sizes = BLOCKED[3]
    x, spec = draw(SHAPE), spec_of(87.5, granularity, symmetric)
    found = jax.device_get(decide(x, spec))
    assert found.scale.shape == granularity.scale_shape(SHAPE)
    for place, block in blocks(x, sizes):
        ordered = np.sort(np.abs(block).ravel() if symmetric else block.ravel())
        k = int(block.size * 0.125) // (1 if symmetric else 2)
        low, high = -ordered[-1 - k] if symmetric else ordered[k], ordered[-1 - k]
        scale, _ = affine(low, high, spec.qtype, symmetric)
        assert 1 <= found.scale[place] / scale <= BIN


@law
@given(st.sampled_from([50.0, 90.0, 99.0, 99.9, 99.99]), st.integers(0, 9), st.sampled_from([300]))
def test_of_a_histogram_it_is_within_a_bin(percent, seed, n):
    x, spec = draw((n,), seed), spec_of(percent)
    limit = upper(np.abs(x), percent)
    assert range_of(fit(x, spec), "int8") == pytest.approx(limit, rel=1e-6)
    assert limit * (1 - 1e-6) <= range_of(decide(x, spec), "int8") <= limit * BIN


def test_the_share_is_counted_in_decimals():
    """0.1 % of 1000 is one value, though 100 - 99.9 is a little less than 0.1 in binary."""
    cases = list(itertools.product([999, 1000, 1001, 10_000], [99.9, 99.7, 90.1]))
    arrays = [np.arange(1, n + 1, dtype=np.float32) for n, _ in cases]

    @jax.jit
    def found(arrays):
        pairs = zip(arrays, cases, strict=True)
        return [fit(x, spec_of(percent)) for x, (_, percent) in pairs]

    for (n, percent), one in zip(cases, found(arrays), strict=True):
        clipped = n * round((100 - percent) * 10) // 1000
        assert range_of(one, "int8") == pytest.approx(n - clipped, abs=0.01), (n, percent)


def test_ranks_are_exact_for_any_count():
    """In uint32, against Python's integers."""
    rng = np.random.default_rng(0)
    counts = [0, 1, 999, 10**6 - 1, 10**6, 2**31, 2**32 - 1, *rng.integers(0, 2**32, 20)]
    n = np.array(counts, np.uint32)
    for percent in (0.0001, 12.3456, 50.0, 99.9, 99.9999, 100.0):
        share = round((100 - percent) * 10_000)
        for ends in (1, 2):
            expected = [int(c) * share // 10**6 // ends for c in n]
            found = jax.jit(Percentile(percent)._clipped, static_argnums=1)(n, ends)
            np.testing.assert_array_equal(found, np.uint32(expected), strict=True)


@functools.partial(jax.jit, static_argnums=1)
def observe(x, spec):
    return spec.calibrator.observe(x, spec)


@functools.partial(jax.jit, static_argnums=1)
def of_stats(stats, spec):
    return spec.calibrator.affine(stats, spec)


def test_counts_that_a_sum_cannot_hold_are_halved():
    """The upper two of three bins hold under a percent; the sum of all wraps around in uint32."""
    spec = spec_of(99.0)
    x = jnp.float32([1.0, 2.0, 4.0])
    stats = observe(x, spec)
    places = np.flatnonzero(stats.counts[0])
    counts = np.zeros(stats.counts.shape, np.uint32)
    counts[0, places] = [2**32 - 1, 10**7, 10**7]
    found = of_stats(stats._replace(counts=on_device(counts)), spec)
    assert 1 <= range_of(found, "int8") * (1 + 1e-6) <= BIN * (1 + 1e-5)
    counts[0, places[-1]] = 1
    none = spec_of(100.0)
    found = of_stats(stats._replace(counts=on_device(counts)), none)
    assert range_of(found, "int8") == pytest.approx(4)


def test_infinities_are_clipped_as_other_values_are():
    x = np.float32([1, 2, 3, np.inf])
    assert np.isinf(range_of(fit(x, spec_of(99.0)), "int8"))
    for find in (fit, decide):
        assert 3 <= range_of(find(x, spec_of(75.0)), "int8") * (1 + 1e-6) <= 3 * BIN * (1 + 1e-5)
    both = np.float32([-np.inf, 1, -1, np.inf])
    for find in (fit, decide):
        found = find(both, spec_of(50.0, symmetric=False))
        assert 2 <= found.scale[0] * 255 * (1 + 1e-6) <= 2 * BIN * (1 + 1e-5)


def test_all_of_a_range_is_that_of_the_extremes():
    x = draw((50,))
    symmetric, asymmetric = spec_of(100.0), spec_of(100.0, symmetric=False)
    for find in (fit, decide):
        assert find(x, symmetric).scale == absmax.fit(x, symmetric).scale
        np.testing.assert_array_equal(find(x, asymmetric), minmax.fit(x, asymmetric))


def test_values_below_and_above_all_bins_are_covered():
    for c in (2.0**-60, 2.0**60):
        x = jnp.full((10,), c)
        assert range_of(decide(x, spec_of(90.0)), "int8") == pytest.approx(c)


@pytest.mark.parametrize("value", [0.0, -1.0, 100.5, 0.00001, np.nan])
def test_a_percentage_out_of_range_is_refused(value):
    assert_refused(lambda: Percentile(value), (), ValueError, "calibrators.Percentile", "percent")


def test_a_percentage_that_is_no_number_is_refused():
    assert_refused(lambda: Percentile("99"), (), TypeError, "calibrators.Percentile", "percent")


def test_it_prints_as_it_is_written():
    assert str(percentile) == "percentile(99.9)"
    assert Percentile(99) == Percentile(99.0)
