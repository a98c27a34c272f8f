import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jqx
from jqx._src.statistics.granularity import is_without_blocks

from ..oracles.refusals import assert_refused

law = settings(max_examples=100, deadline=None)

shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)
sizes = st.integers(1, 7)
RELATIVE = [jqx.per_channel, jqx.per_token]


def per_group_of_two():
    return jqx.per_group(2)


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
def test_the_scale_of_a_relative_granularity_has_the_axes_that_are_kept(shape, data):
    kept = data.draw(st.sets(st.sampled_from(range(len(shape)))))
    expected = tuple(n if i in kept else 1 for i, n in enumerate(shape))
    for relative in RELATIVE:
        resolved = relative().resolve(rank=len(shape), kept=tuple(kept))
        assert not resolved.is_relative
        assert resolved.scale_shape(shape) == expected


@law
@given(shapes.filter(len), st.data())
def test_an_absolute_granularity_means_the_same_at_every_site(shape, data):
    rank = len(shape)
    axes = data.draw(st.lists(st.integers(-rank, rank - 1), min_size=1))
    kept = data.draw(st.sets(st.sampled_from(range(rank))))
    for granularity in (jqx.per_axis(*axes), jqx.per_tensor()):
        resolved = granularity.resolve(rank=rank, kept=tuple(kept))
        assert resolved.scale_shape(shape) == granularity.scale_shape(shape)


def test_an_operand_that_keeps_no_axis_has_one_scale():
    for relative in RELATIVE:
        assert relative().resolve(rank=2, kept=()) == jqx.per_tensor()


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


@pytest.mark.parametrize(
    "shape, kept, size, expected",
    [
        ((64, 3), (1,), 32, (2, 3)),
        ((3, 64), (0,), 32, (3, 2)),
        ((4, 8, 3), (2,), 8, (4, 1, 3)),
        ((4, 8, 3), (2,), 16, (2, 1, 3)),
        ((4, 8, 3), (2,), 4, (4, 2, 3)),
        ((4, 8, 3), (2,), 32, (1, 1, 3)),
        ((4, 8), (0, 1), 1, (4, 8)),
        ((0, 3), (1,), 4, (1, 3)),
    ],
)
def test_per_group_is_a_run_along_the_contracted_axes(shape, kept, size, expected):
    """The last axis is the fastest; every index of a kept axis has runs of its own."""
    granularity = jqx.per_group(size, tail=shape[0] == 0).resolve(len(shape), kept)
    assert granularity.scale_shape(shape) == expected
    assert granularity.resolve(len(shape), kept) == granularity


@pytest.mark.parametrize(
    "shape, kept, expected",
    [((70, 3), (1,), (3, 3)), ((5, 3), (1,), (1, 3)), ((2, 40, 3), (2,), (2, 2, 3))],
)
def test_the_last_group_may_be_smaller_where_it_is_said_so(shape, kept, expected):
    relaxed = jqx.per_group(32, tail=True).resolve(len(shape), kept)
    assert relaxed.scale_shape(shape) == expected
    strict = jqx.per_group(32).resolve(len(shape), kept)
    facts = (f"{shape}", "tail=True")
    assert_refused(lambda: strict.scale_shape(shape), (), ValueError, "per_group", *facts)


@pytest.mark.parametrize(
    "shape, kept, sizes",
    [
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
    ],
)
def test_a_smaller_group_holds_as_many_whole_axes_as_fit(shape, kept, sizes):
    """Those of kernels, whose taps do not divide 32, among them."""
    groups = jqx.per_group(32, tail=True).resolve(len(shape), kept).groups(shape)
    assert groups.sizes == sizes and groups.per_scale <= 32


def test_axes_that_hold_less_than_a_group_are_refused():
    strict = jqx.per_group(32).resolve(3, (2,))
    facts = ("fewer than 32", "(2, 8, 3)", "tail=True")
    assert_refused(lambda: strict.scale_shape((2, 8, 3)), (), ValueError, "per_group", *facts)


def test_blocks_that_do_not_divide_are_refused_by_axis():
    granularity = jqx.per_block({-1: 4})
    facts = ("blocks of 4", "axis 1", "(2, 6)", "divides 6", "tail=True")
    assert_refused(lambda: granularity.scale_shape((2, 6)), (), ValueError, "per_block", *facts)


def test_blocks_of_one_axis_named_twice_are_refused():
    granularity = jqx.per_block({1: 2, -1: 3})
    facts = ("twice", "(2, 6)")
    assert_refused(lambda: granularity.scale_shape((2, 6)), (), ValueError, "per_block", *facts)


@pytest.mark.parametrize(
    "given, error, fact",
    [
        (lambda: jqx.per_block(32), TypeError, "sizes"),
        (lambda: jqx.per_block({0: 2.0}), TypeError, "size"),
        (lambda: jqx.per_block({"a": 2}), TypeError, "axis"),
        (lambda: jqx.per_block({0: True}), TypeError, "size"),
        (lambda: jqx.per_block({0: 2}, tail=1), TypeError, "tail"),
        (lambda: jqx.per_block({}), ValueError, "no blocks"),
        (lambda: jqx.per_block({0: 0}), ValueError, "no elements"),
    ],
)
def test_what_is_no_block_is_refused(given, error, fact):
    assert_refused(given, (), error, "per_block", fact)


@pytest.mark.parametrize(
    "given, error, fact",
    [
        (lambda: jqx.per_group(32.0), TypeError, "size"),
        (lambda: jqx.per_group(True), TypeError, "size"),
        (lambda: jqx.per_group(32, tail="yes"), TypeError, "tail"),
        (lambda: jqx.per_group(0), ValueError, "no elements"),
    ],
)
def test_what_is_no_group_is_refused(given, error, fact):
    assert_refused(given, (), error, "per_group", fact)


def test_blocks_are_distinguished_from_whole_axes():
    without = [jqx.per_tensor(), jqx.per_axis(0), jqx.per_channel(), jqx.per_token()]
    blocked = [jqx.per_block({0: 2}), jqx.per_group(2), jqx.per_group(2).resolve(2, (0,))]
    assert all(is_without_blocks(granularity) for granularity in without)
    assert not any(is_without_blocks(granularity) for granularity in blocked)


@pytest.mark.parametrize(
    "form", [jqx.per_axis(0), jqx.per_axis(0, -1), jqx.per_tensor(), jqx.per_block({-1: 2})]
)
def test_what_is_resolved_resolves_to_itself(form):
    once = form.resolve(rank=3, kept=(1,))
    assert once.resolve(rank=3, kept=(2,)) == once


@pytest.mark.parametrize("relative", [*RELATIVE, per_group_of_two])
def test_a_relative_granularity_has_no_scale_outside_of_a_contraction(relative):
    granularity = relative()
    assert granularity.is_relative
    name = "per_group" if relative is per_group_of_two else relative.__name__
    facts = (
        f"{granularity}" if "(" in str(granularity) else f"{name}()",
        "relative to a contraction",
        "jqx.per_axis(",
        "jqx.per_block(",
    )
    refused = (ValueError, name, *facts)
    assert_refused(lambda: granularity.scale_shape((2, 3)), (), *refused)
    assert_refused(lambda: granularity.groups((2, 3)), (), *refused)
    spec = jqx.QSpec(jnp.int8, granularity)
    assert_refused(lambda x: jqx.QTensor.quantize(x, spec), (jnp.ones((2, 3)),), *refused)


@pytest.mark.parametrize("axes", [(2,), (-3,), (0, 5)])
def test_an_axis_that_the_array_lacks_is_refused_by_number(axes):
    granularity = jqx.per_axis(*axes)
    facts = (f"({axes[-1]})", "rank 2", "[-2, 1]")
    for f in [
        lambda: granularity.scale_shape((2, 3)),
        lambda: granularity.resolve(rank=2, kept=()),
        lambda: jqx.QTensor.quantize(jnp.ones((2, 3)), jqx.QSpec(jnp.int8, granularity)),
    ]:
        assert_refused(f, (), ValueError, "per_axis", *facts)


def test_no_axis_is_one_of_an_array_without_axes():
    facts = ("rank 0", "no axes")
    assert_refused(lambda: jqx.per_axis(0).scale_shape(()), (), ValueError, "per_axis", *facts)


def test_per_axis_without_axes_is_refused():
    """It would read as per_tensor, which has its own name."""
    assert_refused(jqx.per_axis, (), ValueError, "per_axis", "no axis", "per_tensor")


@pytest.mark.parametrize("axis", [1.0, "0", None, (0, 1), [0], True, np.float32(1)], ids=repr)
def test_axes_that_are_no_integers_are_refused(axis):
    assert_refused(lambda: jqx.per_axis(axis), (), TypeError, "per_axis", "integers")


def test_granularities_are_values():
    """Equal and of equal hash where they are written alike, so that they can key a cache."""
    makers = [
        jqx.per_tensor,
        jqx.per_channel,
        jqx.per_token,
        lambda: jqx.per_axis(0),
        lambda: jqx.per_axis(1),
        lambda: jqx.per_axis(0, 1),
        lambda: jqx.per_axis(-1),
        lambda: jqx.per_block({0: 2}),
        lambda: jqx.per_block({0: 2}, tail=True),
        lambda: jqx.per_group(2),
        lambda: jqx.per_group(2, tail=True),
        lambda: jqx.per_group(3).resolve(2, (0,)),
    ]
    assert len({make() for make in makers}) == len(makers)
    for make in makers:
        assert make() == make() and hash(make()) == hash(make())


def test_granularities_cannot_be_changed():
    with pytest.raises(AttributeError):
        jqx.per_axis(0).axes = (1,)


@pytest.mark.parametrize(
    "granularity, text",
    [
        (jqx.per_tensor(), "per_tensor"),
        (jqx.per_axis(1), "per_axis(1)"),
        (jqx.per_axis(0, -1), "per_axis(0, -1)"),
        (jqx.per_channel(), "per_channel"),
        (jqx.per_token(), "per_token"),
        (jqx.per_block({0: 32, -1: 1}), "per_block({0: 32, -1: 1})"),
        (jqx.per_block({1: 8}, tail=True), "per_block({1: 8}, tail=True)"),
        (jqx.per_group(32), "per_group(32)"),
        (jqx.per_group(32, tail=True), "per_group(32, tail=True)"),
        (jqx.per_group(32).resolve(2, (1,)), "per_group(32) along (0,)"),
    ],
)
def test_granularities_print_as_they_are_written(granularity, text):
    assert str(granularity) == text
