"""Indices of QTensors: they take the scales along, and take and refuse what those of `jnp` do."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx

from ..arrays import on_device
from ..oracles.refusals import assert_refused
from .tensors import (
    BOX,
    CASES,
    FEW,
    along_axis,
    assert_commute,
    assert_jitted_laws,
    assert_laws,
    assert_stands_for,
    few,
    made,
    of_elements,
    on_host,
    qtensors,
    random_codes,
    random_tensor,
    tensor,
    tensors_of,
)

INDICES = [
    *(0, -1, 3, np.int64(2), jnp.int32(1), np.array(1)),
    *(slice(None), slice(1, 3), slice(None, None, 2), slice(None, None, -1), slice(3, 0, -2)),
    *(slice(2, 2), slice(10, None), slice(-2, None), ..., None, ()),
    *((..., 0), (None, ..., -1), (0, ..., 0), (slice(1, 1), 2), (2, None, slice(0, 2))),
    *((slice(None), slice(2), 0, slice(None, None, 3)), (-1, -1, -1, -1), (1, 2, 0, 4, ...)),
    *((slice(None), None, 1, ..., None), (slice(3), slice(1, 1), ..., slice(2))),
]
VIEWS = [operator.itemgetter(index) for index in INDICES]


def test_indexing_takes_the_scale_along():
    """Under jit as well."""
    for q in tensors_of((4, 3, 1, 5)):
        assert_laws(q, VIEWS, repr(q))
    assert_commute([q], [VIEWS])


@st.composite
def indexed(draw):
    """A tensor, and a basic index."""
    q = draw(qtensors())
    return q, operator.itemgetter(draw(hnp.basic_indices(q.shape, max_dims=5, allow_newaxis=True)))


@settings(deadline=None)
@given(indexed())
def test_any_basic_index_commutes_with_dequantizing(case):
    q, view = case
    assert_laws(q, [view])


def slices(n, b):
    """Slices of an axis of `n` in blocks of `b`: at the ends of blocks, and not."""
    yield from (np.s_[:], np.s_[b:], np.s_[:b], np.s_[b : 2 * b], np.s_[: n - n % b])
    yield from (np.s_[: b + 1], np.s_[b : n - 1], np.s_[: b - 1], np.s_[n // b * b :])
    yield from (np.s_[1:], np.s_[b - 1 : b + 1], np.s_[:-1], np.s_[-b:], np.s_[-1:])
    yield from (np.s_[::2], np.s_[::b], np.s_[b::3], np.s_[::-1], np.s_[-2:0:-3], np.s_[b::-1])
    yield from (np.s_[b:b], np.s_[n:], np.s_[5:2], np.s_[2:5:-1])


def blocked_axis(name):
    """An axis of a case that has blocks, if any, its length and the size of its blocks."""
    shape, groups = CASES[name].shape, made(name)[0].groups
    axis = max(range(len(shape)), key=lambda i: 1 < groups.sizes[i] < shape[i])
    return axis, shape[axis], max(2, min(groups.sizes[axis], 4 if len(shape) == 3 else 32))


def slices_of(name):
    axis, n, b = blocked_axis(name)
    return [along_axis(axis, s) for s in slices(n, b)]


def test_integers_and_slices_take_the_scales_of_their_blocks():
    """A slice may keep blocks, cut them and leave a tail."""
    for name in CASES:
        axis, n, b = blocked_axis(name)
        indices = [i for i in (0, b - 1, b, n - 1, -1, -b, -b - 1, -n) if -n <= i < n]
        assert_laws(made(name)[0], [along_axis(axis, i) for i in indices], name)
        assert_laws(made(name)[0], slices_of(name), name)
    views = [lambda x: x[1:, ..., None], lambda x: x[..., None, 1:, :], lambda x: x[None, 1:]]
    assert_laws(made("int8 of 100 in blocks of 32")[0], views)


@pytest.mark.parametrize(
    "name",
    [name if name in FEW[::3] else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_a_slice_may_keep_blocks_cut_them_and_leave_a_tail_under_jit(name):
    assert_jitted_laws(name, slices_of(name))


@pytest.mark.parametrize("b", [32, 25])
def test_a_tail_of_any_length_is_kept(b):
    """100 values in 4 blocks: of 32 and of 25 elements are told apart, whatever is cut off."""
    q, _ = made(f"int8 of 100 in blocks of {b}")
    views = [lambda x: x, lambda x: x.T, lambda x: x[:], lambda x: x[..., None], lambda x: x[:, 0]]
    for n in (41, 64, 70, 97, 100):
        head = on_host(q)[:n]
        assert head.scale.shape == (-(-n // b), 2)
        assert head.groups.sizes == (b, 1) and head.T.groups.sizes == (1, b)
        for i, view in enumerate(views):
            expected = of_elements(lambda x, n=n, view=view: view(x[:n]), q)
            assert_stands_for(view(head), expected, f"{n}, view {i}:")


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


def of_arrays(x, index):
    """Indexes an array, or a QTensor, which takes lists as they are."""
    return x[index if isinstance(x, jqx.QTensor) else with_arrays(index)]


ARRAY_VIEWS = [functools.partial(of_arrays, index=index) for index in ARRAYS]


@few
def test_integer_arrays_and_lists_index_as_arrays_index_arrays(name):
    assert_laws(made(name)[0], ARRAY_VIEWS)


@pytest.mark.many
@few
def test_integer_arrays_and_lists_index_as_arrays_index_arrays_under_jit(name):
    assert_jitted_laws(name, ARRAY_VIEWS)


def test_indexing_is_the_same_eagerly():
    *_, q = tensors_of((4, 3), [(0, 1)])
    views = [operator.itemgetter(index) for index in (1, (slice(2), -1), (..., None))]
    for view in views:
        assert_stands_for(view(q), of_elements(view, q))
    q, _ = made("nv with a tail")
    for view in ARRAY_VIEWS[5:9:3]:
        assert_stands_for(view(q), of_elements(view, q))


@pytest.mark.many
@few
def test_scalars_and_arrays_of_indices_may_be_traced(name):
    q, real = made(name)
    views = [
        lambda x, i, k: x[i],
        lambda x, i, k: x[:, i],
        lambda x, i, k: x[k],
        lambda x, i, k: x[..., k],
        lambda x, i, k: x[i, k],
        lambda x, i, k: x[k, None, k],
        lambda x, i, k: x[1:, k[:, None]],
        lambda x, i, k: x.take(k, 0),
        lambda x, i, k: x.take(i, -1),
    ]

    @jax.jit
    def viewed(q, i, k):
        return [view(q, i, k).dequantize() for view in views]

    for i, k in [(1, [0, 1]), (-1, [-1, 0])]:
        actual = viewed(q, np.int32(i), np.int32(k))
        for j, (result, view) in enumerate(zip(actual, views, strict=True)):
            expected = view(real, i, np.array(k))
            np.testing.assert_array_equal(result, expected, f"{i}, view {j}", strict=True)


@pytest.mark.parametrize("name", ["int8 per tensor", "nv with a tail"])
def test_a_traced_index_beyond_the_ends_is_clamped_for_codes_and_scales_alike(name):
    q, real = made(name)

    @jax.jit
    def both(q, real, *indices):
        return [(q[..., index].dequantize(), real[..., index]) for index in indices]

    for place in (-100, -11, 10, 101):
        for actual, expected in both(q, real, np.int32(place), np.int32([place, 1])):
            np.testing.assert_array_equal(actual, expected, f"{place}", strict=True)


def test_an_index_array_may_be_of_any_integer_dtype():
    """Places are not computed in a dtype that does not hold the length of the axis."""
    rng = np.random.default_rng(0)
    q = tensor(random_codes(rng, "int8", (300,)), "int8", rng.uniform(0.01, 1, 10))
    every = []
    for dtype in ("int8", "uint8", "int16", "uint32"):
        positions = [0, 31, 100] + ([-1, -100] if dtype.startswith("i") else [])
        every.append(np.array(positions, dtype))
    traced = jax.jit(lambda q, every: [q[positions] for positions in every])(q, every)
    constant = jax.jit(lambda q: [q[positions] for positions in every])(q)
    for actual in (traced, constant):
        for result, positions in zip(actual, every, strict=True):
            expected = of_elements(operator.itemgetter(positions.astype(int)), q)
            assert_stands_for(result, expected, str(positions.dtype))


MASKS = {
    "of an axis": lambda x: np.array([True, False, True]),
    "of two axes": lambda x: np.arange(12).reshape(3, 4) % 5 == 1,
    "of every axis": lambda x: np.arange(120).reshape(BOX) % 7 == 0,
    "of the last": lambda x: (..., np.arange(10) % 3 == 0),
    "and a slice": lambda x: (slice(None), np.array([True, False, True, True]), slice(4, 9)),
    "and an array": lambda x: (np.array([True, False, True]), slice(None), np.array([1, 9])),
    "and None": lambda x: (np.array([True, False, True]), None),
    "of nothing": lambda x: np.zeros(3, bool),
    "of JAX": lambda x: jnp.array([True, False, True]),
    "in a list": lambda x: [True, False, True],
}


@pytest.mark.parametrize("name", ["int8 per axis, coarser zero point", "nv with a tail"])
def test_a_mask_keeps_what_it_holds(name):
    q, real = made(name)
    indices = {mask: index(q) for mask, index in MASKS.items()}
    actual = jax.jit(lambda q: {mask: q[index].dequantize() for mask, index in indices.items()})(q)
    for mask, index in indices.items():
        plain = np.asarray(index) if isinstance(index, jax.Array) else index
        np.testing.assert_array_equal(actual[mask], real[plain], err_msg=mask, strict=True)
    expected = of_elements(lambda x: x[[0, 2]], q)
    assert_stands_for(on_host(q)[indices["of JAX"]], expected)


OUT_OF_RANGE = [
    ((0, 0, 0), "3 indices", "(2, 3)", "at most 2"),
    ((..., 0, ...), "2 ellipses", "one ellipsis"),
    (2, "axis 0", "(2, 3)", "[-2, 1]"),
    (-3, "axis 0", "[-2, 1]"),
    ((..., 3), "axis 1", "[-3, 2]"),
    ((None, 0, -4), "axis 1", "[-3, 2]"),
]


def test_what_is_no_index_is_refused():
    """Of one scale and of many: jax.Array clamps integers, and a scale that is shared must not hide
    what the values would.
    """
    for axes in ((), (0, 1)):
        q = random_tensor(np.random.default_rng(0), "int8", (2, 3), axes)
        for index, *facts in OUT_OF_RANGE:
            assert_refused(
                lambda q, index=index: q[index], (q,), IndexError, "QTensor.__getitem__", *facts
            )
        for index in (True, np.True_, 1.0, "0", np.float32([0]), jnp.ones(1), [0.5], {0}):
            with pytest.raises(TypeError, match=r"(?s)given:.+fix:.+dequantize"):
                q[index]


def test_a_mask_of_another_shape_or_that_is_traced_is_refused():
    """It is no list of places, of which those beyond the end would be clamped; and the shape of the
    result must be known.
    """
    q, real = made("int8 per tensor")
    for shape in ((4,), (2,), (3, 5), (3, 4, 10, 1)):
        mask = np.ones(shape, bool)
        with pytest.raises(IndexError):
            jax.eval_shape(lambda real, mask=mask: real[mask], real)
        with pytest.raises(IndexError, match=r"QTensor\.__getitem__"):
            q[mask]
    with pytest.raises(TypeError, match="known mask"):
        jax.eval_shape(lambda q, m: q[m].dequantize(), q, np.ones(3, bool))


INDEXED_SHAPES = [(4, 6), (4, 0), (0, 3), (0,), (5,), (2, 3, 4)]
OF_ARRAYS = [(0,), (4,), (5,), (4, 0), (0, 3), (0, 0), (4, 6), (2, 3), (0, 6), (4, 0, 0)]
DTYPES = ["bool", "int8", "uint8", "int32", "uint32", "float32", "bfloat16", "complex64", "O", "U1"]
ONES = np.ones(4, bool)
KINDS_OF_INDEX = {
    "()": (),
    "None": None,
    "...": ...,
    "an integer": -1,
    "a NumPy integer": np.int8(-1),
    "a JAX integer": jnp.int32(1),
    "a slice of NumPy integers": slice(np.int32(0), np.int64(2)),
    "a slice of JAX integers": slice(jnp.int32(0), jnp.int32(2)),
    "a slice of floats": slice(0.0, 2),
    "a slice of arrays": slice(jnp.ones(2), None),
    "a slice without a step": slice(0, 2, 0),
    "empty after all": (..., np.empty(0, np.int32)),
    "empty twice": (np.empty(0, np.int32), np.empty(0, np.int32)),
    "empty floats beside": (slice(None), np.empty(0)),
    "an empty mask beside": (slice(None), np.empty(0, bool)),
    "an empty mask before": (np.empty((4, 0), bool), None),
    "a mask and None": (ONES, None),
    "a mask and an integer": (ONES, 0),
    "a float": 1.0,
    "text": "a",
    "a range": range(0),
    "an object": object(),
    **{
        f"{dtype}{shape}": np.zeros(shape, jnp.bfloat16 if dtype == "bfloat16" else dtype)
        for dtype in DTYPES
        for shape in OF_ARRAYS
    },
    **{f"jnp.bool{shape}": jnp.zeros(shape, bool) for shape in OF_ARRAYS},
    **{f"True{shape}": np.ones(shape, bool) for shape in OF_ARRAYS},
}
REFUSED = (TypeError, ValueError, IndexError)


def granularities(shape):
    blocks = jqx.per_block({-1: 2}, tail=True)
    return [jqx.per_tensor(), jqx.per_axis(0), *([blocks] if shape[-1] else [])]


@pytest.mark.many
@pytest.mark.parametrize("shape", INDEXED_SHAPES)
def test_an_index_takes_what_jnp_takes(shape):
    x = on_device(np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape))
    qs = [jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, own)) for own in granularities(shape)]
    for name, index in KINDS_OF_INDEX.items():
        try:
            want = jax.eval_shape(lambda x, index=index: x[index], x).shape
        except (*REFUSED, OverflowError):
            for q in qs:
                with pytest.raises(REFUSED) as info:
                    q[index]
                assert "fix: " in str(info.value), name
            continue
        for actual in jax.eval_shape(lambda qs, index=index: [q[index] for q in qs], qs):
            assert actual.shape == want, name


def test_lists_are_indices_as_in_numpy():
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    q = jqx.QTensor.quantize(on_device(x), jqx.QSpec(jnp.int8, jqx.per_axis(0)))
    lists = ([], [[]], [1, -1], [[0, 1], [1, 0]], [True, False, False, True], ([0, 1], [2, 3]))
    for index in lists:
        assert q[index].shape == x[index].shape
    for index in ([[0], [0, 1]], [1.0], [None], ["a"], [object()]):
        with pytest.raises(TypeError, match="given: "):
            q[index]
