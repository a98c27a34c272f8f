"""What the contractions accept, as a table of cells; the support matrix of
docs/numerics/contractions.md is made from it.

A cell is an operation, the kinds of its operands, who shares their scales, and how their codes lie.
`test_products.py` computes them.

    python -m tests.contractions.support     prints the matrix
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jqx
from jqx import numerics

from ..arrays import on_device
from ..oracles.contractions import contraction
from .blocks import magnitudes, random_tensor, real_values

K = 64
"""Elements of the contracted axis in the small cells; a block has 32, a tail 8 of them fewer."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of operand.

    Attributes:
      family: floats, integers, wide integers, decoded formats, block formats.
      qtype: `None` for an array.
      dtype: of the real array.
      zero_point: whether it has one.
    """

    family: str
    qtype: Any = None
    dtype: str = "float32"
    zero_point: bool = False


FLOAT, INTEGER, WIDE, DECODED, BLOCK = "float", "integer", "int16", "float8, nf4", "MX, NVFP4"

KINDS = {
    "float32": Kind(FLOAT),
    "bfloat16": Kind(FLOAT, dtype="bfloat16"),
    "int8": Kind(INTEGER, jnp.int8),
    "int8 with zero point": Kind(INTEGER, jnp.int8, zero_point=True),
    "uint8 with zero point": Kind(INTEGER, jnp.uint8, zero_point=True),
    "int4": Kind(INTEGER, jnp.int4),
    "uint4 with zero point": Kind(INTEGER, jnp.uint4, zero_point=True),
    "int3": Kind(INTEGER, numerics.int3),
    "int16": Kind(WIDE, jnp.int16),
    "float8_e4m3fn": Kind(DECODED, jnp.float8_e4m3fn),
    "float8_e5m2": Kind(DECODED, jnp.float8_e5m2),
    "nf4": Kind(DECODED, numerics.nf4),
    "mxfp8": Kind(BLOCK, numerics.mxfp8_e4m3),
    "mxfp4": Kind(BLOCK, numerics.mxfp4),
    "nvfp4": Kind(BLOCK, numerics.nvfp4),
    "mxint8": Kind(BLOCK, numerics.mxint8),
}
SWEPT = tuple(kind for kind in KINDS if kind != "mxint8")
"""The kinds that the matrix has; others are tested in blocks of different sizes alone."""
SHARINGS = ("tensor", "axis", "block", "tail")
LAYOUTS = ("plain", "packed", "pack_for")


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a cell. It shares scales as one of `SHARINGS` says, or in blocks of so many
    elements along the contracted axis and along each axis that is kept.
    """

    kind: str
    sharing: str | tuple[int, int] = "axis"
    layout: str = "plain"


OTHERS = (Operand("float32"), Operand("int8"), Operand("uint8 with zero point", "block"))
"""The other operand of every way to share scales and to lie in memory."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """An operation on two operands."""

    op: str
    lhs: Operand
    rhs: Operand


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation: shapes, and which axis of each operand is contracted, given how many products.

    Attributes:
      shapes: of both operands, for `k` elements of the contracted axis and `n` columns.
      contracted: the axis of each.
      kept: the axes of each that may have their own scales.
      apply: the operation of jqx.
      reference: the same in NumPy.
    """

    shapes: Callable[[int, int], tuple[tuple[int, ...], tuple[int, ...]]]
    contracted: tuple[int, int]
    kept: tuple[tuple[int, ...], tuple[int, ...]]
    apply: Callable[[Any, Any], jax.Array]
    reference: Callable[[np.ndarray, np.ndarray], np.ndarray]


WINDOW: dict[str, Any] = {
    "window_strides": (1, 1),
    "padding": ((1, 0), (0, 1)),
    "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
}
GROUP_SIZES = (2, 0, 3)
BATCHED = (((2,), (1,)), ((0,), (0,)))


def _ragged(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    groups = np.repeat(np.arange(len(GROUP_SIZES)), GROUP_SIZES)
    return np.einsum("mk,mkn->mn", lhs, rhs[groups])


def _conv(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(lax.conv_general_dilated(on_device(lhs), on_device(rhs), **WINDOW))


OPS = {
    "dot_general": Op(
        lambda k, n: ((2, 3, k), (2, k, n)),
        (2, 1),
        ((0, 1), (0, 2)),
        lambda a, b: jqx.dot_general(a, b, BATCHED),
        lambda a, b: contraction(a, b, BATCHED),
    ),
    "matmul": Op(lambda k, n: ((3, k), (k, n)), (1, 0), ((0,), (1,)), jqx.matmul, np.matmul),
    "einsum": Op(
        lambda k, n: ((k, 3), (n, k)),
        (0, 1),
        ((1,), (0,)),
        lambda a, b: jqx.einsum("kb,nk->nb", a, b),
        lambda a, b: np.einsum("kb,nk->nb", a, b),
    ),
    "conv_general_dilated": Op(
        lambda k, n: ((2, 3, 4, k), (2, 2, k, n)),
        (3, 2),
        ((0,), (3,)),
        lambda a, b: jqx.conv_general_dilated(a, b, **WINDOW),
        _conv,
    ),
    "ragged_dot": Op(
        lambda k, n: ((5, k), (3, k, n)),
        (1, 1),
        ((0,), (0, 2)),
        lambda a, b: jqx.ragged_dot(a, b, jnp.array(GROUP_SIZES)),
        _ragged,
    ),
}


def is_possible(operand: Operand) -> bool:
    """Whether there is such an operand at all."""
    kind = KINDS[operand.kind]
    if kind.qtype is None:
        return operand == Operand(operand.kind)
    bits = numerics.format_of(kind.qtype).bits
    if operand.layout == "packed" and bits >= 8:
        return False
    return kind.family != BLOCK or operand.sharing in ("block", "tail")


def cells(op: str) -> Iterator[Cell]:
    """Yields the cells of an operation: every pair of kinds; and every way to share the scales of a
    kind and to lay out its codes, on both sides, beside one of `OTHERS` in turn.
    """
    operands = [
        Operand(*fields)
        for fields in itertools.product(SWEPT, SHARINGS, LAYOUTS)
        if is_possible(Operand(*fields))
    ]
    pairs = list(itertools.product(map(usual, SWEPT), repeat=2))
    for i, operand in enumerate(operands):
        other = OTHERS[(i + i // 3) % len(OTHERS)]
        pairs += [(operand, other), (other, operand)]
    for lhs, rhs in dict.fromkeys(_alike(*pair) for pair in pairs):
        if KINDS[lhs.kind].qtype is not None or KINDS[rhs.kind].qtype is not None:
            yield Cell(op, lhs, rhs)


def _alike(lhs: Operand, rhs: Operand) -> tuple[Operand, Operand]:
    """Gives both a tail if one has it: they are of the same length, which blocks do not divide."""
    if "tail" not in (lhs.sharing, rhs.sharing):
        return lhs, rhs
    lhs, rhs = (
        dataclasses.replace(x, sharing="tail") if x.sharing == "block" else x for x in (lhs, rhs)
    )
    return lhs, rhs


def usual(kind: str) -> Operand:
    """One of a kind: a scale for each index of a kept axis, or blocks where they must be."""
    if KINDS[kind].qtype is None:
        return Operand(kind)
    return Operand(kind, "block" if KINDS[kind].family == BLOCK else "axis")


@functools.cache
def operand(op: str, side: int, described: Operand, k: int, n: int) -> Any:
    """Makes an operand of a cell: random codes, and scales and numbers of different magnitudes."""
    shape = OPS[op].shapes(k, n)[side]
    kind = KINDS[described.kind]
    rng = np.random.default_rng([side, len(shape), len(described.kind)])
    if kind.qtype is None:
        x = rng.normal(size=shape) * 2.0 ** rng.integers(-2, 3, shape) + 0.25
        return on_device(x, kind.dtype)
    contracted, kept = OPS[op].contracted[side], OPS[op].kept[side]
    granularity = _granularity(described.sharing, kind, contracted, kept, len(shape))
    q = random_tensor(rng, kind.qtype, granularity.groups(shape), kind.zero_point)
    if described.layout == "packed":
        return q.pack(contracted)
    return jqx.pack_for(q, "cpu") if described.layout == "pack_for" else q


def _granularity(
    sharing: str | tuple[int, int],
    kind: Kind,
    contracted: int,
    kept: tuple[int, ...],
    rank: int,
) -> Any:
    if sharing == "tensor":
        return jqx.per_tensor()
    if sharing == "axis":
        return jqx.per_axis(*kept)
    form = numerics.format_of(kind.qtype)
    size, columns = sharing if isinstance(sharing, tuple) else (32, 1)
    if isinstance(form, numerics.Block):
        size = form.size // columns
    single = range(rank) if kind.family == BLOCK else kept
    sizes = {axis: columns for axis in single} | {contracted: size}
    return jqx.per_block(sizes, tail=sharing not in SHARINGS[:3])


def products(op: str, k: int) -> int:
    """How many products each element of the result sums."""
    return 4 * k if op == "conv_general_dilated" else k


def errors(
    cells: Sequence[Cell], lengths: Sequence[int], n: int
) -> Iterator[tuple[np.ndarray, np.ndarray] | str]:
    """Yields, for each of some cells of one operation, the difference of the result from float64
    and the sum of magnitudes behind it; or with what it is refused.
    """
    op = OPS[cells[0].op]
    pairs = [
        (operand(cell.op, 0, cell.lhs, k, n), operand(cell.op, 1, cell.rhs, k, n))
        for cell, k in zip(cells, lengths, strict=True)
    ]
    for pair, result in zip(pairs, _results(op, pairs), strict=True):
        if isinstance(result, str):
            yield result
            continue
        with jax.numpy_dtype_promotion("standard"):
            assert result.dtype == jnp.promote_types(pair[0].dtype, pair[1].dtype)
        expected = op.reference(*map(real_values, pair))
        assert result.shape == expected.shape
        difference = np.abs(np.asarray(result, np.float64) - expected)
        yield difference, op.reference(*map(magnitudes, pair))


def _results(op: Op, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Returns the results of one compiled program; or of each alone, where one is refused."""
    try:
        with jax.numpy_dtype_promotion("standard"):
            return jax.jit(lambda pairs: [op.apply(*pair) for pair in pairs])(pairs)
    except (TypeError, ValueError) as refusal:
        if len(pairs) == 1:
            return [str(refusal).partition("\n")[0]]
        return [result for pair in pairs for result in _results(op, [pair])]


def matrix() -> str:
    """Returns the support matrix in Markdown: for each kind of operand, which ways to share scales
    and to lie in memory the sweep has on both sides of every operation.
    """
    columns = (*SHARINGS, *LAYOUTS[1:])
    heads = ("one scale", "per axis", "blocks", "blocks, tail", "packed", "`pack_for`")
    lines = ["| operand | " + " | ".join(heads) + " |", "|---" * (1 + len(columns)) + "|"]
    swept = [{(cell.lhs, cell.rhs) for cell in cells(op)} for op in OPS]
    sides = [{pair[side] for pair in pairs} for pairs in swept for side in (0, 1)]
    everywhere = set.intersection(*sides)
    for kind in SWEPT:
        if KINDS[kind].qtype is None:
            continue
        has = {(x.sharing, x.layout) for x in everywhere if x.kind == kind}
        marks = [any(column in pair for pair in has) for column in columns]
        cells_ = " | ".join("yes" if mark else "" for mark in marks)
        lines.append(f"| {kind} | {cells_} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(matrix())
