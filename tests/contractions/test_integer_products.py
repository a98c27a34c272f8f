"""Sums of integers are exact: of bytes, of codes of 16 bits, of blocks, and of the int8 digits of
floats. A sum that an int32 may not hold is split.

The int32 accumulator is seen through the result: with scale 1 it is what float32 holds, exactly
where it is below 2**24 and rounded once above.

Digits hold a float x of a row to

    |x - step (65536 high + 256 middle + low)|  <=  step / 2 + UNIT |x|,     step = max |x| / TOP

because the quotient x / step is rounded to a float32, by UNIT relative, and then to an integer, by
1/2.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx import numerics
from jqx._src.contractions.integer_products import TALL, integer, planes, rows_product
from jqx._src.contractions.plain import DIGITS as FLOAT_DIGITS
from jqx._src.contractions.plain import TINY, TOP, join, split
from jqx._src.contractions.problem import Dimensions, HowTo

from ..arrays import on_device
from ..oracles.contractions import MATRICES, UNIT, Layout, contraction, dots, dtypes, gamma
from ..oracles.numerics import as_float64, as_int64, assert_floats, code_range
from ..oracles.refusals import assert_refused
from ..strategies import law
from ..tensor.tensors import differences, kept, random_codes, reals, tensor
from .blocks import integers_in_blocks, magnitudes, real_values

BYTES = ("int2", "int4", "int8", "uint2", "uint4", "uint8")


PAIRS = list(itertools.product(BYTES, BYTES))


product = jax.jit(jqx.matmul)


def every_code(qtype):
    low, high = code_range(qtype)
    return np.arange(low, high + 1)


def some_zero_points(qtype):
    low, high = code_range(qtype)
    return np.unique([low, low + 1, (low + high + 1) // 2, high])


@jax.jit
def with_and_without_zero_points(lhs, lhs_zero, rhs, rhs_zero):
    """The products with zero points on neither side, the right, the left and both."""
    ones = jnp.ones((1, 1))
    return [
        jqx.matmul(
            jqx.QTensor(lhs, jnp.broadcast_to(ones, (len(lhs), 1)), a, qtype=lhs.dtype),
            jqx.QTensor(rhs, jnp.broadcast_to(ones, (1, rhs.shape[1])), b, qtype=rhs.dtype),
        )
        for a in (None, lhs_zero)
        for b in (None, rhs_zero)
    ]


def assert_exact(lhs, rhs):
    """Compares all four products with NumPy's int64; `lhs` and `rhs` carry zero points."""
    results = with_and_without_zero_points(lhs.values, lhs.zero_point, rhs.values, rhs.zero_point)
    sides = ((as_int64(q.values), differences(q)) for q in (lhs, rhs))
    for result, pair in zip(results, itertools.product(*sides), strict=True):
        expected = contraction(*pair, MATRICES)
        assert np.abs(expected).max() < 2**24
        assert_floats(result, expected.astype(np.float64), np.float32)


def each_code(qtype):
    """Every code, each with zero points at both ends, near an end and in the middle."""
    grid = itertools.product(every_code(qtype), some_zero_points(qtype))
    codes, zeros = np.array(list(grid)).T
    return tensor(codes[:, None], qtype, np.ones((len(codes), 1)), zeros[:, None])


def extreme_rows(rng, qtype, terms=37):
    """Rows of the lowest codes, of the highest, and of any."""
    low, high = code_range(qtype)
    extreme = np.repeat([[low], [high], [low], [high]], terms, axis=1)
    codes = np.concatenate([extreme, random_codes(rng, qtype, (4, terms))])
    zeros = np.concatenate([[low, low, high, high], random_codes(rng, qtype, 4)])
    return tensor(codes, qtype, np.ones((8, 1)), zeros[:, None])


@pytest.mark.many
@pytest.mark.parametrize("left, right", PAIRS)
def test_products_of_every_pair_of_codes_and_sums_of_extreme_ones_are_exact(left, right):
    assert_exact(each_code(left), each_code(right).T)
    rng = np.random.default_rng([PAIRS.index((left, right))])
    assert_exact(extreme_rows(rng, left), extreme_rows(rng, right).T)


def largest(qtype, has_zero_point):
    low, high = code_range(qtype)
    return high - low if has_zero_point else max(-low, high)


WIDEST = [
    ("int8", False, "int8", False),
    ("uint8", False, "uint8", False),
    ("int8", True, "int8", True),
    ("uint8", True, "uint8", True),
    ("uint8", True, "int8", False),
    ("int4", True, "uint8", False),
    ("int16", False, "int8", False),
    ("int16", True, "uint8", True),
    ("uint16", False, "int2", True),
    ("int16", False, "int16", False),
]


def bound(left, left_zero, right, right_zero):
    """How many products of extreme differences an int32 holds."""
    return (2**31 - 1) // (largest(left, left_zero) * largest(right, right_zero))


widest = pytest.mark.parametrize("left, left_zero, right, right_zero", WIDEST)


def rows(qtype, has_zero_point, terms):
    """Rows of the lowest codes, of the highest, and of any: with zero points at the other end."""
    low, high = code_range(qtype)
    codes = np.stack([np.full(terms, low), np.full(terms, high), np.full(terms, high)])
    codes[2] = random_codes(np.random.default_rng(0), qtype, terms)
    zero = np.array([[high], [low], [low]]) if has_zero_point else None
    return tensor(codes, qtype, np.ones((3, 1)), zero)


@pytest.mark.many
@widest
def test_the_longest_sum_that_an_int32_holds_is_exact(left, left_zero, right, right_zero):
    """Intermediate sums wrap around in int32 here; the total, near 2**31, must not show it. Of one
    row and of many.
    """
    terms = bound(left, left_zero, right, right_zero)
    lhs, rhs = rows(left, left_zero, terms), rows(right, right_zero, terms).T
    expected = contraction(differences(lhs), differences(rhs), MATRICES)
    one_more = largest(left, left_zero) * largest(right, right_zero)
    assert np.abs(expected).max() < 2**31 <= np.abs(expected).max() + one_more
    assert_floats(product(lhs, rhs), expected.astype(np.float32), np.float32)
    assert_floats(product(lhs[:1], rhs), expected[:1].astype(np.float32), np.float32)


@pytest.mark.many
@widest
def test_a_longer_sum_is_split_into_exact_parts(left, left_zero, right, right_zero):
    """Of bytes, each part is rounded to float32 and added: two roundings for two parts. Digits of
    16-bit codes are summed apart: each of up to 9 products of them is rounded and added. Their
    magnitudes sum to that of the code and twice those of the lower digits, which are up to 128.
    """
    terms = bound(left, left_zero, right, right_zero) + 1
    lhs, rhs = rows(left, left_zero, terms), rows(right, right_zero, terms).T
    pair = [differences(q) for q in (lhs, rhs)]
    expected = contraction(*pair, MATRICES)
    assert np.abs(expected).max() >= 2**31, "an int32 would do"
    bits = [int(qtype.strip("uint")) for qtype in (left, right)]
    sizes, roundings = [np.abs(d) for d in pair], 2
    if max(bits) > 8:
        lower = [2 * 128 * (257 if n > 8 else 1) for n in bits]
        sizes, roundings = [size + n for size, n in zip(sizes, lower, strict=True)], 10
    allowed = gamma(roundings) * contraction(*sizes, MATRICES)
    assert np.all(np.abs(as_float64(product(lhs, rhs)) - expected) <= allowed)


@pytest.mark.parametrize("left, right", [("int8", "int8"), ("int16", "int8"), ("int16", "int16")])
def test_parts_of_powers_of_two_are_summed_without_any_rounding(left, right):
    """The lowest codes: float32 holds each sum of their products, so that the total is exact."""
    terms = 2**18
    lhs, rhs = (
        np.full(shape, code_range(q)[0]) for q, shape in ((left, (1, terms)), (right, (terms, 1)))
    )
    expected = terms * np.array([[float(lhs[0, 0] * rhs[0, 0])]])
    assert expected[0, 0] >= 2**32
    assert_floats(product(tensor(lhs, left), tensor(rhs, right)), expected, np.float32)


def shapes_only(qtype, zero_point, shape):
    """The shapes and dtypes of a QTensor that is never made."""
    single = (1,) * len(shape)
    codes, scale = (jax.ShapeDtypeStruct(s, d) for s, d in [(shape, qtype), (single, "float32")])
    zero = jax.ShapeDtypeStruct(single, qtype) if zero_point else None
    return jax.eval_shape(lambda *leaves: jqx.QTensor(*leaves, qtype=qtype), codes, scale, zero)


LONGEST = [case for case in WIDEST if "16" not in case[0]]


def lengths_of(lhs, rhs, numbers=MATRICES):
    """How many products each dot sums, in the form for other platforms than CPU."""
    how = HowTo.of(lhs, rhs, Dimensions.of(numbers, lhs.ndim, rhs.ndim))
    products = dots(lambda lhs, rhs: integer.compute(lhs, rhs, how), lhs, rhs)
    axes = numbers[0][0]
    return [math.prod(dot.invars[0].aval.shape[axis] for axis in axes) for dot in products]


@pytest.mark.parametrize(
    "left, left_zero, right, right_zero",
    [*LONGEST, ("int2", False, "int2", False), ("uint2", True, "uint4", True)],
)
def test_a_sum_is_split_where_an_int32_might_not_hold_it(left, left_zero, right, right_zero):
    """The bound is the one of the formats: for shapes alone, whatever the codes. No part is longer
    than it, and together they are the whole.
    """
    terms = bound(left, left_zero, right, right_zero)
    for n, parts in [(terms, 1), (terms + 1, 2), (2 * terms + 1, 3)]:
        operands = shapes_only(left, left_zero, (1, n)), shapes_only(right, right_zero, (n, 1))
        lengths = lengths_of(*operands)
        assert len(lengths) == parts and sum(lengths) == n and max(lengths) <= terms


def test_the_bound_counts_all_contracted_axes_and_no_other():
    numbers = (((1, 2), (1, 2)), ((0,), (0,)))

    short, long = (
        shapes_only("int8", False, shape) for shape in ((10**6, 362, 362, 10), (1, 363, 363, 1))
    )
    assert lengths_of(short, short, numbers) == [362**2]
    lengths = lengths_of(long, long, numbers)
    assert len(lengths) == 2 and sum(lengths) == 363**2
    assert max(lengths) <= (2**31 - 1) // 128**2


def test_a_sum_longer_in_every_axis_than_an_int32_holds_is_split_along_several():
    """2**20 products, of which the longest axis has 2**7."""
    shape = (2, 2**7, 2**6, 2**7)
    codes = np.full(shape, -128)
    lhs, rhs = tensor(codes, "int8"), tensor(codes, "int8")
    numbers = (((1, 2, 3), (1, 2, 3)), ((0,), (0,)))
    y = jax.jit(functools.partial(jqx.dot_general, dimension_numbers=numbers))(lhs, rhs)
    assert_floats(y, np.full(2, 2.0**34), np.float32)


def test_the_bound_of_an_int32_counts_the_products_of_a_block():
    """More products than one accumulator holds: each block has its own, and is not split."""
    k = 2**18
    lhs = tensor(np.full((1, k), -128), "int8")
    blocks = tensor(np.full((k, 1), -128), "int8", np.full((4, 1), 2.0**-10))
    one_scale = tensor(np.full((k, 1), -128), "int8", np.full((1, 1), 2.0**-10))
    for rhs, lengths in [(blocks, [k // 4]), (one_scale, [131071, 131071, 2])]:
        how = HowTo.of(lhs, rhs, Dimensions.of(MATRICES, 2, 2))
        products = dots(functools.partial(integer.compute, how=how), lhs, rhs)
        assert [dot.invars[1].aval.shape[-2] for dot in products] == lengths
        assert_floats(multiply(lhs, rhs), np.full((1, 1), k * 2.0**4), np.float32)


@pytest.mark.parametrize("qtype", ["int32", "uint32"])
def test_codes_of_32_bits_are_refused_as_no_product_of_them_is_safe(qtype):
    wide, byte = tensor(np.zeros((2, 2)), qtype), tensor(np.zeros((2, 2)), "int8")
    assert_refused(jqx.matmul, (wide, byte), ValueError, "dot_general", f"{qtype} x int8")


@pytest.mark.parametrize("zero_points", [False, True])
def test_byte_formats_are_multiplied_as_int8_into_int32(zero_points):
    """One dot alone, and none of unsigned bytes: GPUs and TPUs have no fast path for those."""
    for left, right in PAIRS:
        lhs, rhs = shapes_only(left, zero_points, (3, 5)), shapes_only(right, zero_points, (5, 2))
        (dot,) = dots(jqx.matmul, lhs, rhs)
        assert dtypes((*dot.invars, *dot.outvars)) == ["int8", "int8", "int32"], (left, right)
        assert dot.params["preferred_element_type"] == jnp.int32


def test_sums_are_int32_where_jax_has_int64():
    for m, n in ((1, 5), (3, 2**13)):
        lhs, rhs = shapes_only("int8", True, (m, 64)), shapes_only("uint8", True, (64, n))
        with jax.enable_x64(True):
            kinds = {tuple(dtypes((*d.invars, *d.outvars))) for d in dots(jqx.matmul, lhs, rhs)}
        assert kinds == {("int8", "int8", "int32")}


DIGITS = {"int4": 1, "int8": 1, "uint8": 2, "int16": 3}
"""int8 digits that hold every code: -128..127 with one, -32896..32639 with two."""


@pytest.mark.parametrize("right", DIGITS)
def test_codes_of_16_bits_are_multiplied_as_int8_digits(right):
    lhs, rhs = tensor(np.zeros((3, 5)), "int16"), tensor(np.zeros((5, 2)), right)
    for operands in [(lhs, rhs), (rhs.T, lhs.T)]:
        products = dots(jqx.matmul, *operands)
        kinds = {tuple(dtypes((*dot.invars, *dot.outvars))) for dot in products}
        assert kinds == {("int8", "int8", "int32")} and len(products) == 3 * DIGITS[right]


@pytest.mark.parametrize("qtype", ["int16", "uint16"])
@pytest.mark.parametrize("zero_point", [False, True])
def test_every_code_of_16_bits_is_multiplied_exactly(qtype, zero_point):
    """By 1 and by the extremes of a byte."""
    codes = every_code(qtype)
    zero = np.full((1, 1), codes[-1]) if zero_point else None
    lhs, rhs = tensor(codes[:, None], qtype, None, zero), tensor([[1, -128, 127]], "int8")
    expected = contraction(differences(lhs), differences(rhs), MATRICES)
    assert np.abs(expected).max() <= 2**24
    assert_floats(product(lhs, rhs), expected.astype(np.float64), np.float32)


def digits_of(numbers):
    """The digits of int32 numbers, as int64, and the numbers that they stand for."""
    digits = [as_int64(digit) for digit in jax.jit(planes)(on_device(numbers, jnp.int32))]
    return digits, sum(digit << 8 * i for i, digit in enumerate(digits))


def test_two_planes_hold_what_two_digits_can_and_three_every_16_bits():
    numbers = np.arange(-(2**16), 2**16)
    digits, total = digits_of(numbers)
    np.testing.assert_array_equal(total, numbers)
    assert all(np.abs(digit + 0.5).max() <= 127.5 for digit in digits)
    np.testing.assert_array_equal(digits[2] == 0, (numbers >= -32896) & (numbers <= 32639))
    assert not np.any(digits[3])


@law
@given(hnp.arrays(np.int32, 16))
def test_planes_hold_every_int32_modulo_2_to_the_32(numbers):
    _, total = digits_of(numbers)
    np.testing.assert_array_equal((total - as_int64(numbers)) % 2**32, 0)


@pytest.mark.parametrize("left, right", [("int8", "int8"), ("uint8", "int4"), ("int4", "uint8")])
def test_scales_come_after_the_exact_sum(left, right):
    """Three roundings: the sum to float32, and a product with each of the scales."""
    pairs = []
    for left_axes, right_axes in itertools.product([(), (0,)], [(), (1,)]):
        rng = np.random.default_rng([len(left_axes), len(right_axes), BYTES.index(left)])
        pairs.append(
            [
                tensor(
                    random_codes(rng, qtype, shape),
                    qtype,
                    rng.uniform(1e-3, 1e3, kept(shape, axes)),
                    random_codes(rng, qtype, kept(shape, axes)),
                )
                for qtype, shape, axes in ((left, (6, 29), left_axes), (right, (29, 5), right_axes))
            ]
        )
    results = jax.jit(lambda pairs: [jqx.matmul(*pair) for pair in pairs])(pairs)
    for pair, y in zip(pairs, results, strict=True):
        expected = contraction(*map(reals, pair), MATRICES)
        # float64 rounds too: each of 29 terms and their sums by 2**-53, of the sum of magnitudes.
        slack = 32 * 2.0**-52 * contraction(*(np.abs(reals(q)) for q in pair), MATRICES)
        assert y.dtype == jnp.float32
        assert np.all(np.abs(as_float64(y) - expected) <= gamma(3) * np.abs(expected) + slack)
    np.testing.assert_array_equal(jqx.matmul(*pairs[-1]), results[-1])


def test_an_accumulator_beyond_the_precision_of_float32_is_rounded_once():
    rng = np.random.default_rng(7)
    lhs = tensor(rng.integers(100, 128, (16, 5000)), "int8")
    rhs = tensor(rng.integers(100, 128, (5000, 16)), "int8")
    expected = contraction(differences(lhs), differences(rhs), MATRICES)
    assert np.any(expected % 2) and expected.min() > 2**25
    assert np.any(expected.astype(np.float32) != expected), "no rounding to be seen"
    assert_floats(product(lhs, rhs), expected.astype(np.float32), np.float32)
    error = np.abs(as_float64(product(lhs, rhs)) - expected)
    assert np.all(error <= UNIT * expected)


def test_one_nan_scale_spoils_its_own_channel_alone():
    lhs = tensor(np.ones((3, 4)), "int8", [[1.0], [np.nan], [2.0]])
    rhs = tensor(np.ones((4, 2)), "int8", [[1.0, np.inf]])
    expected = np.array([[4, np.inf], [np.nan, np.nan], [8, np.inf]])
    assert_floats(product(lhs, rhs), expected, np.float32)


SIZES = {
    "one row": (1, 24, 5),
    "one row in parts": (1, 64, 5),
    "15 rows in parts": (15, 64, 5),
    "17 rows": (17, 64, 5),
    "one column": (3, 24, 1),
    "one product": (1, 1, 1),
    "one row too few to be tall": (TALL - 1, 8, 2),
    "tall": (TALL, 8, 2),
    "tall and one column": (TALL + 1, 8, 1),
}


@pytest.mark.many
@pytest.mark.parametrize("m, k, n", SIZES.values(), ids=SIZES)
def test_rows_are_added_for_the_library_of_cpu_and_taken_away_again(m, k, n):
    """The sums of products, and of either operand where they are asked for."""
    rng = np.random.default_rng([m, k, n])
    codes = [random_codes(rng, "int8", shape) for shape in ((m, k), (k, n))]
    lhs, rhs = codes
    expected = lhs @ rhs, lhs.sum(1, keepdims=True), rhs.sum(0, keepdims=True)
    rows_and_sums = functools.partial(rows_product, dimensions=Dimensions.of(MATRICES, 2, 2))
    forms = list(itertools.product((True, False), repeat=2))
    results = jax.jit(
        lambda *pair: [
            rows_and_sums(*pair, transposed=turned, left=asked, right=asked)
            for asked, turned in forms
        ]
    )(*(on_device(x, jnp.int8) for x in codes))
    for sums, (is_asked, _) in zip(results, forms, strict=True):
        assert [x is not None for x in sums] == [True, is_asked, is_asked]
        for result, exact in zip(sums[: 1 + 2 * is_asked], expected, strict=False):
            assert result.dtype == jnp.int32 and result.ndim == 2
            np.testing.assert_array_equal(
                np.broadcast_to(result, (m, n)), np.broadcast_to(exact, (m, n))
            )


def multiply(lhs, rhs, numbers=MATRICES):
    return jqx.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.float32)


def exact(lhs, rhs, numbers=MATRICES):
    """The contraction in int64, which float32 must hold in any order of its sums."""
    values = [as_int64(real_values(q)) for q in (lhs, rhs)]
    assert contraction(*map(np.abs, values), numbers).max() < 2**24
    return np.float32(contraction(*values, numbers))


INTEGER_BLOCKS = {
    "blocks of 32": (192, 32, 32),
    "blocks on the left": (192, 32, 192),
    "blocks on the right": (192, 192, 32),
    "blocks of 32 and of 64": (192, 32, 64),
    "blocks of 32 and of 48": (192, 32, 48),
    "blocks of 3 and of 4": (24, 3, 4),
    "a tail of 4": (100, 32, 32),
    "a tail of 4 on the left": (100, 32, 100),
    "a tail of 4 beside blocks of 25": (100, 32, 25),
    "two tails": (100, 32, 48),
    "a tail of 32 beside blocks of 32": (96, 64, 32),
    "a block larger than half": (48, 40, 16),
}


@pytest.mark.many
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("qtypes", [("int8", "int8"), ("uint8", "int4"), ("int4", "uint8")])
def test_integers_in_blocks_are_multiplied_exactly(qtypes, zero_point):
    """However the contracted axis lies in blocks, in one compiled program."""
    pairs = []
    for k, left, right in INTEGER_BLOCKS.values():
        rng = np.random.default_rng([k, left, right, zero_point])
        lhs = integers_in_blocks(rng, qtypes[0], (3, k), (1, left), zero_point)
        pairs.append((lhs, integers_in_blocks(rng, qtypes[1], (k, 5), (right, 1), zero_point)))
    products = jax.jit(lambda pairs: [multiply(*pair) for pair in pairs])(pairs)
    for blocks, pair, result in zip(INTEGER_BLOCKS, pairs, products, strict=True):
        np.testing.assert_array_equal(result, exact(*pair), err_msg=blocks, strict=True)


def test_each_block_has_an_exact_int32_accumulator_of_its_own():
    """All other scales are zero; codes are the largest of their formats."""
    codes = np.where(np.arange(192) % 3, 255, 0) * np.ones((3, 1), int)
    lhs = tensor(codes, "uint8", np.ones((1, 1)), np.full((1, 1), 255))
    for block in range(6):
        scale = np.float32(np.arange(6) == block)[:, None]
        rhs = tensor(-np.ones((192, 5)) * 128, "int8", scale)
        elements = slice(32 * block, 32 * block + 32)
        expected = ((codes - 255)[:, elements].sum(1) * -128)[:, None] * np.ones(5)
        assert_floats(multiply(lhs, rhs), expected, np.float32)


def test_blocks_of_integers_are_contracted_as_bytes():
    rng = np.random.default_rng(0)
    lhs = integers_in_blocks(rng, "uint8", (3, 100), (1, 32))
    rhs = integers_in_blocks(rng, "int4", (100, 5), (32, 1))
    assert [dtypes(dot.invars) + dtypes(dot.outvars) for dot in dots(multiply, lhs, rhs)] == [
        ["int8", "int8", "int32"]
    ] * 2  # the full blocks, and the tail


BLOCK_LAYOUTS = {
    "right transposed": Layout((3, 64), (5, 64), (((1,), (1,)), ((), ()))),
    "heads": Layout((3, 64), (64, 2, 5), (((1,), (0,)), ((), ()))),
    "batch": Layout((2, 3, 64), (2, 64, 5), (((2,), (1,)), ((0,), (0,)))),
    "batch axes anywhere": Layout((64, 2, 3), (5, 64, 2), (((0,), (1,)), ((1,), (2,)))),
    "two contracted axes": Layout((3, 4, 16), (4, 16, 5), (((1, 2), (0, 1)), ((), ()))),
    "two contracted axes, crossed": Layout((16, 3, 4), (4, 5, 16), (((0, 2), (2, 0)), ((), ()))),
    "batch and two contracted axes": Layout(
        (2, 4, 3, 16), (2, 4, 16, 5), (((1, 3), (1, 2)), ((0,), (0,)))
    ),
    "everything contracted": Layout((4, 16), (4, 16), (((0, 1), (0, 1)), ((), ()))),
    "negative axes": Layout((2, 3, 64), (2, 64, 5), (((-1,), (-2,)), ((0,), (0,)))),
}


def in_groups(rng, shape, contracted, size):
    """Random codes with a power of two for each group of a contraction, which `per_group` finds."""
    contracted = {axis % len(shape) for axis in contracted}
    axes = [axis for axis in range(len(shape)) if axis not in contracted]
    groups = jqx.per_group(size).resolve(len(shape), axes).groups(shape)
    return integers_in_blocks(rng, "int8", shape, groups.sizes)


@pytest.mark.many
@pytest.mark.parametrize("sizes", [(16, None), (None, 32), (8, 8), (32, 16)])
def test_groups_follow_the_contraction_in_every_layout(sizes):
    """`None` stands for a float operand. All layouts are one compiled program."""
    pairs = []
    for *shapes, numbers in BLOCK_LAYOUTS.values():
        rng = np.random.default_rng([len(shapes[0]), len(shapes[1]), sizes[0] or 0])
        pairs.append(
            [
                on_device(rng.integers(-8, 9, shape).astype(np.float32))
                if size is None
                else in_groups(rng, shape, contracted, size)
                for shape, contracted, size in zip(shapes, numbers[0], sizes, strict=True)
            ]
        )
    numbers = [layout.numbers for layout in BLOCK_LAYOUTS.values()]
    contract = jax.jit(lambda pairs: [multiply(*p, n) for p, n in zip(pairs, numbers, strict=True)])
    for name, pair, result in zip(BLOCK_LAYOUTS, pairs, contract(pairs), strict=True):
        expected = exact(*pair, BLOCK_LAYOUTS[name].numbers)
        np.testing.assert_array_equal(result, expected, err_msg=name, strict=True)


def test_blocks_of_two_contracted_axes_differ_on_both_sides():
    rng = np.random.default_rng(2)
    lhs = integers_in_blocks(rng, "int8", (3, 4, 16), (1, 2, 8))
    rhs = integers_in_blocks(rng, "int8", (4, 16, 5), (4, 4, 1))
    numbers = BLOCK_LAYOUTS["two contracted axes"].numbers
    assert_floats(multiply(lhs, rhs, numbers), exact(lhs, rhs, numbers), np.float32)


@pytest.mark.parametrize("qtype", [jnp.int8, numerics.mxfp4, numerics.nvfp4, numerics.nf4])
def test_jitted_and_vmapped_contractions_in_blocks_are_those_of_a_loop(qtype):
    rng = np.random.default_rng(3)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 64), (2, 64, 5)))
    size = getattr(qtype, "size", 32)
    q = jqx.QTensor.quantize(w, jqx.QSpec(qtype, jqx.per_block({0: 1, 1: size, 2: 1})))
    if isinstance(q.scale, jqx.QTensor):  # its scale has one float for all: nothing to map over
        wide = jnp.broadcast_to(q.scale.scale, (2, 1, 1))
        q = dataclasses.replace(q, scale=dataclasses.replace(q.scale, scale=wide))

    @jax.jit
    def products(x, q, first):
        loop = jnp.stack([multiply(x[i], q[i]) for i in range(2)])
        return loop, jax.vmap(multiply)(x, q), jax.vmap(multiply, (0, None))(x, first)

    def assert_near(result, i, j):
        expected, sizes = (of(x[i]) @ of(q[j]) for of in (real_values, magnitudes))
        assert np.all(np.abs(as_float64(result) - expected) <= gamma(64 + 12) * sizes)

    loop, mapped, shared = products(x, q, q[0])
    for i in range(2):
        for result in (loop, mapped):
            assert_near(result[i], i, i)
        assert_near(shared[i], i, 0)
    assert_near(multiply(x[0], q[0]), 0, 0)


LARGEST_FLOAT = float(np.finfo(np.float32).max)
WEIGHTS = (65536, 256, 1)
split_rows = jax.jit(split, static_argnums=1)


def fixed_point(digits, at):
    """The integers that int8 digits stand for."""
    assert digits.dtype == jnp.int8
    parts = np.split(as_int64(digits), FLOAT_DIGITS, axis=at)
    return sum(weight * part for weight, part in zip(WEIGHTS, parts, strict=True))


def assert_split(x, at=0):
    digits, step = split_rows(on_device(x, jnp.float32), at)
    fixed, step = fixed_point(digits, at), as_float64(step)[..., None]
    exact = as_float64(np.float32(x))
    largest = np.abs(exact).max(-1, keepdims=True, initial=0)
    np.testing.assert_allclose(step, np.maximum(largest, TINY) / TOP, rtol=2 * UNIT)
    assert np.all(np.abs(exact - step * fixed) <= step / 2 + UNIT * np.abs(exact))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


alike = st.tuples(
    hnp.arrays(np.float32, (3, 8), elements=st.floats(-1, 1, width=32)), st.integers(-60, 60)
)


@settings(law, max_examples=100)
@given(hnp.arrays(np.float32, (3, 8), elements=finite) | alike.map(lambda pair: np.ldexp(*pair)))
def test_digits_hold_every_float_to_half_a_step(x):
    """Any finite ones, and those of a like magnitude."""
    assert_split(x)


def test_digits_hold_the_ends_of_every_binade():
    """From the smallest subnormal to the largest float, of either sign, beside zeros."""
    powers = np.ldexp(1.0, np.arange(-149, 128))
    below = np.nextafter(np.float32(powers), np.float32(0))
    assert_split(np.stack([powers, -powers, below, 0 * powers], axis=1))
    assert_split(np.array([[LARGEST_FLOAT, -LARGEST_FLOAT, LARGEST_FLOAT / 2, 0]]))
    digits, step = split_rows(jnp.zeros((2, 5)), 0)
    assert not np.any(digits) and np.all(np.isfinite(step)) and np.all(step > 0)


def test_each_row_of_each_batch_has_a_step_of_its_own():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4)) * 10.0 ** rng.integers(-9, 10, (2, 3, 1))
    assert_split(x, at=1)
    assert len(np.unique(split_rows(on_device(x, jnp.float32), 1)[1])) == 6


def integers_near_borders():
    """Where a digit carries, and the ends of the range."""
    borders = np.arange(-TOP // 128, TOP // 128 + 1) * 128
    near = (borders[:, None] + np.arange(-2, 3)).ravel()
    return np.append(near[np.abs(near) <= TOP], [-TOP, TOP])


def test_integers_near_the_borders_of_digits_are_held_exactly():
    assert_exact_integers(integers_near_borders())


@pytest.mark.slow
def test_every_integer_is_held_exactly():
    assert_exact_integers(np.arange(-TOP, TOP + 1))


def assert_exact_integers(integers):
    """A row whose largest is TOP has a step of 1; joined, its digits are the integers again."""
    assert np.abs(integers).max() == TOP
    digits, step = split_rows(on_device(integers[None], jnp.float32), 0)
    assert_floats(step, np.ones(1), np.float32)
    np.testing.assert_array_equal(fixed_point(digits, 0)[0], integers)
    joined = join(digits.astype(jnp.int32), 0, step)
    np.testing.assert_array_equal(as_int64(joined)[0], integers)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_takes_the_step_of_its_own_row_alone(value):
    x = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    spoilt = x.copy()
    spoilt[1, 2, 3] = value
    digits, step = split_rows(x, 1)
    spoilt_digits, spoilt_step = split_rows(spoilt, 1)
    is_spoilt = np.isnan(spoilt_step)
    assert np.argwhere(is_spoilt).tolist() == [[1, 2]]
    np.testing.assert_array_equal(np.where(is_spoilt, 0, spoilt_step), np.where(is_spoilt, 0, step))
    finite_rows = [d.reshape(2, FLOAT_DIGITS, 3, 4)[:, :, :2] for d in (digits, spoilt_digits)]
    np.testing.assert_array_equal(*finite_rows)


LONG = {
    "int8": ("int8", 2**18, None),
    "uint8": ("uint8", 2**20, None),
    "int8 in blocks": ("int8", 2**18, 2**17),
    "uint8 in blocks": ("uint8", 2**18, 2**17),
}


@pytest.mark.parametrize("qtype, k, size", LONG.values(), ids=LONG)
def test_long_sums_of_extreme_digits_do_not_wrap_around(qtype, k, size):
    """Those of the highest digits are beyond int32 several times."""
    low, high = (-128, 127) if qtype == "int8" else (0, 255)
    codes = np.stack([np.full(k, low), np.full(k, high)], axis=1)
    zero = None if qtype == "int8" else np.array([[high, low]])
    w = tensor(codes, qtype, np.ones((1 if size is None else k // size, 2)), zero)
    expected = real_values(w).sum(0, keepdims=True)
    y = jax.jit(jqx.matmul)(jnp.ones((1, k)), w)
    assert np.all(np.abs(as_float64(y) - expected) <= gamma(k + 12) * np.abs(expected))
