"""Sweeps over a matrix whose codes are chosen: scales that fit the codes, and codes that fit each
other.

GPTQ chooses a column once, and corrects only those after it. A sweep goes over all columns again
and takes for each the code of least error, given all others (coordinate descent). Before it, the
scales of a row are those of least squares, given its codes. Each step lowers the error of the
product, `tr((W - Q) H (W - Q)')`, or leaves it.

Sources: codes one at a time: Behdin et al., "QuantEase", arXiv:2309.01885; scales after GPTQ: Kim
et al., "Two-Stage Grid Optimization for Group-wise Quantization of LLMs", arXiv:2602.02126. That
paper fits one scale at a time; here all scales of a row are those of one linear system.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..tensor import QSpec
from ..tensor._shared import rounded_to
from ._columns import BLOCK, widened

Array = np.ndarray

_RIDGE = 1e-4
"""How much a fitted scale is held at the scale before, relative to the error that it alone
decides: groups of small inputs hardly decide theirs.
"""

_MOST = 2**24
"""Number of elements of a temporary array."""


def fitted_scales(w: Array, units: Array, scale: Array, columns: Array, hessian: Array) -> Array:
    """Returns the scales of least error of a matrix, [rows, groups].

    A scale that would change its sign, or by more than a factor of two, stays.

    Args:
      w: the matrix, float32 [rows, columns].
      units: its chosen values, in units of their scale, likewise.
      scale: the scales of its rows, [rows, groups].
      columns: for each column the number of its group.
      hessian: the damped Hessian.
    """
    order = np.argsort(columns, kind="stable")
    starts = np.flatnonzero(np.diff(columns[order], prepend=-1))
    stops = np.append(starts[1:], len(order))
    h = hessian[np.ix_(order, order)]
    count = max(_MOST // len(order), 1)
    found = np.empty(scale.shape)
    for start in range(0, len(w), count):
        rows = slice(start, start + count)
        own = units[rows][:, order]
        target = np.add.reduceat(own * (w[rows][:, order] @ h), starts, 1)
        matrix = np.empty((len(own), len(starts), len(starts)))
        for k, (i, j) in enumerate(zip(starts, stops, strict=True)):  # it is symmetric
            product = np.add.reduceat((own[:, i:j] @ h[i:j, i:]) * own[:, i:], starts[k:] - i, 1)
            matrix[:, k, k:] = matrix[:, k:, k] = product
        diagonal = np.einsum("ngg->ng", matrix)
        held = _RIDGE * diagonal + np.finfo(np.float32).tiny
        diagonal += held
        target = target + held * scale[rows]
        found[rows] = np.linalg.solve(matrix, target[..., None])[..., 0]
    ratio = found / np.where(scale == 0, 1, scale)
    return np.where((ratio > 0.5) & (ratio < 2), found, scale)


def swept(
    w: Array,
    rounded: Array,
    scale: Array,
    zero_point: Array | None,
    hessian: Array,
    spec: QSpec,
) -> Array:
    """Returns the values of a matrix on its grid, [rows, columns], after one sweep.

    Args:
      w: the matrix, [rows, columns].
      rounded: its values before.
      scale: scale of each element.
      zero_point: likewise, or `None`.
      hessian: the damped Hessian.
      spec: how values are rounded.
    """
    count, size = w.shape[1], min(BLOCK, w.shape[1])
    more = -count % size
    wide = [
        None if x is None else np.pad(x.T, ((0, more), (0, 0)), mode="edge")
        for x in (w, rounded, scale, zero_point)
    ]
    (h,) = widened([hessian], more, 1)
    return np.asarray(_swept(*wide, h, spec=spec, size=size))[:count].T  # type: ignore[arg-type]


@partial(jax.jit, static_argnames=("spec", "size"))
def _swept(
    w: jax.Array,
    rounded: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    hessian: jax.Array,
    *,
    spec: QSpec,
    size: int,
) -> jax.Array:
    """Sweeps over the columns of a matrix [columns, rows], block by block.

    Within a block, the gradient is updated after each column; after it, by one product.
    """
    exact = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

    def block(b: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rounded, gradient = state
        start = b * size
        some = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        scales, zero_points = some(scale), None if zero_point is None else some(zero_point)
        slab = some(hessian)
        corner = some(slab, axis=1)
        before = some(rounded)

        def column(i: jax.Array, own: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            values, ahead = own
            best = values[i] + ahead[i] / corner[i, i]
            to = None if zero_points is None else zero_points[i]
            y = rounded_to(best, scales[i], to, spec)
            return values.at[i].set(y), ahead - corner[i][:, None] * (y - values[i])[None]

        after, _ = lax.fori_loop(0, size, column, (before, some(gradient)))
        rounded = lax.dynamic_update_slice_in_dim(rounded, after, start, 0)
        return rounded, gradient - exact(slab.T, after - before)

    start = rounded, exact(hessian, w - rounded)
    return lax.fori_loop(0, len(w) // size, block, start)[0]
