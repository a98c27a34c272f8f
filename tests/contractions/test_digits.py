"""A float operand as int8 digits: what the digits hold, and the products that are made of them.

    |x - step (65536 high + 256 middle + low)|  <=  step / 2 + UNIT |x|,     step = max |x| / TOP

The quotient x / step is rounded to a float32, by UNIT relative, and then to an integer, by 1/2.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqx
from jqx import numerics
from jqx._src.contractions.plain import DIGITS, TINY, TOP, join, split

from ..arrays import on_device
from ..oracles.contractions import FEW, LARGE, MATRICES, UNIT, Layout, chosen, contraction, gamma
from ..oracles.numerics import as_float64, as_int64, assert_floats, nearest
from ..strategies import law
from ..tensor.tensors import tensor
from .blocks import in_pairs, real_values, weight

LARGEST = float(np.finfo(np.float32).max)
WEIGHTS = (65536, 256, 1)
split_rows = jax.jit(split, static_argnums=1)


def fixed_point(digits, at):
    """The integers that int8 digits stand for."""
    assert digits.dtype == jnp.int8
    parts = np.split(as_int64(digits), DIGITS, axis=at)
    return sum(weight * part for weight, part in zip(WEIGHTS, parts, strict=True))


def assert_split(x, at=0):
    digits, step = split_rows(on_device(x, jnp.float32), at)
    fixed, step = fixed_point(digits, at), as_float64(step)[..., None]
    exact = as_float64(np.float32(x))
    largest = np.abs(exact).max(-1, keepdims=True, initial=0)
    np.testing.assert_allclose(step, np.maximum(largest, TINY) / TOP, rtol=2 * UNIT)
    assert np.all(np.abs(exact - step * fixed) <= step / 2 + UNIT * np.abs(exact))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@law
@given(hnp.arrays(np.float32, (3, 8), elements=finite))
def test_digits_hold_every_float_to_half_a_step(x):
    assert_split(x)


@law
@given(hnp.arrays(np.float32, (3, 8), elements=st.floats(-1, 1, width=32)), st.integers(-60, 60))
def test_digits_hold_numbers_of_a_like_magnitude_to_half_a_step(x, exponent):
    assert_split(np.ldexp(x, exponent))


def test_digits_hold_the_ends_of_every_binade():
    """From the smallest subnormal to the largest float, of either sign, beside zeros."""
    powers = np.ldexp(1.0, np.arange(-149, 128))
    below = np.nextafter(np.float32(powers), np.float32(0))
    assert_split(np.stack([powers, -powers, below, 0 * powers], axis=1))
    assert_split(np.array([[LARGEST, -LARGEST, LARGEST / 2, 0]]))


def test_a_row_of_zeros_has_zeros_for_digits():
    digits, step = split_rows(jnp.zeros((2, 5)), 0)
    assert not np.any(digits) and np.all(np.isfinite(step)) and np.all(step > 0)


def test_each_row_of_each_batch_has_a_step_of_its_own():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4)) * 10.0 ** rng.integers(-9, 10, (2, 3, 1))
    assert_split(x, at=1)
    assert len(np.unique(split_rows(on_device(x, jnp.float32), 1)[1])) == 6


def integers_near_borders():
    """Where a digit carries, and the ends of the range."""
    borders = np.arange(-TOP // 128, TOP // 128 + 1) * 128
    near = (borders[:, None] + np.arange(-2, 3)).ravel()
    return np.append(near[np.abs(near) <= TOP], [-TOP, TOP])


def test_integers_near_the_borders_of_digits_are_held_exactly():
    assert_exact_integers(integers_near_borders())


@pytest.mark.slow
def test_every_integer_is_held_exactly():
    assert_exact_integers(np.arange(-TOP, TOP + 1))


def assert_exact_integers(integers):
    """A row whose largest is TOP has a step of 1; joined, its digits are the integers again."""
    assert np.abs(integers).max() == TOP
    digits, step = split_rows(on_device(integers[None], jnp.float32), 0)
    assert_floats(step, np.ones(1), np.float32)
    np.testing.assert_array_equal(fixed_point(digits, 0)[0], integers)
    joined = join(digits.astype(jnp.int32), 0, step)
    np.testing.assert_array_equal(as_int64(joined)[0], integers)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_takes_the_step_of_its_own_row_alone(value):
    x = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    spoilt = x.copy()
    spoilt[1, 2, 3] = value
    digits, step = split_rows(x, 1)
    others, steps = split_rows(spoilt, 1)
    is_spoilt = np.isnan(steps)
    assert np.argwhere(is_spoilt).tolist() == [[1, 2]]
    np.testing.assert_array_equal(np.where(is_spoilt, 0, steps), np.where(is_spoilt, 0, step))
    rows = [digits.reshape(2, DIGITS, 3, 4)[:, :, :2] for digits in (digits, others)]
    np.testing.assert_array_equal(*rows)


def activations(layout, seed=0):
    """Rows of many magnitudes, with small numbers beside large ones."""
    rng = np.random.default_rng([seed, *layout.lhs])
    x = rng.normal(size=layout.lhs) * 2.0 ** rng.integers(-6, 7, layout.lhs)
    return x.astype(np.float32)


def allowed(x, w, layout, sums):
    """The error of digits: that of the split, and of float32 after the exact sums.

    Three sums are converted and two times added, and scaled by the step and by the scale. `sums`
    counts the results that are added then. Digits are at most as large as the number and two
    carries of 128 * 257 together.
    """
    x, w = np.abs(as_float64(x)), np.abs(real_values(w))
    largest = x.max(tuple(layout.numbers[0][0]), keepdims=True)
    step = np.broadcast_to(largest / TOP, x.shape) * (1 + 2 * UNIT)
    of_split = contraction(step / 2 + UNIT * x, w, layout.numbers)
    carried = contraction(x + 2 * 128 * 257 * step, w, layout.numbers)
    return of_split + gamma(5 + sums) * carried


def assert_products(contract, x, w, layout, name, sums=32, swap=False):
    """Compares with float64; slices are at most 32, and each is a sum of its own."""
    x = on_device(x)
    operands = (w, x) if swap else (x, w)
    assert [cpu for cpu, _ in chosen(contract, *operands)] == [name]
    numbers = layout.swapped if swap else layout.numbers
    expected = contraction(*map(real_values, operands), numbers)
    y = jax.jit(contract)(*operands)
    assert y.shape == expected.shape and y.dtype == jnp.float32
    bound = allowed(x, w, layout, sums)
    if swap:
        rank = len(layout.lhs) - len(layout.numbers[0][0])
        batch = len(layout.numbers[1][0])
        bound = np.moveaxis(bound, range(batch, rank), range(batch - rank, 0))
    assert np.all(np.abs(as_float64(y) - expected) <= bound)


def contraction_of(layout, swap=False):
    numbers = layout.swapped if swap else layout.numbers
    return functools.partial(jqx.dot_general, dimension_numbers=numbers)


layouts = pytest.mark.parametrize("layout", LARGE.values(), ids=LARGE)


@pytest.mark.many
@layouts
def test_digits_give_the_product_in_every_layout(layout):
    w = weight("uint8", layout, zero_point=True)
    assert_products(contraction_of(layout), activations(layout), w, layout, "digits")


@pytest.mark.parametrize("layout", FEW.values(), ids=FEW)
def test_digits_give_the_product_of_a_weight_on_the_left(layout):
    w, contract = weight("uint8", layout), contraction_of(layout, swap=True)
    assert_products(contract, activations(layout), w, layout, "digits", swap=True)


FORMATS = ("int4", "uint8", numerics.int3)
FLAGS = ((False, False), (True, True), (False, True), (True, False))
"""Whether codes have zero points, and whether the weight is the left operand."""


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(FORMATS)), ids=list(map(str, FORMATS)))
@layouts
def test_digits_give_the_product_of_every_format_in_every_layout(layout, index):
    """Each layout and each format with three of the four flags: both values of either."""
    place = list(LARGE.values()).index(layout)
    qtype, (zero_point, swap) = FORMATS[index], FLAGS[(place + index) % 4]
    w = weight(qtype, layout, zero_point=zero_point)
    contract = contraction_of(layout, swap)
    assert_products(contract, activations(layout), w, layout, "digits", swap=swap)


PACKED = [("int4", 0), (numerics.uint7, 1)]
PACKED += [
    pytest.param(*case, marks=pytest.mark.slow) for case in (("int2", 1), (numerics.int3, 0))
]
SHAPES = Layout((3, 136), (136, 128), MATRICES)


@pytest.mark.parametrize("qtype, axis", PACKED)
def test_digits_give_the_product_of_packed_codes(qtype, axis):
    w = weight(qtype, SHAPES, zero_point=True, pack=axis)
    assert_products(contraction_of(SHAPES), activations(SHAPES), w, SHAPES, "digits")


IN_BLOCKS = {
    "matrices": (Layout((4, 128), (128, 160), MATRICES), 32),
    "vector": (LARGE["vector"], 16),
    "both transposed": (Layout((160, 3), (160, 128), (((0,), (0,)), ((), ()))), 32),
    "heads": (LARGE["heads"], 64),
    "an odd count of blocks": (Layout((2, 144), (144, 128), MATRICES), 16),
}


@pytest.mark.many
@pytest.mark.parametrize("layout, size", IN_BLOCKS.values(), ids=IN_BLOCKS)
def test_digits_of_few_rows_give_the_product_in_blocks(layout, size):
    w, sums = weight("uint8", layout, size=size, zero_point=True), layout.products // size + 32
    assert_products(contraction_of(layout), activations(layout), w, layout, "block_digits", sums)


@pytest.mark.parametrize("name", ["matrices", "heads"])
def test_digits_of_few_columns_give_the_product_in_blocks(name):
    layout, size = IN_BLOCKS[name]
    w, contract = weight("int8", layout, size=size), contraction_of(layout, swap=True)
    sums = layout.products // size + 32
    assert_products(contract, activations(layout), w, layout, "block_digits", sums, swap=True)


@pytest.mark.parametrize("axis", [0, 1])
def test_digits_give_the_product_of_packed_codes_in_blocks(axis):
    layout = Layout((2, 256), (256, 128), MATRICES)
    w = weight("int4", layout, size=16, zero_point=True, pack=axis)
    contract, sums = contraction_of(layout), 16 + 32
    assert_products(contract, activations(layout), w, layout, "block_digits", sums)


@pytest.mark.parametrize("size, name", [(None, "digits"), (32, "block_digits")])
def test_digits_give_the_product_of_a_weight_with_swapped_axes(size, name):
    layout = Layout((2, 128), (160, 128), (((1,), (1,)), ((), ())))
    if size is None:
        layout = Layout((2, 128), (128, 160), MATRICES)
    w = jqx.pack_for(weight("int4", layout, size=size, zero_point=True), "cpu")
    assert w.layout.swapped and w.layout.int8
    assert_products(contraction_of(layout), activations(layout), w, layout, name)


@pytest.mark.parametrize("size, name", [(None, "digits"), (32, "block_digits")])
def test_columns_may_share_a_scale(size, name):
    layout = Layout((2, 128), (128, 160), MATRICES)
    w = in_pairs(weight("uint8", layout, size=size, zero_point=True), 1)
    assert w.groups.sizes == (size or 128, 2)
    assert_products(contraction_of(layout), activations(layout), w, layout, name)


@pytest.mark.parametrize("size, name", [(None, "digits"), (32, "block_digits")])
def test_scales_may_be_16_bit_floats(size, name):
    layout = Layout((2, 128), (128, 160), MATRICES)
    w = weight("int8", layout, size=size)
    w = jqx.QTensor(w.values, w.scale.astype(jnp.bfloat16), qtype="int8", blocks=w.blocks)
    assert_products(contraction_of(layout), activations(layout), w, layout, name)


LONG = {
    "int8": ("int8", 2**18, None),
    "uint8": ("uint8", 2**20, None),
    "int8 in blocks": ("int8", 2**18, 2**17),
    "uint8 in blocks": ("uint8", 2**18, 2**17),
}


@pytest.mark.parametrize("qtype, k, size", LONG.values(), ids=LONG)
def test_long_sums_of_extreme_digits_do_not_wrap_around(qtype, k, size):
    """Those of the highest digits are beyond int32 several times."""
    low, high = (-128, 127) if qtype == "int8" else (0, 255)
    codes = np.stack([np.full(k, low), np.full(k, high)], axis=1)
    zero = None if qtype == "int8" else np.array([[high, low]])
    w = tensor(codes, qtype, np.ones((1 if size is None else k // size, 2)), zero)
    expected = real_values(w).sum(0, keepdims=True)
    y = jax.jit(jqx.matmul)(jnp.ones((1, k)), w)
    assert np.all(np.abs(as_float64(y) - expected) <= gamma(k + 12) * np.abs(expected))


@pytest.mark.parametrize("size, name", [(None, "digits"), (32, "block_digits")])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(size, name, value):
    layout = Layout((3, 128), (128, 160), MATRICES)
    w, x = weight("int8", layout, size=size), activations(layout)
    assert chosen(jqx.matmul, x, w) == [(name, "convert")]
    spoilt = x.copy()
    spoilt[1, 5] = value
    y, result = jax.jit(jqx.matmul)(x, w), jax.jit(jqx.matmul)(spoilt, w)
    np.testing.assert_array_equal(result[0], y[0])
    np.testing.assert_array_equal(result[2], y[2])
    assert np.all(np.isnan(result[1])) and np.all(np.isfinite(y))


def test_a_scale_that_is_not_finite_spoils_its_own_column_alone():
    layout = LARGE["one row"]
    w = weight("int8", layout)
    spoilt = jqx.QTensor(w.values, w.scale.at[0, 7].set(jnp.nan), qtype="int8")
    y = np.asarray(jqx.matmul(activations(layout), spoilt))
    assert np.argwhere(np.isnan(y)).tolist() == [[0, 7]]


@pytest.mark.parametrize("dtype, size", [("bfloat16", None), ("float16", 32)])
def test_sixteen_bit_activations_are_split_as_float32_and_rounded_once(dtype, size):
    layout = Layout((2, 128), (128, 160), MATRICES)
    w = weight("int8", layout, size=size)
    x = on_device(activations(layout), dtype)
    wide = jax.jit(jqx.matmul)(x.astype(jnp.float32), w)
    narrow = jax.jit(jqx.matmul)(x, w.astype(jnp.dtype(dtype)))
    assert_floats(narrow, nearest(as_float64(wide), dtype), dtype)


@pytest.mark.slow
def test_mapped_digits_are_those_of_a_loop():
    layout = Layout((3, 5, 128), (128, 160), MATRICES)
    w, x = weight("uint8", layout, zero_point=True), activations(layout)
    loop = np.stack([jqx.matmul(row, w) for row in x])
    mapped = jax.jit(jax.vmap(jqx.matmul, (0, None)))(x, w)
    np.testing.assert_array_equal(mapped, loop)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), w)
    mapped = jax.jit(jax.vmap(jqx.matmul, (None, 0)))(x[0], stacked)
    np.testing.assert_array_equal(mapped[0], loop[0])
    turned = jax.tree.map(lambda leaf: leaf[::-1], w)
    np.testing.assert_array_equal(mapped[1], jqx.matmul(x[0], turned))
