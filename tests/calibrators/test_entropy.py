import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.calibrators.histogram import magnitudes
from jqx.calibrators import Entropy, absmax, entropy
from jqx.numerics import nf4

from ..oracles.calibrators import decide, fit, range_of
from ..oracles.refusals import assert_refused


def divergence(counts, i, levels):
    """Migacz's pseudo-code, line by line, in float64; infinite where Q lacks a bin of P."""
    p = counts[:i].astype(np.float64)
    full = p > 0
    q = np.zeros(i)
    run = np.arange(i) * levels // i
    for level in range(levels):
        inside = run == level
        if (inside & full).any():
            q[inside & full] = p[inside].sum() / (inside & full).sum()
    p[i - 1] += counts[i:].sum()
    p, q = p / p.sum(), q / max(q.sum(), 1e-300)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / q), 0))


def divergences(counts, levels, stride):
    bins = len(counts)
    kept = [*range(max(levels, bins // 16), bins, stride), bins]
    return dict(zip(kept, [divergence(counts, i, levels) for i in kept], strict=True))


def histogram_of(x, bins):
    x = np.abs(x[x != 0])
    place = np.minimum(np.floor(x / x.max() * np.float32(bins)).astype(int), bins - 1)
    return np.bincount(place, minlength=bins)


def draw(n, seed=0):
    return np.random.default_rng(seed).standard_t(4, size=n).astype(np.float32)


@pytest.mark.parametrize("qtype, levels", [("int4", 8), ("int8", 128), ("int3", 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_fit_is_the_textbook_search(qtype, levels, seed):
    """No other threshold diverges less, to the rounding of float32."""
    qtype = jqx.numerics.int3 if qtype == "int3" else qtype
    x, bins, stride = draw(5000, seed), 512, 4
    spec = jqx.QSpec(qtype, calibrator=Entropy(bins, stride))
    expected = divergences(histogram_of(x, bins), levels, stride)
    kept = range_of(fit(x, spec), qtype) / np.abs(x).max() * bins
    assert round(kept) == pytest.approx(kept, abs=1e-3)
    assert expected[round(kept)] <= min(expected.values()) + 1e-5
    assert round(kept) < bins, "nothing is clipped, so nothing was tested"


def test_of_a_histogram_the_threshold_diverges_little_more():
    """The counts are spread over equal bins, so they differ from those of the array."""
    x, bins = draw(200_000, 2), 512
    expected = divergences(histogram_of(x, bins), 8, 4)
    spec = jqx.QSpec(jnp.int4, calibrator=Entropy(bins, 4))
    kept = range_of(decide(x, spec), "int4") / np.abs(x).max() * bins
    assert round(kept) in expected
    assert expected[round(kept)] <= min(expected.values()) * 1.05
    assert round(kept) < bins / 2


def test_counts_are_spread_in_proportion_to_width():
    """The bin [1, 1 + 1/64) is four equal bins of width 1/256; the topmost one is cut at 2."""
    spec = jqx.QSpec(jnp.int4)
    x = jnp.float32([1.0, 1.0, 1.0, 1.0, 2.0])
    calibrator = Entropy(512, 8)

    @jax.jit
    def spread_of(x):
        counts = calibrator.observe(x, spec).counts
        counts = magnitudes(counts)[0, 1:].astype(jnp.float32)
        return calibrator._in_equal_bins(counts, jnp.float32(2.0))

    spread = np.asarray(spread_of(x))
    expected = np.zeros(512)
    expected[256:260] = 1
    np.testing.assert_allclose(spread[:511], expected[:511], atol=1e-6)
    assert spread.sum() == pytest.approx(5), "the topmost value is in the last bin"


def test_zeros_have_no_part_in_it():
    spec = jqx.QSpec(jnp.int4, calibrator=Entropy(256, 4))
    x = draw(3000, 3)
    with_zeros = np.concatenate([x, np.zeros(50_000, np.float32)])
    for find in (fit, decide):
        assert find(x, spec).scale == find(with_zeros, spec).scale


def test_a_distribution_without_tails_is_not_clipped():
    x = np.random.default_rng(4).uniform(-1, 1, 20_000).astype(np.float32)
    spec = jqx.QSpec(jnp.int8, calibrator=entropy)
    for find in (fit, decide):
        assert find(x, spec).scale[0] > 0.95 * absmax.fit(x, spec).scale[0]


def test_an_outlier_is_clipped():
    x = np.append(np.random.default_rng(5).normal(size=50_000), 40).astype(np.float32)
    for qtype in (jnp.int8, nf4):
        spec = jqx.QSpec(qtype, calibrator=entropy)
        for find in (fit, decide):
            assert range_of(find(x, spec), qtype) < 20


def test_an_asymmetric_range_is_clipped_at_both_ends_alike():
    x = np.append(np.abs(np.random.default_rng(6).normal(size=20_000)), 40).astype(np.float32)
    spec = jqx.QSpec(jnp.uint8, symmetric=False, calibrator=entropy)
    symmetric = jqx.QSpec(jnp.int8, calibrator=entropy)
    for find in (fit, decide):
        found = find(x, spec)
        assert found.zero_point[0] == 0
        limit = range_of(find(x, symmetric), "int8")
        assert found.scale[0] * 255 == pytest.approx(limit, rel=1e-5)


def test_a_format_with_more_levels_than_bins_is_not_clipped():
    x = draw(1000)
    spec = jqx.QSpec(jnp.int16, calibrator=Entropy(256, 8))
    assert fit(x, spec).scale == decide(x, spec).scale == absmax.fit(x, spec).scale


def test_each_scale_is_searched_by_itself():
    x = np.stack([draw(2000, 7), 10 * draw(2000, 8)])
    calibrator = Entropy(256, 4)
    spec = jqx.QSpec(jnp.int4, jqx.per_axis(0), calibrator=calibrator)
    alone = jqx.QSpec(jnp.int4, calibrator=calibrator)
    for find in (fit, decide):
        found = find(x, spec).scale.ravel()
        np.testing.assert_allclose(found, [find(row, alone).scale[0] for row in x], rtol=1e-6)


@pytest.mark.parametrize(
    "make, error", [(lambda: Entropy(0), ValueError), (lambda: Entropy(2.5), TypeError)]
)
def test_what_is_no_histogram_is_refused(make, error):
    assert_refused(make, (), error, "calibrators.Entropy", "bins")


def test_a_stride_that_is_none_is_refused():
    assert_refused(lambda: Entropy(8, 0), (), ValueError, "calibrators.Entropy", "stride")


def test_it_prints_as_it_is_written():
    assert (str(entropy), str(Entropy(128, 2))) == ("entropy", "entropy(128, 2)")
