import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.calibrators import absmax, fixed, minmax, moving_average, percentile, rms

from ..arrays import on_device
from ..oracles.refusals import assert_refused

SPEC = jqx.QSpec(jnp.int8, jqx.per_axis(1))
NAME = "calibrators.moving_average"


def draw(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 6, 3)).astype(np.float32)


def test_floats_are_averaged_and_counts_add_up():
    batches = draw(5)
    batches[2, 0, 1] = np.nan
    stats = minmax.empty((1, 3))
    for x in batches:
        stats = moving_average(stats, minmax.observe(on_device(x), SPEC), 0.9)
    low, high = (f(batches, axis=1, keepdims=True) for f in (np.nanmin, np.nanmax))
    for found, each in [(stats.low, low), (stats.high, high)]:
        expected = np.float64(each[0])
        for x in each[1:]:
            expected = 0.9 * expected + 0.1 * x
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert found.dtype == jnp.float32
    np.testing.assert_array_equal(stats.nans, [[0, 1, 0]])
    assert stats.observed == 5


def test_what_observed_nothing_gives_the_other():
    one, none = absmax.observe(jnp.ones((2, 3)), SPEC), absmax.empty((1, 3))
    for mixed in (moving_average(none, one, 0.5), moving_average(one, none, 0.5)):
        jax.tree.map(np.testing.assert_array_equal, mixed, one)


def test_a_dict_is_averaged_entry_by_entry():
    old, new = draw(2)
    kinds = {"a": absmax, "b": minmax, "c": rms(3), "d": fixed(-1, 1)}
    before, now = ({k: c.observe(on_device(x), SPEC) for k, c in kinds.items()} for x in (old, new))
    mixed = jax.jit(lambda a, b: moving_average(a, b, 0.75))(before, now)
    assert set(mixed) == set(kinds)
    for key in kinds:
        alone = moving_average(before[key], now[key], 0.75)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mixed[key], alone)
    assert mixed["d"].observed == 2


def test_entries_of_observers_are_left_out_but_those_of_calibrators():
    """So that `affines` has all that it asks for, whatever was observed beside it."""
    f = lambda w, x: x @ w  # noqa: E731
    w, batches = jnp.eye(2), [jnp.full((1, 2), c) for c in (8.0, 4.0)]
    plan = jqx.make_plan(f, jqx.presets.w8a8())(w, batches[0])
    observers = {".*": (jqx.observers.hessian, jqx.observers.mean, minmax)}
    old, new = (jqx.calibrate(f, plan, observers=observers)(w, x)[1] for x in batches)
    mixed = moving_average(old, new, 0.75)
    assert set(old) - set(mixed) == {f":dot_general:lhs@{name}" for name in ("hessian", "mean")}
    assert float(mixed[":dot_general:lhs@minmax"].high[0, 0]) == 7.0
    assert float(jqx.affines(plan, mixed)[":dot_general:lhs"].scale[0, 0]) == np.float32(7 / 127)


def test_stacked_statistics_are_averaged_where_each_has_seen_something():
    x = on_device(draw(2))
    new = jax.vmap(lambda x: absmax.observe(x, SPEC))(x)
    old = new._replace(largest=new.largest * 2, observed=jnp.int32([0, 1]))
    mixed = moving_average(old, new, 0.5)
    np.testing.assert_array_equal(mixed.largest[0], new.largest[0])
    np.testing.assert_allclose(mixed.largest[1], 1.5 * new.largest[1], rtol=1e-6)


def test_an_infinity_stays_and_makes_no_nan():
    x = jnp.float32([[np.inf, 1, 1]])
    old, new = minmax.observe(x, SPEC), minmax.observe(jnp.ones((1, 3)), SPEC)
    mixed = moving_average(old, new, 0.5)
    np.testing.assert_array_equal(mixed.high, [[np.inf, 1, 1]])


def test_counts_in_bins_are_refused():
    stats = percentile.observe(jnp.ones((2, 3)), SPEC)
    facts = ("HistogramStats.counts", "uint32", "merge")
    assert_refused(lambda: moving_average(stats, stats, 0.5), (), TypeError, NAME, *facts)
    both = {"a": stats}
    assert_refused(lambda: moving_average(both, both, 0.5), (), TypeError, NAME, *facts)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, np.nan])
def test_a_decay_out_of_range_is_refused(decay):
    one = absmax.empty((1, 3))
    facts = ("decay", "below 1")
    assert_refused(lambda: moving_average(one, one, decay), (), ValueError, NAME, *facts)


def test_statistics_that_differ_are_refused():
    one, wide = absmax.empty((1, 3)), absmax.empty((1, 4))
    for old, new, error, fact in [
        (one, minmax.empty((1, 3)), TypeError, "MinMaxStats"),
        (one, 3.0, TypeError, "float"),
        ({"a": one}, one, TypeError, "dict"),
        ({"a": one}, {"b": one}, TypeError, "a, b"),
        (one, wide, ValueError, "(1, 4)"),
    ]:
        assert_refused(lambda a=old, b=new: moving_average(a, b, 0.5), (), error, NAME, fact)
