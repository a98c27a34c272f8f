"""Codes converted a tile at a time: the product is that of the whole, in every layout.

Most values are small integers with powers of two as scales: float32 holds their sums exactly in any
order, so that results are compared bit by bit. Where a format has no integers, sums are held
against float64 within Higham's bound.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import numerics

from ..arrays import on_device
from ..oracles.contractions import (
    FEW,
    LARGE,
    MATRICES,
    Layout,
    chosen,
    contraction,
    dots,
    dtypes,
    gamma,
    small_integers,
)
from ..oracles.numerics import as_float64, assert_floats, nearest
from .blocks import in_pairs, real_values, weight

layouts = pytest.mark.parametrize("layout", LARGE.values(), ids=LARGE)
few_layouts = pytest.mark.parametrize("layout", FEW.values(), ids=FEW)
ROWS = Layout((16, 136), (136, 128), MATRICES)


def activations(layout, dtype="float32"):
    rng = np.random.default_rng([*layout.lhs])
    return on_device(small_integers(rng, layout.lhs), dtype)


def product(x, w, layout, name="tiles", swap=False, exact=True, **options):
    """The product by a formulation, and in float64; checks that float32 holds its sums."""
    operands = (w, x) if swap else (x, w)
    numbers = layout.swapped if swap else layout.numbers
    contract = functools.partial(jqx.dot_general, dimension_numbers=numbers, **options)
    assert [cpu for cpu, _ in chosen(contract, *operands)] == [name]
    values = [real_values(operand) for operand in operands]
    sizes = contraction(*map(np.abs, values), numbers)
    assert not exact or sizes.max() < 2**22  # scales are multiples of 1/4
    return jax.jit(contract)(*operands), contraction(*values, numbers), sizes


@pytest.mark.many
@layouts
def test_tiles_give_the_product_in_every_layout(layout):
    w = weight(jnp.float8_e4m3fn, layout, small=True)
    y, expected, _ = product(activations(layout), w, layout)
    assert_floats(y, expected, np.float32)


@few_layouts
def test_tiles_of_a_weight_on_the_left_give_the_product(layout):
    w = weight("int16", layout, small=True)
    y, expected, _ = product(activations(layout), w, layout, swap=True)
    assert_floats(y, expected, np.float32)


FORMATS = {
    "int8 in blocks": ("int8", 8, True),
    "uint8 in blocks": ("uint8", 34, True),
    "int8 in blocks with a tail": ("int8", 32, False),
    "e5m2 in blocks": (jnp.float8_e5m2, 8, False),
    "mxfp8": (numerics.mxfp8_e4m3, None, False),
    "mxfp4": (numerics.mxfp4, None, False),
    "nvfp4": (numerics.nvfp4, None, False),
    "int16 with a zero point": ("int16", None, True),
}


@pytest.mark.many
@pytest.mark.parametrize("qtype, size, zero_point", FORMATS.values(), ids=FORMATS)
def test_tiles_give_the_product_of_many_rows_in_every_format(qtype, size, zero_point):
    w = weight(qtype, ROWS, size, zero_point, small=True)
    y, expected, _ = product(activations(ROWS), w, ROWS)
    assert_floats(y, expected, np.float32)


@pytest.mark.parametrize("qtype, size", [(jnp.float8_e4m3fn, None), ("int16", 34)], ids=str)
def test_columns_may_share_a_scale(qtype, size):
    w = in_pairs(weight(qtype, ROWS, size, small=True), 1)
    assert w.groups.sizes == (size or 136, 2)
    y, expected, _ = product(activations(ROWS), w, ROWS)
    assert_floats(y, expected, np.float32)


PACKED = {
    "int4 in blocks along the contracted axis": ("int4", 32, 0),
    "int4 in blocks along the other": pytest.param("int4", 32, 1, marks=pytest.mark.slow),
    "int2 in blocks": pytest.param("int2", 32, 0, marks=pytest.mark.slow),
    "int3 in blocks": (numerics.int3, 8, 0),
    "mxfp4": (numerics.mxfp4, None, 0),
    "nvfp4": (numerics.nvfp4, None, 1),
    "nf4": (numerics.nf4, None, 0),
    "nf4 in blocks": (numerics.nf4, 64, 1),
    "binary": (numerics.binary, None, 0),
}


@pytest.mark.parametrize("qtype, size, axis", PACKED.values(), ids=PACKED)
def test_tiles_give_the_product_of_packed_codes(qtype, size, axis):
    """Within Higham's bound on the sum, and roundings for the scale and for what a code is."""
    layout = Layout((16, 512), (512, 96), MATRICES)
    w = weight(qtype, layout, size, pack=axis)
    x = activations(layout)
    y, expected, sizes = product(x, w, layout, exact=False)
    assert np.all(np.abs(as_float64(y) - expected) <= gamma(layout.products + 4) * sizes)


@few_layouts
def test_two_operands_of_8_bit_floats_are_multiplied_as_they_are(layout):
    x, w = (
        weight(jnp.float8_e4m3fn, side, small=True)
        for side in (Layout(layout.rhs, layout.lhs, layout.swapped), layout)
    )
    y, expected, _ = product(x, w, layout, "float8_tiles")
    assert_floats(y, expected, np.float32)


def test_every_two_numbers_of_8_bit_floats_are_multiplied():
    """One product in each sum: bfloat16 holds the numbers, float32 what they give."""
    x, w = (finite_numbers(dtype) for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2))
    x = jqx.QTensor(jnp.tile(x, 65)[:, None], jnp.ones((1, 1)), qtype=x.dtype)
    w = jqx.QTensor(w[None], jnp.ones((1, 1)), qtype=w.dtype)
    layout = Layout(x.shape, w.shape, MATRICES)
    y, expected, _ = product(x, w, layout, "float8_tiles", exact=False)
    assert_floats(y, expected, np.float32)


def finite_numbers(dtype):
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    return on_device(codes[np.isfinite(codes.astype(np.float32))])


SIXTEEN = {
    "bfloat16": (ROWS, "bfloat16"),
    "bfloat16, both transposed": (LARGE["both transposed"], "bfloat16"),
    "float16, one row": (LARGE["one row"], "float16"),
}


@pytest.mark.parametrize("layout, dtype", SIXTEEN.values(), ids=SIXTEEN)
def test_sixteen_bit_activations_accumulate_in_float32_and_round_once(layout, dtype):
    w = weight(jnp.float8_e4m3fn, layout, small=True, dtype=dtype)
    x = activations(layout, dtype) * 7  # of more bits than 16-bit floats have
    y, expected, _ = product(x, w, layout)
    assert np.any(nearest(expected, dtype) != expected), "no rounding to be seen"
    assert_floats(y, nearest(expected, dtype), dtype)
    wide, *_ = product(x, w, layout, preferred_element_type=jnp.float32)
    assert_floats(wide, expected, np.float32)


def test_float64_tiles_are_multiplied_in_float64():
    with jax.enable_x64(True):
        w = weight("int8", ROWS, small=True, dtype=jnp.float64)
        x = activations(ROWS, jnp.float64) + 2.0**-40
        y, expected, _ = product(x, w, ROWS)
        assert y.dtype == jnp.float64 and np.any(np.float32(expected) != expected)
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("qtype", [numerics.nf4, jnp.float8_e4m3fn])
def test_precision_reaches_the_product_of_every_tile(qtype):
    w, x = weight(qtype, ROWS), activations(ROWS)
    found = dots(functools.partial(jqx.matmul, precision="highest"), x, w)
    assert {dot.params["precision"] for dot in found} == {(lax.Precision.HIGHEST,) * 2}


def test_codes_are_multiplied_in_sixteen_bits_where_these_hold_them():
    """Scales come after; where they are in blocks they come first, in float32."""
    x = activations(ROWS, "bfloat16")
    for qtype, size, dtype in [
        (jnp.float8_e4m3fn, None, "bfloat16"),
        (jnp.float8_e4m3fn, 8, "float32"),
        (numerics.nf4, None, "float32"),
    ]:
        w = weight(qtype, ROWS, size, dtype=jnp.bfloat16)
        on_cpu = dots(jqx.matmul, x, w)[0]
        assert dtypes((*on_cpu.invars, *on_cpu.outvars)) == [dtype, dtype, "float32"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(value):
    w, x = weight(numerics.nf4, ROWS), np.array(activations(ROWS))
    x[3, 7] = value
    y = np.asarray(product(on_device(x), w, ROWS, exact=False)[0])
    assert np.isfinite(np.delete(y, 3, axis=0)).all() and not np.isfinite(y[3]).any()
