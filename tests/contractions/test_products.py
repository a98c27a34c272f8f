"""Products of every kind of operand against float64: one differential suite.

The cells of the support matrix come first: each is a pair of operands of some formats, with some
way to share scales and to lie in memory, in each operation. Then come blocks of sizes that differ,
every formulation of CPU in every layout, and the values that are not finite.

Where codes are small integers and scales are powers of two, float32 holds every sum exactly, in any
order, and results are compared bit by bit. All others are held to Higham's bound.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import numerics
from jqx._src.contractions.plain import TOP

from ..arrays import on_device
from ..oracles.contractions import (
    FEW,
    LARGE,
    LAYOUTS,
    MATRICES,
    NEGATIVE,
    UNIT,
    Layout,
    chosen,
    contraction,
    exact_tensor,
    gamma,
    small_integers,
)
from ..oracles.numerics import as_float64, assert_floats
from ..tensor.tensors import reals
from .blocks import SIDES, in_pairs, magnitudes, pair_of, real_values, weight
from .support import (
    BLOCK,
    KINDS,
    OPS,
    Cell,
    Operand,
    cells,
    errors,
    matrix,
    products,
    usual,
)

K, TAIL = 64, 8
AT_ONCE = 16
"""Cells in one compiled program."""
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "numerics" / "contractions.md"
ROUNDINGS = 16
"""Of scales, of digits, of corrections, of sums over blocks."""


def length(cell, k):
    """As many elements as asked for, fewer where a tail is."""
    return k - TAIL if "tail" in (cell.lhs.sharing, cell.rhs.sharing) else k


def wrong(cells, lengths, n, roundings=ROUNDINGS):
    """The cells whose result is off: by how many times what float32 allows, or with what error."""
    failures = {}
    for start in range(0, len(cells), AT_ONCE):
        part, sizes = (x[start : start + AT_ONCE] for x in (cells, lengths))
        for cell, terms, error in zip(part, sizes, errors(part, sizes, n), strict=True):
            if isinstance(error, str):
                failures[cell] = error
                continue
            difference, magnitude = error
            # A float32 sum of products and of sums for zero points, and some roundings around it;
            # then one to the dtype of the result.
            allowed = gamma(products(cell.op, terms) + roundings) * magnitude
            if cell.op == "conv_general_dilated" and "bfloat16" in (cell.lhs.kind, cell.rhs.kind):
                # The real kernel is rounded to the dtype of the image, and so is the result.
                allowed = allowed + 2.0**-8 * magnitude
            ratio = np.max(difference / np.maximum(allowed, 1e-30))
            if not ratio <= 1:
                failures[cell] = float(ratio)
    return failures


def wrong_in(op, k, n, only=lambda cell: True):
    """As `wrong`, of the cells of an operation."""
    chosen_cells = [cell for cell in cells(op) if only(cell)]
    return wrong(chosen_cells, [length(cell, k) for cell in chosen_cells], n)


def is_usual(operand):
    """One of each kind: a scale for each index of a kept axis, or blocks where they must be."""
    return operand.layout == "plain" and operand == usual(operand.kind)


NEAR = {"float32", "int8"}


def test_every_kind_beside_float32_and_int8_is_right():
    def is_near(cell):
        return is_usual(cell.lhs) and is_usual(cell.rhs) and NEAR & {cell.lhs.kind, cell.rhs.kind}

    assert wrong_in("matmul", K, 5, only=is_near) == {}


FULLY_TESTED = ("dot_general", "conv_general_dilated")
"""Operations that are tested in every cell; the others come down to them: in every third."""


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_every_kind_sharing_and_layout_is_right(op):
    third = set(list(cells(op))[list(OPS).index(op) % 3 :: 3])
    assert wrong_in(op, K, 5, only=lambda cell: op in FULLY_TESTED or cell in third) == {}


@pytest.mark.slow
def test_every_sharing_and_layout_is_right_where_operands_are_large():
    """Large enough for the formulations of CPU that avoid copies."""

    def is_laid_out(cell):
        rhs = cell.rhs
        return rhs.layout != "plain" or rhs.sharing in ("block", "tail")

    for lhs in (usual("float32"), usual("int8")):
        assert wrong_in("matmul", 256, 96, lambda c, lhs=lhs: c.lhs == lhs and is_laid_out(c)) == {}


def test_the_documentation_has_the_matrix():
    assert matrix() in PAGE.read_text()


MIXED = {
    "32 and per channel": (192, (32, 1), "axis"),
    "32 and a tail of 4": (100, (32, 1), (32, 1)),
    "32": (192, (32, 1), (32, 1)),
    "per tensor": (192, "tensor", "tensor"),
    "32 and 48": (192, (32, 1), (48, 1)),
    "64 and 32": (192, (64, 1), (32, 1)),
    "64 and 48 with tails": (112, (64, 1), (48, 1)),
    "two axes": (192, (32, 2), (32, 2)),
}
"""Products in a sum, and how scales are shared on the left and on the right: by blocks of so many
elements along the contracted axis and the kept one, or by `sharing` of an operand.
"""


def shared(kind, sharing):
    """An operand of a kind; a block format has its own size, and all others the one asked for."""
    if KINDS[kind].qtype is None:
        return Operand(kind)
    is_block = isinstance(numerics.format_of(KINDS[kind].qtype), numerics.Block)
    return Operand(kind, "block" if is_block and isinstance(sharing, str) else sharing)


@pytest.mark.many
@pytest.mark.parametrize("mixed", MIXED)
def test_pairs_of_kinds_in_blocks_of_different_sizes_are_right(mixed):
    """Each kind beside float32 and beside int8; with a tail, every pair."""
    k, left, right = MIXED[mixed]
    pairs = [
        Cell("matmul", shared(lhs, left), shared(rhs, right))
        for lhs, rhs in itertools.product(KINDS, repeat=2)
        if not {lhs, rhs} <= {"float32", "bfloat16"} and (NEAR & {lhs, rhs} or "a tail" in mixed)
    ]
    assert wrong(pairs, [k] * len(pairs), 6, roundings=12) == {}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].family == BLOCK])
def test_a_block_format_without_a_contracted_block_is_one_block(kind):
    """An axis as long as a block."""
    size = numerics.format_of(KINDS[kind].qtype).size
    assert wrong([Cell("matmul", Operand("float32"), usual(kind))], [size], 3, roundings=12) == {}


TRANSPOSED = (((1,), (1,)), ((), ()))
BATCH = (((2,), (1,)), ((0,), (0,)))
ROWS = Layout((16, 136), (136, 128), MATRICES)
TWO_ROWS = Layout((2, 128), (128, 160), MATRICES)


class Product(NamedTuple):
    """A product that one formulation computes on CPU.

    Attributes:
      formulation: its name.
      layout: shapes, and which axes are contracted.
      qtype: the format of the weight; `size`, `zero_point` and `pack` are those of `weight`.
      left: the format of the other operand; `None` for floats.
      left_zero: whether that has a zero point.
      swap: whether the weight is the left operand.
      change: what is done to the weight before.
      near: whether the sum is held to Higham's bound, not bit by bit.
    """

    formulation: str
    layout: Layout
    qtype: Any
    size: int | None = None
    zero_point: bool = False
    pack: int | None = None
    left: Any = None
    left_zero: bool = False
    swap: bool = False
    change: Callable[[jqx.QTensor], jqx.QTensor] | None = None
    near: bool = False

    @property
    def numbers(self):
        """The dimension numbers of both operands as they are multiplied."""
        return self.layout.swapped if self.swap else self.layout.numbers

    def operands(self):
        """The activations, and the weight."""
        options = {"small": "tiles" in self.formulation and not self.near}
        options |= {"powers": self.formulation == "integer_shaped"}
        w = weight(self.qtype, self.layout, self.size, self.zero_point, pack=self.pack, **options)
        if self.left is not None:
            turned = Layout(self.layout.rhs, self.layout.lhs, self.layout.swapped)
            x = weight(self.left, turned, zero_point=self.left_zero, **options)
        elif "digits" in self.formulation:
            x = on_device(activations(self.layout))
        else:
            x = integers(self.layout)
        return x, w if self.change is None else self.change(w)


def activations(layout):
    """Rows of many magnitudes, with small numbers beside large ones."""
    rng = np.random.default_rng([0, *layout.lhs])
    x = rng.normal(size=layout.lhs) * 2.0 ** rng.integers(-6, 7, layout.lhs)
    return x.astype(np.float32)


def integers(layout, dtype="float32"):
    return on_device(small_integers(np.random.default_rng([*layout.lhs]), layout.lhs), dtype)


def laid_out_for_cpu(w):
    w = jqx.pack_for(w, "cpu")
    assert w.layout.swapped and w.layout.int8
    return w


def in_pairs_of_columns(w):
    shared_by_two = in_pairs(w, 1)
    assert shared_by_two.groups.sizes[1] == 2
    return shared_by_two


def with_bfloat16_scales(w):
    return dataclasses.replace(w, scale=w.scale.astype(jnp.bfloat16))


def digits_of_each_format():
    """Each layout and each format with three of the four flags: both values of either."""
    flags = ((False, False), (True, True), (False, True), (True, False))
    for i, (name, layout) in enumerate(LARGE.items()):
        for j, qtype in enumerate(("int4", "uint8", numerics.int3)):
            zero_point, swap = flags[(i + j) % 4]
            yield (
                f"{qtype}, {name}",
                Product("digits", layout, qtype, zero_point=zero_point, swap=swap),
            )


LONG_ROWS = Layout((16, 512), (512, 96), MATRICES)
ODD_ROWS = Layout((3, 136), (136, 128), MATRICES)
PACKED_ROWS = Layout((2, 256), (256, 128), MATRICES)
BLOCK_LAYOUTS = {
    "matrices": (Layout((4, 128), (128, 160), MATRICES), 32),
    "vector": (LARGE["vector"], 16),
    "both transposed": (Layout((160, 3), (160, 128), (((0,), (0,)), ((), ()))), 32),
    "heads": (LARGE["heads"], 64),
    "an odd count of blocks": (Layout((2, 144), (144, 128), MATRICES), 16),
}
TILES_OF_ROWS = {
    "int8 in blocks": ("int8", 8, True),
    "uint8 in blocks": ("uint8", 34, True),
    "int8 in blocks with a tail": ("int8", 32, False),
    "e5m2 in blocks": (jnp.float8_e5m2, 8, False),
    "mxfp8": (numerics.mxfp8_e4m3, None, False),
    "mxfp4": (numerics.mxfp4, None, False),
    "nvfp4": (numerics.nvfp4, None, False),
    "int16 with a zero point": ("int16", None, True),
}
PACKED_TILES = {
    "int4 in blocks along the contracted axis": ("int4", 32, 0),
    "int4 in blocks along the other": ("int4", 32, 1),
    "int2 in blocks": ("int2", 32, 0),
    "int3 in blocks": (numerics.int3, 8, 0),
    "mxfp4": (numerics.mxfp4, None, 0),
    "nvfp4": (numerics.nvfp4, None, 1),
    "nf4": (numerics.nf4, None, 0),
    "nf4 in blocks": (numerics.nf4, 64, 1),
    "binary": (numerics.binary, None, 0),
}
NINE_ROWS_EACH = Layout((32, 9, 16), (32, 16, 40), BATCH)
SEVENTEEN_BATCHES = Layout((17, 9, 32), (17, 32, 40), BATCH)
TWO_CONTRACTED = Layout((20, 9, 32), (32, 30, 20), (((0, 2), (2, 0)), ((), ())))


def nine_rows(n, m, numbers=MATRICES):
    """Nine rows beside a weight of two axes: more than digits take."""
    return Layout((9, (n, m)[numbers[0][1][0]]), (n, m), numbers)


TURNED_BLOCKS = Layout((2, 128), (160, 128), TRANSPOSED)
PRODUCTS = {
    "digits": {
        name: Product("digits", layout, "uint8", zero_point=True) for name, layout in LARGE.items()
    },
    "digits, weight on the left": {
        name: Product("digits", layout, "uint8", swap=True) for name, layout in FEW.items()
    },
    "digits of each format": dict(digits_of_each_format()),
    "digits of packed codes": {
        "int4": Product("digits", ODD_ROWS, "int4", None, True, 0),
        "uint7": Product("digits", ODD_ROWS, numerics.uint7, None, True, 1),
        "int2": Product("digits", ODD_ROWS, "int2", None, True, 1),
        "int3": Product("digits", ODD_ROWS, numerics.int3, None, True, 0),
    },
    "digits in blocks": {
        name: Product("block_digits", layout, "uint8", size, True)
        for name, (layout, size) in BLOCK_LAYOUTS.items()
    },
    "digits in blocks, weight on the left": {
        name: Product("block_digits", *BLOCK_LAYOUTS[name][:1], "int8", size, swap=True)
        for name, size in {"matrices": 32, "heads": 64}.items()
    },
    "digits in blocks of packed codes": {
        f"along {axis}": Product("block_digits", PACKED_ROWS, "int4", 16, True, axis)
        for axis in (0, 1)
    },
    "digits of a changed weight": {
        "laid out for CPU": Product(
            "digits", TWO_ROWS, "int4", None, True, change=laid_out_for_cpu
        ),
        "blocks laid out for CPU": Product(
            "block_digits", TURNED_BLOCKS, "int4", 32, True, change=laid_out_for_cpu
        ),
        "columns share": Product(
            "digits", TWO_ROWS, "uint8", None, True, change=in_pairs_of_columns
        ),
        "columns share blocks": Product(
            "block_digits", TWO_ROWS, "uint8", 32, True, change=in_pairs_of_columns
        ),
        "bfloat16 scales": Product("digits", TWO_ROWS, "int8", change=with_bfloat16_scales),
        "bfloat16 scales of blocks": Product(
            "block_digits", TWO_ROWS, "int8", 32, change=with_bfloat16_scales
        ),
    },
    "tiles": {name: Product("tiles", layout, jnp.float8_e4m3fn) for name, layout in LARGE.items()},
    "tiles, weight on the left": {
        name: Product("tiles", layout, "int16", swap=True) for name, layout in FEW.items()
    },
    "tiles of each format": {
        name: Product("tiles", ROWS, *options) for name, options in TILES_OF_ROWS.items()
    },
    "tiles whose columns share a scale": {
        "e4m3": Product("tiles", ROWS, jnp.float8_e4m3fn, change=in_pairs_of_columns),
        "int16 in blocks": Product("tiles", ROWS, "int16", 34, change=in_pairs_of_columns),
    },
    "tiles of packed codes": {
        name: Product("tiles", LONG_ROWS, qtype, size, pack=axis, near=True)
        for name, (qtype, size, axis) in PACKED_TILES.items()
    },
    "tiles of slices": {  # cut along one axis or another, with a rest, or not at all
        "packed 4 bits, batch": Product("tiles", NINE_ROWS_EACH, "uint4", pack=0),
        "packed 4 bits, kept": Product("tiles", nine_rows(160, 128, TRANSPOSED), "int4", pack=0),
        "packed 2 bits": Product("tiles", nine_rows(128, 160), "uint2", pack=0),
        "packed 1 bit": Product("tiles", nine_rows(128, 160), numerics.binary, pack=0),
        "packed along the other axis": Product("tiles", nine_rows(137, 128), "int4", pack=1),
        "packed in runs of 74": Product("tiles", nine_rows(148, 130), "int4", pack=0),
        "packed 3 bits": Product("tiles", nine_rows(136, 144), numerics.int3, pack=0),
        "packed with bits to spare": Product("tiles", nine_rows(137, 128), "int4", pack=0),
        "packed in blocks": Product("tiles", nine_rows(128, 160), "int4", 4, True, 0),
        "in blocks, with a rest": Product("tiles", nine_rows(136, 130), "int8", 8, True),
        "in blocks and a tail": Product("tiles", nine_rows(138, 130), "int8", 4, True),
        "kept, beside blocks": Product("tiles", nine_rows(1025, 16, TRANSPOSED), "int8", 4, True),
        "two contracted axes": Product("tiles", TWO_CONTRACTED, "int8"),
        "batch, with a rest": Product("tiles", SEVENTEEN_BATCHES, "int8"),
        "one column, packed": Product("tiles", nine_rows(2**14, 1), numerics.int3, pack=0),
        "a block and a tail": Product("tiles", nine_rows(40, 512), "int8", 32, True),
    },
    "tiles of two 8-bit floats": {
        name: Product("float8_tiles", layout, jnp.float8_e4m3fn, left=jnp.float8_e4m3fn)
        for name, layout in FEW.items()
    },
    "integers": {
        name: Product(
            "integer_shaped", layout, "int4", zero_point=True, left="uint8", left_zero=True
        )
        for name, layout in LARGE.items()
    },
    "integers without zero points": {
        name: Product("integer_shaped", layout, "int8", left="uint8")
        for name, layout in FEW.items()
    },
    "integers, a zero point on one side": {
        f"{name}, {side}": Product(
            "integer_shaped",
            layout,
            "int8",
            zero_point=side == "right",
            left="int8",
            left_zero=side == "left",
        )
        for name, layout in FEW.items()
        for side in ("left", "right")
    },
}
IN_SLOW_RUN = {
    ("digits of packed codes", "int2"),
    ("digits of packed codes", "int3"),
    ("tiles of packed codes", "int4 in blocks along the other"),
    ("tiles of packed codes", "int2 in blocks"),
}


def each_product():
    for group, table in PRODUCTS.items():
        for name, product in table.items():
            is_slow = group == "digits of each format" or (group, name) in IN_SLOW_RUN
            marks = [pytest.mark.slow] * is_slow
            yield pytest.param(group, product, id=f"{group}: {name}", marks=marks)


def digits_allowed(x, w, layout, sums):
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


def allowed(product, x, w):
    """The error that the result may have; `None` where it must be exact."""
    layout = product.layout
    if product.near:
        return gamma(layout.products + 4) * contraction(
            np.abs(real_values(x)), np.abs(real_values(w)), layout.numbers
        )
    if "digits" not in product.formulation:
        return None
    # Slices are at most 32, and each is a sum of its own; so is each block.
    sums = 32 + (layout.products // product.size if product.size else 0)
    bound = digits_allowed(x, w, layout, sums)
    if product.swap:
        rank, batch = len(layout.lhs) - len(layout.numbers[0][0]), len(layout.numbers[1][0])
        bound = np.moveaxis(bound, range(batch, rank), range(batch - rank, 0))
    return bound


@pytest.mark.many("group")
@pytest.mark.parametrize("group, product", list(each_product()))
def test_a_formulation_gives_the_product(group, product):
    x, w = product.operands()
    operands = (w, x) if product.swap else (x, w)
    contract = functools.partial(jqx.dot_general, dimension_numbers=product.numbers)
    assert [cpu for cpu, _ in chosen(contract, *operands)] == [product.formulation]
    y = jax.jit(contract)(*operands)
    values = [real_values(operand) for operand in operands]
    expected = contraction(*values, product.numbers)
    bound = allowed(product, x, w)
    assert y.shape == expected.shape and y.dtype == jnp.float32
    if bound is not None:
        assert np.all(np.abs(as_float64(y) - expected) <= bound)
        return
    if product.left is None:  # scales are multiples of 1/4
        assert contraction(*map(np.abs, values), product.numbers).max() < 2**22
    assert_floats(y, np.float32(expected), np.float32)


def test_rows_and_columns_may_share_scales_and_zero_points():
    turned = Layout((), (16, 128), TRANSPOSED)
    lhs = in_pairs(weight("uint8", turned, zero_point=True, powers=True), 0)
    rhs = in_pairs_of_columns(weight("uint8", TWO_ROWS, zero_point=True, powers=True))
    assert chosen(jqx.matmul, lhs, rhs)[0][0] == "integer_shaped"
    expected = real_values(lhs) @ real_values(rhs)
    assert_floats(jax.jit(jqx.matmul)(lhs, rhs), np.float32(expected), np.float32)


@pytest.mark.many
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_result_is_that_of_the_real_operands_in_every_layout(name):
    """With zero points, and a scale for each index of every axis that is kept; and with swapped
    axes, whatever the last two are: contracted, batched, or both of them kept.

    The shape is that of lax, which has no negative axes: those are ours.
    """
    layout = LAYOUTS[name]
    pairs = [pair_of(layout, formats) for formats in SIDES.values()]
    plain = pair_of(layout, SIDES["integers"], scale_for_each=False)
    packed = [q if q.ndim < 2 else jqx.pack_for(q, "cpu") for q in plain]
    assert all(q.layout.swapped for q in packed if q.ndim > 1)
    contract = functools.partial(jqx.dot_general, dimension_numbers=layout.numbers)
    results = jax.jit(lambda pairs: [contract(*pair) for pair in pairs])([*pairs, packed])
    for pair, result in zip([*pairs, plain], results, strict=True):
        assert_floats(result, contraction(*map(reals, pair), layout.numbers), np.float32)
    if name != NEGATIVE:
        floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in layout[:2]]
        of_lax = functools.partial(lax.dot_general, dimension_numbers=layout.numbers)
        assert results[0].shape == jax.eval_shape(of_lax, *floats).shape


def test_zero_points_and_scales_may_be_left_out():
    layout = LAYOUTS["batch axes anywhere"]
    without = [(False, True), (True, False), (False, False)]
    pairs = [pair_of(layout, formats, *flags) for formats in SIDES.values() for flags in without]
    rng = np.random.default_rng(0)
    w = exact_tensor(rng, "uint8", (5, 4, 2), (0,), zero_point=False)
    one_zero = dataclasses.replace(w, zero_point=jnp.full((1, 1, 1), 7, jnp.uint8))
    pairs += [[pair_of(layout, formats)[0], one_zero] for formats in list(SIDES.values())[:2]]
    contract = functools.partial(jqx.dot_general, dimension_numbers=layout.numbers)
    for pair, result in zip(
        pairs, jax.jit(lambda p: [contract(*x) for x in p])(pairs), strict=True
    ):
        assert_floats(result, contraction(*map(reals, pair), layout.numbers), np.float32)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("qtype, zero_point", [("int8", False), ("uint8", True), ("int16", True)])
def test_a_small_weight_beside_floats_is_as_near_as_float32_allows(side, qtype, zero_point):
    """Sums of 33 products, and of 33 activations for the zero point; 4 more roundings after."""
    layout = Layout((7, 33), (33, 6), MATRICES)
    w = weight(qtype, layout, zero_point=zero_point)
    x = on_device(np.random.default_rng(0).normal(size=layout.lhs), jnp.float32)
    pair = (x, w) if side == "right" else (w.T, x.T)
    expected, sizes = (contraction(*map(of, pair), MATRICES) for of in (real_values, magnitudes))
    y = as_float64(jax.jit(jqx.matmul)(*pair))
    assert np.all(np.abs(y - expected) <= gamma(33 + 4) * sizes)
