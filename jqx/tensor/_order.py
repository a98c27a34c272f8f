"""The order of a QTensor with a permuted axis: which axis that is, and which views it forbids."""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from .._errors import fail


def permuted_axis(order: Any) -> int | None:
    """Returns the axis that an order permutes, counted from the last: the last axis along which
    its size is not 1; `None` if there is none.
    """
    rank = len(order.shape)
    return next((axis - rank for axis in reversed(range(rank)) if order.shape[axis] != 1), None)


def check_order(q: Any) -> None:
    """Checks the dtype and the shape of `order`."""
    order, shape = q.order, tuple(q.order.shape)
    fits = len(shape) == len(q.shape) and all(
        m in (1, n) for m, n in zip(shape, q.shape, strict=True)
    )
    if fits and order.dtype == jnp.int32:
        return
    error = ValueError if order.dtype == jnp.int32 else TypeError
    raise fail(
        "QTensor",
        "`order` does not fit `values`.",
        given=f"order {order.dtype.name}{list(shape)}, shape {q.shape}",
        expected="int32, of the rank of values, with their size along the permuted axis (and "
        "along axes before it that have their own orders), 1 elsewhere",
        fix="reshape it: for a permuted last axis of a matrix, order.reshape(1, -1).",
        error=error,
    )


def inverse_of(order: jax.Array) -> jax.Array:
    """Returns the place of each element of the real array in the values."""
    axis = permuted_axis(order)
    assert axis is not None
    return jnp.argsort(order, axis=axis).astype(jnp.int32)


def taken(x: jax.Array, places: jax.Array, axis: int) -> jax.Array:
    """Returns the elements of an array at `places` along an axis. `places` has the rank of the
    array, and size 1 along axes that share them.
    """
    if places.size == places.shape[axis]:
        return jnp.take(x, places.reshape(-1), axis=axis, mode="clip")
    return jnp.take_along_axis(x, places, axis=axis, mode="clip")


def check_whole(function: str, q: Any, parts: Sequence[Any]) -> None:
    """Checks that an index takes the permuted axis whole."""
    if q.order is None:
        return
    axis = permuted_axis(q.order)
    assert axis is not None
    axes = [part for part in parts if part is not None and part is not Ellipsis]
    if not (isinstance(axes[axis], slice) and axes[axis] == slice(None)):
        refuse(function, q, "an index that takes it whole")


def check_kept(function: str, q: Any, axis: int) -> None:
    """Checks that an axis of which a part is taken is not permuted."""
    if q.order is not None and permuted_axis(q.order) == axis % q.ndim - q.ndim:
        refuse(function, q, "indices of another axis")


def check_same_axis(function: str, q: Any, order: Any, axis: int) -> None:
    """Checks that a view that moved the permuted axis to `axis` kept the axes with their own orders
    before it.
    """
    if permuted_axis(order) != axis:
        refuse(function, q, "axes with their own orders before it")


def refuse(function: str, q: Any, expected: str) -> NoReturn:
    """Raises, because a view or a contraction would need the permuted axis in order."""
    raise fail(
        function,
        f"axis {permuted_axis(q.order)} of the array is permuted, and cannot be cut, joined or "
        "reshaped.",
        given=repr(q),
        expected=expected,
        fix="apply it to q.dequantize(), or before the array is quantized.",
    )
