import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jqx
from jqx.calibrators import Groups

from ..arrays import on_device

law = settings(max_examples=15, deadline=None)


@st.composite
def groups(draw, max_rank=3):
    """Any shape, zero-size axes among them, with block sizes that divide or leave a tail."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 5, 6]), max_size=max_rank)))
    return Groups(shape, tuple(draw(st.integers(min(n, 1), max(n, 1))) for n in shape))


def array_of(found):
    size = int(np.prod(found.shape))
    return np.random.default_rng(size).permutation(size).reshape(found.shape).astype(np.float32) + 1


def reduced(f, x, found, fill):
    """Block by block in NumPy."""
    result = np.full(found.scale_shape, fill, np.float64)
    for place in itertools.product(*map(range, found.scale_shape)):
        pairs = zip(place, found.sizes, strict=True)
        block = x[tuple(slice(i * b, (i + 1) * b) for i, b in pairs)]
        if block.size:
            result[place] = f(block)
    return result


@law
@given(groups())
def test_the_scale_has_an_entry_for_each_block(found):
    """An empty axis shares one scale where its size is 0, and else has none."""
    pairs = zip(found.shape, found.sizes, strict=True)
    assert found.scale_shape == tuple(1 if b == n else -(-n // b) for n, b in pairs)


@law
@given(groups(), st.sampled_from([0.0, -1.0, np.inf]))
def test_join_inverts_split_whatever_fills_the_tail(found, fill):
    x = array_of(found)
    split_and_joined = jax.jit(lambda x: found.join(found.split(x, fill)))
    np.testing.assert_array_equal(split_and_joined(x), x, strict=True)


@law
@given(groups())
def test_a_scale_broadcasts_axis_by_axis_to_what_was_split(found):
    """And each element meets the scale of its own block."""
    scale = np.arange(np.prod(found.scale_shape), dtype=np.float32).reshape(found.scale_shape)

    @jax.jit
    def meet(x, scale):
        split, parameter = found.split(x), found.split_scale(scale)
        assert parameter.ndim == split.ndim
        return found.join(jnp.broadcast_to(parameter, split.shape))

    met = np.asarray(meet(array_of(found), scale))
    for place in itertools.product(*map(range, found.shape)):
        block = tuple(i // b for i, b in zip(place, found.sizes, strict=True))
        assert met[place] == scale[block]


@law
@given(groups())
def test_reduce_is_numpy_block_by_block(found):
    x = array_of(found)
    cases = [(jnp.max, np.max, -np.inf), (jnp.min, np.min, np.inf), (jnp.sum, np.sum, 0)]
    results = jax.jit(lambda x: [found.reduce(ours, x, fill) for ours, _, fill in cases])(x)
    for (_, theirs, fill), result in zip(cases, results, strict=True):
        assert result.dtype == jnp.float32
        np.testing.assert_array_equal(np.float64(result), reduced(theirs, x, found, fill))


@law
@given(groups(max_rank=2))
def test_the_largest_magnitude_is_that_of_numpy(found):
    x = array_of(found) * np.where(array_of(found) % 2 == 0, -1, 1).astype(np.float32)
    result = jax.jit(found.largest_magnitude)(x)
    np.testing.assert_array_equal(
        np.float64(result), reduced(lambda b: np.abs(b).max(), x, found, 0)
    )


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


def are_told_apart(found):
    """Whether no two axes of one length have as many blocks, of different sizes."""
    axes = {*zip(found.shape, found.scale_shape, found.sizes, strict=True)}
    return len({axis[:2] for axis in axes}) == len(axes)


@law
@given(groups().filter(are_told_apart))
def test_the_sizes_are_found_from_the_shape_of_the_scale_and_the_tails(found):
    again = Groups.of_scale(found.shape, found.scale_shape, found.blocks)
    assert again.scale_shape == found.scale_shape
    for n, a, b in zip(found.shape, again.sizes, found.sizes, strict=True):
        assert a == b or n == 1 or -(-n // b) == 1


def test_a_tail_alone_has_its_size_written_down():
    assert Groups((6, 7, 8), (3, 3, 8)).blocks == ((7, 3, 3),)
    assert Groups((6, 7, 8), (1, 7, 2)).blocks == ()
    assert Groups((7, 7), (3, 3)).blocks == ((7, 3, 3),)


def test_tails_that_length_and_number_do_not_tell_apart_are_refused():
    """100 in 4 blocks: of 26, or of 27."""
    with pytest.raises(ValueError, match=r"two axes of the same length(.|\n)*fix"):
        _ = Groups((100, 100), (26, 27)).blocks


def test_elements_per_scale_are_those_of_a_whole_block():
    assert Groups((6, 7, 8), (3, 4, 8)).per_scale == 96


@pytest.mark.parametrize(
    "shape, sizes, text",
    [
        ((2, 3), (2, 3), "per_tensor"),
        ((2, 3), (2, 1), "per_axis(1)"),
        ((2, 3), (1, 1), "per_axis(0, 1)"),
        ((4, 3), (2, 1), "per_block({0: 2, 1: 1})"),
    ],
)
def test_groups_print_as_a_granularity(shape, sizes, text):
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
