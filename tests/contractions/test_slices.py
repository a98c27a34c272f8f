"""A large operand in slices: the sum of what they give is what the whole gives, bit by bit.

Values are small integers with powers of two as scales, which float32 sums exactly in any order.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jqx import numerics
from jqx._src.contractions.blocks import in_slices, slice_along
from jqx._src.contractions.dimensions import Dimensions

from ..arrays import on_device
from ..oracles.contractions import MATRICES, Layout, contraction, small_integers
from ..oracles.numerics import assert_floats
from ..tensor.tensors import assert_equal
from .blocks import real_values, weight


class Case(NamedTuple):
    """A right operand to be cut along its first axis that can be, and how long that is."""

    layout: Layout
    qtype: Any
    length: int
    size: int | None = None
    zero_point: bool = False
    pack: int | None = None


TURNED = (((1,), (1,)), ((), ()))
CROSSED = (((0, 2), (2, 0)), ((), ()))
BATCH = (((2,), (1,)), ((0,), (0,)))
BATCH_LAST = (((0,), (1,)), ((1,), (2,)))
CASES = {
    "contracted": Case(Layout((3, 40), (40, 6), MATRICES), "int8", 40),
    "contracted, with a rest": Case(Layout((3, 37), (37, 6), MATRICES), "uint8", 37, None, True),
    "contracted, of two axes": Case(Layout((5, 3, 16), (16, 2, 5), CROSSED), "int8", 16),
    "kept": Case(Layout((3, 6), (40, 6), TURNED), "int8", 40),
    "kept, with a rest": Case(Layout((3, 6), (37, 6), TURNED), "uint8", 37, None, True),
    "batch": Case(Layout((16, 3, 5), (16, 5, 4), BATCH), "int8", 16, None, True),
    "batch, with a rest": Case(Layout((17, 3, 5), (17, 5, 4), BATCH), "int8", 17),
    "batch axes anywhere": Case(Layout((5, 4, 3), (24, 5, 4), BATCH_LAST), "int8", 24),
    "one column": Case(Layout((40,), (40,), (((0,), (0,)), ((), ()))), "int8", 40),
    "too short": Case(Layout((3, 1), (1, 40), MATRICES), "int8", 40),
    "in blocks": Case(Layout((3, 64), (64, 6), MATRICES), "int8", 64, 4, True),
    "in blocks, with a rest": Case(Layout((3, 68), (68, 6), MATRICES), "int8", 68, 4, True),
    "in blocks and a tail": Case(Layout((3, 66), (66, 6), MATRICES), "int8", 66, 4, True),
    "kept, beside blocks": Case(Layout((3, 8), (40, 8), TURNED), "int8", 40, 4, True),
    "mx": Case(Layout((2, 256), (256, 3), MATRICES), numerics.mxfp4, 256),
    "nv": Case(Layout((2, 256), (256, 3), MATRICES), numerics.nvfp4, 256),
    "8-bit floats": Case(Layout((3, 40), (40, 6), MATRICES), jnp.float8_e4m3fn, 40),
    "8-bit floats, kept": Case(Layout((3, 6), (37, 6), TURNED), jnp.float8_e5m2, 37),
    "packed 4 bits": Case(Layout((3, 64), (64, 6), MATRICES), "int4", 64, pack=0),
    "packed 4 bits, kept": Case(Layout((3, 6), (64, 6), TURNED), "int4", 64, pack=0),
    "packed 4 bits, batch": Case(Layout((32, 3, 5), (32, 5, 4), BATCH), "uint4", 32, pack=0),
    "packed 4 bits in blocks": Case(
        Layout((3, 64), (64, 6), MATRICES), "int4", 64, 4, True, pack=0
    ),
    "packed 2 bits": Case(Layout((3, 128), (128, 6), MATRICES), "uint2", 128, pack=0),
    "packed 1 bit": Case(Layout((3, 128), (128, 6), MATRICES), numerics.binary, 128, pack=0),
    "packed along the other axis": Case(Layout((3, 37), (37, 8), MATRICES), "int4", 37, pack=1),
    "packed in runs that no count divides": Case(
        Layout((3, 52), (52, 6), MATRICES), "int4", 52, pack=0
    ),
    "packed 3 bits, cut along the other": Case(
        Layout((3, 40), (40, 48), MATRICES), numerics.int3, 48, pack=0
    ),
    "packed with bits to spare, cut along the other": Case(
        Layout((3, 41), (41, 48), MATRICES), "int4", 48, pack=0
    ),
}


def product_in_slices(case, count):
    """The right operand, its product in slices and in NumPy, and the slices that were computed."""
    layout, seen = case.layout, []
    w = weight(case.qtype, layout, case.size, case.zero_point, small=True, pack=case.pack)
    x = on_device(small_integers(np.random.default_rng(len(w.shape)), layout.lhs))
    dimensions = Dimensions.of(layout.numbers, x.ndim, w.ndim)

    def compute(lhs, rhs):
        seen.append(rhs)
        return lax.dot_general(lhs, rhs.dequantize(), layout.numbers)

    y = jax.jit(lambda x, w: in_slices(x, w, dimensions, count, compute))(x, w)
    return w, y, contraction(real_values(x), real_values(w), layout.numbers), seen


@pytest.mark.many
@pytest.mark.parametrize("count", [4, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_slices_give_the_whole(case, count):
    """No slice is larger than its share, and each has the format and the scales of the whole."""
    w, y, expected, seen = product_in_slices(case, count)
    assert_floats(y, expected, np.float32)
    sizes = [part.size for part in seen]
    axis = w.shape.index(case.length)
    share = max(w.size // count, w.size // case.length * (case.size or 1))
    if case.pack == axis:  # a slice holds as much of every run: where no count divides, fewer do
        share = w.size // 2
    assert max(sizes) <= share
    assert {part.qtype for part in seen} == {w.qtype}
    assert all(part.ndim == w.ndim and part.shape[axis] < case.length for part in seen)
    packed = [part.layout is not None and part.layout.packing is not None for part in seen]
    assert all(packed) == any(packed) == (case.pack is not None)


@pytest.mark.parametrize("count", [0, 1])
def test_one_slice_is_the_whole(count):
    w, y, expected, seen = product_in_slices(CASES["contracted"], count)
    assert_floats(y, expected, np.float32)
    assert [part.shape for part in seen] == [w.shape]


UNCUT = {
    "shorter than two": Case(Layout((3, 1), (1, 1), MATRICES), "int8", 1),
    "a block and a tail": Case(Layout((3, 7), (7, 1), MATRICES), "int8", 7, 4),
    "packed 3 bits": Case(Layout((3, 40), (40, 1), MATRICES), numerics.int3, 40, pack=0),
}


@pytest.mark.parametrize("case", UNCUT.values(), ids=UNCUT)
def test_what_cannot_be_cut_is_taken_whole(case):
    w, y, expected, seen = product_in_slices(case, 4)
    assert_floats(y, expected, np.float32)
    assert [part.shape for part in seen] == [w.shape]


def test_gradients_of_slices_are_those_of_the_whole():
    case = CASES["contracted, with a rest"]
    layout = case.layout
    w = weight(case.qtype, layout, zero_point=True, small=True)
    x = on_device(small_integers(np.random.default_rng(0), layout.lhs))
    dimensions = Dimensions.of(layout.numbers, 2, 2)
    compute = lambda lhs, rhs: lax.dot_general(lhs, rhs.dequantize(), layout.numbers)  # noqa: E731
    loss = lambda x, w: (in_slices(x, w, dimensions, 4, compute) * cotangent).sum()  # noqa: E731
    cotangent = small_integers(np.random.default_rng(1), (3, 6))
    of_x, of_w = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(x, w)
    assert_floats(of_x, cotangent @ real_values(w).T, np.float32)
    numbers = real_values(w) / np.asarray(w.scale)
    of_scale = (real_values(x).T @ cotangent * numbers).sum(0, keepdims=True)
    assert_floats(of_w.scale, of_scale, np.float32)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_along_an_axis_takes_the_scales_of_its_own(axis):
    layout = Layout((3, 8), (8, 8), MATRICES)
    w = weight("int8", layout, zero_point=True)
    starts = jnp.arange(3, dtype=jnp.int32)
    for start in starts:
        part = jax.jit(slice_along, static_argnums=(1, 3))(w, axis, start, 4)
        key = (slice(None),) * axis + (slice(int(start), int(start) + 4),)
        assert_equal(part, w[key])
    x = jnp.arange(24.0).reshape(3, 8)
    if axis == 1:
        np.testing.assert_array_equal(slice_along(x, 1, 2, 5), x[:, 2:7])
