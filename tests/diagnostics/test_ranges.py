"""`ranges` against the function itself: what is computed lies in what was found, and attains it."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

import jqx
from jqx._src.diagnostics.ranges import Overflow
from jqx.diagnostics import ranges

from ..arrays import normal, on_device
from ..models.forms import FORMS, POLICIES, function, rows, weights
from ..models.transforms import eighths

FLOAT = jqx.Policy([])
"""Nothing is quantized: the integers are those of the function."""

INT8 = jqx.QSpec(jnp.int8)


def dot_in(dtype):
    """A product of matrices with sums of a dtype."""
    numbers = (((1,), (0,)), ((), ()))
    return lambda a, b: lax.dot_general(a, b, numbers, preferred_element_type=dtype)


def abstract(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def ends_of(f, *args, bounds=None, plan=FLOAT):
    """The results of a function of weights and arguments, as pairs."""
    return ranges(f, plan, bounds=bounds)(*args).results


def assert_within(intervals, results):
    for (low, high), x in zip(intervals, jax.tree.leaves(results), strict=True):
        x = np.asarray(x, np.float64)
        assert np.all((x >= low) & (x <= high) | np.isnan(x)), (low, high, x)


# Integer programs: each step computes one more value from two of those before it.

STEPS = {
    "add": lambda x, y, w: x + y,
    "sub": lambda x, y, w: x - y,
    "mul": lambda x, y, w: x * y,
    "square": lambda x, y, w: x * x,
    "neg": lambda x, y, w: -x,
    "abs": lambda x, y, w: abs(x),
    "div": lambda x, y, w: lax.div(x, y) if isinstance(x, jax.Array) else divided(x, y),
    "max": lambda x, y, w: lax.max(x, y) if isinstance(x, jax.Array) else np.maximum(x, y),
    "min": lambda x, y, w: lax.min(x, y) if isinstance(x, jax.Array) else np.minimum(x, y),
    "where": lambda x, y, w: (jnp if isinstance(x, jax.Array) else np).where(x < y, x, y),
    "sum": lambda x, y, w: 0 * x + x.sum(dtype=x.dtype),
    "cumsum": lambda x, y, w: lax.cumsum(x) if isinstance(x, jax.Array) else x.cumsum(),
    "dot": lambda x, y, w: w.astype(x.dtype) @ x,
    "weight": lambda x, y, w: w[0].astype(x.dtype),
    "shift": lambda x, y, w: x << 1 if isinstance(x, np.ndarray) else lax.shift_left(x, one(x)),
    "half": lambda x, y, w: x >> 1 if isinstance(x, np.ndarray) else x >> one(x),
    "reverse": lambda x, y, w: x[::-1],
}


def one(x):
    return jnp.full(x.shape, 1, x.dtype)


def divided(x, y):
    """Towards zero; -1 where XLA divides by zero."""
    return np.where(y == 0, -1, np.sign(x * y) * (abs(x) // np.maximum(abs(y), 1)))


programs = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), max_size=6
)
small = st.integers(-100, 100)


def run(program, w, x):
    values = [x]
    for name, i, j in program:
        values.append(STEPS[name](values[i % len(values)], values[j % len(values)], w))
    return values


@settings(deadline=None, max_examples=150)
@given(program=programs, low=small, high=small, data=st.data())
def test_integers_are_in_their_intervals_or_an_overflow_is_reported(program, low, high, data):
    low, high = min(low, high), max(low, high)

    def draw(a, b, *shape):
        size = math.prod(shape)
        numbers = st.lists(st.integers(a, b), min_size=size, max_size=size)
        return np.reshape(data.draw(numbers), shape)

    w, x = draw(-3, 3, 3, 3), draw(low, high, 3)
    args = on_device(w, jnp.int16), on_device(x, jnp.int16)
    chosen = ranges(lambda w, x: run(program, w, x), FLOAT, bounds={1: (low, high)})(*args)
    assert not chosen.unknown
    exact = run(program, w.astype(np.int64), x.astype(np.int64))
    if all(np.all(abs(value + 0.5) < 2**15) for value in exact):
        results = run(program, *args)
        assert_within(chosen.results, results)
        np.testing.assert_array_equal(results, exact)
    else:
        assert chosen.overflows


PAIRS = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "div": lax.div,
    "rem": lax.rem,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "shift": lambda x, y: lax.shift_right_arithmetic(x, lax.abs(y)),
    "logical": lambda x, y: lax.shift_right_logical(x, lax.abs(y)),
    "less": lambda x, y: x < y,
    "equal": lambda x, y: x == y,
    "at least": lambda x, y: x >= y,
}
ATTAINED = ("add", "sub", "mul", "max", "min", "less", "equal", "at least")
tiny = st.integers(-6, 6)
TINY = np.meshgrid(np.arange(-6, 7), np.arange(-6, 7))


@functools.cache
def of_pairs():
    """What each operation gives of each two tiny integers."""
    operations = jax.jit(lambda x, y: [op(x, y) for op in PAIRS.values()])
    return jax.device_get(operations(*(on_device(x, jnp.int8) for x in TINY)))


@settings(deadline=None, max_examples=50)
@given(tiny, tiny, tiny, tiny)
def test_every_pair_of_integers_lies_in_the_interval(a, b, c, d):
    left, right = sorted((a, b)), sorted((c, d))
    f = lambda _, x, y: [op(x, y) for op in PAIRS.values()]  # noqa: E731
    args = 0.0, abstract(jnp.int8, 1), abstract(jnp.int8, 1)
    intervals = ends_of(f, *args, bounds={1: tuple(left), 2: tuple(right)})
    x, y = TINY
    inside = (left[0] <= x) & (x <= left[1]) & (right[0] <= y) & (y <= right[1])
    results = [result[inside] for result in of_pairs()]
    assert_within(intervals, results)
    for name, ends, result in zip(PAIRS, intervals, results, strict=True):
        attained = name in ATTAINED or (name == "div" and not right[0] <= 0 <= right[1])
        assert not attained or ends == (int(result.min()), int(result.max())), name


REAL = {
    "tanh": lambda x, y, w: jnp.tanh(x),
    "exp": lambda x, y, w: jnp.exp(x),
    "logistic": lambda x, y, w: jax.nn.sigmoid(x),
    "gelu": lambda x, y, w: jax.nn.gelu(x),
    "erf": lambda x, y, w: jax.nn.gelu(x, approximate=False),
    "silu": lambda x, y, w: jax.nn.silu(x),
    "relu": lambda x, y, w: jax.nn.relu(x),
    "softmax": lambda x, y, w: jax.nn.softmax(x),
    "log": lambda x, y, w: jnp.log(abs(x)),
    "sqrt": lambda x, y, w: jnp.sqrt(x),
    "rsqrt": lambda x, y, w: lax.rsqrt(x),
    "div": lambda x, y, w: x / y,
    "rem": lambda x, y, w: lax.rem(x, y),
    "pow": lambda x, y, w: x**y,
    "cube": lambda x, y, w: x**3,
    "inverse": lambda x, y, w: x**-2,
    "sin": lambda x, y, w: jnp.sin(x),
    "add": lambda x, y, w: x + y,
    "sub": lambda x, y, w: x - y,
    "mul": lambda x, y, w: x * y,
    "dot": lambda x, y, w: w @ x,
    "norm": lambda x, y, w: (x - x.mean()) / jnp.sqrt(x.var() + 1e-3),
    "cumsum": lambda x, y, w: jnp.cumsum(x),
    "sort": lambda x, y, w: jnp.sort(x),
    "round": lambda x, y, w: jnp.round(x) + jnp.floor(y) - jnp.ceil(x),
    "half": lambda x, y, w: x.astype(jnp.bfloat16).astype(jnp.float32),
    "integer": lambda x, y, w: jnp.clip(x, -9, 9).astype(jnp.int8).astype(jnp.float32),
    "clip": lambda x, y, w: jnp.clip(x, -1, y),
    "where": lambda x, y, w: jnp.where(x > y, x, w[0]),
    "sign": lambda x, y, w: jnp.sign(x) * abs(y),
    "slope": lambda x, y, w: jax.grad(lambda x: jnp.tanh(x).sum())(x),
}

ONE_PROGRAM_EACH = {name: jax.jit(operation) for name, operation in REAL.items()}

real_programs = st.lists(
    st.tuples(st.sampled_from(sorted(REAL)), st.integers(0, 9), st.integers(0, 9)), max_size=5
)
numbers = st.floats(-8, 8, width=32)
cases = st.tuples(real_programs, numbers, numbers, st.lists(st.floats(0, 1, width=32), min_size=12))


def run_real(program, w, x, operations=REAL):
    values = [x]
    for name, i, j in program:
        values.append(operations[name](values[i % len(values)], values[j % len(values)], w))
    return values


@pytest.mark.slow
@example(
    [
        ([("rsqrt", 0, 0)], -0.0, 0.0, [0.0] * 12),
        ([("cube", 0, 0), ("logistic", 1, 0)], -5.0, -5.0, [0.0] * 12),
        ([("half", 0, 0), ("sign", 1, 1)], 1e-40, 1e-40, [0.0] * 12),
        ([("round", 0, 0), ("div", 0, 1), ("inverse", 1, 1)], -0.25, 0.0, [0.5] * 12),
    ]
)
@settings(deadline=None, max_examples=25)
@given(st.lists(cases, min_size=6, max_size=6))
def test_floats_lie_in_their_intervals(cases):
    """With the rounding that float32 adds: the intervals are widened by it. Six cases are one
    compiled program; and each operation is, of all cases.
    """
    programs, arrays, intervals = [], [], []
    for program, a, b, shares in cases:
        low, high = min(a, b), max(a, b)
        w = np.asarray(shares[:9], np.float32).reshape(3, 3) - 0.5
        x = np.clip(low + (high - low) * np.asarray(shares[9:12], np.float32), low, high)
        args = on_device(w), on_device(x, jnp.float32)
        f = functools.partial(run_real, program)
        result = ranges(f, FLOAT, bounds={1: (low, high)})(*args)
        assert not result.unknown and not result.overflows
        assert_within(result.results, f(*args, operations=ONE_PROGRAM_EACH))
        programs.append(f)
        arrays.append(args)
        intervals.append(result.results)
    compiled = jax.jit(lambda arrays: [f(*of) for f, of in zip(programs, arrays, strict=True)])
    for ends, results in zip(intervals, compiled(arrays), strict=True):
        assert_within(ends, results)


def every_operation(w, x):
    return [operation(x, x[::-1], w) for operation in REAL.values()]


EVERY_OPERATION = jax.jit(every_operation)


@pytest.mark.parametrize(("low", "high"), [(0.5, 3.0), (-3.0, -0.5), (-2.0, 3.0)])
def test_every_operation_lies_in_its_interval(low, high):
    args = eighths(0, 3, 3), on_device(np.linspace(low, high, 3), jnp.float32)
    result = ranges(every_operation, FLOAT, bounds={1: (low, high)})(*args)
    assert not result.unknown and not result.overflows
    assert_within(result.results, EVERY_OPERATION(*args))


codes = st.integers(-128, 127)


@settings(deadline=None, max_examples=50)
@given(st.lists(codes, min_size=12, max_size=12), codes, codes)
def test_the_ends_of_one_product_are_attained(w, a, b):
    low, high = min(a, b), max(a, b)
    w = np.reshape(w, (6, 2))
    up = np.where(w > 0, high, low)
    least, most = (w * (low + high - up)).sum(0).min(), (w * up).sum(0).max()

    f = lambda w, x: dot_in(jnp.int32)(x, w)  # noqa: E731
    args = on_device(w, jnp.int8), abstract(jnp.int8, 1, 6)
    assert ends_of(f, *args, bounds={1: (low, high)}) == ((least, most),)
    attained = np.asarray(f(args[0], on_device(np.vstack([up.T, (low + high - up).T]), jnp.int8)))
    assert (attained.min(), attained.max()) == (least, most)


@pytest.mark.parametrize(
    ("dtype", "fits"), [(jnp.int16, 1), (jnp.int32, 131_071)], ids=["int16", "int32"]
)
def test_a_planted_overflow_is_found_and_goes_with_a_shorter_sum(dtype, fits):
    """The product of two int8 is 16,384 at most: 2 of them leave an int16, 131,072 an int32."""

    def found(products):
        args = abstract(jnp.int8, 1, products), abstract(jnp.int8, products, 1)
        return ranges(dot_in(dtype), FLOAT)(*args)

    assert found(fits).overflows == ()
    (row,) = found(fits + 1).overflows
    name = jnp.dtype(dtype).name
    assert isinstance(row, Overflow) and (row.primitive, row.dtype) == ("dot_general", name)
    assert (row.low, row.high) == (-128 * 127 * (fits + 1), 128 * 128 * (fits + 1))
    assert "test_ranges.py" in row.line and name in str(found(fits + 1))


@pytest.mark.parametrize(
    ("f", "dtype", "fits", "leaves"),
    [
        (lambda _, x: x + x, jnp.int32, 2**30 - 1, 2**30),
        (lambda _, x: jnp.sum(x), jnp.int32, (2**31 - 1) // 8, 2**28),
        (lambda _, x: lax.cumsum(x), jnp.int16, 4095, 4096),
        (lambda _, x: x.astype(jnp.int8), jnp.int32, 127, 128),
        (lambda _, x: jnp.round(x).astype(jnp.int8), jnp.float32, 127, 128),
        (lambda _, x: x * jnp.int16(3), jnp.int16, 10922, 10923),
        (lambda _, x: lax.shift_left(x, jnp.full(8, 3, jnp.int16)), jnp.int16, 4095, 4096),
        (lambda _, x: jnp.zeros(2, jnp.int16).at[x * 0].add(x), jnp.int16, 4095, 4096),
        (lambda _, x: lax.fori_loop(0, 8, lambda i, c: c + x, 0 * x), jnp.int16, 4095, 4096),
        (lambda _, x: lax.scan(lambda c, x: (c + x, None), x[0] * 0, x)[0], jnp.int16, 4095, 4096),
    ],
)
def test_overflows_of_sums_products_and_conversions(f, dtype, fits, leaves):
    args = jnp.zeros(()), abstract(dtype, 8)
    assert ranges(f, FLOAT, bounds={1: (0, fits)})(*args).overflows == ()
    assert len(ranges(f, FLOAT, bounds={1: (0, leaves)})(*args).overflows) == 1


def test_a_sum_over_a_long_scan_is_as_long_as_the_scan():
    def f(_, x):
        start = jnp.zeros((), jnp.int16), jnp.zeros((), jnp.int16)
        return lax.scan(lambda c, x: ((c[1] // 2, c[1] + x.astype(jnp.int16)), c[0]), start, x)

    in_range = ranges(f, FLOAT, bounds={1: (-1, 127)})
    result = in_range(0.0, abstract(jnp.int8, 258))
    assert result.overflows == () and result.results[1] == (-258, 127 * 258)
    (row,) = in_range(0.0, abstract(jnp.int8, 259)).overflows
    assert (row.low, row.high) == (-259, 127 * 259)


def real(i):
    return jnp.asarray(i, jnp.float32)


@pytest.mark.parametrize(
    "f",
    [
        lambda _, n, x: lax.fori_loop(0, n, lambda i, c: jnp.tanh(c + real(i)), x),
        lambda _, n, x: lax.fori_loop(0, 5, lambda i, c: jnp.tanh(c + real(i)), x),
        lambda _, n, x: lax.fori_loop(0, 5000, lambda i, c: jnp.tanh(c + real(i)), x),
        lambda _, n, x: lax.fori_loop(n, 5000, lambda i, c: jnp.tanh(c + real(i)), x),
        lambda _, n, x: lax.while_loop(
            lambda s: (s[0] < n) & (s[1] > 0), lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x)
        ),
        lambda _, n, x: lax.while_loop(
            lambda s: s[0] >= 1, lambda s: (s[0] - 1, jnp.sin(s[1])), (n, x)
        ),
        lambda _, n, x: lax.scan(lambda i, x: (i + 1, x * real(i)), 0, jnp.broadcast_to(x, (999,))),
    ],
)
def test_loop_counters_do_not_overflow(f):
    result = ranges(f, FLOAT)(0.0, abstract(jnp.int32), abstract(jnp.float32))
    assert result.overflows == () and not result.unknown


LOOPS = {
    "scan": lambda _, n, x: lax.scan(
        lambda c, x: ((c * 3 + x) % 7, (c - x, c)), jnp.int32(5), jnp.broadcast_to(x, (300,))
    ),
    "scan of two": lambda _, n, x: lax.scan(
        lambda c, i: ((c[0] + i, jnp.minimum(c[1] + 1, c[0])), c[1]),
        (x, jnp.int32(-4)),
        jnp.arange(300, dtype=jnp.int32) % 5,
    ),
    "scan that hands on": lambda _, n, x: lax.scan(
        lambda c, _: ((c[1], c[0], c[2]), c[0] - c[2]), (x, n, x), None, length=301
    ),
    "reversed": lambda _, n, x: lax.scan(
        lambda c, i: (jnp.maximum(c, i * x), i), n, jnp.arange(9, dtype=jnp.int32), reverse=True
    ),
    "while": lambda _, n, x: lax.while_loop(
        lambda s: s[0] < n, lambda s: (s[0] + 2, jnp.maximum(s[1] - s[0], -9)), (x, x)
    ),
    "long while": lambda _, n, x: lax.while_loop(
        lambda s: s[0] <= 400, lambda s: (s[0] + 1, -s[1]), (jnp.int32(0), n)
    ),
    "while in scan": lambda _, n, x: lax.scan(
        lambda c, i: (lax.while_loop(lambda c: c > i, lambda c: c // 2 - 1, c + 20), c),
        n,
        jnp.arange(200, dtype=jnp.int32) % 3,
    ),
}


COMPILED = {name: jax.jit(loop) for name, loop in LOOPS.items()}


@pytest.mark.parametrize("name", LOOPS)
@settings(deadline=None, max_examples=10)
@given(n=st.integers(-20, 20), x=st.integers(-3, 3))
def test_loops_of_integers_lie_in_their_intervals(name, n, x):
    """Followed step by step and widened; what overflows is told before it is wrong."""
    args = 0.0, jnp.int32(n), jnp.int32(x)
    result = ranges(LOOPS[name], FLOAT, bounds={1: (-20, 20), 2: (-3, 3)})(*args)
    assert not result.unknown
    assert_within(result.results, COMPILED[name](*args))


def test_carried_numbers_that_do_not_grow_keep_their_bounds():
    f = lambda _, n, x: lax.while_loop(  # noqa: E731
        lambda s: s[0] < n, lambda s: (s[0] + 1, -s[1]), (0, x)
    )
    args = 0.0, abstract(jnp.int32), abstract(jnp.int32)
    assert ends_of(f, *args, bounds={1: (3, 500), 2: (-7, 5)}) == ((3, 500), (-7, 7))


def test_indices_from_the_end_and_the_arithmetic_of_jqx_do_not_overflow():
    def of_codes(_, x):
        return jqx.matmul(jqx.QTensor.quantize(x, INT8), jqx.QTensor.quantize(x.T, INT8))

    def indexed(p, i):
        return p[i], jnp.take(p, i, axis=0), lax.dynamic_index_in_dim(p, i[0])

    assert ranges(of_codes, FLOAT)(0.0, abstract(jnp.float32, 4, 4)).overflows == ()
    table = jnp.arange(12.0).reshape(4, 3)
    result = ranges(indexed, FLOAT)(table, abstract(jnp.int32, 5))
    assert result.overflows == () and set(result.results) == {(0.0, 11.0)}
    unlike = lambda _, i: jnp.where(i < 1, i + 5, i)  # noqa: E731
    assert len(ranges(unlike, FLOAT)(0.0, abstract(jnp.int32, 5)).overflows) == 1


# Sites of a plan.

W = on_device([[64.0, 127.0], [-127.0, 1.0], [32.0, 0.0]])
W_127 = on_device([[127.0, 127.0], [-127.0, 1.0], [32.0, 0.0]])
"""Codes of 8 bits: each channel is a scale of 1."""


def matmul(w, x):
    return x @ w


def only(f, plan, *args, affines=None, bounds=None):
    (site,) = ranges(f, plan, affines, bounds=bounds)(*args).sites
    return site


X = abstract(jnp.float32, 4, 3)
DYNAMIC = jqx.presets.w8a8_dynamic()


def test_a_dynamic_scale_leaves_all_codes_and_a_sign_halves_them():
    site = only(matmul, DYNAMIC, W_127, X)
    assert (site.lhs, site.rhs, site.products) == ((-128, 127), (-127, 127), 3)
    assert site.sums == (-128 * (127 + 32) - 127 * 127, 127 * (127 + 32) + 128 * 127)
    half = only(lambda w, x: jax.nn.relu(x) @ w, DYNAMIC, W_127, X)
    assert half.lhs == (0, 127) and half.sums == (-127 * 127, 127 * (127 + 32))
    assert (site.dtype, site.bits, half.bits, site.how) == ("int32", 17, 16, "int32")
    assert half.dtype == "int16" and half.used == 127 * 159 / (2**31 - 1)


def static(low, high, **fields):
    fields = {"qtype": jnp.int8, "calibrator": jqx.calibrators.fixed(low, high), **fields}
    spec = jqx.QSpec(**fields)
    weight = jqx.QSpec(jnp.int8, jqx.per_channel())
    return jqx.Policy([jqx.Rule(weight=weight, activation=spec)])


def calibrated(f, policy, *args):
    plan = jqx.make_plan(f, policy)(*args)
    seen = jax.jit(lambda *args: jqx.affines(plan, jqx.calibrate(f, plan)(*args)[1]))
    return plan, seen(*args)


def test_a_static_scale_narrows_the_codes_to_those_of_the_bounds():
    plan, affines = calibrated(matmul, static(-127.0, 127.0), W_127, jnp.ones((4, 3)))
    site = only(matmul, plan, W_127, X, affines=affines, bounds={1: (-2.0, 3.4)})
    assert site.lhs == (-2, 3)
    assert site.sums == (-2 * (127 + 32) - 3 * 127, 3 * (127 + 32) + 2 * 127)
    assert only(matmul, plan, W_127, X, affines=affines).lhs == (-128, 127)


def test_zero_points_are_taken_off():
    policy = static(-1.0, 254.0, qtype=jnp.uint8, symmetric=False)
    plan, affines = calibrated(matmul, policy, W, jnp.ones((4, 3)))
    site = only(matmul, plan, W, X, affines=affines)
    assert site.lhs == (-1, 254)
    assert only(matmul, plan, W, X).lhs == (-255, 255)
    assert only(matmul, plan, W, X, bounds={1: (0.0, 9.0)}).lhs == (0, 255)


@functools.cache
def of_products():
    """A plan, and the scales, codes and results of it, as one compiled program."""
    plan = jqx.make_plan(matmul, jqx.presets.w8a8())(normal(0, 16, 4), normal(1, 8, 16))

    def run(w, x):
        affines = jqx.affines(plan, jqx.calibrate(matmul, plan)(w, x)[1])
        ((affine,), spec) = affines.values(), plan.sites[0].operands[0].spec
        codes = jqx.QTensor.quantize(x, spec, affine).codes, jqx.quantize_params(w, plan).codes
        return affines, codes, jqx.convert(matmul, plan, affines)(w, x)

    return plan, jax.jit(run)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.sampled_from([(-1.0, 1.0), (0.0, 3.0), (-4.0, -0.5)]))
def test_the_sums_of_random_products_lie_in_their_interval(seed, bounds):
    w, x = normal(seed, 16, 4), np.random.default_rng(seed).uniform(*bounds, (8, 16))
    x = on_device(np.clip(x, *bounds), jnp.float32)
    plan, run = of_products()
    affines, codes, result = run(w, x)
    results = ranges(matmul, plan, affines, bounds={1: bounds})(w, x)
    (site,) = results.sites
    a, b = (np.asarray(values, np.int64) for values in codes)
    assert site.sums[0] <= (a @ b).min() and (a @ b).max() <= site.sums[1]
    assert site.lhs[0] <= a.min() and a.max() <= site.lhs[1]
    assert (site.rhs[0], site.rhs[1]) == (b.min(), b.max())
    assert_within(results.results, result)


@pytest.mark.many
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FORMS)
def test_results_lie_in_their_intervals_in_every_form(name, policy):
    w, x = weights(), rows()
    f = function(name)
    result = ranges(f, POLICIES[policy], bounds={1: (-1.0, 1.0)})(w, x)
    assert not result.unknown and not result.overflows
    converted = jqx.convert(f, POLICIES[policy], "dynamic", unsupported="dequantize")
    assert_within(result.results, jax.jit(converted)(w, x))
    assert all((site.sums is None) == (policy == "weights") for site in result.sites[1:])


def test_a_scan_over_layers_has_the_largest_of_them():
    f = lambda w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]  # noqa: E731
    w = normal(0, 5, 3, 3)
    result = only(f, DYNAMIC, w, X)
    layers = [only(matmul, DYNAMIC, w[i], X) for i in range(5)]
    assert result.sums[0] == min(site.sums[0] for site in layers)
    assert result.sums[1] == max(site.sums[1] for site in layers)
    assert len({site.sums for site in layers}) == 5


def test_scales_in_blocks_are_sums_by_themselves():
    spec = jqx.QSpec(jnp.int8, jqx.per_group(4))
    policy = jqx.Policy([jqx.Rule(weight=spec, activation=jqx.QSpec(jnp.int8, dynamic=True))])
    w = jnp.full((8, 2), 127.0).at[4:].set(-1.0)
    site = only(matmul, policy, w, abstract(jnp.float32, 1, 8), bounds={1: (0.0, 1.0)})
    assert site.products == 4 and site.sums == (-4 * 127 * 127, 4 * 127 * 127)


def test_what_jqx_does_where_an_int32_is_too_small():
    products = 140_000  # of int8 by int8, where 131,071 fit for sure
    args = jnp.full((products, 1), 127.0), abstract(jnp.float32, 1, products)
    site = only(matmul, DYNAMIC, *args)
    assert site.how == "int32 in 2 parts, float32"
    assert site.dtype == "int64" and site.used == 128 * 127 * products / 2**31 > 1
    wide = jqx.Policy([jqx.Rule(weight=INT8, activation=jqx.QSpec(jnp.int16, dynamic=True))])
    assert only(matmul, wide, W, X).how == "int8 digits, int32"
    assert only(matmul, wide, *args).how == "int8 digits, float32"


def test_weights_alone_and_lookups_have_no_sums():
    f, p = lambda p, i: p["t"][i] @ p["w"], {"t": jnp.eye(3), "w": W}
    result = ranges(f, jqx.presets.w8a16(tables="int8"))(p, abstract(jnp.int32, 2))
    assert [(x.op, x.how, x.sums) for x in result.sites] == [
        ("gather", "lookup", None),
        ("dot_general", "float", None),
    ]
    low, high = result.results[0]
    units = 3 * 3 * 2.0**-23  # product, scale and sum of each of 3 terms
    np.testing.assert_allclose((low, high), (-127, 127 + 1), rtol=units)


@pytest.mark.many
@pytest.mark.parametrize(
    "policy",
    [
        jqx.presets.w4a4(),
        jqx.presets.fp8(),
        jqx.presets.mxfp8(),
        jqx.presets.nf4(),
        jqx.presets.w4a16(),
        jqx.Policy([jqx.Rule(weight=INT8, output=INT8)]),
        *(
            static(-1.0, 1.0, dynamic=True, calibrator=calibrator)
            for calibrator in (jqx.calibrators.rms(3.0), jqx.calibrators.mse)
        ),
    ],
    ids="w4a4 fp8 mxfp8 nf4 w4a16 output rms mse".split(),
)
def test_results_lie_in_their_intervals_in_every_format(policy):
    def f(w, x):
        return (x @ w, jnp.tanh(x) @ w)

    w = normal(0, 64, 4)
    x = on_device(np.round(np.random.default_rng(1).uniform(-8, 8, (16, 64))) / 8, jnp.float32)
    plan, affines = calibrated(f, policy, w, x)
    result = ranges(f, plan, affines, bounds={1: (-1.0, 1.0)})(w, x)
    assert_within(result.results, jax.jit(jqx.convert(f, plan, affines))(w, x))
    assert all(math.isfinite(end) for ends in result.results for end in ends)


def conv(w, x):
    return lax.conv_general_dilated(x, w, (1,), "SAME")


def test_a_convolution_is_known_channel_by_channel():
    w = on_device([[[127.0, -2.0], [1.0, 0.0]], [[-127.0, 0.0], [0.0, -3.0]]])  # [out, in, taps]
    site = only(conv, DYNAMIC, w, abstract(jnp.float32, 1, 2, 9), bounds={1: (0.0, 1.0)})
    assert site.products == 4 and site.sums == (-130 * 127, 128 * 127)


def test_groups_of_rows_are_known_matrix_by_matrix():
    f = lambda w, x, sizes: lax.ragged_dot(x, w, sizes)  # noqa: E731
    w = jnp.stack([W[:, :1], 2 * W[:, :1]]).at[1, 0].set(254.0)
    args = w, abstract(jnp.float32, 4, 3), abstract(jnp.int32, 2)
    policy = jqx.presets.w8a8_dynamic(weight={"granularity": jqx.per_tensor()})
    assert only(f, policy, *args, bounds={1: (0.0, 1.0)}).sums == (-127 * 127, 127 * (127 + 32))


def test_codes_given_and_floats_given_are_alike_and_abstract_ones_are_any():
    w = normal(0, 3, 2)
    plan = jqx.make_plan(matmul, DYNAMIC)(w, X)
    site = only(matmul, plan, w, X)
    assert site == only(matmul, plan, jqx.quantize_params(w, plan), X)
    anything = only(matmul, plan, abstract(jnp.float32, 3, 2), X)
    assert (anything.rhs, anything.sums) == ((-128, 127), (-3 * 128 * 127, 3 * 128 * 128))


def test_views_of_weights_keep_their_codes():
    def f(p, x):
        parts = jnp.split(p["a"], 2, axis=1)
        joined = jnp.concatenate([parts[1], p["b"]], axis=1)
        return x @ (parts[0].T * -2)[:, ::-1], x @ joined[:1]

    a, b = on_device([[127.0, 4.0], [-1.0, 0.0]]), on_device([[2.0], [127.0]])
    policy = jqx.presets.w8a8_dynamic(weight={"granularity": jqx.per_tensor()})
    x = abstract(jnp.float32, 1, 1)
    scaled, joined = ranges(f, policy, bounds={1: (0, 1)})({"a": a, "b": b}, x).sites
    assert scaled.rhs in ((-1, 127), (-127, 1))
    assert joined.rhs == (2, 4)


def test_devices_sum_over_what_they_share():
    mesh, x = Mesh(np.array(jax.devices("cpu")[:2]), ("d",)), jnp.ones((4, 4))
    specs = PartitionSpec("d", None), PartitionSpec(None, "d")
    local = lambda w, x: lax.psum(x @ w, "d")  # noqa: E731
    f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    result = ranges(f, FLOAT, bounds={1: (0.0, 1.0)})(jnp.ones((4, 2)), x)
    assert not result.unknown
    assert_within(result.results, f(jnp.ones((4, 2)), x))


def test_an_unknown_primitive_is_reported_and_gradients_and_names_have_none():
    def loss(w, x):
        return jnp.sum(jax.nn.log_softmax(jnp.tanh(conv(w, x))) ** 2)

    args = jnp.ones((2, 2, 3)), abstract(jnp.float32, 1, 2, 9)
    assert not ranges(jax.grad(loss), FLOAT)(*args).unknown
    f = lambda _, x: checkpoint_name(jnp.minimum(x, 0.0), "kept")  # noqa: E731
    named = ranges(f, FLOAT, bounds={1: (-1.0, 0.5)})(0.0, abstract(jnp.float32, 4, 2))
    assert not named.unknown and named.results == ((-1.0, 0.0),)
    result = ranges(lambda w, x: jnp.linalg.cholesky(x), FLOAT)(0.0, abstract(jnp.float32, 3, 3))
    assert list(result.unknown) == ["cholesky"] and "test_ranges.py" in result.unknown["cholesky"]
    assert result.results == ((-math.inf, math.inf),)
    assert "unknown: cholesky" in str(result)


def test_it_prints_and_serializes():
    f = lambda p, x: (x @ p["w"], p["n"] + p["n"])  # noqa: E731
    result = ranges(f, DYNAMIC)({"w": W, "n": jnp.int8(100)}, X)
    text = str(result)
    assert text.splitlines()[0].split()[:2] == ["path", "op"] and "may overflow: add" in text
    data = json.loads(json.dumps(result.to_dict()))
    assert data["sites"][0]["path"] == "w" and data["sites"][0]["bits"] == result.sites[0].bits
    assert data["overflows"][0]["high"] == 200 and data["results"][0] == [None, None]
    assert result.to_markdown().startswith("| path | op |")


def test_bounds_are_pytrees_by_position_or_name():
    f = lambda w, x, *, y: (x["a"], x["b"], y)  # noqa: E731
    x = {"a": abstract(jnp.float32, 2), "b": abstract(jnp.int8)}
    bounds = {1: {"a": (0, 1), "b": (-3.5, 3.5)}, "y": (5, 6)}
    result = ranges(f, FLOAT, bounds=bounds)(0.0, x, y=[abstract(jnp.float32)])
    assert result.results == ((0, 1), (-3, 3), (5, 6))


@pytest.mark.parametrize(
    ("bounds", "problem"),
    [
        ({0: (0, 1)}, "an argument of weights"),
        ({7: (0, 1)}, "names no argument"),
        ({1: (1, 0)}, "does not fit"),
        ({1: (0, 1, 2)}, "does not fit"),
        ({1: {"a": (0, 1)}}, "does not fit"),
        ({1: (math.nan, 1)}, "does not fit"),
        ({2: (0, 300)}, "exceed its dtype"),
    ],
)
def test_wrong_bounds_are_refused(bounds, problem):
    with pytest.raises(ValueError, match=problem) as error:
        ranges(lambda w, x, i: x @ w, DYNAMIC, bounds=bounds)(W, X, abstract(jnp.int8))
    assert "fix" in str(error.value)


def test_traced_weights_and_strange_bounds_are_refused():
    with pytest.raises(ValueError, match="traced"):
        jax.jit(lambda w: ranges(matmul, DYNAMIC)(w, X))(W)
    with pytest.raises(TypeError, match="not a mapping"):
        ranges(matmul, DYNAMIC, bounds=(0, 1))
