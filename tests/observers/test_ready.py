"""The ready observers beside NumPy in float64, of each kind of contraction."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.observers import (
    ObservedSite,
    Observer,
    absmax,
    hessian,
    mean,
    mean_abs,
    places,
)

from .test_custom_observer import ROWS, K, expected, forms, integers, weights

RULE = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8, jqx.per_channel()))])
U = 2.0**-24
B, T, D = 4, 5, 6


def two_axes(w, x):
    """Sums over two axes, the later one first."""
    return lax.dot_general(x, w, (((2, 1), (1, 0)), ((), ())))


def experts(w, x):
    return jnp.einsum("etd,edf->etf", x, w)


def from_the_right(w, x):
    return jnp.einsum("df,btd->fbt", w, x)


def convolution(w, x):
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def flat(x):
    return x.reshape(1, -1, D)


def later_first(x):
    return x.transpose(0, 2, 1).reshape(1, -1, D * T)


class Case(NamedTuple):
    """A contraction, the shape of its weight, its operands as `[stack, rows, channels]`, along
    which axis batches lie, and the shape of a statistic of each channel.
    """

    f: object
    weight: tuple
    rows: object
    axis: int
    shape: tuple


CASES = {
    case.f.__name__: case
    for case in [
        Case(two_axes, (T, D, 2), later_first, 0, (1, T, D)),
        Case(experts, (B, D, 2), lambda x: x, 1, (B, 1, D)),
        Case(from_the_right, (D, 2), flat, 0, (1, 1, D)),
        Case(convolution, (3, D, 2), flat, 0, (1, 1, D)),
    ]
}
PRODUCTS = ("two_axes", "experts", "from_the_right")


def observers_of(name):
    return (*([hessian] if name in PRODUCTS else []), mean, mean_abs, absmax)


def test_statistics_of_two_batches_are_those_of_numpy():
    rng = np.random.default_rng(0)
    dtypes = {name: np.dtype(jnp.bfloat16 if name == "experts" else "float32") for name in CASES}
    values = np.asarray(rng.normal(size=(B, T, D)), np.float32)
    weights = {name: np.zeros(case.weight, dtypes[name]) for name, case in CASES.items()}

    @jax.jit
    def found(weights, values):
        every = {}
        for name, w in weights.items():
            x = values.astype(dtypes[name])
            f, given = CASES[name].f, {"": observers_of(name)}
            parts = [lax.slice_in_dim(x, 0, 1, axis=CASES[name].axis)]
            parts += [lax.slice_in_dim(x, 1, None, axis=CASES[name].axis)]
            plan = jqx.make_plan(f, RULE)(w, x)
            stats = [jqx.calibrate(f, plan, observers=given)(w, part)[1] for part in parts]
            merged = jqx.merge_stats(plan, *stats, observers=given)
            every[name] = {key.partition("@")[2]: value for key, value in merged.items()}
        return every

    for name, stats in found(weights, values).items():
        case = CASES[name]
        rows = case.rows(values.astype(dtypes[name]).astype(np.float64))
        size = np.abs(rows)
        n = rows.shape[1]
        gamma = (n + 2) * U / (1 - (n + 2) * U)  # a product, sums of n, and one between batches
        if name in PRODUCTS:
            want, bound = (np.einsum("snk,snl->skl", v, v) for v in (rows, size))
            products = np.asarray(stats["hessian"].products)
            assert products.dtype == np.float32 and products.ndim == 2 + (name == "experts")
            assert (np.abs(products.reshape(want.shape) - want) <= gamma * bound).all()
        if name == "two_axes":  # by channel in the axes of the operand
            rows, size = (v.reshape(1, n, D, T).swapaxes(2, 3) for v in (rows, size))
        total = np.asarray(stats["mean"].total)
        assert total.shape == stats["absmax"].largest.shape == case.shape
        want, most = (v.sum(1).reshape(case.shape) for v in (rows, size))
        assert (np.abs(total - want) <= gamma * most).all()
        assert (np.abs(np.asarray(stats["mean_abs"].total) - most) <= gamma * most).all()
        np.testing.assert_array_equal(
            stats["absmax"].largest, size.max(1).reshape(case.shape).astype(np.float32)
        )
        assert {int(value.rows) for value in stats.values()} == {n}, name


SITE = ObservedSite("w", "dot_general", "lhs", "activation", True, (1,), (0,), (), None)


READY = [hessian, mean, mean_abs, absmax]


@pytest.mark.parametrize("observer", READY, ids=str)
def test_statistics_are_a_monoid(observer: Observer):
    rng = np.random.default_rng(0)
    parts = [np.float32(rng.integers(-8, 9, (n, 3)) / 4) for n in (0, 1, 4)]

    @jax.jit
    def laws(parts):
        a, b, c = (observer.observe(x, SITE) for x in parts)
        empty = observer.empty(jax.ShapeDtypeStruct((7, 3), jnp.float32), SITE)
        plus, whole = observer.merge, observer.observe(jnp.concatenate(parts), SITE)
        return [
            (plus(a, plus(b, c)), plus(plus(a, b), c)),
            (plus(b, c), plus(c, b)),
            (plus(b, empty), b),
            (plus(empty, b), b),
            (a, empty),
            (plus(b, c), whole),
        ]

    for left, right in laws(parts):
        jax.tree.map(partial(np.testing.assert_array_equal, strict=True), left, right)


def test_counts_stop_at_the_largest_integer_and_a_nan_is_seen():
    x = np.float32([[1, np.nan, 2], [1, 1, 1]])
    clean = [True, False, True]

    @jax.jit
    def seen(x):
        stats = hessian.observe(x, SITE)
        most = stats._replace(rows=jnp.int32(2**31 - 1))
        return hessian.merge(most, stats), mean.observe(x, SITE), absmax.observe(x, SITE)

    products, means, largest = seen(x)
    assert int(products.rows) == 2**31 - 1
    np.testing.assert_array_equal(np.isfinite(means.total[0]), clean)
    np.testing.assert_array_equal(np.isfinite(largest.largest[0]), clean)
    np.testing.assert_array_equal(np.isfinite(products.products), np.outer(clean, clean))


def test_statistics_of_each_expert_are_of_the_rows_that_reach_it():
    f = lambda w, x, sizes: lax.ragged_dot(x, w, sizes)  # noqa: E731
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (9, 3)).astype(np.float32)
    x[8] = np.nan  # no expert has it
    w, sizes = np.ones((4, 3, 2), np.float32), np.array([2, 0, 5, 1], np.int32)
    plan = jqx.make_plan(f, RULE)(w, x, sizes)
    observers = (hessian, mean, mean_abs, absmax, places)
    calibrate = jax.jit(jqx.calibrate(f, plan, observers={"": observers}))
    stats = calibrate(w, x, sizes)[1]
    ends = np.cumsum(sizes)
    parts = [x[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    of = lambda name: stats[f":ragged_dot:lhs@{name}"]  # noqa: E731
    np.testing.assert_array_equal(of("hessian").products, [part.T @ part for part in parts])
    np.testing.assert_array_equal(of("hessian").rows, sizes)
    for name, want in [
        ("mean", [part.sum(0) for part in parts]),
        ("mean_abs", [np.abs(part).sum(0) for part in parts]),
        ("absmax", [np.abs(part).max(0, initial=0) for part in parts]),
    ]:
        np.testing.assert_array_equal(of(name)[0], want)
        np.testing.assert_array_equal(of(name).rows, sizes[:, None])
    elements = np.arange(24).reshape(4, 3, 2).swapaxes(1, 2)
    np.testing.assert_array_equal(stats[":ragged_dot:rhs@places"], elements)


class Seen:
    """What a site has seen; sums of these are of more."""

    def __init__(self, *operands):
        self.operands = operands

    def __add__(self, other):
        return Seen(*self.operands, *other.operands)


def test_means_and_magnitudes_are_taken_in_every_form_and_merged_over_batches():
    params, batches = weights(), [integers(seed, ROWS, K) for seed in range(2)]
    plan = jqx.make_plan(forms, RULE)(params, batches[0])
    given = {".*": (mean_abs, absmax)}
    stats = jqx.calibrate_batches(forms, plan, params, batches, observers=given, progress=False)
    one, two = (expected(x, Seen) for x in batches)
    for path in one:
        steps = np.ravel(np.asarray(one[path]) + np.asarray(two[path]))
        own = {key.partition("@")[2]: v for key, v in stats.items() if key.startswith(f"{path}:")}
        for i, step in enumerate(steps):
            found = jax.tree.map(lambda v: v[i] if len(steps) > 1 else v, own)  # noqa: B023
            rows = np.concatenate([np.zeros((0, K)), *step.operands])
            np.testing.assert_array_equal(found["mean_abs"].total[0], np.abs(rows).sum(0))
            assert found["mean_abs"].rows == found["absmax"].rows == len(rows)
            np.testing.assert_array_equal(
                found["absmax"].largest[0], np.abs(rows).max(0, initial=0)
            )


@pytest.mark.parametrize(
    ("make", "error", "fact"),
    [
        (lambda: hessian(weight=3), TypeError, "observers.hessian: `weight` is not a function"),
        (lambda: mean(weight=np.ones(3)), TypeError, "ndarray"),
    ],
)
def test_mistakes_are_errors_in_four_parts(make, error, fact):
    parts = r"jqx\.observers\.[a-z]+: .+(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+"
    with pytest.raises(error, match=parts) as refusal:
        make()
    assert fact in str(refusal.value)


def test_an_observer_is_named_in_errors_as_users_write_it():
    with pytest.raises(TypeError, match=r"observers\.mean_abs: `weight` is not a function"):
        mean_abs(weight=3)


def test_statistics_can_be_exported():
    f = lambda w, x: x @ w  # noqa: E731
    w, x = np.eye(3, dtype=np.float32), np.ones((2, 3), np.float32)
    plan = jqx.make_plan(f, RULE)(w, x)
    calibrate = jax.jit(jqx.calibrate(f, plan, observers={"": mean}))
    exported = jax.export.export(calibrate)(w, x)
    _, stats = jax.export.deserialize(exported.serialize()).call(w, x)
    assert int(stats[":dot_general:lhs@mean"].rows) == 2
