"""Several contractions, and what is computed of each row between them, as one kernel of jqx-cpu."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..compat_kernels import alone_or_in_parts
from ..kernels.rows_cpu import RowProgram, rows_cpu
from ..numerics.lookup import format_of
from ..statistics.calibrators import Affine
from ..tensor.layout import to_int8
from ..tensor.qtensor import QTensor
from ..tensor.segments import codes_and_index, without_stack
from ..tensor.spec import QSpec
from ..tensor.targets import kernel_of
from .dot_general import as_stored
from .formulation import PLATFORMS, Choice, Formulation
from .integer_products import as_int8
from .kernels import derived_as
from .kernels_cpu import multiplies_bytes, right_of
from .problem import Dimensions, HowTo, find_block, is_byte, max_products_in_int32


class Coded(NamedTuple):
    """How a matrix is quantized before a program reads it.

    Attributes:
      spec: its spec.
      affine: the index of its given scale; -1 if its scales are found at run time.
      part: whether the program reads the codes, or these scales.
      site: a number of the product: each has an operand of its own, by which it is named.
    """

    spec: QSpec
    affine: int
    part: Literal["codes", "scales"]
    site: int


class Argument(NamedTuple):
    """Rows, masks or matrices that a program reads.

    Attributes:
      array: its index among the operands.
      moved: an axis that is moved to the end, along which rows lie; `None` if all stay in place.
      coded: how it is quantized before; `None` if it is read as it is.
    """

    array: int
    moved: int | None
    coded: Coded | None = None


class Region(NamedTuple):
    """What computes some results of a function together.

    Attributes:
      program: the program of the kernel.
      arguments: its arguments with rows.
      specs: how what has each of the given scales is quantized.
      contracted: the contracted axis of each weight.
      plain: the equations of the function: from arrays, given scales and weights to the results, as
        the kernel returns them.
    """

    program: RowProgram
    arguments: tuple[Argument, ...]
    specs: tuple[QSpec, ...]
    contracted: tuple[int, ...]
    plain: Callable[..., list[jax.Array]]


Arrays = Sequence[jax.Array]


def _package_rows(
    arrays: Arrays, affines: Sequence[Affine], weights: Sequence[QTensor], how: Region
) -> list[jax.Array]:
    def kernel(
        arrays: Arrays, affines: Sequence[Affine], weights: Sequence[QTensor]
    ) -> list[jax.Array]:
        rows, others, quantized = [], [], dict[Any, QTensor]()
        for i, axis, coded in how.arguments:
            x: Any = arrays[i]
            if coded is not None:
                key = i, coded.spec, coded.affine
                if key not in quantized:
                    given = None if coded.affine < 0 else affines[coded.affine]
                    quantized[key] = QTensor.quantize(x, coded.spec, given)
                q = quantized[key]
                x = q.scale if coded.part == "scales" else as_int8(q).values
            rows.append(x if axis is None else jnp.moveaxis(x, axis, -1))
        for affine, spec in zip(affines, how.specs, strict=True):
            others.append(affine.scale.astype(jnp.float32).reshape(1))
            if affine.zero_point is not None:
                zero = to_int8(affine.zero_point, format_of(spec.qtype))
                others.append(zero.astype(jnp.int32).reshape(1))
        for q, axis in zip(weights, how.contracted, strict=True):
            others += [x for x in in_rows(q, axis) if x is not None]
        return rows_cpu(how.program, rows, others)

    def alone(*operands: Any) -> list[jax.Array]:
        return alone_or_in_parts(kernel, how.plain, *operands)

    return derived_as(alone, how.plain)(arrays, affines, weights)


def _plain_rows(
    arrays: Arrays, affines: Sequence[Affine], weights: Sequence[QTensor], how: Region
) -> list[jax.Array]:
    return how.plain(arrays, affines, weights)


def _formulation(name: str, reason: str, compute: Callable[..., Any]) -> Formulation:
    return Formulation(name, reason, PLATFORMS, lambda case: True, compute, op="rows")


_KERNEL = _formulation(
    "package_rows",
    "contractions by one kernel of jqx-cpu, with what is computed of each row before, between and "
    "after them: threads take some rows through all of it",
    _package_rows,
)
_PLAIN = _formulation("plain_rows", "the equations of the function", _plain_rows)
CHOICE = Choice(_KERNEL, *([_PLAIN] * (len(PLATFORMS) - 1)))
"""How a region is computed on each platform."""


def in_rows(q: QTensor, axis: int) -> tuple[jax.Array | None, ...]:
    """Returns the codes of a weight, [N, K], its scales, its zero points or `None`, and `None`; of
    a slice of a stack, the codes of the stack, and the index at the end.
    """
    q, dimensions = _stored(q, axis)
    stack, step = codes_and_index(q)
    in_stack = () if step is None else (stack, step)
    (codes, scale, zero), _ = right_of(as_int8(without_stack(q)), HowTo(dimensions), *in_stack)
    zero = None if zero is None else zero[0]
    if step is None:
        return codes[0], scale[0], zero, None
    return codes, scale[0], zero, step.astype(jnp.int32).reshape(1)


def _stored(q: QTensor, axis: int) -> tuple[QTensor, Dimensions]:
    """Returns a matrix with its axes in memory order, and the dimensions of rows times it."""
    rows = jax.ShapeDtypeStruct((1, q.shape[axis]), jnp.float32)
    _, stored, dimensions = as_stored(rows, q, Dimensions.of((((1,), (axis,)), ((), ())), 2, 2))
    return stored, dimensions


def are_multiplied(x: QTensor, matrix: QTensor, contracted: int) -> bool:
    """Whether the kernel multiplies rows of codes by a matrix of codes, both given by their types,
    with so many products in each sum.
    """
    return is_byte(x) and is_byte(matrix) and contracted <= max_products_in_int32(x, matrix)


def is_multiplied(codes: QTensor, q: Any, axis: int) -> bool:
    """Whether the kernel multiplies rows of codes, given by their types, by a weight."""
    is_matrix = isinstance(q, QTensor) and q.ndim == 2 and kernel_of(q) == "cpu"
    if not is_matrix or q.offset is not None or q.order is not None:
        return False
    stored, dimensions = _stored(q, axis)
    numbers = (((codes.ndim - 1,), dimensions.rhs_contracting), ((), ()))
    how = HowTo(Dimensions.of(numbers, codes.ndim, 2))
    return multiplies_bytes(codes, stored, how) and not find_block(codes, stored, how.dimensions)
