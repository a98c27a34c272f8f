"""Contractions of QTensors with offsets and permuted axes, without dequantizing a weight. Offsets
are moved out of the sum, and the other operand is permuted to the order of a permuted axis.

    sum_k x[k] (c[k] s[g] + o[g])  =  sum_k x[k] c[k] s[g]  +  sum_g (sum_{k in g} x[k]) o[g]
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import fail
from ..calibrators import Groups
from ..numerics._shared import common_dtype
from ..tensor import QTensor
from ..tensor._shared import permuted_axis, taken
from ._what._dimensions import Dimensions


def in_order(left: Any, right: Any, dimensions: Dimensions) -> tuple[Any, Any]:
    """Returns operands whose contracted axes have the same order, without an `order` field: the
    other operand of a permuted axis is permuted in the same way.
    """
    both = (
        _ordered_as(left, right, dimensions.swapped),
        _ordered_as(right, left, dimensions),
    )
    left, right = (_without_order(x) for x in both)
    return left, right


def _without_order(x: Any) -> Any:
    if not isinstance(x, QTensor) or x.order is None:
        return x
    return dataclasses.replace(x, order=None)


def _ordered_as(x: Any, q: Any, dimensions: Dimensions) -> Any:
    """Returns the right operand `x`, contracted with `q`, in its order."""
    order = q.order if isinstance(q, QTensor) else None
    axis = None if order is None else permuted_axis(order)
    if order is None or axis is None:
        return x
    axis %= q.ndim
    pairs = dict(zip(dimensions.lhs_contracting, dimensions.rhs_contracting, strict=True))
    batch = dict(zip(dimensions.lhs_batch, dimensions.rhs_batch, strict=True))
    own = {i for i, n in enumerate(order.shape) if n != 1 and i != axis}
    plain = not isinstance(x, QTensor) or (x.order is None and not own)
    if not (axis in pairs and own <= {*batch} and plain):
        raise fail(
            "dot_general",
            f"axis {axis - q.ndim} of an operand is permuted, and cannot be contracted so.",
            given=f"{q!r}, contracted axes {tuple(pairs)}, batch axes {tuple(batch)}",
            expected="a permuted axis that is contracted with an axis that is not permuted, and "
            "several orders only along batch axes",
            fix="contract q.dequantize(), or the other axis.",
        )
    target = {i: pairs[i] if i == axis else batch[i] for i in (*own, axis)}
    stored, wanted = sorted(target), sorted(target, key=target.__getitem__)
    places = order.reshape([order.shape[i] for i in stored])
    places = places.transpose([stored.index(i) for i in wanted])
    shape = [1] * x.ndim
    for i in target:
        shape[target[i]] = order.shape[i]
    places = places.reshape(shape)
    if isinstance(x, QTensor):
        return x.take(places.reshape(-1), pairs[axis])
    return taken(x, places, pairs[axis])


def of_offset(x: Any, q: QTensor, dimensions: Dimensions) -> jax.Array:
    """Returns the term that the offset of a QTensor adds to its contraction with `x`, an array or
    QTensor on the left: sums over groups, times the offset of each group.

    It is computed in float32 on every platform: it is cheap compared to the codes, and often
    cancels most of their sum.
    """
    offset = q.real_offset()
    assert offset is not None
    wide = common_dtype(x.dtype, offset.dtype)
    x = x.astype(wide)
    x, offset = x.dequantize() if isinstance(x, QTensor) else x, offset.astype(wide)
    sizes = [1] * x.ndim
    for mine, axis in zip(dimensions.lhs_contracting, dimensions.rhs_contracting, strict=True):
        sizes[mine] = q.shape[axis] if offset.shape[axis] == 1 else q.groups.sizes[axis]
    sums = Groups(x.shape, tuple(sizes)).reduce(jnp.sum, x, 0)
    for axis in dimensions.rhs_kept:
        n = q.shape[axis]
        if offset.shape[axis] != n:
            size = n if offset.shape[axis] == 1 else q.groups.sizes[axis]
            offset = jnp.take(offset, np.arange(n, dtype=np.int32) // size, axis, mode="clip")
    return lax.dot_general(
        sums,
        offset,
        dimensions.numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )


def check_bare(function: str, *operands: Any, what: str = "") -> None:
    """Checks that operands have neither an offset nor a permuted axis."""
    for q in operands:
        if isinstance(q, QTensor) and not (q.offset is None and q.order is None):
            raise fail(
                function,
                f"an operand has a float offset, or a permuted axis{what}.",
                given=repr(q),
                expected="codes with a scale, and optional zero points",
                fix="pass q.dequantize().",
            )
