"""Views: what happens to the values happens to the scale, so they commute with dequantizing."""

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
from jqx.tensor import axis_groups

from ..numerics.oracles import assert_floats
from ..ops.refusals import assert_refused
from .tensors import SHAPES, kept, qtensors, random_tensor

law = settings(max_examples=25, deadline=None)

SHAPE = (4, 3, 1, 5)
AXES = [(), (0, 3), (1, 2), (0, 1, 2, 3)]
INDICES = [
    *(0, -1, 3, np.int64(2), jnp.int32(1), np.array(1)),
    *(slice(None), slice(1, 3), slice(None, None, 2), slice(None, None, -1), slice(3, 0, -2)),
    *(slice(2, 2), slice(10, None), slice(-2, None), ..., None, ()),
    *((..., 0), (None, ..., -1), (0, ..., 0), (slice(1, 1), 2), (2, None, slice(0, 2))),
    *((slice(None), slice(2), 0, slice(None, None, 3)), (-1, -1, -1, -1), (1, 2, 0, 4, ...)),
    *((slice(None), None, 1, ..., None), (slice(3), slice(1, 1), ..., slice(2))),
]


def tensors_of(shape, axes=AXES, coarser=1):
    """One of each granularity, with zero points as the scales, on fewer of its axes, or absent."""
    for seed, own in enumerate(axes):
        rng = np.random.default_rng(seed)
        for zero_point_axes in (None, own, own[:coarser]):
            yield random_tensor(rng, "uint8", shape, own, zero_point_axes)


def assert_commutes(view, tensors):
    """Asserts that `view(dequantize(q)) == dequantize(view(q))`, bit by bit."""

    @jax.jit
    def both(tensors):
        viewed = [view(q) for q in tensors]
        return [q.dequantize() for q in tensors], [q.dequantize() for q in viewed], viewed

    for real, dequantized, viewed in zip(*both(list(tensors)), strict=True):
        expected = np.asarray(view(np.asarray(real)))
        assert_floats(dequantized, expected, np.float32)
        assert (viewed.shape, viewed.ndim) == (expected.shape, expected.ndim)
        assert viewed.size == expected.size
        assert viewed.scale.ndim == viewed.ndim


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_indexing_takes_the_scale_along(index):
    assert_commutes(lambda x: x[index], tensors_of(SHAPE))


@law
@given(qtensors(), st.data())
def test_any_basic_index_commutes_with_dequantizing(q, data):
    index = data.draw(hnp.basic_indices(q.shape, max_dims=5, allow_newaxis=True))
    assert_commutes(lambda x: x[index], [q])


def test_indexing_is_the_same_eagerly():
    for q in tensors_of((4, 3)):
        real = np.asarray(q.dequantize())
        for index in [1, (slice(2), -1), (..., None)]:
            assert_floats(q[index].dequantize(), np.asarray(real[index]), np.float32)


@pytest.mark.parametrize("axes", [(), (0,), (1,), (0, 1)])
def test_an_index_may_be_traced(axes):
    q = random_tensor(np.random.default_rng(0), "int8", (4, 3), axes, axes)
    real = np.asarray(q.dequantize())
    row = jax.jit(lambda q, i: q[i].dequantize())
    column = jax.jit(lambda q, i: q[1:, i].dequantize())
    for i in (0, 2, -1):
        assert_floats(row(q, i), real[i], np.float32)
        assert_floats(column(q, i), real[1:, i], np.float32)


@pytest.mark.parametrize(
    "index",
    [[0, 1], np.array([0, 1]), jnp.array([True, False]), True, np.True_, 1.0, "0", (0, [1])],
    ids=repr,
)
def test_an_index_that_is_not_basic_is_refused(index):
    """Its result would need scales gathered element by element."""
    q = random_tensor(np.random.default_rng(0), "int8", (2, 3))
    with pytest.raises(TypeError, match=r"(?s)given:.+expected:.+to mend:.+dequantize"):
        q[index]


@pytest.mark.parametrize("axes", [(), (0, 1)])
@pytest.mark.parametrize(
    "index, facts",
    [
        ((0, 0, 0), ("3 indices", "(2, 3)", "at most 2")),
        ((..., 0, ...), ("2 ellipses", "one ellipsis")),
        (2, ("axis 0", "(2, 3)", "[-2, 1]")),
        (-3, ("axis 0", "[-2, 1]")),
        ((..., 3), ("axis 1", "[-3, 2]")),
        ((None, 0, -4), ("axis 1", "[-3, 2]")),
    ],
    ids=repr,
)
def test_an_index_out_of_range_is_refused_whether_or_not_the_axis_has_its_own_scale(
    axes, index, facts
):
    """jax.Array clamps integers; a scale that is shared must not hide what the values would."""
    q = random_tensor(np.random.default_rng(0), "int8", (2, 3), axes)
    assert_refused(lambda q: q[index], (q,), IndexError, "QTensor.__getitem__", *facts)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_transposing_turns_the_scale(order):
    assert_commutes(lambda x: x.transpose(order), tensors_of((2, 3, 4), [(), (1,), (0, 2)]))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 4)], ids=str)
def test_T_reverses_the_axes(shape):
    assert_commutes(lambda x: x.T, tensors_of(shape, [(), tuple(range(len(shape)))]))
    (q, *_) = tensors_of(shape, [(0,)])
    assert_floats(q.T.T.dequantize(), np.asarray(q.dequantize()), np.float32)


def test_transpose_takes_its_axes_as_arrays_do():
    q = random_tensor(np.random.default_rng(0), "int8", (2, 3, 4), (0, 1))
    forms = [(1, 0, 2), ((1, 0, 2),), ([1, 0, 2],), (-2, -3, -1), (np.int64(1), np.int64(0), 2)]
    for axes in forms:
        turned = q.transpose(*axes)
        assert (turned.shape, turned.scale.shape) == ((3, 2, 4), (3, 2, 1))
    for axes in [(), (None,)]:
        assert q.transpose(*axes).scale.shape == (1, 3, 2)


@pytest.mark.parametrize("axes", [(0,), (0, 0, 1), (0, 1, 3)])
def test_axes_that_are_no_permutation_are_refused(axes):
    q = random_tensor(np.random.default_rng(0), "int8", (2, 3, 4))
    with pytest.raises((TypeError, ValueError)):
        q.transpose(axes)


RESHAPES = [
    # shape, axes with their own scale, new shape, shape of the new scale
    ((2, 3, 4), (), (24,), (1,)),
    ((2, 3, 4), (), (4, 6), (1, 1)),
    ((2, 3, 4), (0,), (2, 12), (2, 1)),
    ((2, 3, 4), (0, 1), (6, 4), (6, 1)),
    ((2, 3, 4), (2,), (6, 4), (1, 4)),
    ((2, 3, 4), (2,), (3, 2, 2, 2), (1, 1, 2, 2)),
    ((2, 3, 4), (0, 1, 2), (24,), (24,)),
    ((2, 3, 4), (0, 1, 2), (4, 6), (4, 6)),
    ((6, 4), (0,), (2, 3, 4), (2, 3, 1)),
    ((6, 4), (1,), (2, 3, 2, 2), (1, 1, 2, 2)),
    ((2, 3), (0,), (1, 2, 1, 3, 1), (1, 2, 1, 1, 1)),
    ((1, 2, 1, 3), (0, 1), (2, 3), (2, 1)),
    ((3, 1), (0, 1), (3,), (3,)),
    ((1, 1), (0,), (), ()),
    ((), (), (1, 1), (1, 1)),
    ((0, 3), (), (3, 0), (1, 1)),
    ((0, 3), (1,), (0, 1, 3), (1, 1, 3)),
]


@pytest.mark.parametrize("shape, axes, new, scale", RESHAPES)
def test_reshaping_takes_the_scale_along(shape, axes, new, scale):
    """Axes that merge or split all share a scale, or all have their own."""
    assert_commutes(lambda x: x.reshape(new), tensors_of(shape, [axes], coarser=0))
    q = random_tensor(np.random.default_rng(0), "int8", shape, axes)
    assert q.reshape(new).scale.shape == scale


@pytest.mark.parametrize(
    "shape, axes, new, named",
    [
        ((2, 3), (0,), (6,), "axes (0, 1)"),
        ((2, 3, 4), (2,), (2, 12), "axes (1, 2)"),
        ((2, 3, 4), (0, 2), (24,), "axes (0, 1, 2)"),
        ((4, 6), (0,), (8, 3), "axes (0, 1)"),
        ((4, 6), (1,), (3, 8), "axes (0, 1)"),
    ],
)
def test_a_reshape_that_would_repeat_scales_is_refused_by_the_names_of_its_axes(
    shape, axes, new, named
):
    q = random_tensor(np.random.default_rng(0), "int8", shape, axes)
    facts = (named, str(shape), str(q.scale.shape), str(new))
    assert_refused(lambda q: q.reshape(new), (q,), ValueError, "QTensor.reshape", *facts)


def factorizations(n):
    """All shapes of `n` elements without axes of size 1."""
    if n == 1:
        return [()]
    parts = [k for k in range(2, n + 1) if n % k == 0]
    return [(k, *rest) for k in parts for rest in factorizations(n // k)]


@st.composite
def with_ones(draw, shapes):
    """One of these shapes, with axes of size 1 anywhere."""
    shape = list(draw(st.sampled_from(shapes)))
    for _ in range(draw(st.integers(0, 2))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return tuple(shape)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(factorizations(24)), st.sampled_from(factorizations(24)), st.data())
def test_a_reshape_is_allowed_exactly_where_no_scale_would_be_repeated(shape, new, data):
    """Scales that differ, broadcast and reshaped, vary along axes that hold just so many."""
    axes = data.draw(st.sets(st.sampled_from(range(len(shape)))))
    scale = np.arange(math.prod(kept(shape, axes))).reshape(kept(shape, axes))
    full = np.broadcast_to(scale, shape).reshape(new)
    varying = [i for i in range(len(new)) if (full != full.take([0], i)).any()]
    q = jax.eval_shape(
        functools.partial(jqx.QTensor, qtype=jnp.int8),
        jax.ShapeDtypeStruct(shape, jnp.int8),
        jax.ShapeDtypeStruct(scale.shape, jnp.float32),
    )
    if math.prod(new[i] for i in varying) == scale.size:
        reshaped = jax.eval_shape(lambda q: q.reshape(new), q)
        assert (reshaped.shape, reshaped.scale.shape) == (new, kept(new, varying))
    else:
        with pytest.raises(ValueError, match="the scale cannot follow"):
            jax.eval_shape(lambda q: q.reshape(new), q)


def is_allowed(q, new):
    try:
        jax.eval_shape(lambda q: q.reshape(new), q)
    except ValueError:
        return False
    return True


@law
@given(qtensors(SHAPES[:2]), st.data())
def test_any_reshape_that_is_allowed_commutes_with_dequantizing(q, data):
    allowed = [new for new in factorizations(q.size) if is_allowed(q, new)]
    new = data.draw(with_ones(allowed))
    assert_commutes(lambda x: x.reshape(new), [q])


def test_reshape_takes_its_shape_as_arrays_do():
    q = random_tensor(np.random.default_rng(0), "int8", (6, 4), (0,))
    for shape in [(2, 3, 4), ((2, 3, 4),), ([2, 3, 4],), (2, -1, 4), ((-1, 3, 4),)]:
        reshaped = q.reshape(*shape)
        assert (reshaped.shape, reshaped.scale.shape) == ((2, 3, 4), (2, 3, 1))
    with pytest.raises(TypeError):
        q.reshape(5, 5)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 6, 36]), st.data())
def test_axis_groups_are_the_smallest_that_hold_the_same_elements(size, data):
    """Of any reshape: in order, without the axes of size 1, and none could be split."""
    old, new = (data.draw(with_ones(factorizations(size))) for _ in range(2))
    groups = axis_groups(old, new)
    for side, shape in enumerate((old, new)):
        listed = [axis for group in groups for axis in group[side]]
        assert listed == [i for i, n in enumerate(shape) if n != 1]
    for olds, news in groups:
        products = [
            {math.prod(shape[i] for i in axes[:k]) for k in range(1, len(axes) + 1)}
            for shape, axes in ((old, olds), (new, news))
        ]
        assert products[0] & products[1] == {math.prod(old[i] for i in olds)}
