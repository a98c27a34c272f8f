"""Views: what happens to the values happens to the scale, so they commute with dequantizing."""

import dataclasses
import functools
import itertools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx import numerics
from jqx.tensor._shared import axis_groups

from ..arrays import on_device
from ..numerics.oracles import assert_floats
from ..ops.refusals import assert_refused
from .tensors import (
    BOX,
    CASES,
    NV4,
    SHAPES,
    made,
    qtensors,
    quantized_case,
    random_tensor,
    spec,
    spread_out,
)

batches = settings(max_examples=5, deadline=None)
"""Five cases are one compiled program."""

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


def assert_commute(tensors, views):
    """Asserts that `view(dequantize(q)) == dequantize(view(q))`, bit by bit, of each tensor and
    the views of it, which are one compiled program.
    """
    tensors, views, facts = list(tensors), list(views), []

    @jax.jit
    def both(tensors):
        found = []
        for q, of in zip(tensors, views, strict=True):
            viewed = [view(q) for view in of]
            facts.extend((v.shape, v.ndim, v.size, v.scale.ndim) for v in viewed)
            found.append((q.dequantize(), [v.dequantize() for v in viewed]))
        return found

    found, facts = both(tensors), iter(facts)
    for (real, dequantized), of in zip(found, views, strict=True):
        for result, view in zip(dequantized, of, strict=True):
            expected = np.asarray(view(np.asarray(real)))
            assert_floats(result, expected, np.float32)
            assert next(facts) == (expected.shape, expected.ndim, expected.size, expected.ndim)


def assert_commutes(view, tensors):
    """As `assert_commute`, of one view."""
    tensors = list(tensors)
    assert_commute(tensors, [[view]] * len(tensors))


@pytest.mark.parametrize("own", range(len(AXES)))
def test_indexing_takes_the_scale_along(own):
    tensors = list(tensors_of(SHAPE, AXES))[3 * own : 3 * own + 3]
    views = [operator.itemgetter(index) for index in INDICES]
    assert_commute(tensors, [views] * len(tensors))


@st.composite
def indexed(draw):
    """A tensor, and a basic index."""
    q = draw(qtensors())
    return q, operator.itemgetter(draw(hnp.basic_indices(q.shape, max_dims=5, allow_newaxis=True)))


@batches
@given(st.lists(indexed(), min_size=5, max_size=5))
def test_any_basic_index_commutes_with_dequantizing(cases):
    assert_commute([q for q, _ in cases], [[view] for _, view in cases])


def test_indexing_is_the_same_eagerly():
    for q in tensors_of((4, 3), [(0, 1)]):
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
    "index", [True, np.True_, 1.0, "0", np.float32([0]), jnp.ones(1), [0.5], {0}], ids=repr
)
def test_what_is_no_index_is_refused(index):
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


def test_transposing_turns_the_scale():
    tensors = list(tensors_of((2, 3, 4), [(), (1,), (0, 2)]))
    orders = itertools.permutations(range(3))
    views = [operator.methodcaller("transpose", order) for order in orders]
    assert_commute(tensors, [views] * len(tensors))


def test_T_reverses_the_axes():
    shapes = [(), (3,), (2, 3), (2, 1, 4)]
    of_shapes = [tensors_of(shape, [(), tuple(range(len(shape)))]) for shape in shapes]
    assert_commutes(lambda x: x.T, itertools.chain(*of_shapes))
    of_shapes = [tensors_of(shape, [(0,)]) for shape in shapes]
    assert_commutes(lambda x: x.T.T, itertools.chain(*of_shapes))


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
    ((2, 3), (0,), (6,), (2,)),
    ((4, 6), (0,), (8, 3), (4, 1)),
    ((4, 6), (0,), (2, 12), (2, 2)),
    ((24,), (), (4, 6), (1, 1)),
]


def test_reshaping_takes_the_scale_along():
    """Axes that merge or split share a scale, or have their own, or keep whole blocks."""
    tensors, views = [], []
    for shape, axes, new, scale in RESHAPES:
        own = list(tensors_of(shape, [axes], coarser=0))
        tensors += own
        views += [[operator.methodcaller("reshape", new)]] * len(own)
        q = random_tensor(np.random.default_rng(0), "int8", shape, axes)
        assert jax.eval_shape(lambda q, new=new: q.reshape(new), q).scale.shape == scale
    assert_commute(tensors, views)


@pytest.mark.parametrize(
    "shape, axes, new, named",
    [
        ((2, 3), (1,), (6,), "axes (0, 1)"),
        ((2, 3, 4), (2,), (2, 12), "axes (1, 2)"),
        ((2, 3, 4), (0, 2), (24,), "axes (0, 1, 2)"),
        ((4, 6), (0,), (3, 8), "axes (0, 1)"),
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


def divisors(n):
    return [k for k in range(1, n + 1) if n % k == 0]


def spread(scale, shape):
    """A scale with an entry for each element, `scale.shape` dividing `shape`."""
    for axis, (n, m) in enumerate(zip(shape, scale.shape, strict=True)):
        scale = np.repeat(scale, n // m, axis)
    return scale


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(factorizations(24)), st.sampled_from(factorizations(24)), st.data())
def test_a_reshape_is_allowed_exactly_where_no_scale_would_be_repeated(shape, new, data):
    """Scales that differ, spread and reshaped, are those of as many blocks of the new shape."""
    counts = data.draw(st.tuples(*[st.sampled_from(divisors(n)) for n in shape]))
    scale = np.arange(math.prod(counts)).reshape(counts)
    full = spread(scale, shape).reshape(new)

    def are_blocks(counts):
        firsts = tuple(np.s_[:: n // m] for n, m in zip(new, counts, strict=True))
        return math.prod(counts) == scale.size and (spread(full[firsts], new) == full).all()

    blocks = [counts for counts in itertools.product(*map(divisors, new)) if are_blocks(counts)]
    q = jax.eval_shape(
        functools.partial(jqx.QTensor, qtype=jnp.int8),
        jax.ShapeDtypeStruct(shape, jnp.int8),
        jax.ShapeDtypeStruct(scale.shape, jnp.float32),
    )
    if blocks:
        reshaped = jax.eval_shape(lambda q: q.reshape(new), q)
        assert (reshaped.shape, [reshaped.scale.shape]) == (new, blocks)
    else:
        with pytest.raises(ValueError, match="the scale cannot follow"):
            jax.eval_shape(lambda q: q.reshape(new), q)


def is_allowed(q, new):
    try:
        jax.eval_shape(lambda q: q.reshape(new), q)
    except ValueError:
        return False
    return True


@st.composite
def reshaped(draw):
    """A tensor, and a reshape that is allowed."""
    q = draw(qtensors(SHAPES[:2]))
    allowed = [new for new in factorizations(q.size) if is_allowed(q, new)]
    return q, operator.methodcaller("reshape", draw(with_ones(allowed)))


@batches
@given(st.lists(reshaped(), min_size=5, max_size=5))
def test_any_reshape_that_is_allowed_commutes_with_dequantizing(cases):
    assert_commute([q for q, _ in cases], [[view] for _, view in cases])


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


names = pytest.mark.parametrize("name", CASES)
FEW = (
    "int8 per axis, coarser zero point",
    "int4 with a tail",
    "mx in blocks",
    "nv in blocks of two axes",
)
few = pytest.mark.parametrize("name", FEW)


def assert_sound(viewed, expected):
    """Asserts that a view has the shape of an array, and is a sound QTensor."""
    assert (viewed.shape, viewed.ndim, viewed.size) == (
        expected.shape,
        expected.ndim,
        expected.size,
    )
    rebuilt = dataclasses.replace(viewed)  # checked again
    assert jax.tree.structure(rebuilt) == jax.tree.structure(viewed)


def assert_jitted_laws(name, views):
    """Asserts the law of many views of a case in one compilation."""
    q, real = made(name)

    @jax.jit
    def dequantized(q):
        return [view(q).dequantize() for view in views]

    for i, (found, view) in enumerate(zip(dequantized(q), views, strict=True)):
        expected = np.asarray(view(real))
        assert found.shape == expected.shape, i
        np.testing.assert_array_equal(found, expected, err_msg=f"{name}, view {i}")


def slices(n, b):
    """Slices of an axis of `n` in blocks of `b`: at the ends of blocks, and not."""
    yield from (np.s_[:], np.s_[b:], np.s_[:b], np.s_[b : 2 * b], np.s_[: n - n % b])
    yield from (np.s_[: b + 1], np.s_[b : n - 1], np.s_[: b - 1], np.s_[n // b * b :])
    yield from (np.s_[1:], np.s_[b - 1 : b + 1], np.s_[:-1], np.s_[-b:], np.s_[-1:])
    yield from (np.s_[::2], np.s_[::b], np.s_[b::3], np.s_[::-1], np.s_[-2:0:-3], np.s_[b::-1])
    yield from (np.s_[b:b], np.s_[n:], np.s_[5:2], np.s_[2:5:-1])


def along_axis(axis, index):
    return lambda x: x[(slice(None),) * axis + (index,)]


@pytest.mark.many
@names
def test_a_slice_may_keep_blocks_cut_them_and_leave_a_tail(name):
    shape, groups = CASES[name].shape, made(name)[0].groups
    axis = max(range(len(shape)), key=lambda i: 1 < groups.sizes[i] < shape[i])
    b = min(groups.sizes[axis], 4 if len(shape) == 3 else 32)
    assert_jitted_laws(name, [along_axis(axis, s) for s in slices(shape[axis], max(b, 2))])


@pytest.mark.parametrize("b", [32, 25])
def test_a_tail_of_any_length_is_kept(b):
    """100 values in 4 blocks: of 32 and of 25 elements are told apart, whatever is cut off."""
    q, real = made(f"int8 of 100 in blocks of {b}")
    lengths = (41, 64, 70, 97, 100)
    views = [lambda x: x, lambda x: x.T, lambda x: x[:], lambda x: x[..., None], lambda x: x[:, 0]]

    @jax.jit
    def of_heads(q):
        heads = [q[:n] for n in lengths]
        viewed = [[view(head) for view in views] for head in heads]
        return viewed, [[v.dequantize() for v in of] for of in viewed]

    for n, viewed, dequantized in zip(lengths, *of_heads(q), strict=True):
        assert viewed[0].scale.shape == (-(-n // b), 2)
        assert viewed[0].groups.sizes == (b, 1) and viewed[1].groups.sizes == (1, b)
        for view, v, found in zip(views, viewed, dequantized, strict=True):
            expected = view(real[:n])
            assert_floats(found, expected, np.float32)
            assert_sound(v, expected)


def test_blocks_of_32_and_of_25_are_different_structures():
    a, b = (made(f"int8 of 100 in blocks of {size}")[0] for size in (32, 25))
    a = dataclasses.replace(a, zero_point=None)
    assert [leaf.shape for leaf in jax.tree.leaves(a)] == [
        leaf.shape for leaf in jax.tree.leaves(b)
    ]
    assert jax.tree.structure(a) != jax.tree.structure(b)
    assert jax.tree.structure(a[:64]) == jax.tree.structure(b[:50]), "nothing is left to tell"


ARRAYS = [
    np.array([2, 0]),
    np.array([[0, 1], [2, -1]]),
    [1, 1, 1],
    np.zeros((0,), np.int32),
    np.zeros((2, 0), np.int32),
    np.s_[:, [3, 0, 0]],
    np.s_[:, :, [9, 0, 4, 8]],
    np.s_[..., [-1, -6]],
    np.s_[[0, 2], [1, 3]],
    np.s_[[0, 2], :, [1, 9]],
    np.s_[:, [0, 1], [8, 3]],
    np.s_[[[0], [2]], [1, 3, 0]],
    np.s_[[[0], [2]], :, [1, 3, 0]],
    np.s_[[0], [1, 3, 0], [9]],
    np.s_[1, :, [3, 9]],
    np.s_[[0, 2], 1],
    np.s_[[0, 2], 1:, 3],
    np.s_[[0, 2], None, [1, 1]],
    np.s_[None, [0, 2], None],
    np.s_[1:3, [0, 1], 3:9],
    np.s_[::-1, [0, 1], 4:8],
    np.s_[:, [[0, 1]], ::-2],
    np.s_[None, ..., [[0], [1]], 4:],
    np.s_[np.uint8([0, 2]), np.int8([1, -1])],
    # An ellipsis stands between the arrays even where it stands for no axis.
    np.s_[:, [0, 1], ..., [0, 1]],
    np.s_[None, [0, 1], ..., [0, 1], [1, 2]],
]


def with_arrays(index):
    """Lists in a tuple as arrays, which JAX asks for."""
    if isinstance(index, tuple):
        return tuple(np.array(part) if isinstance(part, list) else part for part in index)
    return np.array(index) if isinstance(index, list) else index


@few
def test_integer_arrays_index_as_they_index_arrays(name):
    indices = map(with_arrays, ARRAYS)
    assert_jitted_laws(name, [lambda x, i=index: x[i] for index in indices])


def test_integer_arrays_index_eagerly_as_under_jit_and_lists_are_arrays():
    q, real = made("nv with a tail")
    for index in ARRAYS[1:13:3]:
        assert_floats(q[index].dequantize(), real[index], np.float32)


@few
def test_scalars_and_arrays_of_indices_may_be_traced(name):
    q, _ = made(name)

    @jax.jit
    def both(q, i, k):
        return [
            [f(q).dequantize(), f(q.dequantize())]
            for f in (
                lambda x: x[i],
                lambda x: x[:, i],
                lambda x: x[k],
                lambda x: x[..., k],
                lambda x: x[i, k],
                lambda x: x[k, None, k],
                lambda x: x[1:, k[:, None]],
                lambda x: x.take(k, 0),
                lambda x: x.take(i, -1),
            )
        ]

    for i, k in [(1, [0, 1]), (-1, [-1, 0])]:
        for found, expected in both(q, jnp.int32(i), jnp.array(k)):
            assert_floats(found, np.asarray(expected), np.float32)


@pytest.mark.parametrize("name", ["int8 per tensor", "nv with a tail"])
@pytest.mark.parametrize("place", [-100, -11, 10, 101])
def test_a_traced_index_beyond_the_ends_is_clamped_for_codes_and_scales_alike(name, place):
    q, real = made(name)
    for index in (jnp.int32(place), jnp.array([place, 1])):
        expected = np.asarray(on_device(real)[..., index])
        assert_floats(q[..., index].dequantize(), expected, np.float32)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_an_index_array_may_be_of_any_integer_dtype(dtype):
    """Places are not computed in a dtype that does not hold the length of the axis."""
    q = jqx.QTensor.quantize(spread_out((300,)), spec(jnp.int8, jqx.per_block({0: 30})))
    real = np.asarray(q.dequantize())
    places = [0, 31, 100] + ([-1, -100] if dtype.startswith("i") else [])
    for index in (np.array(places, dtype), jnp.array(places, dtype)):
        assert_floats(q[index].dequantize(), real[np.array(places)], np.float32)


MASKS = {
    "of an axis": lambda x: np.array([True, False, True]),
    "of two axes": lambda x: np.arange(12).reshape(3, 4) % 5 == 1,
    "of every axis": lambda x: np.arange(120).reshape(BOX) % 7 == 0,
    "of the last": lambda x: (..., np.arange(10) % 3 == 0),
    "and a slice": lambda x: (slice(None), np.array([True, False, True, True]), slice(4, 9)),
    "and an array": lambda x: (np.array([True, False, True]), slice(None), np.array([1, 9])),
    "of nothing": lambda x: np.zeros(3, bool),
    "of JAX": lambda x: jnp.array([True, False, True]),
    "in a list": lambda x: [True, False, True],
}


@pytest.mark.parametrize("name", ["int8 per axis, coarser zero point", "nv with a tail"])
def test_a_mask_keeps_what_it_holds(name):
    q, real = made(name)
    indices = {mask: index(q) for mask, index in MASKS.items()}
    found = jax.jit(lambda q: {mask: q[index].dequantize() for mask, index in indices.items()})(q)
    for mask, index in indices.items():
        plain = np.asarray(index) if isinstance(index, jax.Array) else index
        np.testing.assert_array_equal(found[mask], real[plain], err_msg=mask, strict=True)
    assert_floats(q[indices["of JAX"]].dequantize(), real[[0, 2]], np.float32)


@pytest.mark.parametrize("shape", [(4,), (2,), (3, 5), (3, 4, 10, 1)])
def test_a_mask_of_another_shape_is_refused(shape):
    """It is no list of places: those beyond the end would be clamped."""
    mask = np.ones(shape, bool)
    q, real = made("int8 per tensor")
    with pytest.raises(IndexError):
        on_device(real)[mask]
    with pytest.raises(IndexError, match=r"QTensor\.__getitem__"):
        q[mask]


def test_a_traced_mask_is_refused():
    """The shape of the result would not be known."""
    q, _ = made("int8 per tensor")
    with pytest.raises(TypeError, match="masks of known values"):
        jax.jit(lambda q, m: q[m].dequantize())(q, jnp.ones(3, bool))


@few
def test_taking_splitting_and_transposing_take_the_scale_along(name):
    shape = CASES[name].shape
    last, n = len(shape) - 1, shape[-1]
    views = [lambda x, order=order: x.transpose(order) for order in turns(len(shape))]
    views += [lambda x, axis=axis: x.take(np.array([1, 0, 1]), axis) for axis in (0, last, -1)]
    views += [lambda x: x.take(1, 0), lambda x: x.take(np.array([[0, 1]]), -1)]
    assert_jitted_laws(name, views)
    q, real = made(name)
    splits = [(2, -1), ([1, n - 1], last), ([2, 1], 0), ([], 0), ([-1], 1)]

    @jax.jit
    def split(q):
        return [[part.dequantize() for part in q.split(*of)] for of in splits]

    for parts, (places, axis) in zip(split(q), splits, strict=True):
        expected = np.split(real, places, axis)
        assert len(parts) == len(expected)
        for part, array in zip(parts, expected, strict=True):
            assert_floats(part, array, np.float32)


def turns(rank):
    return list(itertools.permutations(range(rank)))


def test_a_split_at_the_ends_of_blocks_keeps_them():
    q, _ = made("int8 of 100 in blocks of 32")
    assert [part.scale.shape for part in q.split([32, 96])] == [(1, 2), (2, 2), (1, 2)]
    q, _ = made("int8 of 100 in blocks of 25")
    assert [part.scale.shape for part in q.split(2)] == [(2, 2), (2, 2)]
    assert [part.scale.shape for part in q.split([30])] == [(2, 2), (70, 2)]


@few
def test_what_is_joined_stands_for_the_arrays_joined(name):
    """The parts of one array, in order and not, and another of the same format."""
    (q, _), other = made(name), quantized_case(name, seed=1)

    def pairs(q, other):
        yield [q, other], -1
        yield [q, other], 0
        yield [q[..., :4], q[..., 4:]], -1
        yield [q[..., 3:], q[..., :1], other], -1
        yield [q[:, :1], other[:, 1:], q], 1

    @jax.jit
    def joined(q, other):
        wholes = [jqx.QTensor.concatenate(*pair) for pair in pairs(q, other)]
        return wholes, [whole.dequantize() for whole in wholes]

    reals = [np.asarray(jax.jit(jqx.QTensor.dequantize)(x)) for x in (q, other)]
    for whole, found, (parts, axis) in zip(*joined(q, other), pairs(*reals), strict=True):
        expected = np.concatenate(parts, axis)
        assert_floats(found, expected, np.float32)
        assert_sound(whole, expected)


GRANULARITIES = {
    "int8": [
        spec(jnp.int8),
        spec(jnp.int8, jqx.per_axis(0), False),
        spec(jnp.int8, jqx.per_axis(1)),
        spec(jnp.int8, jqx.per_block({0: 2, 1: 5}), False),
        spec(jnp.int8, jqx.per_block({1: 4}, tail=True)),
        spec(jnp.int8, jqx.per_block({0: 3, 1: 1}, tail=True), False),
    ],
    "nv4": [
        spec(NV4, jqx.per_block({0: 1, 1: 4}, tail=True)),
        spec(NV4, jqx.per_block({0: 2, 1: 2})),
        spec(NV4, jqx.per_block({0: 4, 1: 1})),
    ],
}


@pytest.mark.parametrize("family", GRANULARITIES)
@pytest.mark.parametrize("axis", [0, -1])
def test_tensors_of_any_two_granularities_are_joined(family, axis):
    """With a zero point in one and none in the other, with blocks that fit and that do not."""
    specs = GRANULARITIES[family]

    @jax.jit
    def joined(arrays):
        tensors = [jqx.QTensor.quantize(x, of) for x, of in zip(arrays, specs, strict=True)]
        return [
            (jqx.QTensor.concatenate(pair, axis), [q.dequantize() for q in pair])
            for pair in [*itertools.pairwise([*tensors, tensors[0]]), (tensors[2], tensors[0])]
        ]

    for whole, parts in joined([spread_out((4, 10), seed) for seed in range(len(specs))]):
        expected = np.concatenate(parts, axis)
        assert_floats(whole.dequantize(), expected, np.float32)


def test_blocks_that_fit_end_to_end_stay_blocks():
    blocks = spec(jnp.int8, jqx.per_block({0: 4}, tail=True))

    def cases(long, short, tail):
        yield [long, short], 3
        yield [short, long], 3
        yield [long, tail], 4
        yield [tail, long], 15
        yield [short, short], 2
        yield [tail[4:], tail[4:]], 2
        yield [long, tail[4:], short], 15

    @jax.jit
    def joined(arrays):
        tensors = [jqx.QTensor.quantize(x, blocks) for x in arrays]
        wholes = [jqx.QTensor.concatenate(parts) for parts, _ in cases(*tensors)]
        return [q.dequantize() for q in tensors], wholes, [q.dequantize() for q in wholes]

    reals, wholes, found = joined([spread_out((n,), n) for n in (8, 4, 7)])
    for whole, result, (parts, scales) in zip(wholes, found, cases(*reals), strict=True):
        assert_floats(result, np.concatenate(parts), np.float32)
        assert whole.scale.shape == (scales,)


@pytest.mark.parametrize("qtype", ["int2", "uint2", "int4", "uint4"])
def test_codes_below_a_byte_are_joined(qtype):
    """XLA on CPU aborts the process where it joins integers of 2 bits."""
    tensors = [random_tensor(np.random.default_rng(s), qtype, (2, 3), (0,), (0,)) for s in (0, 1)]
    for join in (jqx.QTensor.concatenate, jax.jit(jqx.QTensor.concatenate)):
        found = join(tensors)
        assert found.values.dtype == found.zero_point.dtype == qtype
        expected = np.concatenate([np.asarray(q.dequantize()) for q in tensors])
        assert_floats(found.dequantize(), expected, np.float32)


def test_an_empty_tensor_is_joined_with_any():
    granularities = jqx.per_tensor(), jqx.per_axis(0), jqx.per_axis(1)

    @jax.jit
    def joined(x):
        cases = []
        for granularity in granularities:
            q = jqx.QTensor.quantize(x, spec(jnp.int8, granularity))
            for empty in (q[:0], jqx.QTensor.quantize(x, spec(jnp.int8))[:0]):
                cases += [[empty, q], [q, empty], [q, empty, q], [empty, empty]]
        wholes = [jqx.QTensor.concatenate(parts) for parts in cases]
        return [[q.dequantize() for q in parts] for parts in (*cases, wholes)]

    *cases, wholes = joined(spread_out((4, 3)))
    for parts, whole in zip(cases, wholes, strict=True):
        assert_floats(whole, np.concatenate(parts), np.float32)


@few
def test_stacking_broadcasting_and_new_axes_take_the_scale_along(name):
    (q, _), other = made(name), quantized_case(name, seed=1)
    axes = (0, 1, -1, -2)

    @jax.jit
    def stacked(*both):
        stacks = [jqx.QTensor.stack(both, axis) for axis in axes]
        return [q.dequantize() for q in both], [q.dequantize() for q in stacks]

    both, stacks = stacked(q, other)
    for found, axis in zip(stacks, axes, strict=True):
        assert_floats(found, np.stack(both, axis), np.float32)
    views = [
        lambda x: broadcast(x[:1], (5, *q.shape[1:])),
        lambda x: broadcast(x, (2, 1, *q.shape)),
        lambda x: broadcast(x[..., None], (*q.shape, 3)),
        lambda x: broadcast(x[..., 1:2], q.shape),
        lambda x: broadcast(x, q.shape),
        lambda x: x[None, ..., None].reshape(*q.shape, 1, 1),
        lambda x: x[..., None, :].transpose(*range(1, q.ndim + 1), 0),
    ]
    assert_jitted_laws(name, views)


def broadcast(x, shape):
    return x.broadcast_to(shape) if isinstance(x, jqx.QTensor) else np.broadcast_to(x, shape)


BLOCK_RESHAPES = [
    # shape, block sizes, new shape, block sizes after
    ((4, 12), {0: 1, 1: 4}, (48,), (4,)),
    ((4, 12), {0: 1, 1: 4}, (2, 24), (1, 4)),
    ((4, 12), {0: 1, 1: 4}, (4, 3, 4), (1, 1, 4)),
    ((4, 12), {0: 1, 1: 4}, (4, 6, 2), (1, 2, 2)),
    ((4, 12), {0: 1, 1: 4}, (4, 3, 2, 2), (1, 1, 2, 2)),
    ((4, 12), {0: 1, 1: 4}, (4, 1, 12, 1), (1, 1, 4, 1)),
    ((4, 12), {0: 2}, (4, 3, 4), (2, 3, 4)),
    ((4, 12), {0: 2}, (48,), (24,)),
    ((4, 12), {0: 2}, (2, 2, 12), (1, 2, 12)),
    ((8, 6), {0: 4, 1: 1}, (2, 4, 6), (1, 4, 1)),
    ((8, 6), {0: 4, 1: 3}, (2, 4, 2, 3), (1, 4, 1, 3)),
    ((2, 3, 8), {0: 1, 1: 1, 2: 4}, (6, 8), (1, 4)),
    ((2, 3, 8), {0: 1, 1: 1, 2: 4}, (3, 2, 4, 2), (1, 1, 2, 2)),
]


@pytest.mark.parametrize("qtype", [jnp.int8, numerics.nf4, NV4], ids=str)
def test_blocks_stay_whole_where_axes_merge_or_split(qtype):
    @jax.jit
    def views(arrays):
        results = []
        for x, (shape, sizes, new, after) in zip(arrays, BLOCK_RESHAPES, strict=True):
            per_scale = math.prod(sizes.get(i, n) for i, n in enumerate(shape))
            form = dataclasses.replace(NV4, size=per_scale) if qtype is NV4 else qtype
            q = jqx.QTensor.quantize(x, spec(form, jqx.per_block(sizes)))
            reshaped = q.reshape(new)
            assert reshaped.groups.sizes == after
            results.append([view.dequantize() for view in (q, reshaped, reshaped.reshape(shape))])
        return results

    found = views([spread_out(shape) for shape, *_ in BLOCK_RESHAPES])
    for (shape, _, new, _), (real, reshaped, back) in zip(BLOCK_RESHAPES, found, strict=True):
        assert_floats(reshaped, np.asarray(real).reshape(new), np.float32)
        assert_floats(back, np.asarray(real).reshape(shape), np.float32)


@pytest.mark.parametrize(
    "shape, sizes, new",
    [
        ((4, 12), {0: 2, 1: 4}, (48,)),
        ((4, 12), {0: 1, 1: 4}, (4, 4, 3)),
        ((4, 12), {0: 1, 1: 6}, (4, 3, 4)),
        ((4, 10), {0: 1, 1: 4}, (40,)),
        ((4, 10), {0: 1, 1: 4}, (4, 2, 5)),
        ((100,), {0: 32}, (4, 25)),
        ((100,), {0: 32}, (50, 2)),
    ],
)
def test_a_reshape_that_would_tear_a_block_or_lose_a_tail_is_refused(shape, sizes, new):
    granularity = jqx.per_block(sizes, tail=True)
    q = jqx.QTensor.quantize(spread_out(shape), spec(jnp.int8, granularity))
    facts = (str(shape), str(q.scale.shape), str(new), "whole")
    assert_refused(lambda q: q.reshape(new), (q,), ValueError, "QTensor.reshape", *facts)


@pytest.mark.parametrize("name", ["int4 with a tail", "nv with a tail", "nf4 with a tail"])
def test_a_tail_survives_reshapes_that_leave_its_axis_alone(name):
    views = [lambda x: x.reshape(3, 2, 2, 10), lambda x: x.reshape(3, 4, 1, 10)]
    if made(name)[0].scale.shape[0] > 1:
        views.append(lambda x: x.transpose(2, 0, 1)[:, None])
    assert_jitted_laws(name, views)


@st.composite
def chains(draw, shape):
    """Three views after each other, of an array of `shape`."""
    views = []
    for _ in range(3):
        kind = draw(st.sampled_from(["basic", "basic", "array", "turn", "merge"]))
        if kind == "basic":
            index = draw(hnp.basic_indices(shape, max_dims=4, allow_newaxis=True))
            view = operator.itemgetter(index)
        elif kind == "array" and shape:
            axis = draw(st.integers(0, len(shape) - 1))
            n = shape[axis]
            places = draw(st.lists(st.integers(-n, n - 1), max_size=3)) if n else []
            view = along_axis(axis, np.array(places, np.int32))
        elif kind == "turn":
            order = tuple(draw(st.permutations(range(len(shape)))))
            view = operator.methodcaller("transpose", order)
        else:
            new = (*shape[:1], 1, *shape[1:])
            view = operator.methodcaller("reshape", new)
        views.append(view)
        shape = view(np.zeros(shape)).shape
    return views


@settings(max_examples=3, deadline=None)
@given(st.lists(st.sampled_from(sorted(CASES)), min_size=5, max_size=5), st.data())
def test_views_of_views_commute_with_dequantizing(names, data):
    tensors, reals = zip(*map(made, names), strict=True)
    views = [data.draw(chains(q.shape)) for q in tensors]

    def viewed(arrays):
        for x, of in zip(arrays, views, strict=True):
            yield functools.reduce(lambda x, view: view(x), of, x)

    found = jax.jit(lambda tensors: [q.dequantize() for q in viewed(tensors)])(tensors)
    for result, expected in zip(found, viewed(reals), strict=True):
        assert_floats(result, expected, np.float32)


@pytest.mark.parametrize(
    "name, axes",
    [
        ("int8 per axis, coarser zero point", (0,)),
        ("int4 with a tail", (0,)),
        ("mx in blocks", (0, 1)),
    ],
)
def test_mapping_and_scanning_over_leading_axes_keep_blocks_and_tails(name, axes):
    q, real = made(name)
    if name.startswith("int8"):
        q = dataclasses.replace(q, zero_point=jnp.broadcast_to(q.zero_point, q.scale.shape))
    for axis in axes:
        moved = np.moveaxis(real, axis, 0)
        mapped = jax.vmap(lambda q: q.dequantize(), in_axes=axis)(q)
        assert_floats(mapped, moved, np.float32)
        views = jax.vmap(lambda q: q[..., 1:6], in_axes=axis)(q)
        assert_floats(views.dequantize(), moved[..., 1:6], np.float32)
    _, scanned = jax.lax.scan(lambda c, q: (c, (q.dequantize(), q[..., :9])), 0, q)
    assert_floats(scanned[0], real, np.float32)
    assert_floats(scanned[1].dequantize(), real[..., :9], np.float32)


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_mapping_over_an_axis_after_a_tail_gives_the_right_values_or_raises(axis):
    """The block size is counted from the last axis: it must not be read from another one."""
    granularity = jqx.per_block({0: 32, 1: 1, 2: 1}, tail=True)
    q = jqx.QTensor.quantize(spread_out((100, 4, 3)), spec(jnp.int8, granularity))
    try:
        found = jax.vmap(lambda q: q.dequantize(), in_axes=axis, out_axes=axis)(q)
    except ValueError as error:
        assert "to mend" in str(error)
        return
    assert_floats(found, np.asarray(q.dequantize()), np.float32)


@pytest.mark.parametrize(
    "view",
    [
        lambda q: q.take(np.array([0]), 3),
        lambda q: q.split(2, 3),
        lambda q: jqx.QTensor.concatenate([q, q], 3),
        lambda q: jqx.QTensor.concatenate([q, q], -4),
        lambda q: jqx.QTensor.stack([q, q], 4),
        lambda q: jqx.QTensor.stack([q, q], -5),
        lambda q: q.transpose(3, 1, 2),
        lambda q: q[0, 0, 0].take(0, 0),
        lambda q: jqx.QTensor.concatenate([q[0, 0, 0]] * 2),
    ],
)
def test_an_axis_that_there_is_not_is_refused(view):
    """It does not wrap round."""
    with pytest.raises((ValueError, IndexError), match=r"^jqx\.QTensor"):
        view(made("int8 per tensor")[0])
