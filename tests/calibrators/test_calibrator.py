"""What every calibrator must keep to: statistics are a monoid, however the values are split. Also
what calibrators are as values: how they print, and what they refuse.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx import calibrators, numerics
from jqx._src.statistics import granularity as granularity_file
from jqx._src.statistics.calibrators import Fixed, Rms
from jqx.calibrators import (
    Delayed,
    Hqq,
    Mse,
    Percentile,
    Rounded,
    absmax,
    fixed,
    minmax,
    percentile,
    rms,
)
from jqx.extend import Calibrator
from jqx.numerics import mxfp4, nf4

from ..arrays import on_device
from ..oracles.calibrators import fit, ordinary_floats
from ..oracles.refusals import assert_refused

law = settings(max_examples=8, deadline=None)

SHAPE = (6, 4)
PER_COLUMN = jqx.per_axis(1)
FIXED, RMS = fixed(-2.0, 3.0), rms(3.0)
OF_A_HISTOGRAM = [Percentile(90), Mse(10, 0.3), Hqq(3)]
EVERY = [absmax, minmax, FIXED, RMS, *OF_A_HISTOGRAM, Delayed(3, 1)]
SEARCHING = OF_A_HISTOGRAM[1:]
every_calibrator = pytest.mark.parametrize("calibrator", EVERY, ids=str)

values = hnp.arrays(
    np.float32,
    SHAPE,
    elements=st.one_of(
        ordinary_floats,
        st.sampled_from(np.float32([0, -0.0, np.inf, -np.inf, np.nan]).tolist()),
    ),
)
granularities = st.sampled_from(
    [jqx.per_tensor(), jqx.per_axis(1), jqx.per_block({0: 4, 1: 1}, tail=True)]
)


@functools.cache
def spec_of(calibrator, granularity=PER_COLUMN):
    return jqx.QSpec(jnp.uint8, granularity, symmetric=False, calibrator=calibrator)


@functools.partial(jax.jit, static_argnums=1)
def observe(x, spec):
    return spec.calibrator.observe(x, spec)


@functools.partial(jax.jit, static_argnums=1)
def decide(stats, spec):
    return spec.calibrator.affine(stats, spec)


@functools.partial(jax.jit, static_argnums=0)
def merge(calibrator, a, b):
    return calibrator.merge(a, b)


def assert_same(a, b, rtol=0.0):
    """Compares pytrees bit by bit; NaN equals NaN, and -0.0 equals 0.0. `rtol` is for floats."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if rtol and jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol)
        else:
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)


def tolerance(calibrator):
    """Sums of floats alone depend on their order: four roundings of 2**-24 each."""
    return 2.0**-21 if calibrator == RMS else 0.0


def part(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


@pytest.mark.many
@every_calibrator
@law
@given(x=values, y=values, z=values, granularity=granularities)
def test_statistics_are_a_commutative_monoid(calibrator, x, y, z, granularity):
    spec = spec_of(calibrator, granularity)
    a, b, c = (observe(v, spec) for v in (x, y, z))
    empty = calibrator.empty(granularity.scale_shape(SHAPE))
    plus = functools.partial(merge, calibrator)
    assert_same(plus(a, plus(b, c)), plus(plus(a, b), c), tolerance(calibrator))
    assert_same(plus(a, b), plus(b, a))
    assert_same(plus(a, empty), a)
    assert_same(plus(empty, a), a)
    assert_same(plus(empty, empty), empty)


@pytest.mark.many
@every_calibrator
@law
@given(x=values, cut=st.sampled_from([0, 1, 3, 6]))
def test_merged_shards_are_one_pass(calibrator, x, cut):
    """Bit by bit, the count of arrays apart. A shard may be empty: it changes nothing."""
    spec = spec_of(calibrator)
    stats = merge(calibrator, observe(x[:cut], spec), observe(x[cut:], spec))
    whole = observe(x, spec)
    assert calibrator.observed(stats) == (2 if 0 < cut < 6 else 1)
    assert_same(stats._replace(observed=whole.observed), whole, tolerance(calibrator))


@pytest.mark.many
@every_calibrator
def test_statistics_are_carried_by_scan_and_mapped_by_vmap(calibrator):
    """A carry keeps its dtypes, weak ones included: scan refuses it otherwise."""
    spec, rng = spec_of(calibrator), np.random.default_rng(1)
    batches = rng.normal(size=(3, *SHAPE)).astype(np.float32)
    eager = [observe(x, spec) for x in batches]
    expected = functools.reduce(calibrator.merge, eager)

    def step(stats, x):
        return calibrator.merge(stats, calibrator.observe(x, spec)), None

    empty = calibrator.empty((1, 4))
    rtol = tolerance(calibrator)
    assert_same(jax.jit(lambda xs: jax.lax.scan(step, empty, xs)[0])(batches), expected, rtol)

    mapped = jax.jit(jax.vmap(lambda x: calibrator.observe(x, spec)))(batches)
    merged = functools.reduce(calibrator.merge, [part(mapped, i) for i in range(3)])
    assert_same(merged, expected, rtol)
    # A search sums errors, in an order that is XLA's; a tie may fall to the next candidate.
    rtol = 0.1 if calibrator in SEARCHING else rtol
    affines = jax.jit(jax.vmap(lambda stats: calibrator.affine(stats, spec)))(mapped)
    for i, stats in enumerate(eager):
        found, alone = part(affines, i), decide(stats, spec)
        assert_same(found._replace(zero_point=alone.zero_point), alone, rtol)
        assert np.abs(np.int32(found.zero_point) - np.int32(alone.zero_point)).max() <= rtol * 256


EMPTY = {"low": np.inf, "high": -np.inf}


@every_calibrator
def test_statistics_say_how_many_arrays_they_saw(calibrator):
    """A fixed range needs none, and says 1. No array, and one without elements, are alike."""
    spec = spec_of(calibrator)
    empty, one = calibrator.empty((1, 4)), observe(jnp.ones(SHAPE), spec)
    assert_same(observe(jnp.ones((0, 4)), spec), empty)
    for name, value in empty._asdict().items():
        np.testing.assert_array_equal(value, np.full_like(value, EMPTY.get(name, 0)))
    for stats, count in [
        (empty, int(calibrator == FIXED)),
        (one, 1),
        (merge(calibrator, one, one), 2),
    ]:
        observed = calibrator.observed(stats)
        assert (observed.shape, observed.dtype) == ((), jnp.int32)
        assert observed == count


@pytest.mark.slow
@every_calibrator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_statistics_and_scales_are_float32_whatever_is_observed(calibrator, dtype):
    """Where 64 bits are enabled, too: a sum of int32 is int64 there, as in NumPy, and statistics
    are a carry, which must not widen.
    """
    spec = spec_of(calibrator)
    for x64 in {dtype == "float64", dtype in ("float32", "float64")}:
        with jax.enable_x64(x64):
            x = jnp.full(SHAPE, 1.5, dtype)
            stats = calibrator.observe(x, spec)
            assert [leaf.dtype for leaf in stats] == [a.dtype for a in calibrator.empty((1, 4))]
            assert_same(stats, observe(jnp.full(SHAPE, 1.5, jnp.float32), spec))
            for found in (calibrator.affine(stats, spec), calibrator.fit(x, spec)):
                assert (found.scale.dtype, found.zero_point.dtype) == (jnp.float32, jnp.uint8)
                assert found.scale.shape == found.zero_point.shape == (1, 4)


@pytest.mark.many
@every_calibrator
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_values_and_all_zeros_give_a_finite_scale(calibrator, symmetric):
    """And the values, all of them zero, come back as zeros."""
    spec = jqx.QSpec(jnp.int8, PER_COLUMN, symmetric, calibrator)
    zeros, none = observe(jnp.zeros(SHAPE), spec), observe(jnp.zeros((0, 4)), spec)
    found = [decide(stats, spec) for stats in (calibrator.empty((1, 4)), none, zeros)]
    found += [fit(jnp.zeros(SHAPE), spec), fit(jnp.zeros((0, 4)), spec)]
    for scale, _ in found:
        expected = np.asarray(found[0].scale) if calibrator == FIXED else np.ones((1, 4))
        np.testing.assert_array_equal(scale, expected)
        assert np.isfinite(scale).all()
    q = jqx.QTensor.quantize(jnp.zeros(SHAPE), spec)
    np.testing.assert_array_equal(q.dequantize(), np.zeros(SHAPE))


@pytest.mark.many
@every_calibrator
@law
@given(x=values)
def test_zero_is_on_the_grid_of_every_finite_scale(calibrator, x):
    x = np.nan_to_num(x, nan=1, posinf=2, neginf=-3)
    spec = spec_of(calibrator)
    for affine in (decide(observe(x, spec), spec), fit(x, spec)):
        zeros = jqx.QTensor.quantize(jnp.zeros(SHAPE), spec, affine).dequantize()
        np.testing.assert_array_equal(zeros, np.zeros(SHAPE))


@every_calibrator
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_own_scale_alone(calibrator, poison):
    """NaN makes the scale NaN; an infinity makes it infinite where it is not clipped."""
    spec, rng = spec_of(calibrator), np.random.default_rng(2)
    x = rng.normal(size=SHAPE).astype(np.float32)
    clean, clean_fit = decide(observe(x, spec), spec), fit(x, spec)
    x[3, 2] = poison
    stats = observe(x, spec)
    np.testing.assert_array_equal(calibrator.nans(stats), [[0, 0, int(np.isnan(poison)), 0]])
    later = merge(calibrator, stats, observe(np.zeros_like(x), spec))
    others = [0, 1, 3]
    for found, expected in [(decide(stats, spec), clean), (fit(x, spec), clean_fit)]:
        np.testing.assert_array_equal(found.scale[:, others], expected.scale[:, others])
        np.testing.assert_array_equal(found.zero_point[:, others], expected.zero_point[:, others])
        assert _is_spoilt(calibrator, poison, found.scale[0, 2])
    assert _is_spoilt(calibrator, poison, decide(later, spec).scale[0, 2]), "hidden by a batch"


def _is_spoilt(calibrator, poison, scale):
    if np.isnan(poison):
        return np.isnan(scale)
    return np.isfinite(scale) if calibrator == FIXED else np.isposinf(scale)


@pytest.mark.slow
@every_calibrator
def test_every_format_and_granularity_has_finite_scales_under_jit(calibrator):
    """Symmetric integers, floats, codebooks, and blocks whose scales are powers of two."""
    x = np.random.default_rng(3).normal(size=(9, 3)).astype(np.float32)
    blocks = jqx.per_block({0: 4, 1: 1}, tail=True)
    small_mx = dataclasses.replace(mxfp4, size=4)
    for qtype, granularity in [
        (jnp.int4, blocks),
        (jnp.float8_e4m3fn, jqx.per_axis(1)),
        (nf4, blocks),
        (small_mx, blocks),
    ]:
        spec = jqx.QSpec(qtype, granularity, calibrator=calibrator)
        dtype = jnp.float8_e8m0fnu if qtype is small_mx else jnp.float32
        for found in (fit(x, spec), decide(observe(x, spec), spec)):
            assert found.zero_point is None
            assert (found.scale.shape, found.scale.dtype) == (
                granularity.scale_shape(x.shape),
                dtype,
            )
            scale = np.float32(found.scale)
            assert (np.isfinite(scale) & (scale > 0)).all()
            real = jqx.QTensor.quantize(on_device(x), spec, found).dequantize()
            assert np.abs(real - x).max() < 1.5, "the scale is of the order of the values"


@pytest.mark.many
@every_calibrator
def test_a_constant_stays_within_a_few_percent(calibrator):
    """Whatever its sign and order of magnitude; a fixed range knows nothing of it."""
    for c in (0.7, -3.0, 2.0**-30, 1e6):
        if calibrator == FIXED:
            continue
        spec = spec_of(calibrator)
        x = jnp.full(SHAPE, c)
        for found in (fit(x, spec), decide(observe(x, spec), spec)):
            q = jqx.QTensor.quantize(x, spec, found)
            np.testing.assert_allclose(q.dequantize(), x, rtol=0.03)


@every_calibrator
def test_calibrators_are_values(calibrator):
    """Equal and hashable, so that a spec that holds one can key a compilation."""
    again = type(calibrator)(
        **{f.name: getattr(calibrator, f.name) for f in dataclasses.fields(calibrator)}
    )
    assert calibrator == again and hash(calibrator) == hash(again)
    assert sum(calibrator == other for other in EVERY) == 1
    assert len({str(other) for other in EVERY}) == len(EVERY)


class WidestStats(NamedTuple):
    """Statistics of `Widest`."""

    widest: jax.Array
    nans: jax.Array
    observed: jax.Array


class Widest(Calibrator):
    """A calibrator of a user: one range for all scales, that of the widest. It returns a pair, as
    `jqx.affine_from_range` does.
    """

    def empty(self, shape):
        zeros = jnp.zeros(tuple(shape), jnp.int32)
        return WidestStats(jnp.zeros(()), zeros, jnp.zeros((), jnp.int32))

    def observe(self, x, spec):
        nans = spec.granularity.groups(x.shape).reduce(jnp.sum, jnp.isnan(x).astype(jnp.int32), 0)
        return WidestStats(jnp.max(jnp.abs(x)), nans, jnp.int32(1))

    def merge(self, a, b):
        widest = jnp.maximum(a.widest, b.widest)
        return WidestStats(widest, a.nans + b.nans, a.observed + b.observed)

    def affine(self, stats, spec):
        return jnp.full(stats.nans.shape, stats.widest / 127), None


def test_a_calibrator_may_be_anyones():
    x = jnp.array([[127.0, 2.0, 3.0], [-4.0, 5.0, 6.0]])
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(1), calibrator=Widest())
    q = jqx.QTensor.quantize(x, spec)
    np.testing.assert_array_equal(q.values, np.int8(x))
    np.testing.assert_array_equal(q.scale, np.ones((1, 3)))
    around = jqx.QSpec(jnp.int8, jqx.per_axis(1), calibrator=Rounded(Widest()))
    np.testing.assert_array_equal(jqx.QTensor.quantize(x, around).scale, np.ones((1, 3)))


@pytest.mark.many
@pytest.mark.parametrize("calibrator", [Widest(), *EVERY], ids=lambda c: type(c).__name__)
def test_a_calibrator_serves_a_plan(calibrator):
    def f(w, x):
        return x @ w

    spec = jqx.QSpec(jnp.int8, calibrator=calibrator)
    w, x = jnp.eye(2), jnp.array([[1.0, -2.0]])
    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(activation=spec)]))(w, x)
    parts = [jqx.calibrate(f, plan)(w, x * c)[1] for c in (1.0, 0.5)]
    found = jqx.affines(plan, jqx.merge_stats(plan, *parts))
    assert found
    for affine in found.values():
        assert 0.001 < affine.scale[0, 0] < 0.1


LARGEST = {"int32": 2**31 - 1, "uint32": 2**32 - 1}


@pytest.mark.many
@every_calibrator
def test_counts_stop_at_the_largest_integer_in_jit_and_in_scan(calibrator):
    """What was seen once is never forgotten."""
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


# What a calibrator, or another value of a spec, cannot be made with.


class Duck:
    """Has the methods of a calibrator, and is none."""

    empty = observe = merge = affine = fit = observed = nans = None


@pytest.mark.parametrize("calibrator", [Duck(), Widest, "absmax", None])
def test_what_is_no_calibrator_is_refused(calibrator):
    facts = ("calibrator", "jqx.calibrators.absmax")
    assert_refused(
        lambda: jqx.QSpec(jnp.int8, calibrator=calibrator), (), TypeError, "QSpec", *facts
    )


def test_a_calibrator_without_a_method_cannot_be_made():
    class Half(Calibrator):
        def empty(self, shape):
            return None

    with pytest.raises(TypeError, match="observe"):
        Half()


WRITTEN = {
    "absmax": absmax,
    "minmax": minmax,
    "delayed": calibrators.delayed,
    "delayed(4, 1)": Delayed(4, 1),
    "fixed(-1.0, 2.0)": fixed(-1, 2),
    "rms(3.0)": rms(3),
    "percentile(99.9)": percentile,
    "mse": calibrators.mse,
    "mse(20, 0.5)": Mse(20, 0.5),
    "mse(100, 0.1, norm=3.0)": Mse(norm=3),
    "mse(100, 0.1, signed)": Mse(signed=True),
    "hqq": calibrators.hqq,
    "hqq(5, 0.7, 10.0, 1.01)": Hqq(5),
    "ceil": calibrators.ceil,
    "four_over_six": calibrators.four_over_six,
    "absmax in float16": Rounded(),
    "minmax across d": calibrators.AcrossDevices("d", minmax),
}


def test_calibrators_print_as_they_are_written():
    assert {text: str(calibrator) for text, calibrator in WRITTEN.items()} == {
        x: x for x in WRITTEN
    }
    assert (fixed(-1, 2), rms(3)) == (Fixed(-1.0, 2.0), Rms(3.0))
    assert Percentile(99) == Percentile(99.0)


REFUSED = [
    (lambda: Delayed(0), ValueError, "Delayed", "length"),
    (lambda: Delayed(1.0), TypeError, "Delayed", "length"),
    (lambda: Delayed(2, 0.5), TypeError, "Delayed", "margin"),
    *(
        (
            lambda margin=margin: Delayed(2, margin),
            ValueError,
            "Delayed",
            "`margin` is out of range",
        )
        for margin in (-127, 128, 2000, 10**400)
    ),
    (lambda: fixed(1.0, 1.0), ValueError, "fixed", "empty"),
    (lambda: fixed(2.0, 1.0), ValueError, "fixed", "low 2.0 is not below high 1.0"),
    (lambda: fixed(-np.inf, 1.0), ValueError, "fixed", "finite"),
    (lambda: fixed(0.0, np.nan), ValueError, "fixed", "finite"),
    (lambda: fixed("0", 1.0), TypeError, "fixed", "low"),
    (lambda: fixed(0.0, None), TypeError, "fixed", "high"),
    (lambda: fixed(False, 1.0), TypeError, "fixed", "low"),
    (functools.partial(fixed, jnp.zeros(()), 1.0), TypeError, "fixed", "low"),
    *(
        (lambda value=value: rms(value), ValueError, "rms", "multiplier", "above 0")
        for value in (0.0, -1.0, np.inf, np.nan)
    ),
    (lambda: rms("3"), TypeError, "rms", "multiplier"),
    *(
        (lambda value=value: Percentile(value), ValueError, "Percentile", "percent")
        for value in (0.0, -1.0, 100.5, 0.00001, np.nan)
    ),
    (lambda: Percentile("99"), TypeError, "Percentile", "percent"),
    (lambda: Mse(0), ValueError, "Mse", "candidates"),
    (lambda: Mse(2.0), TypeError, "Mse", "candidates"),
    (lambda: Mse(True), TypeError, "Mse", "candidates"),
    (lambda: Mse(least=0.0), ValueError, "Mse", "least"),
    (lambda: Mse(least=1.5), ValueError, "Mse", "least"),
    (lambda: Mse(least="a"), TypeError, "Mse", "least"),
    (lambda: Mse(norm=0.5), ValueError, "Mse", "norm"),
    (lambda: Mse(norm="2"), TypeError, "Mse", "norm"),
    (lambda: Hqq(0), ValueError, "Hqq", "iterations"),
    (lambda: Hqq(1.5), TypeError, "Hqq", "iterations"),
    (lambda: Hqq(p=0.0), ValueError, "Hqq", "p == 0.0"),
    (lambda: Hqq(p=1.1), ValueError, "Hqq", "p == 1.1"),
    (lambda: Hqq(beta=0.0), ValueError, "Hqq", "beta"),
    (lambda: Hqq(kappa=0.9), ValueError, "Hqq", "kappa"),
    (lambda: Hqq(kappa="1"), TypeError, "Hqq", "kappa"),
    (lambda: Rounded(dtype=jnp.float32), ValueError, "Rounded", "neither float16 nor bfloat16"),
    (lambda: Rounded("absmax"), TypeError, "Rounded", "calibrator"),
]


def test_what_is_out_of_range_is_refused():
    for make, error, name, *facts in REFUSED:
        assert_refused(make, (), error, f"calibrators.{name}", *facts)


def test_the_largest_margins_are_taken():
    for margin in (-126, 127):
        spec = jqx.QSpec(jnp.int8, calibrator=Delayed(2, margin))
        jax.eval_shape(lambda x, spec=spec: jqx.QTensor.quantize(x, spec), jnp.ones(4))


def test_a_factor_narrows_the_range_of_arrays_and_of_statistics():
    x = on_device(np.linspace(-1, 3, 24, dtype=np.float32).reshape(4, 6))
    for whole in (absmax, minmax):
        half = dataclasses.replace(whole, factor=0.5)
        assert str(half) == f"{whole}(0.5)"
        form = {"granularity": jqx.per_axis(0), "symmetric": whole == absmax}
        spec, narrow = (jqx.QSpec(jnp.int8, calibrator=c, **form) for c in (whole, half))
        wide, *narrowed = jax.jit(
            lambda x, spec, narrow: (
                spec.calibrator.fit(x, spec),
                narrow.calibrator.fit(x, narrow),
                narrow.calibrator.affine(narrow.calibrator.observe(x, narrow), narrow),
            ),
            static_argnums=(1, 2),
        )(x, spec, narrow)
        for affine in narrowed:
            np.testing.assert_array_equal(2 * affine.scale, wide.scale)
            np.testing.assert_array_equal(affine.zero_point, wide.zero_point)


HOSTILE = [
    *(None, True, -1, 0, 3.5, math.nan, math.inf, -math.inf, 1e300, 10**400, -(10**400), 2**31),
    *("x", b"x", (), [], {}, (1,), ("a",), ((0, -3),), ((0, 2.5),), ((0,),), {0: 1}, object(), int),
    *(jnp.int8(3), np.float32(2), 1j, jnp.int8, numerics.int3, set(), jqx.RoundMode.UP),
]
MADE = {
    type(absmax): {},
    Delayed: {},
    Fixed: {"low": -1.0, "high": 1.0},
    Hqq: {},
    type(minmax): {},
    Mse: {},
    Percentile: {},
    Rms: {"multiplier": 1.0},
    granularity_file.PerAxis: {},
    granularity_file.PerBlock: {"sizes": ((0, 2),)},
    granularity_file.PerGroup: {"size": 2},
    granularity_file.PerKeptAxis: {"name": "per_channel"},
    granularity_file.PerRun: {"axes": (0,), "size": 2},
    granularity_file.PerShare: {"axes": (0,), "axis": 1, "size": 0.5},
    granularity_file.PerTile: {"size": 2},
    numerics.Block: {"element": jnp.int8, "size": 4},
    numerics.Codebook: {"entries": (-1.0, 1.0)},
    numerics.Integer: {},
    numerics.Minifloat: {"exponent_bits": 2, "mantissa_bits": 1},
    numerics.Numerics: {},
    jqx.QSpec: {"qtype": jnp.int8},
}


@pytest.mark.parametrize("cls", MADE, ids=lambda cls: cls.__name__)
def test_every_field_takes_what_it_is_for_and_refuses_the_rest(cls):
    for field in dataclasses.fields(cls):
        for value in HOSTILE:
            try:
                made = cls(**{**MADE[cls], field.name: value})
            except (TypeError, ValueError) as error:
                assert "fix: " in str(error), (field.name, value, error)
            else:
                hash(made), str(made)


BLOCKS = [
    *((("a", "b", "c"),), ((10, 4, 3.0),), ((True, 1, 1),), (10, 4, 3), "abc", [(10, 4, 3)]),
    *(None, ((10, 4),), ((10, 4, 0),), ({1, 2, 3},)),
]


def test_blocks_of_other_types_are_refused():
    for blocks in BLOCKS:
        with pytest.raises(ValueError, match="`blocks` does not describe block sizes") as info:
            jqx.QTensor(jnp.zeros(10, jnp.int8), jnp.ones(4), qtype=jnp.int8, blocks=blocks)
        assert "fix: " in str(info.value)
