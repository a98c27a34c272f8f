import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.calibrators import Delayed, absmax, advance, delayed

from ..oracles.calibrators import BLOCKED, SHAPE, affine, blocks
from ..oracles.refusals import assert_refused


@functools.partial(jax.jit, static_argnums=0)
def run(spec, batches):
    """The scale that each step uses, before it observes its own values, and the last state."""

    def step(stats, x):
        scale = spec.calibrator.affine(stats, spec).scale
        return spec.calibrator.merge(advance(stats), spec.calibrator.observe(x, spec)), scale

    empty = spec.calibrator.empty(spec.granularity.scale_shape(batches[0].shape))
    stats, scales = jax.lax.scan(step, empty, batches)
    return scales, stats


@pytest.mark.parametrize("length, margin", [(1, 0), (3, 0), (3, 2), (4, -1)])
def test_the_scale_is_that_of_the_last_steps(length, margin):
    """Against a list of maxima; before the first step it is 1."""
    batches = np.random.default_rng(0).normal(size=(9, 5, 2)).astype(np.float32)
    spec = jqx.QSpec(jnp.float8_e4m3fn, jqx.per_axis(1), calibrator=Delayed(length, margin))
    scales, stats = run(spec, batches)
    largest = np.abs(batches).max(1, keepdims=True)
    for step in range(9):
        window = largest[max(step - length, 0) : step]
        expected = np.ones((1, 2), np.float32)
        if len(window):
            expected = window.max(0) * np.float32(2.0**margin) / np.float32(448)
        np.testing.assert_array_equal(scales[step], expected)
    np.testing.assert_array_equal(stats.history, largest[::-1][:length])
    assert stats.observed == 9


def test_one_step_is_absmax():
    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    specs = [jqx.QSpec(jnp.int8, granularity, calibrator=delayed) for granularity, _ in BLOCKED]

    @jax.jit
    def found(x):
        return [(delayed.fit(x, spec), absmax.fit(x, spec)) for spec in specs]

    for (_, sizes), (ours, theirs) in zip(BLOCKED, jax.device_get(found(x)), strict=True):
        np.testing.assert_array_equal(ours.scale, theirs.scale)
        for place, block in blocks(x, sizes):
            m = np.abs(block).max()
            assert ours.scale[place] == affine(-m, m, "int8", True)[0]


def test_the_shards_of_a_step_merge_before_the_next_one():
    spec = jqx.QSpec(jnp.int8, calibrator=delayed)
    x = jnp.float32([[1.0, -5.0], [3.0, 2.0]])
    before = delayed.observe(jnp.float32([[7.0, 7.0]]), spec)
    shards = [delayed.merge(advance(before), delayed.observe(row, spec)) for row in (x[:1], x[1:])]
    whole = delayed.merge(advance(before), delayed.observe(x, spec))
    np.testing.assert_array_equal(delayed.merge(*shards).history, whole.history)


def test_steps_may_be_taken_one_by_one():
    calibrator = Delayed(2)
    spec = jqx.QSpec(jnp.int8, calibrator=calibrator)
    stats, scales = calibrator.empty((1, 1)), []
    for x in np.float32([[[8.0]], [[-3.0]], [[1.0]]]):
        scales.append(calibrator.affine(stats, spec).scale.item())
        stats = calibrator.merge(advance(stats), calibrator.observe(x, spec))
    np.testing.assert_array_equal(stats.history.ravel(), [1, 3])
    np.testing.assert_array_equal(np.float32(scales), np.float32([1, 8 / 127, 8 / 127]))


def test_statistics_stacked_by_a_map_advance_each():
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(0), calibrator=Delayed(3))
    layers = jnp.arange(1.0, 13.0).reshape(2, 3, 2)

    @jax.jit
    def found(layers):
        stacked = jax.vmap(lambda x: spec.calibrator.observe(x, spec))(layers)
        return advance(stacked), [advance(spec.calibrator.observe(x, spec)) for x in layers]

    stacked, alone = found(layers)
    for i in range(2):
        np.testing.assert_array_equal(stacked.history[i], alone[i].history)


@pytest.mark.parametrize("length", [2, 40])
def test_a_nan_or_infinity_spoils_the_steps_that_remember_it(length):
    spec = jqx.QSpec(jnp.int8, calibrator=Delayed(length))
    for poison in (np.nan, np.inf):
        batches = np.float32([1.0, poison, *[2.0] * (length + 1)])[:, None]
        scales, stats = jax.device_get(run(spec, batches))
        spoilt = [1 < step < 2 + length for step in range(len(batches))]
        np.testing.assert_array_equal(~np.isfinite(scales.ravel()), spoilt)
        assert np.isnan(scales[2, 0]) == np.isnan(poison)
        assert stats.nans[0] == int(np.isnan(poison))


def test_other_statistics_of_a_dict_are_left_alone():
    spec = jqx.QSpec(jnp.int8)
    x = jnp.float32([4.0])
    stats = {"a": delayed.observe(x, spec), "b": absmax.observe(x, spec)}
    after = advance(stats)
    assert after["b"] is stats["b"]
    np.testing.assert_array_equal(after["a"].history[:2, 0], [0, 4])


@pytest.mark.parametrize("stats", [None, (1, 2), absmax.empty((1,))], ids=str)
def test_what_has_no_history_is_refused(stats):
    assert_refused(lambda: advance(stats), (), TypeError, "calibrators.advance", "DelayedStats")


@pytest.mark.parametrize(
    "make, error, fact",
    [
        (lambda: Delayed(0), ValueError, "length"),
        (lambda: Delayed(1.0), TypeError, "length"),
        (lambda: Delayed(2, 0.5), TypeError, "margin"),
    ],
)
def test_what_is_no_recipe_is_refused(make, error, fact):
    assert_refused(make, (), error, "calibrators.Delayed", fact)


def test_it_prints_as_it_is_written():
    assert (str(delayed), str(Delayed(4, 1))) == ("delayed", "delayed(4, 1)")
