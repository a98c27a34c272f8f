"""Counts stop at the largest integer: what was seen once is never forgotten."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import calibrators

CALIBRATORS = [
    *(calibrators.absmax, calibrators.minmax, calibrators.delayed, calibrators.fixed(-1, 1)),
    *(calibrators.rms(2.0), calibrators.mse),
]
LARGEST = {"int32": 2**31 - 1, "uint32": 2**32 - 1}


@pytest.mark.parametrize("calibrator", CALIBRATORS, ids=str)
def test_merging_saturates_in_jit_and_in_scan(calibrator):
    spec = jqx.QSpec(jnp.int8, calibrator=calibrator)
    one = calibrator.observe(jnp.full((2, 4), jnp.nan).at[0, 0].set(1.0), spec)

    @jax.jit
    def doubled(stats):
        return jax.lax.scan(lambda s, _: (calibrator.merge(s, s), None), stats, length=40)[0]

    found = doubled(one)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, one)
    for before, after in zip(jax.tree.leaves(one), jax.tree.leaves(found), strict=True):
        if (largest := LARGEST.get(before.dtype.name)) is not None:
            before, after = np.asarray(before, np.int64), np.asarray(after, np.int64)
            np.testing.assert_array_equal(after, np.minimum(before * 2**40, largest))


def test_counts_of_a_moving_average_saturate():
    spec = jqx.QSpec(jnp.int8)
    stats = spec.calibrator.observe(jnp.array([1.0, jnp.nan]), spec)
    full = stats._replace(nans=jnp.full((1,), 2**31 - 1), observed=jnp.int32(2**31 - 1))
    found = calibrators.moving_average(full, stats, 0.5)
    assert int(found.nans[0]) == int(found.observed) == 2**31 - 1


def test_nan_values_of_many_merges_are_reported():
    def f(w, x):
        return x @ w

    w, x = jnp.ones((4, 3)), jnp.full((2, 4), jnp.nan)
    plan = jqx.make_plan(f, jqx.presets.w8a8())(w, x)
    stats = jqx.calibrate(f, plan)(w, x)[1]
    for _ in range(33):
        stats = jqx.merge_stats(plan, stats, stats)
    with pytest.raises(ValueError, match="rows with NaN at :dot_general:lhs") as info:
        jqx.affines(plan, stats)
    assert str(2**31 - 1) in str(info.value)
