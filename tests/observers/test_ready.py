"""The laws of observers, and the ready ones beside NumPy, of each kind of contraction."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.statistics.calibrators import Calibrated
from jqx._src.statistics.statistics import flags
from jqx.extend import ObservedSite, Observer, absmax, hessian, mean, mean_abs, places

from ..oracles.refusals import assert_error
from .test_custom_observer import ROWS, WEIGHTS, K, expected, forms, integers, weights

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
            plan = jqx.make_plan(f, WEIGHTS)(w, x)
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


SPEC = jqx.QSpec(jnp.int8, jqx.per_axis(1))
SITE = ObservedSite("w", "dot_general", "lhs", "activation", True, (1,), (0,), (), SPEC)
READY = [hessian, mean, mean_abs, absmax]
EVERY = [
    *READY,
    *(observer(weight=abs) for observer in READY),
    flags,
    *map(Calibrated, (jqx.calibrators.absmax, jqx.calibrators.minmax, jqx.calibrators.delayed)),
]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_statistics_are_a_monoid(is_weighted):
    """Those of no rows are `empty`, bit by bit, with weights and without them."""
    rng = np.random.default_rng(0)
    parts = [np.float32(rng.integers(-8, 9, (n, 3)) / 4) for n in (0, 1, 4)]
    without = [observer for observer in EVERY if observer.weight is None]
    observers = [x for x in EVERY if x not in without] if is_weighted else without

    def observe(observer: Observer, x):
        counts = jnp.abs(x[:, :1]) if is_weighted else None
        return observer.observe(x, dataclasses.replace(SITE, weights=counts))

    @jax.jit
    def laws(parts):
        pairs = []
        for observer in observers:
            a, b, c = (observe(observer, x) for x in parts)
            empty = observer.empty(jax.ShapeDtypeStruct((7, 3), jnp.float32), SITE)
            plus, whole = observer.merge, observe(observer, jnp.concatenate(parts))
            both = plus(b, c)
            if isinstance(observer, Calibrated):  # one array, not two
                whole = whole._replace(observed=both.observed)
            pairs += [
                (plus(a, both), plus(plus(a, b), c)),
                (both, plus(c, b)),
                (plus(b, empty), b),
                (plus(empty, b), b),
                (a, empty),
                (both, whole),
            ]
        return pairs

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


def test_a_row_is_not_finite_if_infinities_cancel_before_a_relu():
    """On x86 `inf - inf` is a NaN whose sign is set."""
    f = lambda w, x: jax.nn.relu(x @ w) @ w  # noqa: E731
    w, x = np.float32([[1, 0], [-1, 1]]), np.ones((3, 2), np.float32)
    x[1] = np.inf
    plan = jqx.make_plan(f, WEIGHTS)(w, x)
    stats = jax.jit(jqx.calibrate(f, plan, observers={"": absmax}))(w, x)[1]
    nans_infinities = {key: flags[:2].tolist() for key, flags in stats.flags.items()}
    assert nans_infinities == {":dot_general:lhs": [0, 1], ":dot_general#1:lhs": [1, 0]}


def test_statistics_of_each_expert_are_of_the_rows_that_reach_it():
    f = lambda w, x, sizes: lax.ragged_dot(x, w, sizes)  # noqa: E731
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (9, 3)).astype(np.float32)
    x[8] = np.nan  # no expert has it
    w, sizes = np.ones((4, 3, 2), np.float32), np.array([2, 0, 5, 1], np.int32)
    plan = jqx.make_plan(f, WEIGHTS)(w, x, sizes)
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
    plan = jqx.make_plan(forms, WEIGHTS)(params, batches[0])
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


def test_mistakes_are_errors_in_four_parts():
    """They name an observer as users write it."""
    for observer, weight, fact in [
        (hessian, 3, "extend.hessian: `weight` is not a function"),
        (mean_abs, 3, "extend.mean_abs: `weight` is not a function"),
        (mean, np.ones(3), "ndarray"),
    ]:
        assert_error(partial(observer, weight=weight), "jqx.extend.", fact, error=TypeError)


def test_statistics_can_be_exported():
    f = lambda w, x: x @ w  # noqa: E731
    w, x = np.eye(3, dtype=np.float32), np.ones((2, 3), np.float32)
    plan = jqx.make_plan(f, WEIGHTS)(w, x)
    calibrate = jax.jit(jqx.calibrate(f, plan, observers={"": mean}))
    exported = jax.export.export(calibrate)(w, x)
    _, stats = jax.export.deserialize(exported.serialize()).call(w, x)
    assert int(stats[":dot_general:lhs@mean"].rows) == 2


# Convolutions as products of matrices: patches times kernels are the result, by group.


CONVOLUTIONS = {
    "plain": ((2, 6, 7, 4), (3, 3, 4, 5), {"padding": "SAME"}),
    "strides": ((2, 9, 7, 4), (3, 2, 4, 5), {"window_strides": (2, 3), "padding": "VALID"}),
    "dilated": ((1, 9, 9, 4), (3, 3, 4, 6), {"padding": "SAME", "rhs_dilation": (2, 1)}),
    "stretched": (
        (1, 4, 5, 4),
        (3, 3, 4, 6),
        {"padding": [(1, 2), (2, 0)], "lhs_dilation": (2, 2)},
    ),
    "groups": ((2, 6, 6, 8), (3, 1, 2, 12), {"padding": "SAME", "feature_group_count": 4}),
    "depthwise": ((2, 6, 6, 4), (3, 3, 1, 8), {"padding": "SAME", "feature_group_count": 4}),
    "pointwise": ((2, 3, 3, 4), (1, 1, 4, 5), {"padding": [(1, 0), (0, 2)]}),
}


class Rows(Observer):
    """The matrices themselves."""

    def looks_at(self, site):
        return site.role != "result"

    def empty(self, operand, site):
        return jnp.zeros(jax.eval_shape(site.rows, operand).shape)

    def observe(self, x, site):
        return site.rows(x)

    def merge(self, a, b):
        return a


@pytest.mark.parametrize("numbers", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")], ids=str)
def test_patches_times_kernels_are_the_convolution(numbers):
    rng = np.random.default_rng(0)

    def given(name):
        image, kernel, _ = CONVOLUTIONS[name]
        arrays = (rng.integers(-3, 4, shape).astype(np.float32) for shape in (image, kernel))
        if numbers[0] == "NHWC":
            return tuple(arrays)
        turned = ((0, 3, 1, 2), (3, 2, 0, 1))
        return tuple(x.transpose(order) for x, order in zip(arrays, turned, strict=True))

    def convolution(name):
        options = {"window_strides": (1, 1), **CONVOLUTIONS[name][2]}
        return lambda w, x: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)

    @jax.jit
    def found(inputs):
        every = {}
        for name, (x, w) in inputs.items():
            f = convolution(name)
            plan = jqx.make_plan(f, jqx.presets.w8a16())(w, x)
            observers = {".*": (Rows(), hessian, places)}
            every[name] = jqx.calibrate(f, plan, observers=observers)(w, x)
        return every

    inputs = {name: given(name) for name in CONVOLUTIONS}
    for name, (y, stats) in found(inputs).items():
        x, w = (np.asarray(stats[f":conv_general_dilated:{side}@rows"]) for side in ("lhs", "rhs"))
        features = -1 if numbers[2] == "NHWC" else 1
        expected = np.moveaxis(np.asarray(y), features, -1)
        product = np.einsum("...rk,...nk->r...n", x, w).reshape(expected.shape)
        np.testing.assert_array_equal(product, expected, err_msg=name)  # small integers
        seen = stats[":conv_general_dilated:lhs@hessian"]
        np.testing.assert_array_equal(seen.products, x.mT @ x, err_msg=name)
        assert int(seen.rows) == x.shape[-2]
        elements = np.asarray(stats[":conv_general_dilated:rhs@places"])
        np.testing.assert_array_equal(inputs[name][1].ravel()[elements], w, err_msg=name)


def test_hessians_of_batch_groups_are_refused():
    f = lambda w, x: lax.conv_general_dilated(  # noqa: E731
        x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), batch_group_count=2
    )
    w, x = np.ones((3, 4, 6), np.float32), np.ones((2, 5, 4), np.float32)
    plan = jqx.make_plan(f, jqx.presets.w8a16())(w, x)
    with pytest.raises(NotImplementedError, match=r"extend\.hessian: (.|\n)*fix"):
        jax.eval_shape(jqx.calibrate(f, plan, observers={"": hessian}), w, x)
