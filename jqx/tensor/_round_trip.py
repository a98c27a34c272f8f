"""Conversion of a real array to a QTensor and back: one compiled program each, also eagerly."""

import functools
from functools import partial
from typing import Any

import jax

from ..calibrators import Affine
from ..numerics import format_of
from ..numerics._shared import common_dtype, narrow, pack_bits, widen
from ..ops._shared import affine_dequantize, affine_quantize
from ._grid import grid_of, wide_scale
from ._layout import Layout, Packing
from ._order import inverse_of, permuted_axis, taken
from ._spec import QSpec


@partial(jax.jit, static_argnames=("cls", "spec", "axis"), inline=True)
def quantized(
    x: jax.Array, affine: Affine | None, *, cls: Any, spec: QSpec, axis: int | None
) -> Any:
    """Returns `x` as a QTensor, packed along `axis`; see `QTensor.quantize`."""
    grid = grid_of("QTensor.quantize", x, spec, affine)
    codes = affine_quantize(
        grid.groups.split(x),
        *grid.lined_up(),
        qtype=spec.qtype,
        round_mode=spec.rounding,
        numerics=spec.numerics,
        as_bits=axis is not None,
    )
    codes = grid.groups.join(codes)
    scale = grid.scale
    if grid.inner is not None:
        scale = cls(scale, grid.inner, qtype=scale.dtype, dtype=grid.inner.dtype)
    return cls(
        codes if axis is None else pack_bits(codes, format_of(spec.qtype).bits, axis),
        scale,
        grid.zero_point,
        qtype=spec.qtype,
        dtype=x.dtype,
        blocks=grid.groups.blocks,
        layout=None if axis is None else Layout(Packing(axis - x.ndim, x.shape[axis])),
    )


@partial(jax.jit, inline=True)
def dequantized(q: Any) -> jax.Array:
    """Returns the real array of a QTensor; see `QTensor.dequantize`."""
    groups, offset = q.groups, q.real_offset()
    scale = wide_scale(q.scale.dequantize() if hasattr(q.scale, "qtype") else q.scale)
    wide = q.dtype
    if offset is not None:
        offset = widen(offset)
        wide = functools.reduce(common_dtype, (x.dtype for x in (scale, offset)), q.dtype)
    real = affine_dequantize(
        groups.split(q.codes),
        groups.split_scale(scale),
        None if q.zero_point is None else groups.split_scale(q.zero_point),
        qtype=q.qtype,
        dtype=wide,
    )
    if offset is not None:
        real = narrow(real + groups.split_scale(offset.astype(wide)), q.dtype)
    real = groups.join(real)
    axis = None if q.order is None else permuted_axis(q.order)
    if q.order is None or axis is None:
        return real
    return taken(real, inverse_of(q.order), axis)
