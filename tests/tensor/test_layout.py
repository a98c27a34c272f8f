"""Layouts: however codes lie, the array is the same; a view keeps the layout or refuses."""

import contextlib
import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx import numerics
from jqx._src.numerics.packing import pack_bits
from jqx._src.tensor.layout import Layout, Packing

from ..arrays import assert_same
from ..oracles.numerics import as_float64, assert_floats
from ..oracles.refusals import assert_refused
from .tensors import CASES, made, on_host, random_tensor, spec, spread_out

SWAPPED, AS_INT8 = Layout(swapped=True), Layout(int8=True)
BOTH = Layout(swapped=True, int8=True)


def packed(axis, length, swapped=False):
    return Layout(Packing(axis, length), swapped)


def layouts_of(q):
    """Every layout that a QTensor can have."""
    yield SWAPPED
    form = numerics.format_of(q.qtype)
    if form.storage.name in ("int2", "uint2", "int4", "uint4") or form.name == "uint8":
        yield from (AS_INT8, BOTH)
    if numerics.format_of(q.qtype).bits < 8:
        for axis, length in zip(range(-q.ndim, 0), q.shape, strict=True):
            yield from (packed(axis, length), packed(axis, length, swapped=True))


def laid_out(q, layout):
    """A plain QTensor with another layout."""
    return laid_out_in(q, (layout,))[0]


def in_every_layout(q):
    """The layouts that a plain QTensor can have, and the tensor in each."""
    layouts = tuple(layouts_of(q))
    return list(zip(layouts, laid_out_in(q, layouts), strict=True))


@functools.partial(jax.jit, static_argnames="layouts")
def laid_out_in(q, layouts):
    return [_laid_out(q, layout) for layout in layouts]


def _laid_out(q, layout):
    """Puts the values in place by hand."""
    form, values = numerics.format_of(q.qtype), q.values
    if layout.swapped:
        values = values.transpose((*range(q.ndim - 2), q.ndim - 1, q.ndim - 2))
    if layout.int8:
        less = 128 if form.name == "uint8" else 0
        values = (values.astype(jnp.int16) - jnp.int16(less)).astype(jnp.int8)
    if layout.packing is not None:
        axis = layout.packing.axis
        if layout.swapped and axis > -3:
            axis = -3 - axis
        values = pack_bits(form.to_bits(values), form.bits, axis % q.ndim)
    return dataclasses.replace(q, values=values, layout=layout)


def swap_last(x):
    """The last two axes swapped, of an array or a QTensor."""
    return x.transpose((*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_every_layout_holds_the_same_array(name):
    q, real = made(name)
    tensors = [laid for _, laid in in_every_layout(q)]

    @jax.jit
    def all_of(tensors):
        return [
            (q.dequantize(), q.unpack(), q.codes, q.in_memory_order.dequantize()) for q in tensors
        ]

    for laid, (actual, plain, codes, stored) in zip(tensors, all_of(tensors), strict=True):
        assert (laid.shape, laid.ndim, laid.size) == (q.shape, q.ndim, q.size)
        assert_floats(actual, real, np.float32)
        assert_same(plain, q)
        form = numerics.format_of(q.qtype)
        as_bytes = laid.layout.packing is not None or laid.layout.int8
        assert codes.dtype.itemsize == 1 if as_bytes else codes.dtype == form.storage
        expected = form.widen_bits(form.to_bits(q.values)) if as_bytes else q.values
        np.testing.assert_array_equal(codes, expected, strict=True)
        expected = np.swapaxes(real, -1, -2) if laid.layout.swapped else real
        assert_floats(stored, expected, np.float32)
    assert q.unpack() is q and q.in_memory_order is q


@pytest.mark.parametrize("name", ["int4 with a tail", "nv in blocks of two axes", "mx in blocks"])
def test_stored_moves_no_code_and_names_the_axes_as_they_lie(name):
    q, _ = made(name)
    every = in_every_layout(q)
    unpacked = jax.jit(lambda tensors: [laid.in_memory_order.unpack() for laid in tensors])
    for (layout, laid), plain in zip(every, unpacked([laid for _, laid in every]), strict=True):
        stored = laid.in_memory_order
        assert stored.values is laid.values
        if not layout.swapped:
            assert stored is laid
            continue
        assert stored.shape == swap_last(q).shape
        packing = layout.packing
        if packing is not None:
            axis = {-1: -2, -2: -1}.get(packing.axis, packing.axis)
            assert stored.layout == Layout(Packing(axis, packing.length))
            assert stored.values.shape[axis] == laid.values.shape[axis] < packing.length
        else:
            assert stored.layout == (AS_INT8 if layout.int8 else None)
            assert stored.values.shape == stored.shape
        assert_same(plain, swap_last(on_host(q)))


def everywhere(x):
    """An array of rank 4 made of two: views of its leading axes can do anything."""
    return jqx.QTensor.stack([x, x], 0) if isinstance(x, jqx.QTensor) else np.stack([x, x])


def broadcast(x, shape):
    return x.broadcast_to(shape) if isinstance(x, jqx.QTensor) else np.broadcast_to(x, shape)


def joined(x):
    parts = [x[:, :1], x[:, 1:], x]
    if isinstance(x, jqx.QTensor):
        return jqx.QTensor.concatenate(parts, 1)
    return np.concatenate(parts, 1)


LEADING = [
    lambda x: x[1],
    lambda x: x[:, -1],
    lambda x: x[1:, ::-1],
    lambda x: x[..., :, :],
    lambda x: x[0, ..., :, :],
    lambda x: x[0, 1:, ..., : x.shape[-2], : x.shape[-1] + 5],
    lambda x: x[0, :, :, :, ...],
    lambda x: x[None, :, None, [2, 0]],
    lambda x: x[np.array([1, 0, 1]), np.array([2, 0, 2])],
    lambda x: x[np.arange(6).reshape(2, 3) % 2 == 0],
    lambda x: x.take(np.array([2, 0]), 1),
    lambda x: x.transpose(1, 0, 2, 3),
    lambda x: x.reshape(6, *x.shape[2:]),
    lambda x: x.reshape(-1, 1, *x.shape[2:]),
    lambda x: broadcast(x, (3, *x.shape)),
    lambda x: broadcast(x[:, :1], (2, 5, *x.shape[2:])),
    joined,
]


@pytest.mark.parametrize("name, first", [("int4 with a tail", 0), ("nv with a tail", 1)])
def test_views_of_leading_axes_keep_the_layout(name, first):
    """Every second view of a layout, and of the other tensor the others."""
    q, real = made(name)
    plain = jax.eval_shape(everywhere, q)
    layouts = tuple(layout for layout in layouts_of(plain) if layout.depth <= 2)
    views = [LEADING[(first + i) % 2 :: 2] for i in range(len(layouts))]

    @jax.jit
    def all_of(tensors):
        tensors = map(everywhere, tensors)
        actual = [[view(q) for view in of] for q, of in zip(tensors, views, strict=True)]
        for layout, viewed in zip(layouts, actual, strict=True):
            assert all(q.layout == layout for q in viewed)
        return [[dataclasses.replace(q).dequantize() for q in viewed] for viewed in actual]

    for layout, of, actual in zip(layouts, views, all_of(laid_out_in(q, layouts)), strict=True):
        for i, (view, y) in enumerate(zip(of, actual, strict=True)):
            expected = view(np.stack([real, real]))
            np.testing.assert_array_equal(y, expected, f"{layout}, view {i}", strict=True)


@pytest.mark.parametrize("name", ["int4 with a tail", "nv with a tail", "nf4 with a tail"])
def test_a_swap_of_the_last_axes_moves_no_code(name):
    q, real = made(name)
    every, swapped = in_every_layout(q), swap_last(on_host(q))

    @jax.jit
    def all_of(tensors):
        turned = list(map(swap_last, tensors))
        return [(t.unpack(), swap_last(t).unpack(), t.dequantize()) for t in turned]

    actual = all_of([laid for _, laid in every])
    for (layout, laid), (plain, back, y) in zip(every, actual, strict=True):
        turned = swap_last(laid)
        assert turned.values is laid.values
        assert turned.shape == swapped.shape
        assert_same(plain, swapped)
        assert_same(back, q)
        assert turned.layout is None or swap_last(turned).layout == layout
        assert_floats(y, np.swapaxes(real, -1, -2), np.float32)


def test_a_matrix_and_a_row_turn_as_arrays_do():
    q = jqx.QTensor.quantize(spread_out((4, 6)), spec(jnp.int4, jqx.per_axis(1), False))
    for _, laid in in_every_layout(q):
        turned = laid.T
        assert turned.shape == (6, 4)
        assert_same(turned.unpack(), q.T)
    row = q[0].pack()
    assert_same(row.T, row)


def joined_again(x, positions):
    if isinstance(x, jqx.QTensor):
        return jqx.QTensor.concatenate(x.split(positions, -1)[::-1], -1)
    return np.concatenate(np.split(x, positions, -1)[::-1], -1)


def test_codes_stored_as_int8_pass_through_every_view():
    """They are where plain ones are, each in a byte."""
    q, real = made("int4 with a tail")
    views = [
        lambda x: x[..., 3],
        lambda x: x[:, [1, 0], ::-2],
        lambda x: x.transpose(2, 0, 1),
        lambda x: x.reshape(12, 10),
        lambda x: broadcast(x[..., :1], (2, 3, 4, 7)),
        lambda x: x.take(np.array([9, 4]), -1),
    ]
    views.append(lambda x: joined_again(x, [3]))

    @jax.jit
    def all_of(q, laid):
        actual = [view(laid) for view in views]
        assert all(w.layout == AS_INT8 and w.values.dtype == jnp.int8 for w in actual)
        return [
            (view(q), w.unpack(), w.dequantize()) for view, w in zip(views, actual, strict=True)
        ]

    for view, (expected, plain, y) in zip(views, all_of(q, laid_out(q, AS_INT8)), strict=True):
        assert_same(plain, expected)
        assert_floats(y, view(real), np.float32)


def whole_last(shape, index, depth):
    """Whether a basic index leaves the last axes of an array as they are, by its strides."""
    x = np.zeros(shape)
    y = x[index]
    last = slice(len(shape) - depth, None)
    tail = slice(y.ndim - depth, None)
    return y.ndim >= depth and (y.shape[tail], y.strides[tail]) == (x.shape[last], x.strides[last])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_an_index_is_refused_exactly_where_it_changes_what_is_laid_out(data):
    shape = (2, 3, 4, 5)
    q = random_tensor(np.random.default_rng(0), "int4", shape, (0, 3), (0,))
    layout = data.draw(st.sampled_from(list(layouts_of(q))))
    index = data.draw(hnp.basic_indices(shape, max_dims=6, allow_newaxis=True))
    laid = laid_out(q, layout)
    if whole_last(shape, index, layout.depth):
        actual = laid[index]
        assert actual.layout == layout
        assert_same(actual.unpack(), q[index])
    elif layout.swapped and any(layout.follows((), {axis}) for axis in (-2, -1)):
        with contextlib.suppress(ValueError):  # it may take a part of an axis that is not packed
            actual = laid[index]
            assert actual.layout == layout
            assert_same(actual.unpack(), q[index])
    else:
        with pytest.raises(ValueError, match=r"QTensor\.__getitem__: the codes are "):
            laid[index]


BOX = (2, 4, 6)
GETITEM, CONCATENATE = "QTensor.__getitem__", "QTensor.concatenate"


@pytest.mark.parametrize(
    "layout, words, axes",
    [
        (packed(-1, 6), "packed along axis -1", "[-1]"),
        (packed(-2, 4), "packed along axis -2", "[-2, -1]"),
        (packed(-3, 2), "packed along axis -3", "[-3, -2, -1]"),
        (SWAPPED, "swapped", "[-2, -1]"),
        (BOTH, "swapped and as int8", "[-2, -1]"),
        (packed(-1, 6, True), "packed along axis -1 and swapped", "[-2, -1]"),
    ],
    ids=str,
)
def test_a_view_that_a_layout_does_not_survive_is_refused_with_the_way_out(layout, words, axes):
    q = laid_out(random_tensor(np.random.default_rng(0), "int4", BOX), layout)
    uses = [
        (GETITEM, lambda q: q[..., 0]),
        (GETITEM, lambda q: q[..., None]),
        (GETITEM, lambda q: q.take(np.array([0]), -1)),
        ("QTensor.transpose", lambda q: q.transpose(2, 0, 1)),
        ("QTensor.reshape", lambda q: q.reshape(48)),
        ("QTensor.reshape", lambda q: q.reshape(2, 24)),
        ("QTensor.broadcast_to", lambda q: q.broadcast_to((2, 4, 7))),
        ("QTensor.pack", lambda q: q.pack(0)),
    ]
    if layout.packing is not None:
        uses += [
            (GETITEM, lambda q: q.split(2, -1)),
            (CONCATENATE, lambda q: jqx.QTensor.concatenate([q, q], -1)),
        ]
    if layout.depth > 1:
        uses += [
            (GETITEM, lambda q: q[:, 0]),
            ("QTensor.transpose", lambda q: q.transpose(1, 0, 2)),
            ("QTensor.broadcast_to", lambda q: q.broadcast_to((6,))),
        ]
    if layout.depth > 1 and layout.packing is not None:
        uses += [
            (GETITEM, lambda q: q[:, 1:]),
            (CONCATENATE, lambda q: jqx.QTensor.concatenate([q, q], 1)),
        ]
    for function, use in uses:
        facts = () if function == "QTensor.pack" else (f"axes {axes}",)
        assert_refused(
            use, (q,), ValueError, function, f"the codes are {words}.", "q.unpack()", *facts
        )


def test_parts_of_swapped_axes_are_taken_in_the_order_of_the_values():
    """Such as the parts of a fused projection, which stay swapped."""
    views = [
        lambda q: q[:, 1:, ::-2],
        lambda q: q.split(3, -1)[1],
        lambda q: jqx.QTensor.concatenate([q, q[:, :, :2]], -1),
        lambda q: jqx.QTensor.concatenate([q, q], 1),
        lambda q: jqx.dynamic_slice(q, (0, 0, jnp.int32(2)), (1, 4, 3)),
        lambda q: q[None, ..., 1:],
    ]
    packed_along_rows = [views[1], views[2], views[4]]
    q = random_tensor(np.random.default_rng(0), "int4", BOX)
    for layout, some in ((SWAPPED, views), (packed(-2, 4, True), packed_along_rows)):
        for view in some:
            actual = view(laid_out(q, layout))
            assert actual.layout == layout
            assert_same(actual.unpack(), view(q))


def test_codes_stored_as_int8_are_unpacked_before_they_are_packed():
    q = laid_out(random_tensor(np.random.default_rng(0), "int4", (4, 6)), AS_INT8)
    assert_refused(lambda q: q.pack(), (q,), ValueError, "QTensor.pack", "as int8", "q.unpack()")
    assert_same(q.unpack().pack().unpack(), q.unpack())


def test_tensors_of_different_layouts_are_not_joined():
    q = random_tensor(np.random.default_rng(0), "int4", (4, 6))
    for other in (laid_out(q, SWAPPED), laid_out(q, AS_INT8), q.pack()):
        for function in (jqx.QTensor.concatenate, jqx.QTensor.stack):
            facts = ("different layouts", "q.unpack()", str(other.layout))
            name = f"QTensor.{function.__name__}"
            assert_refused(lambda a, b, f=function: f([a, b]), (q, other), TypeError, name, *facts)


def test_mapping_and_scanning_over_leading_axes_keep_a_layout():
    q, real = made("int4 with a tail")
    tensors = [laid for layout, laid in in_every_layout(q) if layout.depth <= 2]

    def reals_of_rows(laid):
        mapped = (
            jax.vmap(lambda q: q.dequantize())(laid),
            jax.vmap(lambda q: q.in_memory_order.unpack())(laid),
        )
        _, (scanned, turned) = jax.lax.scan(lambda c, q: (c, (q.dequantize(), q.T)), 0, laid)
        return *mapped, laid.in_memory_order.unpack(), scanned, turned

    actual = jax.jit(lambda tensors: list(map(reals_of_rows, tensors)))(tensors)
    for laid, (of_map, mapped, stored, scanned, turned) in zip(tensors, actual, strict=True):
        assert_floats(of_map, real, np.float32)
        assert_same(mapped, stored)
        assert_floats(scanned, real, np.float32)
        assert_same(turned, swap_last(laid))


def test_mapping_over_a_swapped_axis_of_a_matrix_raises():
    q = laid_out(random_tensor(np.random.default_rng(0), "int8", (4, 4), (0, 1)), SWAPPED)
    with pytest.raises(ValueError, match=r"(?s)two axes to be swapped.+leading axes"):
        jax.vmap(lambda q: q.dequantize())(q)


@pytest.mark.parametrize("name", ["int4 with a tail", "nv with a tail"])
def test_the_scale_changes_under_any_layout_and_the_codes_stay(name):
    q, real = made(name)
    every = in_every_layout(q)
    changes = [
        (lambda q: q.scaled(-2.0), -2 * real),
        (lambda q: q.map_scale(lambda scale: scale / 4), real / 4),
        (lambda q: q.astype(jnp.bfloat16), real.astype(jnp.bfloat16)),
    ]
    reals = jax.jit(lambda tensors: [[f(q).dequantize() for f, _ in changes] for q in tensors])
    actual = reals([laid for _, laid in every])
    for (layout, laid), of_layout in zip(every, actual, strict=True):
        for (change, expected), y in zip(changes, of_layout, strict=True):
            changed = change(laid)
            assert changed.values is laid.values and changed.layout == layout
            assert_floats(y, expected, expected.dtype)


def test_the_gradient_reaches_the_scale_in_its_own_order():
    q = random_tensor(np.random.default_rng(0), "int4", (4, 6), (1,))
    cotangent = np.random.default_rng(1).integers(-8, 8, (4, 6)).astype(np.float32)

    def loss(scale, q):
        return jnp.sum(dataclasses.replace(q, scale=scale).dequantize() * cotangent)

    expected = (as_float64(q.values) * cotangent).sum(0, keepdims=True)
    for layout in (SWAPPED, BOTH, packed(-1, 6, True)):
        actual = jax.jit(jax.grad(loss))(q.scale, laid_out(q, layout))
        assert_floats(actual, expected, np.float32)


def test_a_layout_crosses_trees_copies_and_pickles_and_tells_structures_apart():
    q = random_tensor(np.random.default_rng(0), "int4", BOX, (2,), (2,))
    tensors = [q, *(laid for _, laid in in_every_layout(q))]
    structures = [jax.tree.structure(laid) for laid in tensors]
    assert len(set(structures)) == len(tensors)
    for laid in tensors:
        leaves, structure = jax.tree.flatten(laid)
        for other in (
            jax.tree.unflatten(structure, leaves),
            pickle.loads(pickle.dumps(laid)),
            copy.deepcopy(laid),
            jax.jit(lambda q: q)(laid),
        ):
            assert_same(other, laid)
            assert type(other.layout) is type(laid.layout)
        masked = jax.tree.map(lambda leaf: None, laid)
        assert masked.layout == laid.layout and "QTensor" in repr(masked)


def test_a_layout_that_says_nothing_is_none():
    q = random_tensor(np.random.default_rng(0), "int4", (4, 6))
    assert dataclasses.replace(q, layout=Layout()).layout is None
    assert swap_last(laid_out(q, SWAPPED)).layout is None
    assert laid_out(q, SWAPPED).in_memory_order.layout is None


def test_it_shows_how_the_codes_lie():
    q = random_tensor(np.random.default_rng(0), "int4", (4, 6))
    shown = {
        SWAPPED: "int4[4, 6] per_tensor swapped,",
        AS_INT8: "int4[4, 6] per_tensor as int8,",
        BOTH: "int4[4, 6] per_tensor swapped and as int8,",
        packed(-2, 4): "int4[4, 6] per_tensor packed along axis -2,",
        packed(-1, 6, True): "int4[4, 6] per_tensor packed along axis -1 and swapped,",
    }
    for layout, words in shown.items():
        laid = laid_out(q, layout)
        assert words in repr(laid) and f"{laid.nbytes:,} bytes" in repr(laid)
        abstract = jax.eval_shape(lambda q: q, laid)
        assert repr(abstract) == repr(laid)


INTEGERS_ONLY = "integers of up to 8 bits"
WRONG_VALUES = [  # shape and dtype of the values, format, layout, and what the error says
    ((5,), "uint8", "int4", packed(-1, 12), "packed shape", "(5,)", "6 bytes"),
    ((6,), "uint8", "int4", packed(0, 12), "packed shape", "axis=0"),
    ((6,), "uint8", "int4", packed(-2, 12), "packed shape", "axis=-2"),
    ((4, 3), "uint8", "int4", packed(-1, 6, True), "3 bytes along axis -2"),
    ((5,), "int4", "int4", SWAPPED, "two axes to be swapped", "(5,)"),
    ((5,), "int8", "int8", AS_INT8, "int8", "int8=True", INTEGERS_ONLY),
    ((5,), "int8", numerics.int3, AS_INT8, "int3", INTEGERS_ONLY),
    ((5,), "uint8", numerics.nf4, AS_INT8, "nf4", INTEGERS_ONLY),
    ((5,), "uint8", "int8", packed(-1, 5), "int8", "less than 8 bits"),
    ((6,), "uint8", "int4", Layout(Packing(-1, 12), int8=True), "int4", "int8=True", "Packing"),
]
WRONG_TYPES = [
    ((5,), "int4", "int4", AS_INT8, "`values`", "int4", "not int8"),
    ((5,), "uint8", "uint4", AS_INT8, "`values`", "not int8"),
    ((6,), "uint8", "int4", Packing(-1, 12), "`layout`", "Packing", "Layout"),
    ((6,), "uint8", "int4", "packed", "`layout`", "str", "Layout"),
    ((6,), "uint8", "int4", Layout((-1, 12)), "`layout`", "(-1, 12)"),
    ((6,), "uint8", "int4", Layout(Packing("-1", 12)), "`layout`", "axis='-1'"),
    ((2, 2), "int8", "int8", Layout(swapped=1), "`layout`", "swapped=1"),
    ((2, 2), "int4", "int4", Layout(int8=None), "`layout`", "int8=None"),
]


def test_a_layout_that_does_not_fit_is_refused():
    for error, cases in ((ValueError, WRONG_VALUES), (TypeError, WRONG_TYPES)):
        for shape, dtype, qtype, layout, *facts in cases:
            leaves = np.zeros(shape, jnp.dtype(dtype)), np.ones((1,) * len(shape), np.float32)
            make = functools.partial(jqx.QTensor, qtype=qtype, layout=layout)
            assert_refused(make, leaves, error, "QTensor", *facts)
