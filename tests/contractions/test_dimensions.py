"""Any dimension numbers: each scale and zero point meets its own axis of the result."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jqx
from jqx._src.contractions.dimensions import Dimensions

from ..oracles.contractions import contraction, exact_tensor, small_integers
from ..oracles.numerics import assert_floats
from ..strategies import law
from ..tensor.tensors import reals

contract = jax.jit(jqx.dot_general, static_argnums=2)


@st.composite
def numbered(draw):
    """Shapes and dimension numbers: each axis is batched, contracted or free, in any order.

    All sizes differ, or two axes could be mistaken for each other unseen.
    """
    sizes = list(draw(st.permutations([1, 2, 3, 4, 5])))
    batch, contracting = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    shared = [sizes.pop() for _ in range(batch + contracting)]
    split = draw(st.integers(0, len(sizes)))
    sides = []
    for free in (sizes[:split], sizes[split:]):
        shape = draw(st.permutations([*shared, *free]))
        sides.append((tuple(shape), [shape.index(size) for size in shared]))
    (left, left_axes), (right, right_axes) = sides
    numbers = (
        (tuple(left_axes[batch:]), tuple(right_axes[batch:])),
        (tuple(left_axes[:batch]), tuple(right_axes[:batch])),
    )
    return left, right, numbers


@settings(max_examples=25, deadline=None)
@given(numbered(), st.sampled_from([("int4", "uint8"), (None, "uint4"), ("int8", None)]))
def test_every_axis_that_is_kept_may_have_its_own_scale_and_zero_point(case, formats):
    """Small integers and powers of two: the sums are exact in any order."""
    *shapes, numbers = case
    rng = np.random.default_rng(0)
    pair = []
    for shape, contracting, qtype in zip(shapes, numbers[0], formats, strict=True):
        kept = [i for i in range(len(shape)) if i not in contracting]
        pair.append(
            small_integers(rng, shape) if qtype is None else exact_tensor(rng, qtype, shape, kept)
        )
    expected = contraction(reals(pair[0]), reals(pair[1]), numbers)
    assert_floats(contract(*pair, numbers), expected, np.float32)


@law
@given(numbered(), st.randoms(use_true_random=False))
def test_every_axis_is_told_apart(case, random):
    """By its size, which no other axis has."""
    left, right, numbers = case
    lhs, rhs = (jax.ShapeDtypeStruct(shape, np.float32) for shape in (left, right))
    dimensions = Dimensions.of(numbers, lhs.ndim, rhs.ndim)
    (lc, rc), (lb, _) = numbers
    assert dimensions.numbers == numbers
    result = contraction(np.ones(left), np.ones(right), numbers).shape
    rest = [left[i] for i in dimensions.lhs_free], [right[j] for j in dimensions.rhs_free]
    assert result == (*(left[i] for i in lb), *rest[0], *rest[1])
    assert dimensions.rows(lhs) == math.prod(rest[0])
    assert dimensions.columns(rhs) == math.prod(rest[1])
    assert dimensions.contracted_size(lhs) == math.prod(left[i] for i in lc)
    for axis in range(rhs.ndim):
        partner = dimensions.partner(axis)
        assert (partner is None) == (axis in dimensions.rhs_free)
        assert partner is None or left[partner] == right[axis]
        if axis in dimensions.rhs_kept:
            assert result[dimensions.output_axis(axis)] == right[axis]
    swapped = dimensions.swapped
    other = np.ones(contraction(np.ones(right), np.ones(left), swapped.numbers).shape)
    assert jax.eval_shape(dimensions.swap_output, other).shape == result
    orders = [random.sample(range(x.ndim), x.ndim) for x in (lhs, rhs)]
    turned = [
        np.ones([shape[i] for i in o]) for shape, o in zip((left, right), orders, strict=True)
    ]
    places = [np.argsort(order).tolist() for order in orders]
    renamed = contraction(*turned, dimensions.renamed(*places).numbers).shape
    assert renamed[: len(lb)] == result[: len(lb)] and sorted(renamed) == sorted(result)
    for x, contracted, to_output in [
        (lhs, lc, dimensions.lhs_to_output),
        (rhs, rc, dimensions.rhs_to_output),
    ]:
        parameter = np.ones([1 if i in contracted else n for i, n in enumerate(x.shape)])
        own = {n for i, n in enumerate(x.shape) if i not in contracted}
        lined_up = jax.eval_shape(to_output, parameter).shape
        assert lined_up == tuple(n if n in own else 1 for n in result)


def test_negative_axes_count_from_the_end_of_their_own_operand():
    rng = np.random.default_rng(1)
    lhs = exact_tensor(rng, "int8", (2, 3, 4), (0, 1))
    rhs = exact_tensor(rng, "uint8", (4, 2), (1,))
    negative = jqx.dot_general(lhs, rhs, (((-1,), (-2,)), ((-3,), (-1,))))
    np.testing.assert_array_equal(negative, jqx.dot_general(lhs, rhs, (((2,), (0,)), ((0,), (1,)))))


def test_dimension_numbers_may_be_lists_and_numpy_integers():
    rng = np.random.default_rng(2)
    lhs, rhs = exact_tensor(rng, "int8", (3, 4), (0,)), exact_tensor(rng, "int8", (4, 5), (1,))
    expected = jqx.dot_general(lhs, rhs, (((1,), (0,)), ((), ())))
    for numbers in (([[1], [0]], [[], []]), ((np.array([1]), [np.int64(0)]), ((), ()))):
        np.testing.assert_array_equal(jqx.dot_general(lhs, rhs, numbers), expected)


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_out_of_range_is_refused(axis):
    q = jqx.QTensor.quantize(jnp.ones((3, 4)), jqx.QSpec(jnp.int8))
    with pytest.raises(TypeError, match=r"axis .* of `dimension_numbers` is out of range"):
        jqx.dot_general(jnp.ones((3, 4)), q, (((axis,), (1,)), ((), ())))


@st.composite
def any_numbers(draw):
    """Shapes of few sizes, and dimension numbers that seldom fit."""
    shapes = [tuple(draw(st.lists(st.integers(0, 2), max_size=3))) for _ in range(2)]
    lc, lb, rc, rb = (
        draw(st.lists(st.integers(0, len(shape) - 1), max_size=2)) if shape else []
        for shape in shapes
        for _ in range(2)
    )
    return *shapes, ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb)))


@settings(max_examples=200, deadline=None)
@given(any_numbers())
def test_shapes_fit_where_lax_says_so_and_the_result_has_the_shape_that_lax_says(case):
    left, right, numbers = case
    dimensions = Dimensions.of(numbers, len(left), len(right))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (left, right)]
    try:
        expected = jax.eval_shape(lambda a, b: jax.lax.dot_general(a, b, numbers), *shapes).shape
    except TypeError:
        expected = None
    assert dimensions.fits(left, right) == (expected is not None)
    if expected is not None:
        assert dimensions.result_shape(left, right) == expected


def test_shapes_that_fit_are_not_evaluated(monkeypatch):
    q = jqx.QTensor.quantize(jnp.ones((4, 2)), jqx.QSpec(jnp.int8))
    monkeypatch.setattr(jax, "eval_shape", lambda *args: 1 / 0)
    jax.make_jaxpr(jqx.matmul)(jnp.ones((3, 4)), q)
