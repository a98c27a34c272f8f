"""`take` on arrays and QTensors: an embedding lookup that dequantizes only the rows it takes."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import ArrayLike

from ..checks import as_integers, as_signed, called, normalize_axes
from ..errors import fail
from ..statistics.granularity import Groups
from ..tensor.layout import check_kept
from ..tensor.qtensor import QTensor
from .dot_general import Operand, as_operand

MODES = (None, "fill", "clip", "wrap")


@called("take")
def take(
    operand: Operand,
    indices: ArrayLike,
    axis: int | None = None,
    *,
    mode: str | None = None,
    fill_value: float | None = None,
) -> jax.Array:
    """Takes indices along an axis of an array or QTensor, as `jax.numpy.take`.

    Codes, scales and zero points are gathered, and the gathered elements are dequantized. Packed
    codes are also unpacked after the gather, unless `axis` is the packed axis or `None`. The result
    equals `jax.numpy.take(operand.dequantize(), ...)`, bit for bit.

    Args:
      operand: array or QTensor, any shape.
      indices: integers, any shape; negative ones count from the end, but are out of bounds for
        `mode="clip"`.
      axis: the axis to take from; `None` takes from the flattened array.
      mode: the result of an index out of bounds: `"fill"` (or `None`) gives `fill_value`, `"clip"`
        the nearest element, and `"wrap"` the element at the index modulo the length.
      fill_value: a number, for `mode="fill"`; `None` means NaN.

    Returns:
      Array of the dtype of `operand`, its shape with `axis` replaced by the shape of `indices`.

    Raises:
      ValueError: `axis` is out of range, `mode` is unknown, or `fill_value` is given for a mode
        without a fill value.
      TypeError: `indices` are not integers.
      IndexError: indices are taken from an axis of length 0.

    Gradient: JAX differentiates it with respect to the scale; codes have no gradient.
    NaN and infinities: NaN out of bounds, unless `fill_value` says otherwise; scales as in
      `QTensor.dequantize`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> table = jnp.array([[1.0, 127.0], [-254.0, 2.0], [3.0, -381.0]])
      >>> q = jqx.QTensor.quantize(table, jqx.QSpec(jnp.int8, jqx.per_axis(0)))
      >>> jqx.take(q, jnp.array([2, 0]), axis=0)
      Array([[   3., -381.],
             [   1.,  127.]], dtype=float32)
    """
    _check_mode(mode, fill_value)
    if not isinstance(operand, QTensor):
        return jnp.take(operand, indices, axis=axis, mode=mode, fill_value=fill_value)
    q = as_operand(operand)
    if axis is not None:
        (axis,) = normalize_axes("take", axis, q.ndim, argument="axis")
    n = q.size if axis is None else q.shape[axis]
    indices = as_integers("take", "indices", _wrapped(indices, n) if mode == "wrap" else indices)
    if n == 0 and indices.size != 0:
        problem = f"there is nothing to take from an axis of length 0, in shape {q.shape}."
        raise fail("take", problem, fix="take from another axis.", error=IndexError)
    positions, inside = _places(indices, n, mode)
    rows = _elements(q, positions) if axis is None else _rows(q, positions, axis)
    if inside is None:
        return rows
    fill = jnp.asarray(math.nan if fill_value is None else fill_value, q.dtype)
    lead = axis or 0
    trail = rows.ndim - lead - indices.ndim
    return jnp.where(inside.reshape((1,) * lead + indices.shape + (1,) * trail), rows, fill)


def take_along(q: Any, index: jax.Array, axis: int) -> Any:
    """Takes places, a vector of indices in range, along an axis of an array or QTensor whose codes
    are not packed along it.
    """
    if not isinstance(q, QTensor):
        return jnp.take(q, index, axis=axis, mode="clip")
    swapped = q.layout is not None and q.layout.swapped and axis >= q.ndim - 2
    stored_axis = 2 * q.ndim - 3 - axis if swapped else axis
    groups, order = q.groups, q.order
    if order is not None:
        check_kept("take", q, axis)
        order = order if order.shape[axis] == 1 else take_along(order, index, axis)
    taken = q.map_parameters(lambda leaf: take_entries(leaf, index, axis, groups))
    # `blocks` stays valid for other axes; along this axis, entries are shared or per element.
    return dataclasses.replace(taken, values=take_along(q.values, index, stored_axis), order=order)


def take_entries(parameter: Any, positions: jax.Array, axis: int, groups: Groups) -> Any:
    """Takes the entries of a scale or zero point for the elements at `positions`; a shared entry
    does not change.
    """
    if parameter.shape[axis] == 1:
        return parameter
    return take_along(parameter, positions // groups.sizes[axis], axis)


def _rows(q: QTensor, positions: jax.Array, axis: int) -> jax.Array:
    """Returns the elements at places along an axis, dequantized."""
    packing = None if q.layout is None else q.layout.packing
    if packing is not None and packing.axis + q.ndim == axis:
        q = q.unpack()
    if any(map(export.is_symbolic_dim, positions.shape[1:])):  # JAX may not be able to flatten them
        return jax.vmap(lambda vector: _rows(q, vector, axis), out_axes=axis)(positions)
    # Places are flattened to one axis, so that the layout, which counts from the last, stays valid.
    rows = take_along(q, positions.reshape(-1), axis).dequantize()
    return rows.reshape(*q.shape[:axis], *positions.shape, *q.shape[axis + 1 :])


def _elements(q: QTensor, positions: jax.Array) -> jax.Array:
    """Returns the elements at places of the flattened array, dequantized.

    It indexes by coordinates, because most scales could not follow a flattening.
    """
    q = q.unpack() if q.ndim else q[None]
    return q[jnp.unravel_index(positions, q.shape)].dequantize()


def _wrapped(indices: Any, n: Any) -> Any:
    """Returns NumPy's integers modulo the length, before JAX makes 32 bits of 64."""
    is_numpy = isinstance(indices, np.ndarray) and jnp.issubdtype(indices.dtype, jnp.integer)
    return indices % n if is_numpy and isinstance(n, int) and n else indices


def _places(indices: jax.Array, n: int, mode: str | None) -> tuple[jax.Array, jax.Array | None]:
    """Returns indices in `[0, n)`, and, for a mode that fills, which of them were in bounds."""
    if mode == "wrap":
        wide = indices if indices.dtype.itemsize >= 4 else as_signed(indices, n)
        return as_signed(wide % n, n), None
    indices = as_signed(indices, n)
    if mode == "clip":
        return jnp.clip(indices, 0, n - 1), None
    indices = jnp.where(indices < 0, indices + n, indices)
    return jnp.clip(indices, 0, n - 1), (indices >= 0) & (indices < n)


def _check_mode(mode: str | None, fill_value: float | None) -> None:
    if mode not in MODES:
        fix = f"pass one of {', '.join(map(repr, MODES))}."
        raise fail("take", f"`mode` is unknown: {mode!r}.", fix=fix)
    if fill_value is not None and mode not in (None, "fill"):
        raise fail(
            "take", f"`fill_value` has no effect with mode={mode!r}.", fix="drop one of the two."
        )
