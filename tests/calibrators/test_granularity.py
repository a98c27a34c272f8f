"""Which elements share a scale: granularities, the groups that they make, and their rows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jqx
from jqx._src.statistics.granularity import is_without_blocks, members, rows_of
from jqx.extend import Groups

from ..arrays import on_device
from ..oracles.calibrators import BLOCKED, SHAPE, blocks
from ..oracles.refusals import assert_refused

law = settings(max_examples=100, deadline=None)
compiled_law = settings(max_examples=15, deadline=None)

shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)
sizes = st.integers(1, 7)
RELATIVE = {
    "per_channel": jqx.per_channel(),
    "per_token": jqx.per_token(),
    "per_group": jqx.per_group(2),
}


@law
@given(shapes)
def test_per_tensor_has_one_scale_for_all(shape):
    assert jqx.per_tensor().scale_shape(shape) == (1,) * len(shape)


@law
@given(shapes.filter(len), st.data())
def test_per_axis_has_a_scale_for_each_index_of_its_axes(shape, data):
    """In any order, counted from either end, named twice or not; one for an axis without any."""
    axes = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), min_size=1))
    expected = [1] * len(shape)
    for axis in axes:
        expected[axis] = shape[axis]
    assert jqx.per_axis(*axes).scale_shape(shape) == tuple(expected)


@law
@given(shapes.filter(len), st.data())
def test_relative_granularities_keep_the_axes_of_a_site_and_others_do_not_depend_on_it(shape, data):
    rank = len(shape)
    kept = tuple(data.draw(st.sets(st.sampled_from(range(rank)))))
    axes = data.draw(st.lists(st.integers(-rank, rank - 1), min_size=1))
    expected = tuple(n if i in kept else 1 for i, n in enumerate(shape))
    for name in ("per_channel", "per_token"):
        resolved = RELATIVE[name].resolve(rank=rank, kept=kept)
        assert not resolved.is_relative
        assert resolved.scale_shape(shape) == expected
        assert RELATIVE[name].resolve(rank=2, kept=()) == jqx.per_tensor()
    for granularity in (jqx.per_axis(*axes), jqx.per_tensor()):
        resolved = granularity.resolve(rank=rank, kept=kept)
        assert resolved.scale_shape(shape) == granularity.scale_shape(shape)


@law
@given(shapes.filter(len), st.data())
def test_per_block_has_a_scale_for_each_block_the_last_one_smaller(shape, data):
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    chosen = {axis: data.draw(sizes) for axis in axes}
    spelt = {axis - data.draw(st.sampled_from([0, len(shape)])): b for axis, b in chosen.items()}
    expected = [1] * len(shape)
    for axis, size in chosen.items():
        expected[axis] = max(-(-shape[axis] // size), 1)
    granularity = jqx.per_block(spelt, tail=True)
    assert granularity.scale_shape(shape) == tuple(expected)
    resolved = granularity.resolve(len(shape), ())
    assert resolved.scale_shape(shape) == tuple(expected)
    assert resolved == jqx.per_block(dict(sorted(chosen.items())), tail=True)
    if all(shape[axis] % size == 0 for axis, size in chosen.items()):
        assert jqx.per_block(spelt).scale_shape(shape) == tuple(expected)


def test_per_group_is_a_run_along_the_contracted_axes():
    """The last axis is the fastest; every index of a kept axis has runs of its own."""
    for shape, kept, size, expected in [
        ((64, 3), (1,), 32, (2, 3)),
        ((3, 64), (0,), 32, (3, 2)),
        ((4, 8, 3), (2,), 8, (4, 1, 3)),
        ((4, 8, 3), (2,), 16, (2, 1, 3)),
        ((4, 8, 3), (2,), 4, (4, 2, 3)),
        ((4, 8, 3), (2,), 32, (1, 1, 3)),
        ((4, 8), (0, 1), 1, (4, 8)),
        ((0, 3), (1,), 4, (1, 3)),
    ]:
        granularity = jqx.per_group(size, tail=shape[0] == 0).resolve(len(shape), kept)
        assert granularity.scale_shape(shape) == expected
        assert granularity.resolve(len(shape), kept) == granularity


def test_a_smaller_group_holds_as_many_whole_axes_as_fit():
    """Those of kernels, whose taps do not divide 32, among them. Without `tail` it is refused."""
    for shape, kept, expected in [
        ((70, 3), (1,), (32, 1)),
        ((5, 3), (1,), (5, 1)),
        ((2, 40, 3), (2,), (1, 32, 1)),
        ((8, 64, 3, 3), (0,), (1, 3, 3, 3)),
        ((3, 3, 64, 8), (3,), (1, 1, 32, 1)),
        ((3, 3, 3, 8), (3,), (3, 3, 3, 1)),
        ((3, 3, 1, 8), (3,), (3, 3, 1, 1)),
        ((7, 7, 3, 8), (3,), (1, 7, 3, 1)),
        ((16, 16, 3, 8), (3,), (1, 10, 3, 1)),
        ((4, 12, 3), (2,), (2, 12, 1)),
        ((4, 24, 3), (2,), (1, 24, 1)),
        ((5, 40, 3), (2,), (1, 32, 1)),
        ((0, 3, 2), (2,), (0, 3, 1)),
        ((3, 0, 2), (2,), (1, 0, 1)),
    ]:
        groups = jqx.per_group(32, tail=True).resolve(len(shape), kept).groups(shape)
        assert groups.sizes == expected and groups.per_scale <= 32
        if shape in ((70, 3), (5, 3), (2, 40, 3)):
            strict = jqx.per_group(32).resolve(len(shape), kept)
            facts = ValueError, "per_group", str(shape), "tail=True"
            assert_refused(lambda: strict.scale_shape(shape), (), *facts)  # noqa: B023


def test_blocks_are_distinguished_from_whole_axes():
    without = [jqx.per_tensor(), jqx.per_axis(0), jqx.per_channel(), jqx.per_token()]
    blocked = [jqx.per_block({0: 2}), jqx.per_group(2), jqx.per_group(2).resolve(2, (0,))]
    assert all(is_without_blocks(granularity) for granularity in without)
    assert not any(is_without_blocks(granularity) for granularity in blocked)


def test_what_is_resolved_resolves_to_itself():
    for form in (jqx.per_axis(0), jqx.per_axis(0, -1), jqx.per_tensor(), jqx.per_block({-1: 2})):
        once = form.resolve(rank=3, kept=(1,))
        assert once.resolve(rank=3, kept=(2,)) == once


REFUSED = [
    (lambda: jqx.per_block(32), TypeError, "per_block", "sizes"),
    (lambda: jqx.per_block({0: 2.0}), TypeError, "per_block", "size"),
    (lambda: jqx.per_block({"a": 2}), TypeError, "per_block", "axis"),
    (lambda: jqx.per_block({0: True}), TypeError, "per_block", "size"),
    (lambda: jqx.per_block({0: 2}, tail=1), TypeError, "per_block", "tail"),
    (lambda: jqx.per_block({}), ValueError, "per_block", "no blocks"),
    (lambda: jqx.per_block({0: 0}), ValueError, "per_block", "without elements"),
    (lambda: jqx.per_group(32.0), TypeError, "per_group", "size"),
    (lambda: jqx.per_group(True), TypeError, "per_group", "size"),
    (lambda: jqx.per_group(32, tail="yes"), TypeError, "per_group", "tail"),
    (lambda: jqx.per_group(0), ValueError, "per_group", "size == 0", "1 or more"),
    (jqx.per_axis, ValueError, "per_axis", "no axis", "per_tensor"),
    (lambda: jqx.per_axis(0).scale_shape(()), ValueError, "per_axis", "rank 0", "no axes"),
    (
        lambda: jqx.per_block({-1: 4}).scale_shape((2, 6)),
        *(ValueError, "per_block", "blocks of 4", "axis 1", "(2, 6)", "divides 6", "tail=True"),
    ),
    (
        lambda: jqx.per_block({1: 2, -1: 3}).scale_shape((2, 6)),
        *(ValueError, "per_block", "twice", "(2, 6)"),
    ),
    (
        lambda: jqx.per_group(32).resolve(3, (2,)).scale_shape((2, 8, 3)),
        *(ValueError, "per_group", "fewer than 32", "(2, 8, 3)", "tail=True"),
    ),
]


def test_what_is_no_granularity_of_an_array_is_refused():
    for call, error, function, *facts in REFUSED:
        assert_refused(call, (), error, function, *facts)
    for axis in (1.0, "0", None, (0, 1), [0], True, np.float32(1)):
        assert_refused(lambda: jqx.per_axis(axis), (), TypeError, "per_axis", "integers")  # noqa: B023


def uses(granularity, x):
    """What asks a granularity for the scale of an array."""
    return {
        "scale_shape": lambda: granularity.scale_shape(x.shape),
        "groups": lambda: granularity.groups(x.shape),
        "quantize": lambda: jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, granularity)),
    }


def test_a_relative_granularity_has_no_scale_outside_of_a_contraction():
    for name, granularity in RELATIVE.items():
        assert granularity.is_relative
        written = f"{granularity}" if "(" in str(granularity) else f"{name}()"
        facts = (written, "relative to a contraction", "jqx.per_axis(", "jqx.per_block(")
        for use in uses(granularity, jnp.ones((2, 3))).values():
            assert_refused(use, (), ValueError, name, *facts)


def test_an_axis_that_the_array_lacks_is_refused_by_number():
    for axes in ((2,), (-3,), (0, 5)):
        granularity = jqx.per_axis(*axes)
        calls = uses(granularity, jnp.ones((2, 3)))
        calls["resolve"] = lambda: granularity.resolve(rank=2, kept=())  # noqa: B023
        for call in calls.values():
            facts = (f"({axes[-1]})", "rank 2", "[-2, 1]")
            assert_refused(call, (), ValueError, "per_axis", *facts)


WRITTEN = {
    "per_tensor": jqx.per_tensor,
    "per_channel": jqx.per_channel,
    "per_token": jqx.per_token,
    "per_axis(0)": lambda: jqx.per_axis(0),
    "per_axis(1)": lambda: jqx.per_axis(1),
    "per_axis(0, 1)": lambda: jqx.per_axis(0, 1),
    "per_axis(0, -1)": lambda: jqx.per_axis(0, -1),
    "per_axis(-1)": lambda: jqx.per_axis(-1),
    "per_block({0: 32, -1: 1})": lambda: jqx.per_block({0: 32, -1: 1}),
    "per_block({1: 8})": lambda: jqx.per_block({1: 8}),
    "per_block({1: 8}, tail=True)": lambda: jqx.per_block({1: 8}, tail=True),
    "per_group(32)": lambda: jqx.per_group(32),
    "per_group(32, tail=True)": lambda: jqx.per_group(32, tail=True),
    "per_group(32) along (0,)": lambda: jqx.per_group(32).resolve(2, (1,)),
}


def test_granularities_are_values_and_print_as_they_are_written():
    """Equal and of equal hash where they are written alike, so that they can key a cache."""
    assert len({make() for make in WRITTEN.values()}) == len(WRITTEN)
    for text, make in WRITTEN.items():
        assert make() == make() and hash(make()) == hash(make())
        assert str(make()) == text
    with pytest.raises(AttributeError):
        jqx.per_axis(0).axes = (1,)


# Groups: how an array is split, reduced and joined.


@st.composite
def groups(draw, max_rank=3):
    """Any shape, zero-size axes among them, with block sizes that divide or leave a tail."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 5, 6]), max_size=max_rank)))
    return Groups(shape, tuple(draw(st.integers(min(n, 1), max(n, 1))) for n in shape))


def array_of(groups):
    size = int(np.prod(groups.shape))
    permuted = np.random.default_rng(size).permutation(size)
    return permuted.reshape(groups.shape).astype(np.float32) + 1


def reduced(f, x, groups, fill):
    """Block by block in NumPy."""
    result = np.full(groups.scale_shape, fill, np.float64)
    for place in itertools.product(*map(range, groups.scale_shape)):
        pairs = zip(place, groups.sizes, strict=True)
        block = x[tuple(slice(i * b, (i + 1) * b) for i, b in pairs)]
        if block.size:
            result[place] = f(block)
    return result


@compiled_law
@given(groups(), st.sampled_from([0.0, -1.0, np.inf]))
def test_an_array_is_split_with_its_scale_and_joined_whatever_fills_the_tail(groups, fill):
    """A scale broadcasts axis by axis: each element meets the scale of its own block."""
    pairs = zip(groups.shape, groups.sizes, strict=True)
    assert groups.scale_shape == tuple(1 if b == n else -(-n // b) for n, b in pairs)
    x = array_of(groups)
    scale = np.arange(np.prod(groups.scale_shape), dtype=np.float32).reshape(groups.scale_shape)

    @jax.jit
    def joined(x, scale):
        split, parameter = groups.split(x, fill), groups.split_scale(scale)
        assert parameter.ndim == split.ndim
        return groups.join(split), groups.join(jnp.broadcast_to(parameter, split.shape))

    again, met = joined(x, scale)
    np.testing.assert_array_equal(again, x, strict=True)
    for place in itertools.product(*map(range, groups.shape)):
        block = tuple(i // b for i, b in zip(place, groups.sizes, strict=True))
        assert met[place] == scale[block]


@compiled_law
@given(groups())
def test_reductions_are_those_of_numpy_block_by_block(groups):
    x = array_of(groups)
    x *= np.where(x % 2 == 0, -1, 1).astype(np.float32)
    cases = [(jnp.max, np.max, -np.inf), (jnp.min, np.min, np.inf), (jnp.sum, np.sum, 0)]

    @jax.jit
    def found(x):
        reductions = [groups.reduce(ours, x, fill) for ours, _, fill in cases]
        return [*reductions, groups.largest_magnitude(x)]

    magnitudes = (None, lambda block: np.abs(block).max(), 0)
    for (_, theirs, fill), result in zip([*cases, magnitudes], found(x), strict=True):
        assert result.dtype == jnp.float32
        np.testing.assert_array_equal(np.float64(result), reduced(theirs, x, groups, fill))


@pytest.mark.many
@pytest.mark.parametrize("length", [1, 8, 31, 32, 100, 1024, 4096])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_nan_makes_the_largest_magnitude_nan_in_any_place(length, dtype):
    """Along a long axis XLA on CPU loses one in a maximum of floats."""
    found = Groups((3, length), (1, length))
    x = np.tile(np.linspace(-3, 2, length, dtype=np.float32), (3, 1))
    for place in {0, length // 2, length - 1}:
        poisoned = x.copy()
        poisoned[1, place] = np.nan
        largest = jax.jit(found.largest_magnitude)(on_device(poisoned, dtype))
        assert largest.dtype == jnp.dtype(dtype)
        assert np.isnan(np.float32(largest)).ravel().tolist() == [False, True, False]
        np.testing.assert_array_equal(np.float32(largest[0, 0]), np.abs(np.asarray(x, dtype)).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_nan_of_either_sign_is_the_largest_magnitude_after_a_relu(sign, dtype):
    """XLA removes an `abs` after `max(x, 0)`, which leaves the sign of a NaN."""
    x = np.ones((3, 64), np.float32)
    x[1, 5] = np.copysign(np.float32(np.nan), np.float32(sign))
    largest = jax.jit(lambda x: Groups(x.shape, (1, 64)).largest_magnitude(jax.nn.relu(x)))
    np.testing.assert_array_equal(
        np.float32(largest(on_device(x, dtype))), np.float32([[1], [np.nan], [1]])
    )


def are_told_apart(groups):
    """Whether no two axes of one length have as many blocks, of different sizes."""
    axes = {*zip(groups.shape, groups.scale_shape, groups.sizes, strict=True)}
    return len({axis[:2] for axis in axes}) == len(axes)


@compiled_law
@given(groups().filter(are_told_apart))
def test_the_sizes_are_found_from_the_shape_of_the_scale_and_the_tails(groups):
    again = Groups.of_scale(groups.shape, groups.scale_shape, groups.blocks)
    assert again.scale_shape == groups.scale_shape
    for n, a, b in zip(groups.shape, again.sizes, groups.sizes, strict=True):
        assert a == b or n == 1 or -(-n // b) == 1


def test_a_tail_alone_has_its_size_written_down():
    assert Groups((6, 7, 8), (3, 3, 8)).blocks == ((7, 3, 3),)
    assert Groups((6, 7, 8), (1, 7, 2)).blocks == ()
    assert Groups((7, 7), (3, 3)).blocks == ((7, 3, 3),)
    assert Groups((6, 7, 8), (3, 4, 8)).per_scale == 96
    # 100 in 4 blocks: of 26, or of 27.
    with pytest.raises(ValueError, match=r"two axes of the same length(.|\n)*fix"):
        _ = Groups((100, 100), (26, 27)).blocks


def test_groups_print_as_a_granularity():
    for shape, sizes, text in [
        ((2, 3), (2, 3), "per_tensor"),
        ((2, 3), (2, 1), "per_axis(1)"),
        ((2, 3), (1, 1), "per_axis(0, 1)"),
        ((4, 3), (2, 1), "per_block({0: 2, 1: 1})"),
    ]:
        assert str(Groups(shape, sizes)) == text


EXTREMES = [0.0, -0.0, 1e-38, 3e38, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_magnitudes_that_other_platforms_find_are_those_of_cpu(dtype):
    x = np.random.default_rng(0).normal(size=(12, 64))
    x[:7, 3], x[7], x[8, :2] = EXTREMES, 0, -5
    x = on_device(x, dtype)
    for granularity in (jqx.per_axis(0), jqx.per_tensor(), jqx.per_block({0: 1, 1: 16})):
        groups = granularity.groups(x.shape)
        expected = jax.jit(groups._in_steps)(groups.split(x))
        for other in (groups._on_tpu, groups._at_once):
            found = jax.jit(other)(groups.split(x))
            assert found.dtype == expected.dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(np.float32(found), np.float32(expected), strict=True)


def test_a_row_holds_the_elements_that_share_a_scale():
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    for granularity, sizes in BLOCKED:
        groups = granularity.groups(SHAPE)
        rows, count = rows_of(on_device(x), groups, jnp.nan), members(groups)
        assert rows.shape == (*groups.scale_shape, groups.per_scale)
        assert (count.shape, count.dtype) == (groups.scale_shape, jnp.uint32)
        for place, block in blocks(x, sizes):
            row = np.asarray(rows[place])
            assert count[place] == block.size
            np.testing.assert_array_equal(np.sort(row)[: block.size], np.sort(block.ravel()))
            assert np.isnan(row).sum() == groups.per_scale - block.size
    for shape in ((), (0,), (3, 0), (0, 2)):
        groups = jqx.per_tensor().groups(shape)
        rows = rows_of(jnp.ones(shape), groups, 0)
        assert rows.shape == (*groups.scale_shape, int(np.prod(shape)))
        assert np.asarray(members(groups)).sum() == np.prod(shape)
