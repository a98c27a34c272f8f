"""Views: what happens to the values happens to the scale, so they commute with dequantizing.

Most laws compare, in NumPy, the code, the scale and the zero point of each element. Indexing and
transposing a QTensor of NumPy arrays compiles nothing; some cases come again under jit, with their
real values.
"""

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
from jqx._src.tensor.views import axis_groups
from jqx.numerics import format_of

from ..oracles.numerics import assert_floats
from ..oracles.refusals import assert_refused
from .tensors import (
    CASES,
    NV4,
    SHAPES,
    along_axis,
    assert_commute,
    assert_jitted_laws,
    assert_laws,
    assert_stands_for,
    elements,
    few,
    made,
    of_elements,
    on_host,
    qtensors,
    quantized_case,
    random_tensor,
    spec,
    spread,
    spread_out,
    tensor,
    tensors_of,
)

batches = settings(max_examples=5, deadline=None)
"""Five cases are one compiled program."""


def test_T_reverses_the_axes():
    shapes = [(), (3,), (2, 3), (2, 1, 4)]
    tensors = [
        q for shape in shapes for q in tensors_of(shape, [(), (0,), tuple(range(len(shape)))])
    ]
    assert_commute(tensors, [[lambda x: x.T, lambda x: x.T.T]] * len(tensors))


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
        axes_of_scale = list(tensors_of(shape, [axes], coarser=0))
        tensors += axes_of_scale
        views += [[operator.methodcaller("reshape", new)]] * len(axes_of_scale)
        q = random_tensor(np.random.default_rng(0), "int8", shape, axes)
        assert jax.eval_shape(lambda q, new=new: q.reshape(new), q).scale.shape == scale
    assert_commute(tensors, views)


def test_a_reshape_that_would_repeat_scales_is_refused_by_the_names_of_its_axes():
    tensors = [
        (random_tensor(np.random.default_rng(0), "int8", shape, axes), new, f"axes {named}")
        for shape, axes, new, named in [
            ((2, 3), (1,), (6,), (0, 1)),
            ((2, 3, 4), (2,), (2, 12), (1, 2)),
            ((2, 3, 4), (0, 2), (24,), (0, 1, 2)),
            ((4, 6), (1,), (3, 8), (0, 1)),
        ]
    ]
    of_two_axes = blocked(jnp.int8, (4, 12), {0: 2, 1: 4})
    for q, new, fact in [*tensors, (of_two_axes, (48,), "only some of axes (0, 1)")]:
        facts = (fact, str(q.shape), str(q.scale.shape), str(new))
        assert_refused(
            lambda q, new=new: q.reshape(new), (q,), ValueError, "QTensor.reshape", *facts
        )


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


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(factorizations(24)), st.sampled_from(factorizations(24)), st.data())
def test_a_reshape_keeps_blocks_where_it_can(shape, new, data):
    """Scales that differ, spread and reshaped, are those of as many blocks of the new shape, or of
    smaller blocks.
    """
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
        return
    real = jqx.QTensor(np.zeros(shape, np.int8), np.asarray(scale, np.float32), qtype=jnp.int8)
    try:
        reshaped = real.reshape(new)
    except ValueError as error:
        assert "the scale cannot follow" in str(error)
    else:  # in smaller blocks
        assert reshaped.scale.size > scale.size
        assert (spread(np.asarray(reshaped.scale), new) == full).all()


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


def test_transpose_and_reshape_take_axes_and_shapes_as_arrays_do():
    q = random_tensor(np.random.default_rng(0), "int8", (2, 3, 4), (0, 1))
    forms = [(1, 0, 2), ((1, 0, 2),), ([1, 0, 2],), (-2, -3, -1), (np.int64(1), np.int64(0), 2)]
    cases = [(q.transpose, axes, (3, 2, 4), (3, 2, 1)) for axes in forms]
    cases += [(q.transpose, axes, (4, 3, 2), (1, 3, 2)) for axes in ((), (None,))]
    q = random_tensor(np.random.default_rng(0), "int8", (6, 4), (0,))
    forms = [(2, 3, 4), ((2, 3, 4),), ([2, 3, 4],), (2, -1, 4), ((-1, 3, 4),)]
    cases += [(q.reshape, shape, (2, 3, 4), (2, 3, 1)) for shape in forms]
    for method, args, shape, scale in cases:
        view = method(*args)
        assert (view.shape, view.scale.shape) == (shape, scale)
    for method, args in [(q.reshape, (5, 5)), *((q.transpose, a) for a in ((0,), (0, 0), (0, 3)))]:
        with pytest.raises((TypeError, ValueError)):
            method(*args)


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


SPLITS = [(2, -1), ([1, -1], -1), ([2, 1], 0), ([], 0), ([-1], 1)]


def taken(name):
    """Views of a case: transposes, and what is taken."""
    last = len(CASES[name].shape) - 1
    views = [lambda x, order=order: x.transpose(order) for order in turns(last + 1)]
    views += [lambda x, axis=axis: x.take(np.array([1, 0, 1]), axis) for axis in (0, last, -1)]
    return [*views, lambda x: x.take(1, 0), lambda x: x.take(np.array([[0, 1]]), -1)]


@few
def test_taking_splitting_and_transposing_take_the_scale_along(name):
    q, _ = made(name)
    assert_laws(q, taken(name))
    for positions, axis in SPLITS:
        parts = on_host(q).split(positions, axis)
        expected = of_elements(lambda x, of=(positions, axis): np.split(x, *of), q)
        assert len(parts) == len(expected["code"])
        for i, part in enumerate(parts):
            of_part = {name: split[i] for name, split in expected.items()}
            assert_stands_for(part, of_part, f"{positions}, {axis}, part {i}:")


@pytest.mark.many
@few
def test_taking_splitting_and_transposing_take_the_scale_along_under_jit(name):
    parts = [
        lambda x, of=of, i=i: (x.split(*of) if isinstance(x, jqx.QTensor) else np.split(x, *of))[i]
        for of, i in zip(SPLITS, (1, 2, 0, 0, 1), strict=True)
    ]
    assert_jitted_laws(name, taken(name) + parts)


def turns(rank):
    return list(itertools.permutations(range(rank)))


def test_a_split_at_the_ends_of_blocks_keeps_them():
    q, _ = made("int8 of 100 in blocks of 32")
    assert [part.scale.shape for part in q.split([32, 96])] == [(1, 2), (2, 2), (1, 2)]
    q, _ = made("int8 of 100 in blocks of 25")
    assert [part.scale.shape for part in q.split(2)] == [(2, 2), (2, 2)]
    assert [part.scale.shape for part in q.split([30])] == [(2, 2), (14, 2)]


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
        return [jqx.QTensor.concatenate(*pair) for pair in pairs(q, other)]

    for i, whole in enumerate(joined(q, other)):
        expected = of_elements(lambda *both, i=i: np.concatenate(*list(pairs(*both))[i]), q, other)
        assert_stands_for(whole, expected, f"join {i}:")


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


def assert_joined(whole, parts, axis, case):
    """Asserts that a tensor has the elements of others, joined."""
    expected = of_elements(lambda *arrays: np.concatenate(arrays, axis), *parts)
    assert_stands_for(whole, expected, case)


@pytest.mark.parametrize("family", GRANULARITIES)
def test_tensors_of_any_two_granularities_are_joined(family):
    """With a zero point in one and none in the other, with blocks that fit and that do not."""
    specs = GRANULARITIES[family]

    def pairs(tensors):
        return [*itertools.pairwise([*tensors, tensors[0]]), (tensors[2], tensors[0])]

    @jax.jit
    def joined(arrays):
        tensors = [jqx.QTensor.quantize(x, of) for x, of in zip(arrays, specs, strict=True)]
        wholes = [
            [jqx.QTensor.concatenate(pair, axis) for pair in pairs(tensors)] for axis in (0, -1)
        ]
        return tensors, wholes

    tensors, wholes = joined([spread_out((4, 10), seed) for seed in range(len(specs))])
    for axis, of_axis in zip((0, -1), wholes, strict=True):
        for i, (whole, pair) in enumerate(zip(of_axis, pairs(tensors), strict=True)):
            assert_joined(whole, pair, axis, f"axis {axis}, pair {i}:")


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
        return tensors, [jqx.QTensor.concatenate(parts) for parts, _ in cases(*tensors)]

    tensors, wholes = joined([spread_out((n,), n) for n in (8, 4, 7)])
    for i, (whole, (parts, scales)) in enumerate(
        zip(wholes, cases(*map(on_host, tensors)), strict=True)
    ):
        assert_joined(whole, parts, 0, f"case {i}:")
        assert whole.scale.shape == (scales,)


def test_codes_below_a_byte_are_joined():
    """XLA on CPU aborts the process where it joins integers of 2 bits."""
    pairs = {
        qtype: [random_tensor(np.random.default_rng(s), qtype, (2, 3), (0,), (0,)) for s in (0, 1)]
        for qtype in ("int2", "uint2", "int4", "uint4")
    }
    join = jqx.QTensor.concatenate
    actual = jax.jit(lambda pairs: {qtype: join(pair) for qtype, pair in pairs.items()})(pairs)
    actual = [*actual.items(), ("int2", join(pairs["int2"]))]
    for qtype, whole in actual:
        assert whole.values.dtype == whole.zero_point.dtype == qtype
        assert_joined(whole, pairs[qtype], 0, qtype)


def test_an_empty_tensor_is_joined_with_any():
    granularities = jqx.per_tensor(), jqx.per_axis(0), jqx.per_axis(1)

    @jax.jit
    def joined(x):
        cases = []
        for granularity in granularities:
            q = jqx.QTensor.quantize(x, spec(jnp.int8, granularity))
            for empty in (q[:0], jqx.QTensor.quantize(x, spec(jnp.int8))[:0]):
                cases += [[empty, q], [q, empty], [q, empty, q], [empty, empty]]
        return cases, [jqx.QTensor.concatenate(parts) for parts in cases]

    cases, wholes = joined(spread_out((4, 3)))
    for i, (whole, parts) in enumerate(zip(wholes, cases, strict=True)):
        assert_joined(whole, parts, 0, f"case {i}:")


@few
def test_stacking_broadcasting_and_new_axes_take_the_scale_along(name):
    (q, _), other = made(name), quantized_case(name, seed=1)
    axes = (0, 1, -1, -2)
    stacks = jax.jit(lambda *both: [jqx.QTensor.stack(both, axis) for axis in axes])(q, other)
    for stack, axis in zip(stacks, axes, strict=True):
        expected = of_elements(lambda *both, axis=axis: np.stack(both, axis), q, other)
        assert_stands_for(stack, expected, f"axis {axis}:")
    views = [
        lambda x: broadcast(x[:1], (5, *q.shape[1:])),
        lambda x: broadcast(x, (2, 1, *q.shape)),
        lambda x: broadcast(x[..., None], (*q.shape, 3)),
        lambda x: broadcast(x[..., 1:2], q.shape),
        lambda x: broadcast(x, q.shape),
        lambda x: x[None, ..., None].reshape(*q.shape, 1, 1),
        lambda x: x[..., None, :].transpose(*range(1, q.ndim + 1), 0),
    ]
    assert_commute([q], [views])


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


def blocked(qtype, shape, sizes):
    """A tensor of codes from 0 to 3 in blocks, whose scales all differ."""
    rng, sizes = np.random.default_rng(0), [sizes.get(i, n) for i, n in enumerate(shape)]
    scale_shape = [-(-n // size) for n, size in zip(shape, sizes, strict=True)]
    scale = rng.permutation(math.prod(scale_shape)).reshape(scale_shape) + 1
    blocks = tuple(zip(shape, scale_shape, sizes, strict=True))
    codes = rng.integers(0, 4, shape)
    if qtype is not NV4:
        blocks = tuple(block for block in blocks if block[0] % block[2])
        codes = codes.astype(format_of(qtype).storage)
        return jqx.QTensor(codes, np.float32(scale), qtype=qtype, blocks=blocks)
    form = dataclasses.replace(NV4, size=math.prod(sizes))
    return jqx.QTensor(
        codes.astype(jnp.float4_e2m1fn),
        tensor(scale, jnp.float8_e4m3fn, np.full((1,) * len(shape), 0.5)),
        qtype=form,
    )


@pytest.mark.parametrize("qtype", [jnp.int8, numerics.nf4, NV4], ids=str)
def test_blocks_stay_whole_where_axes_merge_or_split(qtype):
    tensors = [blocked(qtype, shape, sizes) for shape, sizes, *_ in BLOCK_RESHAPES]

    @jax.jit
    def views(tensors):
        there = [q.reshape(new) for q, (_, _, new, _) in zip(tensors, BLOCK_RESHAPES, strict=True)]
        return there, [q.reshape(case[0]) for q, case in zip(there, BLOCK_RESHAPES, strict=True)]

    for case, q, there, back in zip(BLOCK_RESHAPES, tensors, *views(tensors), strict=True):
        assert there.groups.sizes == case[3], case
        assert_stands_for(there, of_elements(lambda x, new=case[2]: x.reshape(new), q), case)
        assert_stands_for(back, elements(q), case)


def test_blocks_that_a_reshape_would_tear_become_smaller():
    cases = [
        ((4, 12), {0: 1, 1: 4}, (1, 1, 1), (4, 4, 3)),
        ((4, 12), {0: 1, 1: 6}, (1, 1, 2), (4, 3, 4)),
        ((4, 10), {0: 1, 1: 4}, (2,), (40,)),
        ((4, 10), {0: 1, 1: 4}, (1, 1, 1), (4, 2, 5)),
        ((100,), {0: 32}, (1, 1), (4, 25)),
        ((100,), {0: 32}, (2, 2), (50, 2)),
    ]
    for shape, sizes, after, new in cases:
        q = blocked(jnp.int8, shape, sizes)
        actual = q.reshape(new)
        assert actual.groups.sizes == after
        assert np.array_equal(actual.dequantize(), q.dequantize().reshape(new))


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
            positions = draw(st.lists(st.integers(-n, n - 1), max_size=3)) if n else []
            view = along_axis(axis, np.array(positions, np.int32))
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

    actual = jax.jit(lambda tensors: [q.dequantize() for q in viewed(tensors)])(tensors)
    for result, expected in zip(actual, viewed(reals), strict=True):
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

    @jax.jit
    def mapped(q):
        actual = []
        for axis in axes:
            whole = jax.vmap(lambda q: q.dequantize(), in_axes=axis)(q)
            views = jax.vmap(lambda q: q[..., 1:6], in_axes=axis)(q)
            actual += [(whole, views.dequantize())]
        _, (whole, views) = jax.lax.scan(lambda c, q: (c, (q.dequantize(), q[..., :9])), 0, q)
        return actual, (whole, views.dequantize())

    actual, scanned = mapped(q)
    for axis, (whole, view) in zip(axes, actual, strict=True):
        moved = np.moveaxis(real, axis, 0)
        assert_floats(whole, moved, np.float32)
        assert_floats(view, moved[..., 1:6], np.float32)
    assert_floats(scanned[0], real, np.float32)
    assert_floats(scanned[1], real[..., :9], np.float32)


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_mapping_over_an_axis_after_a_tail_gives_the_right_values_or_raises(axis):
    """The block size is counted from the last axis: it must not be read from another one."""
    granularity = jqx.per_block({0: 32, 1: 1, 2: 1}, tail=True)
    x = spread_out((100, 4, 3))

    @jax.jit
    def mapped(x):
        q = jqx.QTensor.quantize(x, spec(jnp.int8, granularity))
        return jax.vmap(lambda q: q.dequantize(), in_axes=axis, out_axes=axis)(q), q.dequantize()

    try:
        actual, expected = mapped(x)
    except ValueError as error:
        assert "fix" in str(error)
        return
    assert_floats(actual, np.asarray(expected), np.float32)


NO_AXES = [
    lambda q: q.take(np.array([0]), 3),
    lambda q: q.split(2, 3),
    lambda q: jqx.QTensor.concatenate([q, q], 3),
    lambda q: jqx.QTensor.concatenate([q, q], -4),
    lambda q: jqx.QTensor.stack([q, q], 4),
    lambda q: jqx.QTensor.stack([q, q], -5),
    lambda q: q.transpose(3, 1, 2),
    lambda q: q[0, 0, 0].take(0, 0),
    lambda q: jqx.QTensor.concatenate([q[0, 0, 0]] * 2),
]


def test_an_axis_that_there_is_not_is_refused():
    """It does not wrap round."""
    for view in NO_AXES:
        with pytest.raises((ValueError, IndexError), match=r"^jqx\.QTensor"):
            view(made("int8 per tensor")[0])
