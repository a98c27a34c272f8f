"""`ragged_dot` by jqx-cpu: its kernels multiply one group of rows after another, without copies."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._compat_kernels import alone_or_in_parts
from ..kernels._shared import product_cpu
from ..tensor import QTensor
from ..tensor._shared import kernel_of
from ._how._blocks import find_block
from ._how._formulation import CPU, formulation
from ._how._kernels_cpu import as_output, left_of, multiplies_bytes, right_of
from ._how._kernels_cpu_groups import decoded, floats, multiplies_decoded, multiplies_floats
from ._how._kernels_of_codes import derived_as
from ._how._scales import HowTo
from ._integers._bytes import as_int8
from ._ragged_tiles import Args, Groups, ragged_tiles
from ._what._dimensions import Dimensions

MATRICES = Dimensions(2, 3, (1,), (2,), (), (0,))
"""Rows and a stack of matrices [G, N, K]; the rows do not have the axis of the stack."""


def _how(lhs: Any, rhs: QTensor, args: Args) -> HowTo:
    return HowTo(MATRICES, args.precision, find_block(lhs, rhs, MATRICES))


def _is_for_package(case: Groups) -> bool:
    x, q = case.lhs, case.rhs
    if kernel_of(q) != "cpu" or not q.layout.swapped or q.offset is not None or q.order is not None:
        return False
    q = q.stored
    known = multiplies_bytes, multiplies_floats, multiplies_decoded
    return any(multiplies(x, q, _how(x, q, case.how)) for multiplies in known)


@formulation(
    "rows in groups, and matrices that are laid out for jqx-cpu: its kernel multiplies one group "
    "after another by its matrix, which is not copied",
    CPU,
    _is_for_package,
    op="ragged_dot",
)
def ragged_package(lhs: Any, rhs: QTensor, sizes: jax.Array, how: Args) -> jax.Array:
    def kernel(lhs: Any, rhs: QTensor, sizes: jax.Array) -> jax.Array:
        q = rhs.stored
        inner = _how(lhs, q, how)
        if not isinstance(lhs, QTensor):
            by = floats if multiplies_floats(lhs, q, inner) else decoded
            return by(lhs, q, how=inner, sizes=sizes).astype(how.dtype)
        weight, _ = right_of(as_int8(q), inner)
        rows = left_of(as_int8(lhs), inner)
        y = product_cpu(*rows, *weight, dtype=jnp.float32, sizes=sizes)
        return as_output(y, lhs, inner).astype(how.dtype)

    plain = functools.partial(ragged_tiles.compute, how=how)
    return derived_as(functools.partial(alone_or_in_parts, kernel, plain), plain)(lhs, rhs, sizes)
