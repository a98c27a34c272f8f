"""Both operands quantized: the int32 accumulator is exact, and a sum that it may not hold is split.

The accumulator is seen through the result: with scale 1 it is what float32 holds, exactly where it
is below 2**24 and rounded once above.
"""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

import jqx
from jqx._src.contractions.blocks import HowTo
from jqx._src.contractions.dimensions import Dimensions
from jqx._src.contractions.exact import integer, planes

from ..arrays import on_device
from ..oracles.contractions import MATRICES, UNIT, contraction, dots, dtypes, gamma
from ..oracles.numerics import as_float64, as_int64, assert_floats, code_range
from ..oracles.refusals import assert_refused
from ..strategies import law
from ..tensor.tensors import differences, random_codes, reals, tensor

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
    one = jnp.ones((1, 1))
    return [
        jqx.matmul(
            jqx.QTensor(lhs, jnp.broadcast_to(one, (len(lhs), 1)), a, qtype=lhs.dtype),
            jqx.QTensor(rhs, jnp.broadcast_to(one, (1, rhs.shape[1])), b, qtype=rhs.dtype),
        )
        for a in (None, lhs_zero)
        for b in (None, rhs_zero)
    ]


def assert_exact(lhs, rhs):
    """Compares all four products with NumPy's int64; `lhs` and `rhs` carry zero points."""
    results = with_and_without_zero_points(lhs.values, lhs.zero_point, rhs.values, rhs.zero_point)
    forms = itertools.product(
        (as_int64(lhs.values), differences(lhs)), (as_int64(rhs.values), differences(rhs))
    )
    for result, (left, right) in zip(results, forms, strict=True):
        expected = contraction(left, right, MATRICES)
        assert np.abs(expected).max() < 2**24
        assert_floats(result, expected.astype(np.float64), np.float32)


@pytest.mark.many
@pytest.mark.parametrize("left, right", PAIRS)
def test_the_product_of_every_pair_of_codes_is_exact(left, right):
    """Every pair of codes, each with zero points at both ends, near an end and in the middle."""

    def column(qtype):
        grid = itertools.product(every_code(qtype), some_zero_points(qtype))
        codes, zeros = np.array(list(grid)).T
        return tensor(codes[:, None], qtype, np.ones((len(codes), 1)), zeros[:, None])

    assert_exact(column(left), column(right).T)


@pytest.mark.many
@pytest.mark.parametrize("left, right", PAIRS)
def test_sums_of_random_and_extreme_codes_are_exact(left, right):
    rng = np.random.default_rng([PAIRS.index((left, right))])
    terms = 37

    def rows(qtype):
        low, high = code_range(qtype)
        extreme = np.repeat([[low], [high], [low], [high]], terms, axis=1)
        codes = np.concatenate([extreme, random_codes(rng, qtype, (4, terms))])
        zeros = np.concatenate([[low, low, high, high], random_codes(rng, qtype, 4)])
        return tensor(codes, qtype, np.ones((8, 1)), zeros[:, None])

    assert_exact(rows(left), rows(right).T)


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
    """Intermediate sums wrap around in int32 here; the total, near 2**31, must not show it."""
    terms = bound(left, left_zero, right, right_zero)
    lhs, rhs = rows(left, left_zero, terms), rows(right, right_zero, terms).T
    expected = contraction(differences(lhs), differences(rhs), MATRICES)
    one_more = largest(left, left_zero) * largest(right, right_zero)
    assert np.abs(expected).max() < 2**31 <= np.abs(expected).max() + one_more
    assert_floats(product(lhs, rhs), expected.astype(np.float32), np.float32)


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
    one = (1,) * len(shape)
    codes, scale = (jax.ShapeDtypeStruct(s, d) for s, d in [(shape, qtype), (one, "float32")])
    zero = jax.ShapeDtypeStruct(one, qtype) if zero_point else None
    return jax.eval_shape(lambda *leaves: jqx.QTensor(*leaves, qtype=qtype), codes, scale, zero)


LONGEST = [case for case in WIDEST if "16" not in case[0]]


def lengths_of(lhs, rhs, numbers=MATRICES):
    """How many products each dot sums, in the form for other platforms than CPU."""
    how = HowTo.of(lhs, rhs, Dimensions.of(numbers, lhs.ndim, rhs.ndim))
    found = dots(lambda lhs, rhs: integer.compute(lhs, rhs, how), lhs, rhs)
    axes = numbers[0][0]
    return [math.prod(dot.invars[0].aval.shape[axis] for axis in axes) for dot in found]


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

    many, few = (
        shapes_only("int8", False, shape) for shape in ((10**6, 362, 362, 10), (1, 363, 363, 1))
    )
    assert lengths_of(many, many, numbers) == [362**2]
    lengths = lengths_of(few, few, numbers)
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


@pytest.mark.parametrize("qtype", ["int32", "uint32"])
def test_codes_of_32_bits_are_refused_as_no_product_of_them_is_safe(qtype):
    wide, byte = tensor(np.zeros((2, 2)), qtype), tensor(np.zeros((2, 2)), "int8")
    assert_refused(jqx.matmul, (wide, byte), ValueError, "dot_general", f"{qtype} x int8")


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("left, right", PAIRS)
def test_byte_formats_are_multiplied_as_int8_into_int32(left, right, zero_points):
    """One dot alone, and none of unsigned bytes: GPUs and TPUs have no fast path for those."""
    zero = np.zeros((1, 1)) if zero_points else None
    lhs = tensor(np.zeros((3, 5)), left, zero_point=zero)
    rhs = tensor(np.zeros((5, 2)), right, zero_point=zero)
    (dot,) = dots(jqx.matmul, lhs, rhs)
    assert dtypes(dot.invars) == ["int8", "int8"]
    assert dtypes(dot.outvars) == ["int32"]
    assert dot.params["preferred_element_type"] == jnp.int32


DIGITS = {"int4": 1, "int8": 1, "uint8": 2, "int16": 3}
"""int8 digits that hold every code: -128..127 with one, -32896..32639 with two."""


@pytest.mark.parametrize("right", DIGITS)
def test_codes_of_16_bits_are_multiplied_as_int8_digits(right):
    lhs, rhs = tensor(np.zeros((3, 5)), "int16"), tensor(np.zeros((5, 2)), right)
    for operands in [(lhs, rhs), (rhs.T, lhs.T)]:
        found = dots(jqx.matmul, *operands)
        kinds = {tuple(dtypes((*dot.invars, *dot.outvars))) for dot in found}
        assert kinds == {("int8", "int8", "int32")} and len(found) == 3 * DIGITS[right]


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


@pytest.mark.parametrize("left, right", [("int8", "int8"), ("uint8", "int4")])
def test_the_lowered_program_holds_an_int8_dot_with_an_int32_result(left, right):
    zero = np.zeros((1, 1))
    lhs, rhs = tensor(np.zeros((3, 5)), left, None, zero), tensor(np.zeros((5, 2)), right)
    text = product.lower(lhs, rhs).as_text()
    found = re.findall(r"dot_general.*?: \(tensor<(\S+)>, tensor<(\S+)>\) -> tensor<(\S+)>", text)
    assert found == [("3x5xi8", "5x2xi8", "3x2xi32")]


@functools.cache
def scaled(left, right, left_axes, right_axes):
    rng = np.random.default_rng([len(left_axes), len(right_axes), BYTES.index(left)])

    def one(qtype, shape, axes):
        kept = tuple(n if i in axes else 1 for i, n in enumerate(shape))
        scale = rng.uniform(1e-3, 1e3, kept)
        return tensor(random_codes(rng, qtype, shape), qtype, scale, random_codes(rng, qtype, kept))

    return one(left, (6, 29), left_axes), one(right, (29, 5), right_axes)


@pytest.mark.many
@pytest.mark.parametrize("left_axes", [(), (0,)])
@pytest.mark.parametrize("right_axes", [(), (1,)])
@pytest.mark.parametrize("left, right", [("int8", "int8"), ("uint8", "int4"), ("int4", "uint8")])
def test_scales_come_after_the_exact_sum(left, right, left_axes, right_axes):
    """Three roundings: the sum to float32, and a product with each of the scales."""
    lhs, rhs = scaled(left, right, left_axes, right_axes)
    expected = contraction(reals(lhs), reals(rhs), MATRICES)
    # float64 rounds too: each of 29 terms and their sums by 2**-53, of the sum of magnitudes.
    slack = 32 * 2.0**-52 * contraction(np.abs(reals(lhs)), np.abs(reals(rhs)), MATRICES)
    y = product(lhs, rhs)
    assert y.dtype == jnp.float32
    assert np.all(np.abs(as_float64(y) - expected) <= gamma(3) * np.abs(expected) + slack)


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


def test_jitted_and_eager_and_vmapped_products_are_equal_bit_by_bit():
    lhs, rhs = scaled("uint8", "int4", (0,), (1,))
    y = np.asarray(product(lhs, rhs))
    np.testing.assert_array_equal(jqx.matmul(lhs, rhs), y)
    pairs = jax.tree.map(lambda *leaves: jnp.stack(leaves), lhs, lhs[::-1])
    mapped = jax.jit(jax.vmap(jqx.matmul, in_axes=(0, None)))(pairs, rhs)
    np.testing.assert_array_equal(mapped, np.stack([y, y[::-1]]))
    mapped = jax.jit(jax.vmap(jqx.matmul, in_axes=(None, 1), out_axes=1))(lhs, columns(rhs))
    np.testing.assert_array_equal(mapped[..., 0], y)


def columns(q):
    """The columns of a matrix as matrices of one column, along a new second axis."""
    return q[:, :, None]


def test_the_gradient_of_scales_is_that_of_the_dequantized_product():
    """Powers of two and small codes: every sum is exact, so both gradients are equal."""
    rng = np.random.default_rng(3)
    a, b = random_codes(rng, "int4", (3, 5)), random_codes(rng, "uint4", (5, 2))
    zero = np.array([[3, 9]])
    g = rng.integers(-3, 4, (3, 2)).astype(np.float32)
    left_scale, right_scale = np.float32([[0.5], [2], [1]]), np.float32([[4, 0.25]])

    def loss(left_scale, right_scale):
        lhs = jqx.QTensor(on_device(a, jnp.int4), left_scale, qtype=jnp.int4)
        codes, zeros = on_device(b, jnp.uint4), on_device(zero, jnp.uint4)
        return (jqx.matmul(lhs, jqx.QTensor(codes, right_scale, zeros, qtype=jnp.uint4)) * g).sum()

    total = a @ (b - zero)
    dleft, dright = jax.jit(jax.grad(loss, (0, 1)))(left_scale, right_scale)
    assert_floats(dleft, (g * total * right_scale).sum(1, keepdims=True), np.float32)
    assert_floats(dright, (g * total * left_scale).sum(0, keepdims=True), np.float32)
