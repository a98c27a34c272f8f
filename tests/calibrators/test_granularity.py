import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jqx

from ..ops.refusals import assert_refused

law = settings(max_examples=100, deadline=None)

shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)
RELATIVE = [jqx.per_channel, jqx.per_token]


@law
@given(shapes)
def test_per_tensor_has_one_scale_for_all(shape):
    assert jqx.per_tensor().scale_shape(shape) == (1,) * len(shape)


@law
@given(shapes.filter(len), st.data())
def test_per_axis_has_a_scale_for_each_index_of_its_axes(shape, data):
    """In any order, counted from either end, named twice or not."""
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


@pytest.mark.parametrize("form", [jqx.per_axis(0), jqx.per_axis(0, -1), jqx.per_tensor()])
def test_what_is_resolved_resolves_to_itself(form):
    once = form.resolve(rank=3, kept=(1,))
    assert once.resolve(rank=3, kept=(2,)) == once


@pytest.mark.parametrize("relative", RELATIVE)
def test_a_relative_granularity_has_no_scale_outside_of_a_contraction(relative):
    granularity = relative()
    assert granularity.is_relative
    facts = (f"{relative.__name__}()", "(2, 3)", "no contraction", "jqx.per_axis(")
    refused = (ValueError, relative.__name__, *facts)
    assert_refused(lambda: granularity.scale_shape((2, 3)), (), *refused)
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
    ],
)
def test_granularities_print_as_they_are_written(granularity, text):
    assert str(granularity) == text
