"""What every calibrator must keep to: statistics are a monoid, however the values are split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx import calibrators
from jqx.calibrators import Affine

from .oracles import ordinary_floats

law = settings(max_examples=25, deadline=None)

SHAPE = (6, 4)
PER_COLUMN = jqx.per_axis(1)
every_calibrator = pytest.mark.parametrize(
    "calibrator", [calibrators.absmax, calibrators.minmax], ids=str
)

values = hnp.arrays(
    np.float32,
    SHAPE,
    elements=st.one_of(
        ordinary_floats,
        st.sampled_from(np.float32([0, -0.0, np.inf, -np.inf, np.nan]).tolist()),
    ),
)
granularities = st.sampled_from([jqx.per_tensor(), jqx.per_axis(1), jqx.per_axis(0, 1)])


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


def assert_same(a, b):
    """Compares pytrees bit by bit; NaN equals NaN, and -0.0 equals 0.0."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)


@every_calibrator
@law
@given(x=values, y=values, z=values, granularity=granularities)
def test_statistics_are_a_commutative_monoid(calibrator, x, y, z, granularity):
    spec = spec_of(calibrator, granularity)
    a, b, c = (observe(v, spec) for v in (x, y, z))
    empty = calibrator.empty(granularity.scale_shape(SHAPE))
    plus = functools.partial(merge, calibrator)
    assert_same(plus(a, plus(b, c)), plus(plus(a, b), c))
    assert_same(plus(a, b), plus(b, a))
    assert_same(plus(a, empty), a)
    assert_same(plus(empty, a), a)
    assert_same(plus(empty, empty), empty)


@every_calibrator
@law
@given(x=values, cut=st.sampled_from([0, 1, 3, 6]), granularity=st.sampled_from([(), (1,)]))
def test_merged_shards_decide_as_one_pass_does(calibrator, x, cut, granularity):
    """A shard may be empty: its statistics change nothing."""
    spec = spec_of(calibrator, jqx.per_axis(*granularity) if granularity else jqx.per_tensor())
    stats = merge(calibrator, observe(x[:cut], spec), observe(x[cut:], spec))
    assert_same(decide(stats, spec), decide(observe(x, spec), spec))


@every_calibrator
def test_the_order_and_grouping_of_devices_changes_nothing(calibrator):
    spec, rng = spec_of(calibrator), np.random.default_rng(0)
    shards = [rng.normal(size=SHAPE).astype(np.float32) for _ in range(5)]
    stats = [observe(x, spec) for x in shards]
    plus = functools.partial(merge, calibrator)
    a, b, c, d, e = stats
    total = functools.reduce(plus, stats)
    assert_same(plus(plus(e, b), plus(c, plus(a, d))), total)
    assert calibrator.observed(total) == 5
    assert_same(decide(total, spec), decide(observe(np.concatenate(shards), spec), spec))


@every_calibrator
def test_statistics_are_carried_by_scan_and_mapped_by_vmap(calibrator):
    """A carry keeps its dtypes, weak ones included: scan refuses it otherwise."""
    spec, rng = spec_of(calibrator), np.random.default_rng(1)
    batches = rng.normal(size=(3, *SHAPE)).astype(np.float32)
    eager = [calibrator.observe(x, spec) for x in batches]
    expected = functools.reduce(calibrator.merge, eager)

    def step(stats, x):
        return calibrator.merge(stats, calibrator.observe(x, spec)), None

    empty = calibrator.empty((1, 4))
    assert_same(jax.jit(lambda xs: jax.lax.scan(step, empty, xs)[0])(batches), expected)

    @jax.jit
    def mapped_then_merged(xs):
        stats = jax.vmap(lambda x: calibrator.observe(x, spec))(xs)
        parts = [jax.tree.map(lambda leaf, i=i: leaf[i], stats) for i in range(3)]
        return functools.reduce(calibrator.merge, parts)

    assert_same(mapped_then_merged(batches), expected)
    mapped = jax.vmap(lambda x: calibrator.affine(calibrator.observe(x, spec), spec))(batches)
    for i, stats in enumerate(eager):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], mapped)
        assert_same(one, calibrator.affine(stats, spec))


@every_calibrator
def test_statistics_say_how_many_arrays_they_saw(calibrator):
    spec = spec_of(calibrator)
    empty, one = calibrator.empty((1, 4)), observe(jnp.ones(SHAPE), spec)
    for stats, count in [(empty, 0), (one, 1), (calibrator.merge(one, one), 2)]:
        observed = calibrator.observed(stats)
        assert (observed.shape, observed.dtype) == ((), jnp.int32)
        assert observed == count


@every_calibrator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_statistics_and_scales_are_float32_whatever_is_observed(calibrator, dtype):
    spec = spec_of(calibrator)
    stats = observe(jnp.full(SHAPE, 1.5, dtype), spec)
    exact = observe(jnp.full(SHAPE, 1.5), spec)
    assert_same(stats, exact)
    scale, zero_point = decide(stats, spec)
    assert (scale.dtype, zero_point.dtype) == (jnp.float32, jnp.uint8)
    assert scale.shape == zero_point.shape == (1, 4)


@every_calibrator
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_values_and_all_zeros_give_a_finite_scale(calibrator, symmetric):
    """And the values, all of them zero, come back as zeros."""
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(1), symmetric, calibrator)
    zeros = observe(jnp.zeros(SHAPE), spec)
    none = observe(jnp.zeros((0, 4)), spec)
    for stats in (calibrator.empty((1, 4)), none, zeros, merge(calibrator, none, zeros)):
        scale, _ = decide(stats, spec)
        np.testing.assert_array_equal(scale, np.ones((1, 4)))
    q = jqx.QTensor.quantize(jnp.zeros(SHAPE), spec)
    np.testing.assert_array_equal(q.dequantize(), np.zeros(SHAPE))


@every_calibrator
@law
@given(x=values, qtype=st.sampled_from(["int4", "int8", "uint8"]))
def test_zero_is_on_the_grid_of_every_finite_scale(calibrator, x, qtype):
    x = np.nan_to_num(x, nan=1, posinf=2, neginf=-3)
    spec = jqx.QSpec(qtype, jqx.per_axis(1), symmetric=False, calibrator=calibrator)
    affine = decide(observe(x, spec), spec)
    zeros = jqx.QTensor.quantize(jnp.zeros(SHAPE), spec, affine).dequantize()
    np.testing.assert_array_equal(zeros, np.zeros(SHAPE))


@every_calibrator
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_own_scale_alone(calibrator, poison):
    spec, rng = spec_of(calibrator), np.random.default_rng(2)
    x = rng.normal(size=SHAPE).astype(np.float32)
    clean = decide(observe(x, spec), spec)
    x[3, 2] = poison
    scale, zero_point = decide(observe(x, spec), spec)
    others = [0, 1, 3]
    assert not np.isfinite(scale[0, 2])
    np.testing.assert_array_equal(scale[:, others], clean.scale[:, others])
    np.testing.assert_array_equal(zero_point[:, others], clean.zero_point[:, others])
    stats = merge(calibrator, observe(x, spec), observe(np.zeros_like(x), spec))
    assert not np.isfinite(decide(stats, spec).scale[0, 2]), "a later batch must not hide it"


@every_calibrator
def test_calibrators_are_values(calibrator):
    """Equal and hashable, so that a spec that holds one can key a compilation."""
    again = type(calibrator)()
    assert calibrator == again and hash(calibrator) == hash(again)
    assert calibrators.absmax != calibrators.minmax


class Fixed:
    """A calibrator of a user: the statistics are a count alone, the scale is always 0.5."""

    def empty(self, shape):
        return jnp.zeros((), jnp.int32)

    def observe(self, x, spec):
        return jnp.ones((), jnp.int32)

    def merge(self, a, b):
        return a + b

    def observed(self, stats):
        return stats

    def affine(self, stats, spec):
        return Affine(jnp.full((1, 1), 0.5))


def test_a_calibrator_may_be_anyones():
    q = jqx.QTensor.quantize(jnp.ones((2, 3)), jqx.QSpec(jnp.int8, calibrator=Fixed()))
    np.testing.assert_array_equal(q.values, np.full((2, 3), 2))
    np.testing.assert_array_equal(q.scale, [[0.5]])
