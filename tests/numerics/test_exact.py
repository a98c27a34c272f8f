"""Fails when a new XLA undoes one of the tricks of `jqx/_src/numerics/exact.py`."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jqx._src.numerics.exact import (
    bit_width,
    common_dtype,
    compute_dtype,
    difference,
    divide,
    divide_by_steps,
    float_difference,
    holds_codes,
    is_signed,
    multiply,
    narrow,
    saturating_float_sum,
    saturating_sum,
    split_reciprocal,
)
from jqx._src.numerics.qtype import INTEGERS

from ..arrays import on_device
from ..oracles.numerics import assert_codes, assert_floats, code_range, codes_of, nearest, saturated

SMALL = [qtype for qtype in INTEGERS if not qtype.endswith("32")]
SHAPE = (400, 300)  # 120,000 quotients


def normals(seed, shape=SHAPE, dtype=np.float32):
    """Normal numbers over forty binades, so that subnormals play no part."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, shape)).astype(dtype)


X = normals(0)
DIVISORS = {
    "scalar": normals(1, ()),
    "per_row": normals(2, (400, 1)),
    "per_column": normals(3, (1, 300)),
    "elementwise": normals(4),
}


def assert_same_bits(result, expected):
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(result), expected)


def jitted(f, operands, constants=()):
    """Evaluates a function under jit, some of its operands as constants of the program."""

    def of_the_others(others):
        others = list(others)
        of = [on_device(x) if i in constants else others.pop(0) for i, x in enumerate(operands)]
        return f(*of)

    return jax.jit(of_the_others)([x for i, x in enumerate(operands) if i not in constants])


@pytest.mark.parametrize("constants", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("placement", DIVISORS)
def test_divide_is_a_true_division(placement, constants):
    """Under jit, and op by op."""
    operands = X, DIVISORS[placement]
    expected = X / DIVISORS[placement]
    assert_same_bits(jitted(divide, operands, constants), expected)
    if not constants:
        assert_same_bits(divide(*map(on_device, operands)), expected)


def test_divide_is_a_true_division_in_float64():
    with jax.enable_x64(True):
        x, s = normals(5, dtype=np.float64), normals(6, (), np.float64)
        assert_same_bits(jax.jit(divide)(x, s), x / s)


def scanned(unroll):
    """A division of each row inside of a scan."""

    def f(xs, s):
        return lax.scan(lambda carry, x: (carry, divide(x, s)), None, xs, unroll=unroll)[1]

    return f


OF_ONE_DIVISOR = {
    "vmap": jax.vmap(divide, in_axes=(0, None)),
    "scan": scanned(1),
    "scan, unrolled": scanned(8),
    "fori_loop": lambda x, s: lax.fori_loop(0, 1, lambda i, x: divide(x, s), x),
    "cond": lambda x, s: lax.cond(s != 0, divide, lambda x, s: x, x, s),
    "remat": jax.checkpoint(divide),
    "map": lambda x, s: lax.map(lambda row: divide(row, s), x),
}
OF_A_DIVISOR_FOR_EACH_ROW = {
    "vmap": jax.vmap(divide),
    "nested vmap": jax.vmap(jax.vmap(divide, in_axes=(0, None))),
    "scan": lambda xs, s: lax.scan(lambda c, v: (c, divide(*v)), None, (xs, s))[1],
}


def test_divide_is_a_true_division_by_one_divisor_inside_of_maps_loops_and_conditionals():
    """Of a divisor that is an argument, and of a constant."""
    s = DIVISORS["scalar"]
    for f in OF_ONE_DIVISOR.values():
        assert_same_bits(jax.jit(f)(X, s), X / s)
        assert_same_bits(jax.jit(lambda x, f=f: f(x, on_device(s)))(X), X / s)


def test_divide_is_a_true_division_by_a_divisor_for_each_row_inside_of_maps_and_scans():
    s = normals(8, (400,))
    for f in OF_A_DIVISOR_FOR_EACH_ROW.values():
        assert_same_bits(jax.jit(f)(X, s), X / s[:, None])
    s = DIVISORS["scalar"]
    assert_same_bits(OF_ONE_DIVISOR["vmap"](X, s), X / s)
    s = normals(7, (40,))
    result = jax.jit(jax.vmap(divide, in_axes=(None, 0)))(X[:40], s)
    assert_same_bits(result, X[None, :40] / s[:, None, None])


def test_divide_is_a_true_division_amid_other_arithmetic():
    s, steps = DIVISORS["scalar"], np.float32(255)
    f = jax.jit(lambda x, s: divide(jnp.abs(divide(x, s)), on_device(steps)))
    assert_same_bits(f(X, s), np.abs(X / s) / steps)


def test_divide_follows_ieee_for_zeros_infinities_and_nan():
    values = np.array([0.0, -0.0, 1.0, -3.0, np.inf, -np.inf, np.nan], np.float32)
    x, s = np.meshgrid(values, values, indexing="ij")
    with np.errstate(all="ignore"):
        expected = x / s
    np.testing.assert_array_equal(jax.jit(divide)(x, s), expected)
    np.testing.assert_array_equal(np.signbit(divide(x, s)), np.signbit(expected))
    for divisor in values:
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(jax.jit(divide)(values, divisor), values / divisor)


def test_divide_has_the_derivatives_of_a_quotient():
    x, s = jnp.array([3.0, -5.0], jnp.float32), jnp.array(2.0, jnp.float32)
    dx, ds = jax.jit(jax.grad(lambda x, s: divide(x, s).sum(), argnums=(0, 1)))(x, s)
    np.testing.assert_array_equal(dx, [0.5, 0.5])
    np.testing.assert_array_equal(ds, 0.5)  # -(3 - 5) / 2**2
    _, tangent = jax.jvp(lambda x: divide(x, s), (x,), (jnp.ones_like(x),))
    np.testing.assert_array_equal(tangent, [0.5, 0.5])


def test_naive_division_by_a_broadcast_divisor_is_still_wrong_so_the_barrier_is_still_needed():
    # Seen in the optimized HLO as a product with 1 / s, so it does not hinge on the machine.
    s = DIVISORS["scalar"]
    assert np.any(np.asarray(jax.jit(lambda x, s: x / s)(X, s)) != X / s)


def test_naive_division_under_vmap_is_still_wrong_where_the_barrier_is_not_tied_to_x():
    def untied(x, s):
        return x / lax.optimization_barrier(jnp.broadcast_to(s, x.shape))

    s = DIVISORS["scalar"]
    result = jax.jit(jax.vmap(untied, in_axes=(0, None)))(X, s)
    assert np.any(np.asarray(result) != X / s)


def test_the_split_reciprocal_gives_every_quotient_however_it_is_fused():
    for steps in range(1, 1024):
        k = np.arange(steps + 1, dtype=np.float32)
        high, low = split_reciprocal(steps)
        exact_high, exact_low = k * np.float64(high), k * np.float64(low)  # 24 and 34 bits
        assert np.array_equal(exact_high, (k * high).astype(np.float64))
        quotient = k / np.float32(steps)
        assert_same_bits((k * high) + (k * low), quotient)
        assert_same_bits((exact_high + (k * low)).astype(np.float32), quotient)
        assert_same_bits((exact_high + exact_low).astype(np.float32), quotient)


STEPS = [1, 2, 3, 7, 15, 100, 255, 511, 1022, 1023, 1024, 4095, 65535, 2**24 - 1, 2**24 + 1]


@pytest.mark.many
@pytest.mark.parametrize("steps", STEPS)
def test_divide_by_steps_is_a_true_division(steps):
    k = np.unique(np.linspace(0, steps, 5001).round()).astype(np.float32)
    k = np.append(k, np.float32(np.nan))
    expected = k / np.float32(steps)
    assert_same_bits(divide_by_steps(on_device(k), steps), expected)
    assert_same_bits(jax.jit(lambda k: divide_by_steps(k, steps))(k), expected)
    mapped = jax.jit(jax.vmap(lambda k: divide_by_steps(jnp.asarray(k), steps)))
    assert_same_bits(mapped(k), expected)
    with jax.enable_x64(True):
        wide = k.astype(np.float64)
        result = jax.jit(lambda k: divide_by_steps(k, steps))(wide)
        assert_same_bits(result, wide / steps)


def multiply_add(a, b, c):
    return multiply(a, b) + c


A, B = normals(11), normals(12)
C = (-A * B * (1 + normals(13) * np.float32(2.0**-20))).astype(np.float32)  # cancels the product


@pytest.mark.parametrize("constants", [(), (1,), (2,), (0, 1, 2)], ids=str)
def test_multiply_add_rounds_the_product_and_then_the_sum(constants):
    """Under jit, and op by op."""
    assert_same_bits(jitted(multiply_add, (A, B, C), constants), A * B + C)
    if not constants:
        assert_same_bits(multiply_add(*map(on_device, (A, B, C))), A * B + C)


def test_multiply_add_rounds_twice_with_broadcast_operands():
    b, c = normals(14, (1, 300)), normals(15, ())
    assert_same_bits(jax.jit(multiply_add)(A, b, c), A * b + c)


def test_multiply_add_rounds_twice_under_vmap_and_scan():
    b, c = normals(16, (300,)), normals(17, (300,))
    mapped = jax.jit(jax.vmap(multiply_add, in_axes=(0, None, None)))
    assert_same_bits(mapped(A, b, c), A * b + c)
    scanned = jax.jit(lambda a, b, c: lax.scan(lambda k, v: (k, multiply_add(v, b, c)), None, a)[1])
    assert_same_bits(scanned(A, b, c), A * b + c)


def test_multiply_add_rounds_twice_where_the_sum_is_read_by_more_arithmetic():
    f = jax.jit(lambda a, b, c: multiply_add(multiply_add(a, b, c), b, c))
    assert_same_bits(f(A, B, C), (A * B + C) * B + C)


def test_multiply_add_rounds_twice_in_float64():
    with jax.enable_x64(True):
        a, b, c = (normals(seed, dtype=np.float64) for seed in (18, 19, 20))
        c = -a * b * (1 + c * 2.0**-50)
        assert_same_bits(jax.jit(multiply_add)(a, b, c), a * b + c)


def test_multiply_add_follows_ieee_for_infinities_and_nan():
    values = np.array([0.0, 1.0, -2.0, np.inf, -np.inf, np.nan], np.float32)
    a, b, c = np.meshgrid(values, values, values, indexing="ij")
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(jax.jit(multiply_add)(a, b, c), a * b + c)


NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
READERS = {
    "widened": lambda y, k: y.astype(jnp.float32),
    "widened_and_multiplied": lambda y, k: y.astype(jnp.float32) * k,
    "widened_reshaped_and_added": lambda y, k: y.reshape(-1).astype(jnp.float32) + k,
    "widened_and_divided": lambda y, k: divide(y.astype(jnp.float32), k),
    "multiplied_as_it_is": lambda y, k: y * k.astype(y.dtype),
}
NUMPY_READERS = READERS | {
    "widened_and_divided": lambda y, k: y.astype(np.float32) / k,
    "widened_reshaped_and_added": lambda y, k: y.reshape(-1).astype(np.float32) + k,
}


@pytest.mark.many
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", NARROW)
def test_narrow_rounds_whatever_reads_the_result(name, reader):
    dtype = NARROW[name]
    rng = np.random.default_rng(21)
    x, y = rng.uniform(0.5, 2, (2, *SHAPE)).astype(np.float32)
    k = np.float32(1.7)
    expected = NUMPY_READERS[reader]((x * y).astype(dtype), k)

    def f(x, y, k):
        return READERS[reader](narrow(x * y, dtype), k)

    operands = [on_device(v) for v in (x, y, k)]
    assert_same_bits(f(*operands), expected)
    assert_same_bits(jax.jit(f)(*operands), expected)
    assert_same_bits(jax.jit(lambda: f(*operands))(), expected)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_rounds_under_vmap_and_scan(name):
    dtype = NARROW[name]
    x = np.random.default_rng(22).uniform(0.5, 2, SHAPE).astype(np.float32)

    def f(row):
        return narrow(row * row, dtype).astype(jnp.float32) * jnp.float32(3)

    expected = (x * x).astype(dtype).astype(np.float32) * np.float32(3)
    assert_same_bits(jax.jit(jax.vmap(f))(x), expected)
    assert_same_bits(
        jax.jit(lambda x: lax.scan(lambda c, row: (c, f(row)), None, x)[1])(x), expected
    )


@pytest.mark.parametrize("name", NARROW)
def test_narrow_rounds_every_tie_to_even(name):
    dtype = NARROW[name]
    bits = np.arange(2**15, dtype=np.uint16)
    kept = bits.view(dtype).astype(np.float32)
    finite = np.isfinite(kept) & (kept >= np.float32(ml_dtypes.finfo(dtype).smallest_normal))
    kept = kept[finite]
    x = ((kept[:-1].astype(np.float64) + kept[1:]) / 2).astype(np.float32)  # exact: one more bit
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])
    assert_floats(jax.jit(lambda x: narrow(x, dtype))(x), nearest(x, dtype), dtype)


def test_narrow_to_the_same_dtype_is_the_identity():
    x = jnp.ones(3, jnp.float32)
    assert narrow(x, jnp.float32) is x


def test_a_16_bit_product_is_still_not_rounded_where_it_is_widened():
    # Why 16-bit floats are computed in float32 and narrowed by hand; seen in the optimized HLO.
    x = np.random.default_rng(23).uniform(0.5, 2, SHAPE).astype(ml_dtypes.bfloat16)
    result = jax.jit(lambda x: (x * x).astype(jnp.float32))(x)
    assert np.any(np.asarray(result) != (x * x).astype(np.float32))


def _integral_floats():
    edges = [0, 1, 2, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 65537, 2**24 - 1, 2**24]
    powers = [2.0**k for k in range(24, 41)] + [2.0**64, 2.0**127]
    steps = [np.nextafter(np.float32(p), np.float32(to)) for p in powers for to in (0, np.inf)]
    rng = np.random.default_rng(24)
    spread = np.rint(rng.uniform(1, 2, 600) * 2.0 ** rng.uniform(0, 34, 600))
    halves = np.rint(rng.uniform(-0x8000, 0x8000, 200)) * 65536
    magnitudes = np.concatenate([edges, powers, steps, spread, halves]).astype(np.float32)
    special = np.array([np.inf, -np.inf, np.nan, np.finfo(np.float32).max, -0.0], np.float32)
    return np.concatenate([magnitudes, -magnitudes, special])


def _zero_points(qtype):
    low, high = code_range(qtype)
    middle = (low + high) // 2
    near = [low, low + 1, low + 2, middle - 1, middle, middle + 1, high - 1, high, 0, 1, -1]
    halves = [65535, 65536, 65537, 32767, 32768, 2**24, 2**24 + 1, -65535, -65536, -65537, -(2**24)]
    rng = np.random.default_rng(25)
    spread = rng.integers(low, high, 40, endpoint=True).tolist()
    return codes_of(sorted({z for z in [*near, *halves, *spread] if low <= z <= high}), qtype)


R = _integral_floats()


def _saturating_sum(r, zero_point, qtype):
    return saturating_sum(r, zero_point, *code_range(qtype), jnp.dtype(qtype))


def _saturating_float_sum(r, zero_point, qtype):
    return saturating_float_sum(r, zero_point, *code_range(qtype))


def _sums(qtype):
    """Integers as floats, and zero points, which all pairs of are added."""
    zero_points = _zero_points(qtype)[:, None]
    return np.broadcast_to(R, (len(zero_points), len(R))), zero_points


@pytest.mark.many
@pytest.mark.parametrize("constants", [(), (0, 1)], ids=str)
@pytest.mark.parametrize("qtype", INTEGERS)
def test_saturating_sum_is_exact_and_saturates_in_every_format(qtype, constants):
    operands = _sums(qtype)
    result = jitted(lambda r, z: _saturating_sum(r, z, qtype), operands, constants)
    assert_codes(result, saturated(*operands, qtype), qtype)


EAGER = [
    qtype if qtype in ("int8", "uint32") else pytest.param(qtype, marks=pytest.mark.slow)
    for qtype in INTEGERS
]


@pytest.mark.parametrize("qtype", EAGER)
def test_saturating_sum_is_exact_and_saturates_op_by_op(qtype):
    r, zero_points = _sums(qtype)
    result = _saturating_sum(on_device(r), on_device(zero_points), qtype)
    assert_codes(result, saturated(r, zero_points, qtype), qtype)


def test_saturating_sum_without_a_zero_point_adds_zero():
    results = jax.jit(lambda r: {qtype: _saturating_sum(r, None, qtype) for qtype in INTEGERS})(R)
    for qtype, result in results.items():
        assert_codes(result, saturated(R, 0, qtype), qtype)


def test_saturating_sum_of_float64_is_exact():
    r = np.concatenate([R.astype(np.float64), np.float64([2**31 - 1, 2**32 - 1, -(2**31) - 1])])
    every = {qtype: _zero_points(qtype)[:, None] for qtype in INTEGERS}

    @jax.jit
    def sums(r, every):
        return {
            qtype: _saturating_sum(jnp.broadcast_to(r, (len(z), len(r))), z, qtype)
            for qtype, z in every.items()
        }

    with jax.enable_x64(True):
        results = sums(r, every)
    for qtype, zero_points in every.items():
        expected = saturated(np.broadcast_to(r, (len(zero_points), len(r))), zero_points, qtype)
        assert_codes(results[qtype], expected, qtype)


@pytest.mark.parametrize("qtype", SMALL)
def test_saturating_float_sum_holds_the_same_codes_in_float32(qtype):
    assert holds_codes(np.float32, qtype)
    zero_points = _zero_points(qtype)[:, None]
    r = np.broadcast_to(R, (len(zero_points), len(R)))
    both = jax.jit(lambda *of: [_saturating_float_sum(r, z, qtype) for r, z in of])
    result, without = both((r, zero_points), (R, None))
    assert_floats(result, saturated(r, zero_points, qtype).astype(np.float64), np.float32)
    assert not np.any(np.signbit(result) & (np.asarray(result) == 0))
    assert_floats(without, saturated(R, 0, qtype).astype(np.float64), np.float32)


@pytest.mark.parametrize("low, high", [(-127, 127), (-5, 3), (0, 1), (-1, 1), (2, 9)])
def test_sums_saturate_to_the_range_that_is_given(low, high):
    zero_points = np.arange(-8, 8, dtype=np.int8)[:, None]
    r = np.broadcast_to(R, (len(zero_points), len(R)))
    sums = np.clip(np.nan_to_num(r.astype(np.float64), posinf=1e30, neginf=-1e30), -1e9, 1e9)
    expected = np.clip(sums + zero_points, low, high)
    expected = np.where(np.isnan(r), 0, expected).astype(np.int64)
    for dtype in (jnp.int8, jnp.int16):
        f = jax.jit(lambda r, z, dtype=dtype: saturating_sum(r, z, low, high, dtype))
        assert_codes(f(r, zero_points), expected, dtype)
    floats = saturating_float_sum(on_device(r), on_device(zero_points), low, high)
    assert_floats(floats, expected.astype(np.float64), np.float32)


def test_sums_of_32_bits_saturate_to_a_narrow_range_in_float32():
    low, high = -(2**31) + 1, 2**31 - 1
    r = on_device([-np.inf, -(2.0**31), -(2.0**31) + 128, 2.0**31, np.nan], jnp.float32)
    expected = np.array([low, low, -(2**31) + 128, high, 0])
    assert_codes(saturating_sum(r, None, low, high, jnp.int32), expected, jnp.int32)


@pytest.mark.parametrize(
    "dtype, wide",
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_small_floats_are_computed_in_float32(dtype, wide):
    assert compute_dtype(dtype) == np.dtype(wide)
    assert common_dtype(jnp.dtype(dtype), jnp.dtype("float16")) == np.dtype(wide)
    assert common_dtype(jnp.dtype("bfloat16"), jnp.dtype(dtype)) == np.dtype(wide)


@pytest.mark.parametrize("qtype", INTEGERS)
def test_widths_and_signs_are_those_of_the_names(qtype):
    low, high = code_range(qtype)
    assert bit_width(qtype) == (high - low).bit_length()
    assert is_signed(qtype) is (low < 0)
    assert type(bit_width(qtype)) is int


def test_float32_holds_no_codes_of_32_bits_and_float64_holds_all():
    for qtype in INTEGERS:
        assert holds_codes(np.float32, qtype) is (qtype in SMALL)
        assert holds_codes(np.float64, qtype)


def _codes(qtype, seed):
    low, high = code_range(qtype)
    edges = [low, low + 1, high, high - 1, 0, 1, 127, 255, 256, 257, 32767, 65535, 65536]
    powers = [s * 2**k + d for k in range(7, 32) for d in (-1, 0, 1) for s in (1, -1)]
    rng = np.random.default_rng(seed)
    spread = rng.integers(low, high, 60, endpoint=True).tolist()
    values = {v for v in [*edges, *powers, *spread] if low <= v <= high}
    return codes_of(sorted(values), qtype)


def _assert_difference_is_rounded_once(q, zero_point, dtype, eager=False):
    exact = q.astype(np.int64) - zero_point.astype(np.int64)  # of 33 bits, so exact in float64
    with np.errstate(over="ignore"):
        expected = nearest(exact.astype(np.float64), dtype)
    wide = compute_dtype(dtype)
    assert_floats(jax.jit(lambda q, z: difference(q, z, dtype))(q, zero_point), expected, wide)
    if q.dtype.itemsize == 4:  # where it takes more than one subtraction
        operands = on_device(q), on_device(zero_point)
        if eager:
            assert_floats(difference(*operands, dtype), expected, wide)
        assert_floats(jax.jit(lambda: difference(*operands, dtype))(), expected, wide)


@pytest.mark.many
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("qtype", INTEGERS)
def test_difference_is_exact_and_rounded_once(qtype, dtype):
    q, zero_point = np.broadcast_arrays(_codes(qtype, 26)[:, None], _codes(qtype, 27))
    with jax.enable_x64(dtype == "float64"):
        _assert_difference_is_rounded_once(np.array(q), np.array(zero_point), dtype)


NARROWER = ("float16", "bfloat16", "float32")


def test_difference_without_a_zero_point_rounds_the_codes_once():
    every = {qtype: _codes(qtype, 28) for qtype in INTEGERS}

    @jax.jit
    def differences(every):
        return {
            qtype: {dtype: difference(q, None, dtype) for dtype in NARROWER}
            for qtype, q in every.items()
        }

    for qtype, of_qtype in differences(every).items():
        for dtype, result in of_qtype.items():
            with np.errstate(over="ignore"):
                expected = nearest(every[qtype].astype(np.float64), dtype)
            assert result.dtype == compute_dtype(dtype)
            np.testing.assert_array_equal(np.float64(result), expected, f"{qtype}, {dtype}")


@pytest.mark.parametrize("qtype", ["int32", "uint32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_differences_of_33_bits_beside_a_tie_are_not_rounded_twice(qtype, dtype):
    bits = 8 if dtype == "bfloat16" else 24
    rng = np.random.default_rng(29)
    kept = rng.integers(2 ** (bits - 1), 2**bits, 4000)
    shift = rng.integers(1, 33 - bits, 4000)  # to a magnitude below 2**32
    tie = (2 * kept + 1) << (shift - 1)
    wanted = np.concatenate([tie, tie - 1, tie + 1, tie - 256, tie + 256])
    wanted = wanted[wanted < 2**32]
    wanted = np.concatenate([wanted, -wanted])
    low, high = code_range(qtype)
    least, most = np.maximum(low, low + wanted), np.minimum(high, high + wanted)
    assert np.all(least <= most)
    q = rng.integers(least, most, endpoint=True)
    q, zero_point = codes_of(q, qtype), codes_of(q - wanted, qtype)
    _assert_difference_is_rounded_once(q, zero_point, dtype, eager=qtype == "int32")


@pytest.mark.parametrize("qtype", SMALL)
def test_float_difference_of_codes_held_in_float32_is_rounded_once(qtype):
    q, zero_point = map(
        np.array, np.broadcast_arrays(_codes(qtype, 26)[:, None], _codes(qtype, 27))
    )
    exact = (q.astype(np.int64) - zero_point.astype(np.int64)).astype(float)
    f = jax.jit(lambda q, z: [float_difference(q, z, dtype) for dtype in NARROWER])
    for dtype, result in zip(NARROWER, f(q.astype(np.float32), zero_point), strict=True):
        assert result.dtype == np.float32
        np.testing.assert_array_equal(np.float64(result), nearest(exact, dtype), dtype)


def test_every_pair_of_int8_codes_has_its_exact_difference():
    codes = np.arange(-128, 128, dtype=np.int8)
    q, zero_point = (np.array(v) for v in np.broadcast_arrays(codes[:, None], codes))
    exact = q.astype(np.float64) - zero_point
    results = jax.jit(lambda q, z: [difference(q, z, dtype) for dtype in NARROWER])(q, zero_point)
    for dtype, result in zip(NARROWER, results, strict=True):
        np.testing.assert_array_equal(np.asarray(result), exact, dtype)
