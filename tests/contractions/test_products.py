"""Sums of products of bytes: both forms are the int64 sums of NumPy, in every layout."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.contractions.dimensions import Dimensions
from jqx._src.contractions.exact import TALL, plain, rows_product, shaped

from ..arrays import on_device
from ..oracles.contractions import FEW, LARGE, LAYOUTS, MATRICES, Layout, chosen, contraction
from ..oracles.numerics import as_int64, assert_floats
from ..tensor.tensors import random_codes, tensor
from .blocks import in_pairs, real_values, weight

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def expected_sums(lhs, rhs, layout):
    """The three sums, each broadcast to the shape of the result."""
    lhs, rhs = as_int64(lhs), as_int64(rhs)
    one, two = np.ones_like(lhs), np.ones_like(rhs)
    return [contraction(*pair, layout.numbers) for pair in ((lhs, rhs), (lhs, two), (one, rhs))]


def assert_sums(found, expected, left, right):
    for part, exact, is_asked in zip(found, expected, (True, left, right), strict=True):
        assert (part is not None) == is_asked
        if part is not None:
            assert part.dtype == jnp.int32 and part.ndim == exact.ndim
            np.testing.assert_array_equal(np.broadcast_to(part, exact.shape), exact)


def codes(layout, seed=0):
    rng = np.random.default_rng([seed, len(layout.lhs), len(layout.rhs)])
    shapes = layout.lhs, layout.rhs
    return [on_device(random_codes(rng, "int8", shape), jnp.int8) for shape in shapes]


@functools.partial(jax.jit, static_argnums=(2, 3))
def both_forms(lhs, rhs, dimensions, asked):
    return [form(lhs, rhs, dimensions, **asked._asdict()) for form in (plain, shaped)]


class Asked(NamedTuple):
    left: bool = True
    right: bool = True


@pytest.mark.many
@layouts
def test_both_forms_are_exact_in_every_layout(layout):
    lhs, rhs = codes(layout)
    dimensions = Dimensions.of(layout.numbers, lhs.ndim, rhs.ndim)
    for found in both_forms(lhs, rhs, dimensions, Asked()):
        assert_sums(found, expected_sums(lhs, rhs, layout), True, True)


TURNED = Layout((5, 4, 3), (4, 2), (((1,), (0,)), ((), ())))


@pytest.mark.parametrize("asked", [Asked(left, right) for left in (0, 1) for right in (0, 1)])
def test_sums_of_one_operand_are_computed_where_they_are_asked_for(asked):
    """With a right operand that is the smaller one, to which `shaped` turns."""
    lhs, rhs = codes(TURNED)
    for found in both_forms(lhs, rhs, Dimensions.of(TURNED.numbers, 3, 2), asked):
        assert_sums(found, expected_sums(lhs, rhs, TURNED), *asked)


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
WAYS = [(asked, turned) for asked in (Asked(), Asked(False, False)) for turned in (False, True)]


@pytest.mark.many
@pytest.mark.parametrize("m, k, n", SIZES.values(), ids=SIZES)
def test_rows_are_added_and_taken_away_again(m, k, n):
    layout = Layout((m, k), (k, n), MATRICES)
    lhs, rhs = codes(layout, seed=1)
    product = functools.partial(rows_product, dimensions=Dimensions.of(MATRICES, 2, 2))
    results = jax.jit(
        lambda *args: [
            product(*args, transposed=turned, **asked._asdict()) for asked, turned in WAYS
        ]
    )(lhs, rhs)
    for found, (asked, _) in zip(results, WAYS, strict=True):
        assert_sums(found, expected_sums(lhs, rhs, layout), *asked)


def test_sums_are_int32_where_JAX_has_int64():
    layout = Layout((1, 64), (64, 5), MATRICES)
    lhs, rhs = codes(layout)
    with jax.enable_x64(True):
        for found in both_forms(lhs, rhs, Dimensions.of(MATRICES, 2, 2), Asked()):
            assert_sums(found, expected_sums(lhs, rhs, layout), True, True)


@pytest.mark.many
@pytest.mark.parametrize("layout", LARGE.values(), ids=LARGE)
def test_integers_with_zero_points_are_multiplied_exactly_in_every_layout(layout):
    assert_exact(layout, "uint8", "int4", zero_point=True)


@pytest.mark.parametrize("layout", FEW.values(), ids=FEW)
def test_integers_without_zero_points_are_multiplied_exactly(layout):
    assert_exact(layout, "uint8", "int8", zero_point=False)


def assert_exact(layout, left, right, zero_point):
    """The int32 sum is rounded to float32 once; powers of two as scales round no more."""
    turned = Layout(layout.rhs, layout.lhs, layout.swapped)
    pair = [power(weight(left, turned, zero_point=zero_point))]
    pair.append(power(weight(right, layout, zero_point=zero_point)))
    contract = functools.partial(jqx.dot_general, dimension_numbers=layout.numbers)
    (name,) = {cpu for cpu, _ in chosen(contract, *pair)}
    assert name == "integer_shaped"
    expected = contraction(*map(real_values, pair), layout.numbers)
    assert_floats(jax.jit(contract)(*pair), np.float32(expected), np.float32)


def test_rows_and_columns_may_share_scales_and_zero_points():
    lhs, rhs = (
        power(in_pairs(weight("uint8", layout, zero_point=True), axis))
        for layout, axis in (
            (Layout((), (16, 128), (((), (1,)), ((), ()))), 0),
            (Layout((), (128, 160), MATRICES), 1),
        )
    )
    expected = real_values(lhs) @ real_values(rhs)
    assert_floats(jax.jit(jqx.matmul)(lhs, rhs), np.float32(expected), np.float32)


def power(q):
    """With the next power of two as each scale."""
    scale = 2.0 ** jnp.round(jnp.log2(q.scale))
    return jqx.QTensor(q.values, scale, q.zero_point, qtype=q.qtype)


@pytest.mark.parametrize("zero_point", [False, True])
def test_extreme_codes_are_summed_exactly(zero_point):
    """Of one row and of many, near the ends of int32."""
    k = 2**15
    low, high = -128, 127
    codes = np.stack([np.full(k, low), np.full(k, high), np.resize([low, high], k)])
    zeros = np.array([[high], [low], [low]]) if zero_point else None
    w = tensor(codes.T, "int8", np.ones((1, 3)), None if zeros is None else zeros.T)
    x = tensor(codes, "int8", np.ones((3, 1)), zeros)
    expected = real_values(x) @ real_values(w)
    assert np.abs(expected).max() > (2**30 if zero_point else 2**28)
    for rows in (slice(0, 1), slice(0, 3)):
        part = x[rows]
        assert_floats(jax.jit(jqx.matmul)(part, w), np.float32(expected[rows]), np.float32)
