"""The loop of GPTQ over the columns of a matrix: each column is rounded, and later columns
compensate for its error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", arXiv:2210.17323; corrections of columns for float inputs: Li et al., "GPTAQ:
Efficient Finetuning-Free Quantization for Asymmetric Calibration", arXiv:2504.02692.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..calibrators import Affine
from ..tensor import QSpec
from ..tensor._shared import rounded_to

BLOCK = 32
"""Columns of a block: corrected one by one. All later columns are corrected by one product. On CPU,
the loop takes half as long as with blocks of 128.
"""


class Columns(NamedTuple):
    """The result of the loop, in the order of the columns.

    Attributes:
      rounded: their values on the grid, float32 [columns, rows].
      before: their values just before they were rounded.
      scale: scale of each group, [groups, rows].
      zero_point: likewise, or `None`.
    """

    rounded: jax.Array
    before: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None


@partial(jax.jit, static_argnames=("spec", "size"))
def round_columns(
    w: jax.Array,
    upper: jax.Array,
    carried: jax.Array | None,
    affine: Affine | None,
    group: jax.Array | None,
    *,
    spec: QSpec,
    size: int = BLOCK,
    given: jax.Array | None = None,
) -> Columns:
    """Rounds the columns of a matrix in order.

    For a column `x`, rounded to `y`, all later columns lose `(x - y) / upper[i, i] * upper[i]` and
    gain `x * carried[i]`. Within a block of `size` columns this is done column by column; columns
    after the block are corrected by one product. The compile time does not depend on their number.

    Args:
      w: float32 [columns, rows]; the number of columns is a multiple of `size`.
      upper: float32 [columns, columns], upper triangular: `upper.T @ upper` is the inverse of the
        Hessian.
      carried: strictly upper triangular, or `None`.
      affine: scales and zero points, [groups, rows]. `None` computes them when the loop reaches a
        group, from columns that are corrected already; a group is then a block.
      group: for each column, the index of its group in `affine`.
      spec: the format and the round mode. Without `affine`, also how scales are computed, for a
        matrix [columns, rows] of `size` columns, one for each row.
      size: number of columns of a block.
      given: values that the columns are rounded to instead, if they are known.
    """
    count, _ = w.shape

    def block(start: jax.Array, state: Columns) -> Columns:
        _, left, scales, zero_points = state
        rows = lax.dynamic_slice_in_dim(left, start, size)
        corner = lax.dynamic_slice(upper, (start, start), (size, size))
        gain = None if carried is None else lax.dynamic_slice(carried, (start, start), (size, size))
        if affine is None:
            found = spec.calibrator.fit(rows, spec)
            at = start // size
            scales = lax.dynamic_update_slice_in_dim(scales, found.scale, at, 0)
            if zero_points is not None and found.zero_point is not None:
                zero_points = lax.dynamic_update_slice_in_dim(zero_points, found.zero_point, at, 0)

        def column(i: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            rows, rounded, lost = own
            x = rows[i]
            at = start // size if group is None else group[start + i]
            zero_point = None if zero_points is None else zero_points[at]
            y = rounded_to(x, scales[at], zero_point, spec) if given is None else given[start + i]
            error = (x - y) / corner[i, i]
            ahead = jnp.arange(size) > i
            change = corner[i][:, None] * error[None]
            if gain is not None:
                change -= gain[i][:, None] * x[None]
            rows = jnp.where(ahead[:, None], rows - change, rows)
            return rows, rounded.at[i].set(y), lost.at[i].set(error)

        empty = jnp.zeros_like(rows)
        before, rounded, lost = lax.fori_loop(0, size, column, (rows, empty, empty))
        if count > size:
            after = (jnp.arange(count) >= start + size)[None]
            slab = jnp.where(after, lax.dynamic_slice_in_dim(upper, start, size), 0)
            left = left - _product(slab, lost)
            if carried is not None:
                slab = jnp.where(after, lax.dynamic_slice_in_dim(carried, start, size), 0)
                left = left + _product(slab, before)
        left = lax.dynamic_update_slice_in_dim(left, before, start, 0)
        rounded = lax.dynamic_update_slice_in_dim(state.rounded, rounded, start, 0)
        return Columns(rounded, left, scales, zero_points)

    start = Columns(jnp.zeros_like(w), w, *_scales(w, affine, spec, size))
    return lax.fori_loop(0, count // size, lambda i, state: block(i * size, state), start)


@jax.custom_batching.sequential_vmap
def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `a.T @ b`. Several matrices are multiplied one by one, because a stacked product may
    sum in another order than a single one: a matrix must get the same codes alone and in a stack.
    """
    return jnp.matmul(a.T, b, precision=lax.Precision.HIGHEST)


def _scales(w: jax.Array, affine: Affine | None, spec: QSpec, size: int) -> tuple[Any, Any]:
    """Returns the given scales and zero points, or zeros for those to be computed."""
    if affine is not None:
        return affine.scale, affine.zero_point
    one = jax.eval_shape(partial(spec.calibrator.fit, spec=spec), w[:size])
    count = w.shape[0] // size
    scale, zero_point = (
        None if x is None else jnp.zeros((count, w.shape[1]), x.dtype) for x in one
    )
    return scale, zero_point


def widened(each: Sequence[np.ndarray], more: int, diagonal: float = 0) -> np.ndarray:
    """Returns matrices as one float32 array with additional rows and columns, which are zero except
    on the diagonal.
    """
    size = len(each[0])
    wide = np.zeros((len(each), size + more, size + more), np.float32)
    for to, x in zip(wide, each, strict=True):
        to[:size, :size] = x
    own = np.arange(size, size + more)
    wide[:, own, own] = diagonal
    return wide
