"""Slices whose start is known only at run time, for reading and writing caches of keys and values.

A write replaces a scale if it overwrites all elements that share it. Otherwise the scale stays, and
the written elements are quantized with it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._calls import called
from .._checks import as_real
from .._errors import fail
from ..calibrators import Affine, Groups, absmax, minmax
from ..calibrators._shared import per_block, per_tensor
from ..numerics import Integer, format_of
from ..tensor import QSpec, QTensor
from ..tensor._shared import lay_out, refine, swap_axes
from ._bare import check_bare
from ._dot_general import Operand
from ._window import (
    Window,
    affine_in,
    groups_in,
    is_on_blocks,
    place_of_entries,
    place_of_values,
    sliced,
    window_of,
)


@overload
def dynamic_slice(operand: QTensor, start_indices: Any, slice_sizes: Sequence[int]) -> QTensor: ...
@overload
def dynamic_slice(
    operand: ArrayLike, start_indices: Any, slice_sizes: Sequence[int]
) -> jax.Array: ...
@called("dynamic_slice")
def dynamic_slice(
    operand: Operand, start_indices: Any, slice_sizes: Sequence[int]
) -> jax.Array | QTensor:
    """Returns a slice whose start is a run-time value, as `jax.lax.dynamic_slice`.

    `dynamic_slice(q, ...).dequantize()` equals `dynamic_slice(q.dequantize(), ...)`. Along an axis
    with blocks, a slice whose start is a Python integer has the largest blocks that fit it;
    otherwise each of its elements gets its own scale.

    Args:
      operand: array or QTensor, any shape.
      start_indices: an integer for each axis, or a vector of them; negative integers count from
        the end. They are clamped so that the slice fits.
      slice_sizes: the shape of the slice.

    Returns:
      An array or a QTensor, like `operand`, of shape `slice_sizes`.

    Raises:
      ValueError: starts or sizes do not fit the shape, or the slice cuts an axis along which codes
        are packed or swapped.
      TypeError: a start is not an integer.

    Gradient: JAX differentiates it with respect to the scale; codes have no gradient.
    NaN and infinities: kept; nothing is computed.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> x = jnp.array([[1.0, 2.0], [3.0, 127.0], [5.0, 6.0]])
      >>> q = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8))
      >>> jqx.dynamic_slice(q, (jnp.int32(7), 0), (1, 2)).dequantize()
      Array([[5., 6.]], dtype=float32)
    """
    if not isinstance(operand, QTensor):
        return lax.dynamic_slice(jnp.asarray(operand), start_indices, slice_sizes)
    layout, sizes = operand.layout, tuple(slice_sizes)
    if layout is not None and layout.swapped and len(sizes) == operand.ndim:
        cut = {i - len(sizes) for i, n in enumerate(sizes) if n != operand.shape[i]}
        if layout.follows((), cut):
            turned = [[*x[:-2], *reversed(x[-2:])] for x in (tuple(start_indices), sizes)]
            return swap_axes(dynamic_slice(swap_axes(operand), *turned))
    window = window_of("dynamic_slice", operand, start_indices, slice_sizes)
    known = [isinstance(start, int) for start in window.starts]
    if any(known):
        parts = [
            slice(start, start + n) if is_known else slice(None)
            for start, n, is_known in zip(*window, known, strict=True)
        ]
        operand = operand[tuple(parts)]
        pairs = zip(window.starts, known, strict=True)
        window = window._replace(starts=tuple(0 if is_known else x for x, is_known in pairs))
    return sliced(operand, window)


@overload
def dynamic_update_slice(operand: QTensor, update: Operand, start_indices: Any) -> QTensor: ...
@overload
def dynamic_update_slice(
    operand: ArrayLike, update: ArrayLike, start_indices: Any
) -> jax.Array: ...
@called("dynamic_update_slice")
def dynamic_update_slice(
    operand: Operand, update: Operand, start_indices: Any
) -> jax.Array | QTensor:
    """Returns `operand` with an overwritten slice whose start is a run-time value, as
    `jax.lax.dynamic_update_slice`.

    An array is quantized to the format of the QTensor it is written to. If the slice holds all
    elements that share a scale (a token in a cache with one scale per token, or whole blocks), new
    scales are computed from the array: from the largest magnitude, or with zero points from the
    range. If elements outside of the slice share a scale with it (one scale for the whole cache),
    scales and zero points do not change, and the array is quantized with them; calibrate them
    beforehand. A QTensor is written with its own scales, which is possible only in the first case;
    pass a QTensor to find the scales in another way.

    Args:
      operand: array or QTensor, any shape. If it is donated to a jit, it is updated in place.
      update: array of floats, or QTensor of the format, dtype and granularity of `operand` (or a
        coarser one); its shape is that of the slice.
      start_indices: as in `jqx.dynamic_slice`. Along an axis with blocks that is not overwritten as
        a whole, a Python integer at the border of a block; the slice must also end at a border. If
        the start is known only at run time, give the blocks their own axis:
        `q.reshape(..., n // b, b, ...)`.

    Returns:
      An array or a QTensor, like `operand`, of its shape, dtypes and layout.

    Raises:
      ValueError: starts or shapes do not fit; the slice cuts a block, or an axis along which codes
        are packed or swapped; `update` is a QTensor with scales that `operand` cannot hold.
      TypeError: a start is not an integer; `update` is a QTensor of another format or dtype, or
        `operand` is not a QTensor.

    Gradient: JAX differentiates it with respect to scales; codes have no gradient.
    NaN and infinities: a NaN in the array makes its new scale NaN; else as in `jqx.quantize`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> cache = jqx.QTensor.zeros((4, 2), jqx.QSpec(jnp.int8, jqx.per_axis(0)))
      >>> cache = jqx.dynamic_update_slice(cache, jnp.array([[1.0, 254.0]]), (jnp.int32(1), 0))
      >>> cache.dequantize()
      Array([[  0.,   0.],
             [  0., 254.],
             [  0.,   0.],
             [  0.,   0.]], dtype=float32)
    """
    function = "dynamic_update_slice"
    if not isinstance(operand, QTensor):
        if isinstance(update, QTensor):
            raise fail(
                function,
                "a QTensor cannot be written to an array.",
                given=f"update {update!r}",
                expected="an array, or a QTensor as operand",
                fix="pass update.dequantize(), or start from jqx.QTensor.zeros(shape, spec).",
                error=TypeError,
            )
        return lax.dynamic_update_slice(jnp.asarray(operand), jnp.asarray(update), start_indices)
    check_bare(function, operand, update)
    update = update if isinstance(update, QTensor) else as_real(function, "update", update)
    window = window_of(function, operand, start_indices, update.shape)
    if 0 in window.sizes:
        return operand
    _check_blocks(operand, window)
    if isinstance(update, QTensor):
        return _written(operand, _matched(operand, update, window), window)
    return _written(operand, _quantized(operand, update, window), window)


def _check_blocks(q: QTensor, window: Window) -> None:
    groups = q.groups
    for axis, (n, b) in enumerate(zip(groups.shape, groups.sizes, strict=True)):
        blocked = 1 < b < n and window.sizes[axis] != n
        start = window.starts[axis]
        known = f"{start}" if isinstance(start, int) else "known only at run time"
        if blocked and not is_on_blocks(window, axis, n, b):
            raise fail(
                "dynamic_update_slice",
                f"the slice may cut a block along axis {axis}.",
                given=f"size {window.sizes[axis]}, start {known}, blocks of {b}",
                expected="a Python integer as start, and whole blocks",
                fix=f"give the blocks their own axis: q.reshape(..., {n // b}, {b}, ...).",
            )


def _shared_axes(q: QTensor, window: Window) -> list[int]:
    """Returns the axes along which elements inside and outside of the window share a scale."""
    return [
        axis
        for axis, (size, n) in enumerate(zip(window.sizes, q.shape, strict=True))
        if size < n and q.scale.shape[axis] == 1
    ]


def spec_like(q: QTensor, groups: Groups) -> QSpec:
    """Returns the spec to quantize an array with its own groups to the format of a QTensor: from
    the largest magnitude, or with zero points from the range.
    """
    form = format_of(q.qtype)
    unsigned = isinstance(form, Integer) and not form.signed
    symmetric = q.zero_point is None and not unsigned
    sizes = {axis: max(b, 1) for axis, b in enumerate(groups.sizes)}
    granularity = per_block(sizes, tail=True) if sizes else per_tensor()
    return QSpec(q.qtype, granularity, symmetric, absmax if symmetric else minmax)


def _quantized(q: QTensor, x: jax.Array, window: Window) -> QTensor:
    """Quantizes the array to be written, with new scales or with those that it shares."""
    old, spec = affine_in(q, window), spec_like(q, groups_in(q.groups, window))
    affine = old
    if not _shared_axes(q, window):
        found = spec.calibrator.fit(x, spec)
        check_zero_points(q, found.zero_point, old.zero_point)
        affine = Affine(_kept_as(found.scale, old.scale), found.zero_point)
    packing = None if q.layout is None else q.layout.packing
    pack = None if packing is None else packing.axis + q.ndim
    return QTensor.quantize(x, spec, affine, pack=pack)


def _kept_as(scale: Any, old: Any) -> Any:
    """Returns a scale in the float dtype or the quantized format of the scale it replaces."""
    if isinstance(old, QTensor):
        scale = scale.astype(old.dtype)
        inner: Any = old.scale
        return QTensor.quantize(scale, QSpec(old.qtype), Affine(inner))
    return scale.astype(old.dtype)


def _matched(q: QTensor, update: QTensor, window: Window) -> QTensor:
    """Returns the update with as many scales and zero points as the window of the operand has."""
    _check_format(q, update)
    shared = _shared_axes(q, window)
    nested = isinstance(q.scale, QTensor)
    if not (not shared and not nested):
        raise fail(
            "dynamic_update_slice",
            "scales of `operand` are shared with elements that are not overwritten"
            + (f", along axes {shared}." if shared else ": they are quantized, with one scale."),
            given=f"update {update!r} for operand {q!r}",
            expected="an array, to be quantized with the scale of operand",
            fix="pass the array itself, or update.dequantize().",
        )
    target = groups_in(q.groups, window)
    for axis, (n, b) in enumerate(zip(target.shape, target.sizes, strict=True)):
        own = update.groups.sizes[axis]
        if own != b and not (b > 0 and own > b and (own % b == 0 or own == n)):
            raise fail(
                "dynamic_update_slice",
                f"`operand` has fewer scales than `update` along axis {axis}.",
                given=f"update {update!r} for operand {q!r}",
                expected=f"scales shared by {b} elements along axis {axis}, or by a multiple",
                fix="quantize update with the granularity of operand, or pass the array itself.",
            )
        update = update if own == b else refine(update, axis, b)
    zero_point: Any = update.zero_point
    if q.zero_point is not None and zero_point is None:
        zero_point = jnp.zeros(update.scale.shape, q.zero_point.dtype)
    old = affine_in(q, window).zero_point
    check_zero_points(q, zero_point, old)
    if old is not None:
        zero_point = jnp.broadcast_to(zero_point, old.shape)
    return dataclasses.replace(update, zero_point=zero_point)


def _check_format(q: QTensor, update: QTensor) -> None:
    def kinds(x: QTensor) -> tuple[Any, ...]:
        return x.qtype, x.dtype, x.scale.dtype, getattr(x.scale, "qtype", None)

    if kinds(q) != kinds(update):
        raise fail(
            "dynamic_update_slice",
            "`operand` and `update` have different formats.",
            given=f"update {update!r} for operand {q!r}",
            expected="one qtype, one dtype and one dtype of scales",
            fix="quantize update to the format of operand, or pass update.dequantize().",
            error=TypeError,
        )


def check_zero_points(q: QTensor, new: Any, old: Any) -> None:
    """Checks that the operand has a place for each zero point to be written."""
    fits = new is None or (
        old is not None and all(m in (1, n) for m, n in zip(new.shape, old.shape, strict=True))
    )
    if not fits:
        raise fail(
            "dynamic_update_slice",
            "`operand` has no place for the zero points.",
            given=f"zero points of shape {() if new is None else new.shape} for operand {q!r}",
            expected="a symmetric update" if old is None else "a zero point for each scale",
            fix="start from jqx.QTensor.zeros(shape, spec) with the spec of update.",
        )


def _written(q: QTensor, update: QTensor, window: Window) -> QTensor:
    """Writes codes, scales and zero points of the same granularity and format."""

    def write(parameter: Any, new: Any) -> Any:
        if isinstance(parameter, QTensor):  # its own scale is shared, and does not change
            values = write(parameter.values, new.values)
            return dataclasses.replace(parameter, values=values)
        starts, _ = place_of_entries(parameter.shape, q.groups, window)
        return lax.dynamic_update_slice(parameter, new, starts)

    starts, _ = place_of_values(q, window)
    return dataclasses.replace(
        q,
        values=lax.dynamic_update_slice(q.values, values_as(update, q), starts),
        scale=write(q.scale, update.scale),
        zero_point=None if q.zero_point is None else write(q.zero_point, update.zero_point),
    )


def values_as(update: QTensor, q: QTensor) -> jax.Array:
    """Returns the codes of `update` in the layout of another QTensor."""
    if update.layout == q.layout:
        return update.values
    plain = update.unpack()
    return plain.values if q.layout is None else lay_out(plain, q.layout).values
