"""The columns of matrices, rounded one by one: later columns make up for errors of earlier ones."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import fail
from ..statistics.calibrators import Affine
from ..statistics.granularity import per_block
from ..tensor.grid import rounded_to
from ..tensor.spec import QSpec
from .grids import Grids
from .matrices import (
    Matrix,
    Order,
    order_of,
    stacked,
)

Array = np.ndarray

BLOCK = 32
"""Columns of a block: corrected one by one. All later columns are corrected by one product. On CPU,
the loop takes half as long as with blocks of 128.
"""


class Columns(NamedTuple):
    """The result of the loop, in the order of the columns.

    Attributes:
      rounded: their values on the grid, float32 [columns, rows].
      unrounded: their values just before they were rounded.
      scale: scale of each group, [groups, rows].
      zero_point: likewise, or `None`.
    """

    rounded: jax.Array
    unrounded: jax.Array
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
    targets: jax.Array | None = None,
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
      targets: values that the columns are rounded to instead, if they are known.
    """
    count, _ = w.shape

    def block(start: jax.Array, state: Columns) -> Columns:
        _, left, scales, zero_points = state
        rows = lax.dynamic_slice_in_dim(left, start, size)
        corner = lax.dynamic_slice(upper, (start, start), (size, size))
        gain = None if carried is None else lax.dynamic_slice(carried, (start, start), (size, size))
        if affine is None:
            fitted = spec.calibrator.fit(rows, spec)
            group_index = start // size
            scales = lax.dynamic_update_slice_in_dim(scales, fitted.scale, group_index, 0)
            if zero_points is not None and fitted.zero_point is not None:
                zero_points = lax.dynamic_update_slice_in_dim(
                    zero_points, fitted.zero_point, group_index, 0
                )

        def column(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            rows, rounded, errors = carry
            x = rows[i]
            group_index = start // size if group is None else group[start + i]
            zero_point = None if zero_points is None else zero_points[group_index]
            y = (
                rounded_to(x, scales[group_index], zero_point, spec)
                if targets is None
                else targets[start + i]
            )
            error = (x - y) / corner[i, i]
            ahead = jnp.arange(size) > i
            change = corner[i][:, None] * error[None]
            if gain is not None:
                change -= gain[i][:, None] * x[None]
            rows = jnp.where(ahead[:, None], rows - change, rows)
            return rows, rounded.at[i].set(y), errors.at[i].set(error)

        empty = jnp.zeros_like(rows)
        corrected_rows, rounded, errors = lax.fori_loop(0, size, column, (rows, empty, empty))
        if count > size:
            is_later = (jnp.arange(count) >= start + size)[None]
            slab = jnp.where(is_later, lax.dynamic_slice_in_dim(upper, start, size), 0)
            left = left - _product(slab, errors)
            if carried is not None:
                slab = jnp.where(is_later, lax.dynamic_slice_in_dim(carried, start, size), 0)
                left = left + _product(slab, corrected_rows)
        left = lax.dynamic_update_slice_in_dim(left, corrected_rows, start, 0)
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
    kinds = jax.eval_shape(partial(spec.calibrator.fit, spec=spec), w[:size])
    count = w.shape[0] // size
    scale, zero_point = (
        None if x is None else jnp.zeros((count, w.shape[1]), x.dtype) for x in kinds
    )
    return scale, zero_point


def widened(matrices: Sequence[np.ndarray], padding: int, diagonal: float = 0) -> np.ndarray:
    """Returns matrices as one float32 array with additional rows and columns, which are zero except
    on the diagonal.
    """
    size = len(matrices[0])
    wide = np.zeros((len(matrices), size + padding, size + padding), np.float32)
    for to, x in zip(wide, matrices, strict=True):
        to[:size, :size] = x
    padded = np.arange(size, size + padding)
    wide[:, padded, padded] = diagonal
    return wide


# Sweeps over a matrix whose codes are chosen: scales that fit the codes, and codes that fit each
# other.
#
# GPTQ chooses a column once, and corrects only those after it. A sweep goes over all columns again
# and takes for each the code of least error, given all others (coordinate descent). Before it, the
# scales of a row are those of least squares, given its codes. Each step lowers the error of the
# product, `tr((W - Q) H (W - Q)')`, or leaves it.
#
# Sources: codes one at a time: Behdin et al., "QuantEase", arXiv:2309.01885; scales after GPTQ: Kim
# et al., "Two-Stage Grid Optimization for Group-wise Quantization of LLMs", arXiv:2602.02126. That
# paper fits one scale at a time; here all scales of a row are those of one linear system.


_RIDGE = 1e-4
"""How much a fitted scale is held at the scale before, relative to the error that it alone
decides: groups of small inputs hardly decide theirs.
"""

_SWEPT = 2**24
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
    count = max(_SWEPT // len(order), 1)
    scales = np.empty(scale.shape)
    for start in range(0, len(w), count):
        rows = slice(start, start + count)
        row_units = units[rows][:, order]
        target = np.add.reduceat(row_units * (w[rows][:, order] @ h), starts, 1)
        matrix = np.empty((len(row_units), len(starts), len(starts)))
        for k, (i, j) in enumerate(zip(starts, stops, strict=True)):  # it is symmetric
            product = np.add.reduceat(
                (row_units[:, i:j] @ h[i:j, i:]) * row_units[:, i:], starts[k:] - i, 1
            )
            matrix[:, k, k:] = matrix[:, k:, k] = product
        diagonal = np.einsum("ngg->ng", matrix)
        ridge = _RIDGE * diagonal + np.finfo(np.float32).tiny
        diagonal += ridge
        target = target + ridge * scale[rows]
        scales[rows] = np.linalg.solve(matrix, target[..., None])[..., 0]
    ratio = scales / np.where(scale == 0, 1, scale)
    return np.where((ratio > 0.5) & (ratio < 2), scales, scale)


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
    padding = -count % size
    wide = [
        None if x is None else np.pad(x.T, ((0, padding), (0, 0)), mode="edge")
        for x in (w, rounded, scale, zero_point)
    ]
    (h,) = widened([hessian], padding, 1)
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
        old = some(rounded)

        def column(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            values, ahead = carry
            best = values[i] + ahead[i] / corner[i, i]
            to = None if zero_points is None else zero_points[i]
            y = rounded_to(best, scales[i], to, spec)
            return values.at[i].set(y), ahead - corner[i][:, None] * (y - values[i])[None]

        new, _ = lax.fori_loop(0, size, column, (old, some(gradient)))
        rounded = lax.dynamic_update_slice_in_dim(rounded, new, start, 0)
        return rounded, gradient - exact(slab.T, new - old)

    start = rounded, exact(hessian, w - rounded)
    return lax.fori_loop(0, len(w) // size, block, start)[0]


# Matrices of one shape that are rounded together: one loop over their columns, on the device.


_MOST = 2**28
"""Maximum number of bytes that the loop over the columns of several matrices reads."""


def parted(matrices: Sequence[Matrix]) -> Iterator[Sequence[Matrix]]:
    """Splits matrices of one shape into parts that fit into memory, of at least one matrix each."""
    rows, columns = matrices[0].element_ids.shape
    count = max(_MOST // (4 * columns * (columns + rows)), 1)
    for start in range(0, len(matrices), count):
        yield matrices[start : start + count]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices to round, [matrices, rows, columns].

    Attributes:
      element_ids: for each entry the number of its element of the weight.
      w: their values, float32.
      label: for each entry the index of its scale.
      order: the order of columns, [matrices, columns].
      columns: for each column the number of its group, likewise.
      grids: scales and zero points, by index.
      spec: how values are rounded.
    """

    element_ids: Array
    w: Array
    label: Array
    order: Array
    columns: Array
    grids: Grids
    spec: QSpec

    @classmethod
    def of(cls, matrices: Sequence[Matrix], grids: Grids, spec: QSpec, order: Order) -> "Stack":
        """Collects matrices of a weight."""
        element_ids = stacked(matrices)
        label = grids.label(element_ids)
        columns = np.stack([_groups(labels) for labels in label])
        orders = [
            order_of(matrix.hessian, groups, order)
            for matrix, groups in zip(matrices, columns, strict=True)
        ]
        return cls(
            element_ids, grids.floats(element_ids), label, np.stack(orders), columns, grids, spec
        )

    def of_some(self, which: Sequence[int]) -> "Stack":
        """Returns some of them."""
        if len(which) == len(self.w):
            return self
        fields = ("element_ids", "w", "label", "order", "columns")
        return dataclasses.replace(self, **{name: getattr(self, name)[which] for name in fields})

    def nearest(self) -> Array:
        """Returns the matrices rounded to nearest with the current scales."""
        scale, zero_point = self.grids.at(self.label)
        return np.array(_nearest(self.w, scale, zero_point, spec=self.spec))

    def static(self, w: Array, upper: list[Array], carried: list[Array] | None) -> Array:
        """Returns the matrices with rounded columns, with the current scales."""
        size = min(BLOCK, w.shape[-1])
        padding = -w.shape[-1] % size
        label = np.pad(self._ordered(self.label), ((0, 0), (0, padding), (0, 0)), mode="edge")
        affine = Affine(*self.grids.at(label))  # pyright: ignore
        return self._run(w, upper, carried, size, affine)[0]

    def dynamic(self, w: Array, upper: list[Array], carried: list[Array] | None) -> Array:
        """Returns the matrices with rounded columns. Scales are computed during the loop and
        written to the grids.
        """
        runs = np.take_along_axis(self.columns, self.order, 1)
        is_first = np.diff(runs, prepend=-1) != 0
        starts = np.flatnonzero(is_first[0])
        sizes = np.diff(starts, append=runs.shape[1])
        size, rows = int(sizes[0]), w.shape[1]
        ranks = np.unique(self.label)
        is_separate = len(ranks) == len(w) * rows * len(starts)
        label_counts = np.bincount(self.label.ravel(), minlength=len(self.grids.sizes))
        if not (
            self.grids.is_plain
            and is_separate
            and len(starts) == runs.max() + 1
            and bool(np.all(sizes[:-1] == size))
            and bool(np.all(is_first == is_first[0]))
            and bool(np.all(label_counts[ranks] == self.grids.sizes[ranks]))
        ):
            problem = "scales of this granularity cannot be computed during the loop: that needs "
            problem += "groups of one size, a scale for each row, in float or a power of two."
            groups = f"{len(starts)} groups of {sorted({*sizes.tolist()})} columns"
            detail = f"{self.spec} of {rows} rows, {groups}"
            raise fail("algorithms.gptq", problem, given=detail, fix="pass groups='static'.")
        by_row = per_block({0: size, 1: 1})
        spec = dataclasses.replace(self.spec, granularity=by_row, stacked=())
        rounded, affine = self._run(w, upper, carried, size, None, spec)
        self.grids.put(self._ordered(self.label)[:, starts], affine)
        return rounded

    def fit_scales(self, w: Array, importance: Array, factors: Sequence[float]) -> None:
        """Multiplies each scale by the factor of least expected error, and writes it to the grids.

        The error is that of rounding each entry, squared, times the importance of its column.

        Args:
          w: the matrices, [matrices, rows, columns].
          importance: of each column, [matrices, columns].
          factors: factors that are tried besides 1.
        """
        tried = np.asarray([1, *factors], np.float32)
        for i, labels in enumerate(self._scales_of_rows):
            if labels is not None:
                grid, groups = self.grids.at(self.label[i]), self.columns[i]
                errors = _errors_of_scales(
                    w[i], *grid, tried, importance[i], groups, spec=self.spec, count=labels.shape[1]
                )
                factor = tried[np.argmin(errors, 0)]
                self.grids.put_scales(labels, self.grids.at(labels)[0] * factor)

    def swept(self, w: Array, rounded: Array, hessians: Sequence[Array]) -> Array:
        """Returns the matrices after a sweep over their columns. Scales of rows are fitted to their
        codes, and written to the grids.

        Args:
          w: the matrices, [matrices, rows, columns].
          rounded: their values before, likewise.
          hessians: the damped Hessian of each.
        """
        result = np.empty_like(rounded)
        for i, (hessian, row_labels) in enumerate(zip(hessians, self._scales_of_rows, strict=True)):
            label, values = self.label[i], rounded[i]
            if row_labels is not None:
                scale, _ = self.grids.at(label)
                units = np.divide(values, scale, out=np.zeros_like(scale), where=scale != 0)
                of_rows = self.grids.at(row_labels)[0], self.columns[i], hessian
                self.grids.put_scales(row_labels, fitted_scales(w[i], units, *of_rows))
                values = units * self.grids.at(label)[0]
            result[i] = swept(w[i], values, *self.grids.at(label), hessian, self.spec)
        return result

    @cached_property
    def _scales_of_rows(self) -> list[Array | None]:
        """For each matrix the indices of its scales, [rows, groups]; `None` if they are not floats,
        or belong to several rows or to other matrices too.
        """
        labels_of_matrix = []
        for label, columns in zip(self.label, self.columns, strict=True):
            row_labels = label[:, np.unique(columns, return_index=True)[1]]
            count = np.bincount(label.ravel(), minlength=len(self.grids.sizes))
            is_own = count[row_labels] == self.grids.sizes[row_labels]
            is_apart = np.count_nonzero(count) == row_labels.size and bool(np.all(is_own))
            labels_of_matrix.append(row_labels if self.grids.has_floats and is_apart else None)
        return labels_of_matrix

    def _ordered(self, x: Array) -> Array:
        """Returns matrices with the columns first, in the order in which they are rounded."""
        return np.take_along_axis(x, self.order[:, None], 2).swapaxes(1, 2)

    def _run(
        self,
        w: Array,
        upper: list[Array],
        carried: list[Array] | None,
        size: int,
        affine: Affine | None,
        spec: QSpec | None = None,
    ) -> tuple[Array, Affine]:
        """Runs the loop on whole blocks: columns of zeros are appended."""
        count = w.shape[-1]
        padding = -count % size
        also = None if carried is None else widened(carried, padding)
        group = None if affine is None else np.arange(count + padding, dtype=np.int32)
        result = _round_each(
            jnp.asarray(np.pad(self._ordered(w), ((0, 0), (0, padding), (0, 0)))),
            jnp.asarray(widened(upper, padding, 1)),  # no copy of it remains on the host
            also,
            affine,
            group,
            spec=spec or self.spec,
            size=size,
        )
        rounded = np.empty_like(self.w)
        columns = np.asarray(result.rounded)[:, :count].swapaxes(1, 2)
        np.put_along_axis(rounded, self.order[:, None], columns, 2)
        return rounded, Affine(result.scale, result.zero_point)


def _groups(label: Array) -> Array:
    """Returns for each column of a matrix the number of its group: columns with the same scales."""
    row = label[:1]
    if np.array_equal(label, label[:, :1] + (row - row[0, 0])):
        label = row  # the column part of labels is the same in each row, so one row is enough
    _, starts, group = np.unique(label, axis=1, return_index=True, return_inverse=True)
    rank = np.empty(len(starts), int)
    rank[np.argsort(starts)] = np.arange(len(starts))
    return rank[group.ravel()]


@partial(jax.jit, static_argnames=("spec", "size"))
def _round_each(
    w: Array,
    upper: Array,
    carried: Array | None,
    affine: Affine | None,
    group: Array | None,
    *,
    spec: QSpec,
    size: int,
) -> Columns:
    """Rounds the columns of each matrix; all share `group`."""

    def one(w: Any, upper: Any, carried: Any, affine: Any) -> Columns:
        return round_columns(w, upper, carried, affine, group, spec=spec, size=size)  # type: ignore[arg-type]

    return jax.vmap(one)(w, upper, carried, affine)


_nearest = jax.jit(rounded_to, static_argnames="spec")


@partial(jax.jit, static_argnames=("spec", "count"))
def _errors_of_scales(
    w: Any,
    scale: Any,
    zero_point: Any,
    factors: Array,
    importance: Array,
    groups: Array,
    *,
    spec: QSpec,
    count: int,
) -> jax.Array:
    """Returns the weighted squared error of rounding with each factor, [factors, rows, groups]."""

    def error(factor: jax.Array) -> jax.Array:
        difference = w - rounded_to(w, scale * factor, zero_point, spec)
        weighted = jnp.square(difference) * importance[None]
        return jax.ops.segment_sum(weighted.T, groups, num_segments=count).T

    return lax.map(error, jnp.asarray(factors))
