"""Calibrators that search a range: their histogram, and percentile, mse, hqq and the rules for
blocks beside searches in NumPy.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx._src.statistics import searches
from jqx._src.statistics.searches import LENGTH, ZERO, bin_of, points_in, points_of
from jqx.calibrators import (
    Hqq,
    Mse,
    Percentile,
    absmax,
    ceil,
    four_over_six,
    hqq,
    minmax,
    mse,
    percentile,
)
from jqx.numerics import mxfp4, mxfp8_e4m3, nf4, nvfp4

from ..arrays import on_device
from ..oracles.calibrators import (
    BLOCKED,
    SHAPE,
    affine,
    blocks,
    decide,
    dequantized,
    draw,
    fit,
    quantized,
    range_of,
)
from ..oracles.formats import nearest_number

SPEC = jqx.QSpec(jnp.int8, calibrator=percentile)

# The histogram.


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
    return np.bincount(ZERO + np.where(x < 0, -place, place), minlength=LENGTH)


@pytest.mark.many
@pytest.mark.parametrize("granularity, sizes", BLOCKED, ids=str)
@settings(max_examples=12, deadline=None)
@given(x=values)
def test_the_counts_are_those_of_numpy_with_the_documented_edges(granularity, sizes, x):
    spec = jqx.QSpec(jnp.int8, granularity, calibrator=percentile)
    stats = jax.jit(percentile.observe, static_argnums=1)(x, spec)
    assert stats.counts.dtype == jnp.uint32
    for place, block in blocks(x, sizes):
        np.testing.assert_array_equal(stats.counts[place], counted(block.ravel()))
        assert (stats.low[place], stats.high[place]) == (block.min(), block.max())


def test_the_edges_are_the_documented_ones_and_bins_are_narrow():
    np.testing.assert_array_equal(searches.EDGES, EDGES)
    widths = np.diff(EDGES) / EDGES[:-1]
    assert 1 / 128 < widths.min() and widths.max() == 1 / 64
    np.testing.assert_array_equal(searches.UPPER[ZERO:], [*EDGES, np.inf])
    np.testing.assert_array_equal(searches.UPPER[:ZERO], -EDGES[::-1])


def test_nan_is_counted_apart_and_magnitudes_count_both_signs():
    x = np.float32([[1, np.nan], [np.inf, np.nan], [-np.inf, 2]])
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(1), calibrator=percentile)
    stats = percentile.observe(on_device(x), spec)
    np.testing.assert_array_equal(stats.nans, [[0, 2]])
    np.testing.assert_array_equal(stats.counts.sum(-1), [[3, 1]])
    assert stats.counts[0, 0, 0] == stats.counts[0, 0, -1] == 1
    np.testing.assert_array_equal(stats.low, [[-np.inf, 2]])
    x = np.float32([0, 0, 1, -1, 1, -3, 1e-20, np.inf, -np.inf])
    counts = searches.magnitudes(percentile.observe(on_device(x), SPEC).counts)
    np.testing.assert_array_equal(counts[0], counted(np.abs(x))[ZERO:])


def test_counts_saturate_and_still_merge_in_any_order():
    top = 2**32 - 1
    one, two, near = (np.uint32(n) for n in (1, 2, top - 2))

    def add(a, b):
        return np.asarray(searches.saturating_add(on_device(a), on_device(b)))

    assert add(near, one) == top - 1
    assert add(near, two) == add(add(near, two), two) == add(near, near) == top
    for a, b, c in [(near, near, two), (one, near, two), (near, two, one)]:
        assert add(a, add(b, c)) == add(add(a, b), c) == add(c, add(b, a))


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


# Percentiles.


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


@pytest.mark.parametrize(
    "symmetric, percents", [(True, (50.0, 87.5, 100.0)), (False, (80.0,))], ids=str
)
def test_fit_is_the_percentile_exactly_and_statistics_are_near(symmetric, percents):
    """Of magnitudes, or half at either end, rounded down: 20 % of 7 is one value, and none at
    either end.
    """
    x = draw(SHAPE) + np.float32(0.0 if symmetric else 0.3)
    for percent, (place, (granularity, sizes)) in itertools.product(percents, enumerate(BLOCKED)):
        specs = tuple(spec_of(percent, granularity, symmetric) for granularity, _ in BLOCKED)
        found, near = (each[place] for each in of_every_granularity(x, specs))
        for block_place, block in blocks(x, sizes):
            ordered, k = np.sort(block.ravel()), int(block.size * (100 - percent) / 100) // 2
            low, high = ordered[k], ordered[-1 - k]
            if symmetric:
                high = upper(np.abs(block), percent)
                low = -high
            scale, zero = affine(low, high, specs[place].qtype, symmetric)
            assert found.scale[block_place] == scale
            assert symmetric or int(found.zero_point[block_place]) == int(zero)
            assert 1 <= near[block_place] / scale <= BIN
        if percent == 100:
            np.testing.assert_array_equal(near, found.scale)
            assert near.shape == granularity.scale_shape(SHAPE)


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


@settings(max_examples=25, deadline=None)
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


def test_counts_that_a_sum_cannot_hold_are_halved():
    """The upper two of three bins hold under a percent; the sum of all wraps around in uint32."""
    spec = spec_of(99.0)
    x = jnp.float32([1.0, 2.0, 4.0])
    stats = percentile.observe(x, spec)
    of_stats = jax.jit(Percentile.affine, static_argnums=(0, 2))
    places = np.flatnonzero(stats.counts[0])
    counts = np.zeros(stats.counts.shape, np.uint32)
    counts[0, places] = [2**32 - 1, 10**7, 10**7]
    found = of_stats(spec.calibrator, stats._replace(counts=on_device(counts)), spec)
    assert 1 <= range_of(found, "int8") * (1 + 1e-6) <= BIN * (1 + 1e-5)
    counts[0, places[-1]] = 1
    none = spec_of(100.0)
    found = of_stats(none.calibrator, stats._replace(counts=on_device(counts)), none)
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
    for c in (2.0**-60, 2.0**60):  # below and above all bins
        x = jnp.full((10,), c)
        assert range_of(decide(x, spec_of(90.0)), "int8") == pytest.approx(c)


# The least error.


FORMATS = [
    ("int4", True),
    ("int8", True),
    ("int4", False),
    ("uint8", False),
    (jnp.float8_e4m3fn, True),
    (nf4, True),
]
of_formats = pytest.mark.parametrize("qtype, symmetric", FORMATS, ids=str)


def range_with_zero(x, symmetric):
    low, high = np.minimum(x.min(), np.float32(0)), np.maximum(x.max(), np.float32(0))
    m = np.maximum(high, -low)
    return (-m, m) if symmetric else (low, high)


def brute_force(x, qtype, symmetric, candidates, least, norm=2):
    """The error of every factor, in float64, for float32 ranges."""
    low, high = range_with_zero(x, symmetric)
    factors = np.linspace(1, least, candidates).astype(np.float32)
    ranges = [(x, low * f, high * f, qtype, symmetric) for f in factors]
    return factors, np.array([error_of(x, dequantized(*of), norm) for of in ranges])


def error_of(x, real, norm=2):
    return np.mean(np.abs(np.float64(x) - np.float64(real)) ** norm)


@of_formats
def test_no_factor_of_a_brute_force_search_is_better(qtype, symmetric):
    """To the rounding of a float32 sum; the candidates are those of the oracle."""
    x = draw((200,))
    spec = jqx.QSpec(qtype, symmetric=symmetric, calibrator=Mse(40, 0.2))
    _, errors = brute_force(x, qtype, symmetric, 40, 0.2)
    assert error_of(x, quantized(x, fit, spec)) <= errors.min() * (1 + 1e-4)


def test_the_error_may_be_of_another_power():
    """One that is higher clips less."""
    x, factors = draw((200,), seed=5), []
    for norm in (1, 2.4, 6.0):
        spec = jqx.QSpec("int4", calibrator=Mse(40, 0.2, norm))
        _, errors = brute_force(x, "int4", True, 40, 0.2, norm)
        assert error_of(x, quantized(x, fit, spec), norm) <= errors.min() * (1 + 1e-4)
        assert errors.min() < 0.97 * errors[0] or norm == 6
        factors.append(float(fit(x, spec).scale[0]))
    assert factors == sorted(factors) and factors[0] < factors[-1]


@pytest.mark.parametrize("qtype", ["int4", "int2", nf4, mxfp4], ids=str)
def test_a_signed_scale_lets_the_larger_end_take_the_code_that_has_no_opposite(qtype):
    """By enumeration of factors and signs; formats of even ranges have the scales they had."""
    x = draw((64, 32), seed=7)
    spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: 32}), calibrator=Mse(20, 0.5, signed=True))
    plain = jqx.QSpec(qtype, spec.granularity, calibrator=Mse(20, 0.5))
    found, before = (np.float64(fit(x, own).scale.astype(np.float32)) for own in (spec, plain))
    if qtype in (nf4, mxfp4):
        np.testing.assert_array_equal(found, before)
        return
    low, high = {"int4": (-8, 7), "int2": (-2, 1)}[qtype]
    wide = np.float64(x)
    largest = np.abs(wide).max(1, keepdims=True)
    sizes = [*np.linspace(1, 0.5, 20), high / -low]
    every = np.array([sign * size * largest / high for sign in (1, -1) for size in sizes])
    error = [((np.clip(np.rint(wide / s), low, high) * s - wide) ** 2).sum(1) for s in every]
    real = np.float64(quantized(x, fit, spec))
    own = ((real - wide) ** 2).sum(1)
    np.testing.assert_allclose(own, np.min(error, 0), rtol=1e-4)
    assert (found < 0).sum() > 10 and (found > 0).sum() > 10
    q = jqx.QTensor.quantize(jnp.asarray(x), spec)
    assert own.sum() < 0.95 * ((np.float64(quantized(x, fit, plain)) - wide) ** 2).sum()
    y = draw((5, 32), seed=8)
    for laid_out in (q, jqx.pack_for(q, "cpu")):
        product = jqx.einsum("bk,nk->bn", jnp.asarray(y), laid_out)
        np.testing.assert_allclose(product, np.float64(y) @ real.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("qtype, symmetric", [("int4", True), ("uint4", False), (nf4, True)])
def test_each_scale_is_searched_by_itself(qtype, symmetric):
    x = draw(SHAPE, seed=1)
    specs = [jqx.QSpec(qtype, granularity, symmetric, Mse(20, 0.3)) for granularity, _ in BLOCKED]
    found = jax.jit(lambda x: [quantized(x, fit, spec) for spec in specs])(x)
    for (_, sizes), real in zip(BLOCKED, jax.device_get(found), strict=True):
        for (_, block), (_, theirs) in zip(blocks(x, sizes), blocks(real, sizes), strict=True):
            _, errors = brute_force(block, qtype, symmetric, 20, 0.3)
            assert error_of(block, theirs) <= errors.min() * (1 + 1e-4) + 1e-12


@pytest.mark.many("calibrator")
@pytest.mark.parametrize("calibrator, power", [(mse, 2), (hqq, 0.7)], ids=str)
@of_formats
def test_it_is_never_worse_than_covering_everything(qtype, symmetric, calibrator, power):
    """Also where squares of the values would be too small or too large for a float32."""
    spec = jqx.QSpec(qtype, jqx.per_axis(0), symmetric, calibrator)
    whole = (absmax if symmetric else minmax).fit

    @jax.jit
    def both(x, unit):
        return [quantized(x, find, spec) * unit for find in (fit, whole)]

    for c in (1.0, 1e-20, 1e25):
        unit = np.float32(1 / c)
        x = draw((4, 30), seed=2) * np.float32(c)
        for row, ours, theirs in zip(x * unit, *both(x, unit), strict=True):
            assert error_of(row, ours, power) <= error_of(row, theirs, power) * (1 + 1e-5)


@of_formats
def test_of_a_histogram_the_error_is_near_the_least(qtype, symmetric):
    """The bins are as wide as steps of int8, and the error is within 3 % of the best one."""
    x = draw((20_000,), seed=3)
    spec = jqx.QSpec(qtype, symmetric=symmetric, calibrator=Mse(40, 0.025))
    _, errors = brute_force(x, qtype, symmetric, 40, 0.025)
    assert error_of(x, quantized(x, decide, spec)) <= errors.min() * 1.03
    assert errors.min() < errors[0] * 0.97 or qtype in (jnp.float8_e4m3fn,)


def test_ranges_at_the_ends_of_the_search():
    """A range in which every value is a number of the grid is kept; an outlier is clipped; one
    candidate is the whole range; and the rule of MX, which covers 7.9 by 6 with scale 1, clips, so
    that 2 is better here.
    """
    spec = jqx.QSpec(jnp.int4, calibrator=mse)
    outlier = np.append(draw((1000,), seed=4).clip(-3, 3), np.float32(30))
    blocks, block = jqx.QSpec(mxfp4, jqx.per_block({0: 32}), calibrator=mse), jnp.full((32,), 7.9)
    assert float(absmax.fit(block, blocks).scale[0]) == 1
    for find in (fit, decide):
        assert find(jnp.arange(-7.0, 8.0), spec).scale[0] == 1
        assert find(outlier, spec).scale[0] * 7 < 15
        assert float(find(block, blocks).scale[0]) == 2
    x, one = draw((30,)), jqx.QSpec(jnp.int4, calibrator=Mse(1))
    assert fit(x, one).scale == absmax.fit(x, one).scale


# Half-quadratic optimization.


def shrink(e, beta, p):
    with np.errstate(divide="ignore"):
        return np.sign(e) * np.maximum(np.abs(e) - np.abs(e) ** (p - 1) / beta, 0)


def ranges(x, calibrator, high):
    """The iterates of the symmetric form, in float64: the largest magnitude of each."""
    x, limit, beta = np.float64(x), np.abs(np.float64(x)).max(), calibrator.beta
    yield limit
    for _ in range(calibrator.iterations):
        y = x / (limit / high)
        q = np.clip(np.rint(y), -high - 1, high)
        w = shrink(y - q, beta, calibrator.p)
        limit *= np.sum((y - w) * q) / np.sum(q * q)
        beta *= calibrator.kappa
        yield limit


def zero_points(x, scale, zero, calibrator, high):
    """The iterates of the asymmetric form, rounded."""
    y, beta = np.float64(x) / scale, calibrator.beta
    zero = np.float64(zero)
    yield zero
    for _ in range(calibrator.iterations):
        q = np.clip(np.rint(y + zero), 0, high)
        w = shrink(y - (q - zero), beta, calibrator.p)
        zero = np.mean(q - (y - w))
        beta *= calibrator.kappa
        yield np.clip(np.rint(zero), 0, high)


@pytest.mark.parametrize("seed", range(3))
def test_the_scale_is_the_best_iterate(seed):
    """Against float64; the iterates differ by rounding, so the errors are compared."""
    x, calibrator = draw((300,), seed), Hqq(10)
    spec = jqx.QSpec(jnp.int4, calibrator=calibrator)
    found = quantized(x, fit, spec)
    limits = np.float32(list(ranges(x, calibrator, 7)))
    errors = [error_of(x, dequantized(x, -m, m, "int4", True), 0.7) for m in limits]
    assert error_of(x, found, 0.7) == pytest.approx(min(errors), rel=0.01)
    assert min(errors) < 0.99 * errors[0], "the start is the best, so nothing was tested"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [1.0, 10.0])
def test_the_zero_point_is_the_best_iterate(seed, beta):
    x, calibrator = np.exp(draw((300,), seed) / 2), Hqq(10, beta=beta)
    spec = jqx.QSpec(jnp.uint4, symmetric=False, calibrator=calibrator)
    start, found = jax.jit(lambda x: (minmax.fit(x, spec), fit(x, spec)))(x)
    assert found.scale == start.scale
    scale = np.float64(start.scale[0])

    def error(zero):
        return error_of(x, (np.clip(np.rint(x / scale) + zero, 0, 15) - zero) * scale, 0.7)

    zeros = list(zero_points(x, scale, int(start.zero_point[0]), calibrator, 15))
    assert error(int(found.zero_point[0])) == pytest.approx(min(map(error, zeros)), rel=1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_result_follows_the_units_of_the_values(symmetric):
    x = draw((200,), seed=5)
    spec = jqx.QSpec("int4", symmetric=symmetric, calibrator=hqq)
    one, other = fit(x, spec), fit(x * np.float32(2.0**-9), spec)
    np.testing.assert_allclose(one.scale, other.scale * 2.0**9, rtol=1e-6)
    assert symmetric or one.zero_point == other.zero_point


def test_of_a_histogram_the_error_is_near_that_of_the_array():
    x = draw((20_000,), seed=6)
    spec = jqx.QSpec(jnp.int4, calibrator=hqq)
    errors = [error_of(x, quantized(x, find, spec), 0.7) for find in (fit, decide, absmax.fit)]
    assert errors[1] <= errors[0] * 1.02 < errors[2]


def test_scales_that_are_powers_of_two_stay_so():
    x = draw((64,), seed=7)
    spec = jqx.QSpec(mxfp4, jqx.per_block({0: 32}), calibrator=hqq)
    found = fit(x, spec).scale
    assert found.dtype == jnp.float8_e8m0fnu
    assert (np.frexp(np.float32(found))[0] == 0.5).all()


# Rules for 4-bit floats in blocks.


@pytest.mark.parametrize(("qtype", "high"), [(mxfp4, 6), (mxfp8_e4m3, 448)], ids=str)
def test_ceil_is_the_least_power_of_two_that_clips_nothing(qtype, high):
    """For magnitudes beside every power of two and beside each of them times the largest number."""
    powers = 2.0 ** np.arange(-100, 100)
    ends = np.float32(np.concatenate([powers, powers * high]))
    inf = np.float32(np.inf)
    x = np.stack([np.nextafter(ends, -inf), ends, np.nextafter(ends, inf)]).ravel()[:, None]
    x = np.pad(x, ((0, 0), (0, 31)))
    spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: 32}), calibrator=ceil)
    fitted = spec.calibrator.fit(on_device(x), spec).scale
    m, e = np.frexp(np.float64(np.abs(x).max(1)) / high)
    expected = np.where(m == 0.5, 2.0 ** (e - 1), 2.0**e)
    np.testing.assert_array_equal(np.float64(fitted.astype(jnp.float32))[:, 0], expected)
    seen = spec.calibrator.affine(spec.calibrator.observe(on_device(x), spec), spec)
    np.testing.assert_array_equal(*(np.float32(y) for y in (seen.scale, fitted)))
    real = jqx.QTensor.quantize(on_device(x), spec).dequantize()
    assert np.all(np.abs(real) <= high * expected[:, None])


def test_four_over_six_takes_what_loses_less():
    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    x[0] = [1, *[0.8] * 15]  # 6 and 4.8: four takes it
    x[1] = [1, *[0.5] * 15]  # 6 and 3: six does
    spec = jqx.QSpec(nvfp4, jqx.per_block({0: 1, 1: 16}), calibrator=four_over_six)
    scale = np.float64(spec.calibrator.fit(on_device(x), spec).scale)
    largest = np.abs(np.float64(x)).max(1, keepdims=True)
    second = scale.max() / 448  # the scale of the scales, which are e4m3
    scales = (nearest_number(largest / n / second, "float8_e4m3fn") * second for n in (6, 4))
    six, four = (((x - nearest_number(x / s, "float4_e2m1fn") * s) ** 2).sum(1) for s in scales)
    apart = np.abs(six - four) > 1e-6 * six
    expected = np.where(four < six, largest[:, 0] / 4, largest[:, 0] / 6)
    assert apart.sum() > 60 and 10 < np.sum((four < six)[apart]) < 60
    np.testing.assert_allclose(scale[apart, 0], expected[apart], rtol=1e-6)
    losses = {}
    for calibrator in (absmax, four_over_six):
        of = jqx.QSpec(nvfp4, jqx.per_block({0: 1, 1: 16}), calibrator=calibrator)
        real = jqx.QTensor.quantize(on_device(x), of).dequantize()
        losses[str(calibrator)] = float(jnp.sum((real - x) ** 2))
    assert losses["four_over_six"] < 0.85 * losses["absmax"]


def test_four_over_six_does_not_hang_on_the_last_place():
    # Blocks with few values other than 0 often lose the same under both scales.
    rng = np.random.default_rng(1)
    x = np.float32(np.maximum(rng.normal(size=(1024, 16)), 0) ** 4 * (rng.random((1024, 16)) < 0.3))
    spec = jqx.QSpec(nvfp4, jqx.per_block({0: 1, 1: 16}), calibrator=four_over_six)
    quantize = jax.jit(lambda x: jqx.QTensor.quantize(x, spec).dequantize())
    near = x * np.float32(1 + 2.0**-23 * rng.integers(-1, 2, x.shape))
    np.testing.assert_allclose(quantize(x), quantize(near), rtol=1e-6)


def test_they_are_of_formats_of_their_own():
    x = on_device(np.random.default_rng(1).normal(size=(4, 32)), jnp.float32)
    for qtype in (nvfp4, jnp.int4, jnp.float8_e4m3fn):  # nothing is clipped there anyway
        spec = jqx.QSpec(qtype, jqx.per_block({0: 1, 1: 16}))
        same = (y.fit(x, spec).scale for y in (ceil, absmax))
        np.testing.assert_array_equal(*same)
    spec = jqx.QSpec(mxfp4, jqx.per_block({0: 1, 1: 32}))
    with pytest.raises(ValueError, match="four_over_six: mxfp4 has other elements or scales"):
        four_over_six.fit(x, spec)
