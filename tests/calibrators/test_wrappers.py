"""What changes a calibrator or its statistics: steps of a history, averages, 16-bit scales."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.calibrators import (
    Delayed,
    Rounded,
    absmax,
    advance,
    delayed,
    fixed,
    hqq,
    minmax,
    moving_average,
    mse,
    percentile,
    rms,
)
from jqx.numerics import mxfp4

from ..arrays import on_device
from ..oracles.calibrators import BLOCKED, SHAPE, affine, blocks
from ..oracles.refusals import assert_refused

# The history of the last steps.


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


def test_steps_may_be_taken_one_by_one_and_other_statistics_of_a_dict_are_left_alone():
    calibrator = Delayed(2)
    spec = jqx.QSpec(jnp.int8, calibrator=calibrator)
    other = absmax.observe(jnp.float32([4.0]), spec)
    stats, scales = calibrator.empty((1, 1)), []
    for x in np.float32([[[8.0]], [[-3.0]], [[1.0]]]):
        scales.append(calibrator.affine(stats, spec).scale.item())
        after = advance({"a": stats, "b": other})
        assert after["b"] is other
        stats = calibrator.merge(after["a"], calibrator.observe(x, spec))
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


def test_what_has_no_history_is_refused():
    for stats in (None, (1, 2), absmax.empty((1,))):
        facts = TypeError, "calibrators.advance", "DelayedStats"
        assert_refused(lambda: advance(stats), (), *facts)  # noqa: B023


# The moving average.


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


def test_what_observed_nothing_gives_the_other_and_counts_saturate():
    one, none = absmax.observe(jnp.ones((2, 3)), SPEC), absmax.empty((1, 3))
    for mixed in (moving_average(none, one, 0.5), moving_average(one, none, 0.5)):
        jax.tree.map(np.testing.assert_array_equal, mixed, one)
    most = one._replace(nans=jnp.full((1, 3), 2**31 - 1), observed=jnp.int32(2**31 - 1))
    found = moving_average(most, absmax.observe(jnp.full((2, 3), jnp.nan), SPEC), 0.5)
    assert int(found.nans[0, 0]) == int(found.observed) == 2**31 - 1


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
    observers = {".*": (jqx.extend.hessian, jqx.extend.mean, minmax)}
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


def test_what_has_no_average_is_refused():
    one, wide = absmax.empty((1, 3)), absmax.empty((1, 4))
    bins = percentile.observe(jnp.ones((2, 3)), SPEC)
    of_bins = (TypeError, "HistogramStats.counts", "uint32", "merge")
    for old, new, decay, error, *facts in [
        *((one, one, decay, ValueError, "decay", "below 1") for decay in (0.0, 1.0, -0.1, np.nan)),
        (bins, bins, 0.5, *of_bins),
        ({"a": bins}, {"a": bins}, 0.5, *of_bins),
        (one, minmax.empty((1, 3)), 0.5, TypeError, "MinMaxStats"),
        (one, 3.0, 0.5, TypeError, "float"),
        ({"a": one}, one, 0.5, TypeError, "dict"),
        ({"a": one}, {"b": one}, 0.5, TypeError, "a, b"),
        (one, wide, 0.5, ValueError, "(1, 4)"),
    ]:
        call = functools.partial(moving_average, old, new, decay)
        assert_refused(call, (), error, NAME, *facts)


# Scales in 16 bits.


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_every_size_of_scale_is_rounded_as_numpy_rounds_it(dtype):
    rng = np.random.default_rng(0)
    scales = np.ldexp(rng.uniform(1, 2, 3000), rng.integers(-40, 20, 3000)).astype(np.float32)
    x = jnp.asarray(scales[:, None] * 127)
    spec = jqx.QSpec("int8", jqx.per_axis(0), calibrator=Rounded(dtype=dtype))
    found = jax.jit(lambda x: jqx.QTensor.quantize(x, spec).scale)(x)[:, 0]
    plain = jqx.QTensor.quantize(x, jqx.QSpec("int8", jqx.per_axis(0))).scale[:, 0]
    kind = jnp.finfo(dtype)
    with np.errstate(over="ignore"):
        want = np.asarray(plain).astype(dtype).astype(np.float32)
    want = np.clip(want, float(kind.smallest_subnormal), float(kind.max))
    np.testing.assert_array_equal(found, want)


def test_codes_are_chosen_for_the_rounded_scale():
    x = jax.random.normal(jax.random.key(0), (16, 64))
    for calibrator in (absmax, mse, hqq):
        spec = jqx.QSpec(
            "int4", jqx.per_block({0: 1, 1: 32}), symmetric=False, calibrator=Rounded(calibrator)
        )
        q = jqx.QTensor.quantize(x, spec)
        assert (q.scale.astype(jnp.float16).astype(jnp.float32) == q.scale).all()
        again = np.round(np.asarray(x).reshape(16, 2, 32) / np.asarray(q.scale)[..., None])
        codes = np.clip(again + np.asarray(q.zero_point)[..., None].astype(int), -8, 7)
        np.testing.assert_array_equal(np.asarray(q.codes).reshape(16, 2, 32), codes)


def test_zeros_nan_and_signs_are_kept():
    spec = jqx.QSpec("int8", jqx.per_axis(0), calibrator=Rounded())
    x = jnp.array([[0.0], [jnp.nan], [jnp.inf]])
    plain = jqx.QTensor.quantize(x, jqx.QSpec("int8", jqx.per_axis(0)))
    np.testing.assert_array_equal(jqx.QTensor.quantize(x, spec).scale, plain.scale)


def test_observed_values_give_rounded_scales_too():
    def f(w, x):
        return x @ w

    w, x = jnp.eye(8), jax.random.normal(jax.random.key(0), (4, 8))
    spec = jqx.QSpec("int8", jqx.per_tensor(), calibrator=Rounded())
    policy = jqx.Policy([jqx.Rule(weight="int8", activation=spec)])
    made = jqx.ptq(f, policy, progress=False)(w, [(x,)])
    (scale,) = (affine.scale for affine in made.affines.values())
    assert (scale.astype(jnp.float16).astype(jnp.float32) == scale).all()


def test_formats_with_scales_of_their_own_are_refused():
    spec = jqx.QSpec(mxfp4, jqx.per_block({0: 1, 1: 32}), calibrator=Rounded())
    with pytest.raises(ValueError, match="its own format of scales"):
        jqx.QTensor.quantize(jnp.ones((1, 32)), spec)
