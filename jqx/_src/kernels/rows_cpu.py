"""Programs of rows for the package jqx-cpu: products of codes or floats, and what is computed of
each row between them. See `cpu/src/rows.h`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from .. import package_cpu
from .products_cpu import one_by_one

OPS = ("quantize", "product", "matrix_product", "select", "add", "sub", "mul", "div", "max", "min")
OPS += ("neg", "abs", "exp", "tanh", "logistic", "erf", "erfc", "sqrt", "rsqrt", "sum", "largest")
OPS += ("magnitude",)
"""The steps of a program, in the order of the kernel."""

INPUT, COLUMNS, CONSTANT, OF_ROW, OF_BLOCK, OUTPUT, CODES, MASK, MATRIX = range(9)
STRIDED = (INPUT, OUTPUT, MASK, MATRIX)
RUN = 64
"""Codes of a row lie in whole runs of so many bytes."""


class Value(NamedTuple):
    """Some numbers for each row, or codes of a row.

    Attributes:
      kind: `INPUT` for rows of an argument, `MASK` for booleans, `MATRIX` for what many rows are
        multiplied by, `COLUMNS` for numbers that all rows share, `CONSTANT`; or `OF_BLOCK` for the
        result of a step, `CODES` for codes.
      at: the index of the argument, or of the constant.
      width: how many numbers a row has; one stands for as many as are needed. Of a matrix, its
        columns.
      strides: of the first three kinds, the elements from one index to the next along each axis of
        rows.
    """

    kind: int
    at: int
    width: int
    strides: tuple[int, ...] = ()


class Step(NamedTuple):
    """A step of a program.

    Attributes:
      op: one of `OPS`.
      to: the value that it makes.
      operands: the values that it reads. Of a quantization: numbers, and their scale; of a
        selection: a mask, the numbers where it is set, and those elsewhere.
      numbers: of a quantization, the argument of its zero point or -1, the lowest and the highest
        code; of a product of codes, the arguments of its weight, its scale, its zero point or -1,
        and the index of the weight in a stack or -1; of one with a matrix, the elements between
        its rows and between its columns, and if it is of codes, the arguments of its scale and of
        its zero point, or -1 for 1 and 0.
    """

    op: str
    to: int
    operands: tuple[int, ...]
    numbers: tuple[int, ...] = ()


class Result(NamedTuple):
    """A value that a program returns, as an array with the axes of rows in some order, and the
    width.
    """

    value: int
    axes: tuple[int, ...]


class RowProgram(NamedTuple):
    """A program.

    Attributes:
      lead: the sizes of the axes of rows.
      values: what steps read and make.
      constants: numbers.
      steps: the steps in order.
      results: what it returns.
    """

    lead: tuple[int, ...]
    values: tuple[Value, ...]
    constants: tuple[float, ...]
    steps: tuple[Step, ...]
    results: tuple[Result, ...]


def rows_cpu(
    program: RowProgram, rows: Sequence[jax.Array], others: Sequence[jax.Array]
) -> list[jax.Array]:
    """Runs a program on rows.

    Args:
      program: the program. Its arguments are numbered: first `rows`, then `others`.
      rows: float32, booleans for masks, or int8 for matrices of codes, of any shape.
      others: what all rows share: float32 [width] or [1], and of products of codes the weights,
        int8 [N, K] or stacks [L, N, K], their scales, float32 [N] or [1], zero points, int32 [N]
        or [1], and indices, int32 [1].

    Returns:
      Its results, float32 [*sizes of axes, width].
    """
    return list(_over_batches(program, len(rows))(*rows, *others))


@functools.cache
def _over_batches(program: RowProgram, count: int) -> Any:
    values, steps = _placed(program)
    options = {
        "lead": np.array(program.lead, np.int64),
        "rows": np.array([value[:3] for value in values], np.int64).ravel(),
        "strides": np.array([value.strides for value in values], np.int64).ravel(),
        "steps": np.array(steps, np.int64).ravel(),
        "constants": np.array(program.constants, np.float32),
    }
    shapes = [
        (*(program.lead[axis] for axis in axes), program.values[value].width)
        for value, axes in program.results
    ]
    multiplies = "s8" if any(step.op == "quantize" for step in program.steps) else "f32"

    @custom_vmap
    def call(*args: jax.Array) -> tuple[jax.Array, ...]:
        with jax.named_scope(f"multiplies_{multiplies}"):  # shown by jqx.lowering
            kinds = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
            return tuple(package_cpu.call("rows", kinds, *args, **options))

    @call.def_vmap
    def _(size: int, batched: Sequence[bool], *args: jax.Array) -> tuple[Any, Any]:
        is_mapped = tuple(True for _ in program.results)
        if any(batched[count:]):
            return one_by_one(call, batched, args), is_mapped

        def mapped(value: Value) -> Value:
            if value.kind not in STRIDED:
                return value
            step = args[value.at].size // size if batched[value.at] else 0
            return value._replace(strides=(step, *value.strides))

        results = [Result(i, (0, *(axis + 1 for axis in axes))) for i, axes in program.results]
        more = program._replace(
            lead=(size, *program.lead),
            values=tuple(map(mapped, program.values)),
            results=tuple(results),
        )
        return _over_batches(more, count)(*args), is_mapped

    return call


class _Places:
    """Places in the memory of a thread, which are given again to values of the same width."""

    def __init__(self) -> None:
        self.end, self._free = 0, dict[int, list[int]]()

    def take(self, width: int) -> int:
        """Returns the place of so many numbers, the first at a multiple of 16."""
        free = self._free.setdefault(width, [])
        if free:
            return free.pop()
        start, self.end = self.end, self.end + -(-width // 16) * 16
        return start

    def give(self, place: int, width: int) -> None:
        """Takes back a place."""
        self._free[width].append(place)


def _placed(program: RowProgram) -> tuple[list[Value], list[tuple[int, ...]]]:
    """Returns the values of a program with their places, and the numbers of its steps.

    Between two products all steps run on one row after another, so that a value which is not read
    after the next product needs memory for one row only.
    """
    values, steps, rank = list(program.values), program.steps, len(program.lead)
    nothing = (0,) * rank
    segments = np.cumsum([step.op in ("product", "matrix_product") for step in steps])
    last = dict[int, int]()
    for i, step in enumerate(steps):
        last |= dict.fromkeys(step.operands, i)
    outputs = {}
    for i, (value, axes) in enumerate(program.results):
        strides, step_size = [0] * rank, values[value].width
        for axis in reversed(axes):
            strides[axis], step_size = step_size, step_size * program.lead[axis]
        outputs[value] = Value(OUTPUT, i, values[value].width, tuple(strides))
    of_rows, of_blocks, codes = _Places(), _Places(), 0
    fields = []
    for i, step in enumerate(steps):
        kind, _, width, _ = values[step.to]
        is_late = segments[last.get(step.to, i)] != segments[i]
        if step.to in outputs:
            values[step.to] = outputs[step.to]
        elif kind == CODES:
            values[step.to] = Value(CODES, codes, width)
            codes += -(-width // RUN) * RUN
        elif is_late or step.op in ("product", "matrix_product"):
            values[step.to] = Value(OF_BLOCK, of_blocks.take(width), width)
        else:
            values[step.to] = Value(OF_ROW, of_rows.take(width), width)
        for value in {step.to, *step.operands}:
            kind, at, width, _ = values[value]
            if kind in (OF_ROW, OF_BLOCK) and last.get(value, i) == i:
                (of_rows if kind == OF_ROW else of_blocks).give(at, width)
        is_unary = len(step.operands) == 1 and step.op != "product"
        operands = step.operands * 2 if is_unary else step.operands
        numbers = (OPS.index(step.op), step.to, *operands, *step.numbers)
        fields.append(numbers + (0,) * (9 - len(numbers)))
    return [x if x.strides else x._replace(strides=nothing) for x in values], fields


def strides_of(shape: Sequence[int], axes: Sequence[Any], wanted: Sequence[Any]) -> tuple[int, ...]:
    """Returns the elements from one index to the next of an array, along the axes with the given
    names; 0 for an axis that it does not have.
    """
    steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    named = dict(zip(axes, steps, strict=True))
    return tuple(named.get(name, 0) for name in wanted)
