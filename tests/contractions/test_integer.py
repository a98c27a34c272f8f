"""Both operands quantized: the int32 accumulator is exact, and whatever could break it is refused.

The accumulator is seen through the result: with scale 1 it is what float32 holds, exactly where it
is below 2**24 and rounded once above.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..numerics.oracles import as_float64, as_int64, assert_floats, code_range
from ..ops.refusals import assert_refused
from ..tensor.tensors import differences, random_codes, reals, tensor
from .oracles import UNIT, contraction, dots, dtypes, gamma

BYTES = ("int2", "int4", "int8", "uint2", "uint4", "uint8")
PAIRS = list(itertools.product(BYTES, BYTES))
MATRICES = (((1,), (0,)), ((), ()))
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


@pytest.mark.parametrize("left, right", PAIRS)
def test_the_product_of_every_pair_of_codes_is_exact(left, right):
    """Every pair of codes, each with zero points at both ends, near an end and in the middle."""

    def column(qtype):
        grid = itertools.product(every_code(qtype), some_zero_points(qtype))
        codes, zeros = np.array(list(grid)).T
        return tensor(codes[:, None], qtype, np.ones((len(codes), 1)), zeros[:, None])

    assert_exact(column(left), column(right).T)


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


@pytest.mark.parametrize("left, left_zero, right, right_zero", WIDEST)
def test_the_longest_contraction_allowed_is_exact(left, left_zero, right, right_zero):
    """Intermediate sums wrap around in int32 here; the total, near 2**31, must not show it."""
    terms = bound(left, left_zero, right, right_zero)
    rng = np.random.default_rng(0)

    def rows(qtype, has_zero_point):
        low, high = code_range(qtype)
        codes = np.stack([np.full(terms, low), np.full(terms, high), np.full(terms, high)])
        codes[2] = random_codes(rng, qtype, terms)
        zero = np.array([[high], [low], [low]]) if has_zero_point else None
        return tensor(codes, qtype, np.ones((3, 1)), zero)

    lhs, rhs = rows(left, left_zero), rows(right, right_zero).T
    expected = contraction(differences(lhs), differences(rhs), MATRICES)
    one_more = largest(left, left_zero) * largest(right, right_zero)
    assert np.abs(expected).max() < 2**31 <= np.abs(expected).max() + one_more
    assert_floats(product(lhs, rhs), expected.astype(np.float32), np.float32)


def shapes_only(qtype, zero_point, shape):
    """The shapes and dtypes of a QTensor that is never made."""
    codes, scale = (jax.ShapeDtypeStruct(s, d) for s, d in [(shape, qtype), ((1, 1), "float32")])
    zero = jax.ShapeDtypeStruct((1, 1), qtype) if zero_point else None
    return jax.eval_shape(lambda *leaves: jqx.QTensor(*leaves, qtype=qtype), codes, scale, zero)


@pytest.mark.parametrize(
    "left, left_zero, right, right_zero",
    [*WIDEST, ("int2", False, "int2", False), ("uint2", True, "uint4", True)],
)
def test_a_contraction_that_could_overflow_int32_is_refused(left, left_zero, right, right_zero):
    """The bound is the one of the formats: for shapes alone, whatever the codes."""
    terms = bound(left, left_zero, right, right_zero)

    def shapes(terms):
        return shapes_only(left, left_zero, (1, terms)), shapes_only(right, right_zero, (terms, 1))

    assert jax.eval_shape(jqx.matmul, *shapes(terms)).shape == (1, 1)
    with pytest.raises(ValueError, match=r"^jqx\.dot_general: the int32 accumulator") as refusal:
        jax.eval_shape(jqx.matmul, *shapes(terms + 1))
    text = str(refusal.value)
    assert f"{left} x {right} over {terms + 1} products" in text
    assert f"at most {terms} products" in text


def test_the_overflow_guard_counts_all_contracted_axes_and_no_other():
    def shapes(*shape):
        codes = jax.ShapeDtypeStruct(shape, jnp.int8)
        return codes, jax.ShapeDtypeStruct((1,) * len(shape), jnp.float32)

    def f(*leaves):
        q = jqx.QTensor(*leaves, qtype=jnp.int8)
        return jqx.dot_general(q, q, (((1, 2), (1, 2)), ((0,), (0,))))

    assert jax.eval_shape(f, *shapes(10**6, 362, 362, 10)).shape == (10**6, 10, 10)
    with pytest.raises(ValueError, match="over 131769 products"):
        jax.eval_shape(f, *shapes(1, 363, 363, 1))


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


@pytest.mark.parametrize("right", ["int4", "int8", "uint8", "int16"])
def test_codes_of_16_bits_are_multiplied_as_int32(right):
    terms = 1 if right == "int16" else 5
    lhs, rhs = tensor(np.zeros((3, terms)), "int16"), tensor(np.zeros((terms, 2)), right)
    for operands in [(lhs, rhs), (rhs.T, lhs.T)]:
        (dot,) = dots(jqx.matmul, *operands)
        assert dtypes((*dot.invars, *dot.outvars)) == ["int32"] * 3


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
        lhs = jqx.QTensor(jnp.asarray(a, jnp.int4), left_scale, qtype=jnp.int4)
        codes, zeros = jnp.asarray(b, jnp.uint4), jnp.asarray(zero, jnp.uint4)
        return (jqx.matmul(lhs, jqx.QTensor(codes, right_scale, zeros, qtype=jnp.uint4)) * g).sum()

    total = a @ (b - zero)
    dleft, dright = jax.jit(jax.grad(loss, (0, 1)))(left_scale, right_scale)
    assert_floats(dleft, (g * total * right_scale).sum(1, keepdims=True), np.float32)
    assert_floats(dright, (g * total * left_scale).sum(0, keepdims=True), np.float32)
