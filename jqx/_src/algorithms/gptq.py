"""GPTQ: chooses the codes of a weight column by column; later columns compensate for the rounding
errors of earlier ones."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import Rule, check_fields, choice, nothing, number, whole
from ..errors import fail
from ..files import Path
from ..statistics.calibrators import Affine, Calibrator, fit_of
from ..statistics.granularity import per_block
from ..tensor.grid import rounded_to
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec
from ..transforms.algorithm import AlgorithmResult
from ..transforms.plan import Plan
from .grids import Grids, Group
from .interface import AlgorithmReport, MatrixReport, algorithm, check_options
from .layer_by_layer import LayerByLayer
from .matrices import (
    Factor,
    Matrix,
    Order,
    Unsupported,
    by_shape,
    carried_over,
    damped,
    factor,
    ledoit_wolf_damping,
    order_of,
    stacked,
)
from .store import Where

# Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
# Transformers", arXiv:2210.17323; corrections of columns for float inputs: Li et al., "GPTAQ:
# Efficient Finetuning-Free Quantization for Asymmetric Calibration", arXiv:2504.02692.


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
def solve(
    W: jax.Array,
    U: jax.Array,
    P: jax.Array | None,
    affine: Affine | None,
    group: jax.Array | None,
    *,
    spec: QSpec,
    size: int = BLOCK,
    targets: jax.Array | None = None,
) -> Columns:
    """Algorithm 1 of the paper: rounds the columns of a matrix in order.

    For a column `w` of `W`, rounded to `q`, all later columns lose `(w - q) / U[i, i] * U[i]` and
    gain `w * P[i]`. Within a block of `size` columns this is done column by column; columns after
    the block are corrected by one product. The compile time does not depend on their number.

    Args:
      W: float32 [columns, rows], the transpose of the paper's; the number of columns is a multiple
        of `size`.
      U: float32 [columns, columns], upper triangular: `U.T @ U` is the inverse of the Hessian.
      P: [columns, columns], strictly upper triangular, as in GPTAQ; or `None`.
      affine: scales and zero points, [groups, rows]. `None` computes them when the loop reaches a
        group, from columns that are corrected already; a group is then a block.
      group: for each column, the index of its group in `affine`.
      spec: the format and the round mode. Without `affine`, also how scales are computed, for a
        matrix [columns, rows] of `size` columns, one for each row.
      size: number of columns of a block.
      targets: values that the columns are rounded to instead, if they are known.
    """
    count, _ = W.shape

    def block(start: jax.Array, state: Columns) -> Columns:
        Q, W, scales, zero_points = state
        W_block = lax.dynamic_slice_in_dim(W, start, size)
        U_block = lax.dynamic_slice(U, (start, start), (size, size))
        P_block = None if P is None else lax.dynamic_slice(P, (start, start), (size, size))
        if affine is None:
            fitted = fit_of(spec.calibrator, W_block, spec)
            put = partial(lax.dynamic_update_slice_in_dim, start_index=start // size, axis=0)
            scales = put(scales, fitted.scale)
            if zero_points is not None and fitted.zero_point is not None:
                zero_points = put(zero_points, fitted.zero_point)

        def column(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            W_block, Q_block, E = carry
            w, g = W_block[i], start // size if group is None else group[start + i]
            zero_point = None if zero_points is None else zero_points[g]
            if targets is None:
                q = rounded_to(w, scales[g], zero_point, spec)
            else:
                q = targets[start + i]
            error = (w - q) / U_block[i, i]
            change = U_block[i][:, None] * error[None]
            if P_block is not None:
                change -= P_block[i][:, None] * w[None]
            is_later = (jnp.arange(size) > i)[:, None]
            W_block = jnp.where(is_later, W_block - change, W_block)
            return W_block, Q_block.at[i].set(q), E.at[i].set(error)

        empty = jnp.zeros_like(W_block)
        W_block, Q_block, E = lax.fori_loop(0, size, column, (W_block, empty, empty))
        if count > size:
            is_later = (jnp.arange(count) >= start + size)[None]
            U_later = jnp.where(is_later, lax.dynamic_slice_in_dim(U, start, size), 0)
            W = W - _product(U_later, E)
            if P is not None:
                P_later = jnp.where(is_later, lax.dynamic_slice_in_dim(P, start, size), 0)
                W = W + _product(P_later, W_block)
        W = lax.dynamic_update_slice_in_dim(W, W_block, start, 0)
        Q = lax.dynamic_update_slice_in_dim(Q, Q_block, start, 0)
        return Columns(Q, W, scales, zero_points)

    start = Columns(jnp.zeros_like(W), W, *_scales(W, affine, spec, size))
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
        return solve(w, upper, carried, affine, group, spec=spec, size=size)  # type: ignore[arg-type]

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


# GPTQ: chooses the codes of a weight column by column; later columns compensate for the rounding
# errors of earlier ones.


_STRENGTH = {"none": 0.0, "qep": 0.5, "gptaq": 0.25}
_LEAST_INPUTS = dataclasses.replace(number(), convert=lambda count: count)  # printed as given
_FACTOR = number(0, 2, above=True)
_FACTORS = Rule(
    "factors above 0 and up to 2, such as (0.9, 0.8)",
    lambda factors: isinstance(factors, tuple),
    lambda factors: all(_FACTOR.is_kind(x) and _FACTOR.holds(x) for x in factors),
)


@algorithm("gptq", "pass options by name, such as jqx.algorithms.gptq(order='activation').")
@dataclasses.dataclass(frozen=True)
class gptq(LayerByLayer):
    """Chooses the codes of weights by GPTQ: an algorithm of `jqx.ptq` and `jqx.quantize_params`.

    For every matrix that a site multiplies by, it minimizes the squared error of the product over
    the inputs, `tr((W - Q) H (W - Q)')` with `H` the sum of `x x'`. Columns are rounded one by one,
    and the remaining columns compensate for the error of each. A row whose final error is above
    that of rounding to nearest with the same scales is rounded to nearest, and reported. All
    formats and granularities of a `QSpec` are supported. Activations stay in float while codes are
    chosen.

    In the sequential mode, leaves of parameters may be `jqx.interop.Lazy`, for a model larger than
    memory. A leaf is read for the stage, or the site, that needs it, and dropped before the next.
    Results are stored in files, in the folder of the checkpoint or in a temporary one that lives as
    long as the result. The returned weights are lazy; as their source is a digest of the run,
    `jqx.save(..., resume=True)` continues an interrupted save. A stack that a scan steps over is
    read whole in each step, so separate layers need the least memory. If several sites share a
    weight, the function is run once more before.

    Attributes:
      damping: what is added to the diagonal of `H`, relative to its mean. If `H` is not positive
        definite then, it is raised by factors of ten, up to 1. `"ledoit-wolf"` estimates it for
        each matrix, as if its inputs were independent: much for few inputs, nearly none for many.
        The report has the final value.
      order: the order in which columns are rounded. `"activation"` starts with the largest inputs;
        `"groups"` does so inside each group, and orders groups by their largest input; `"given"`
        keeps the order. The codes are stored in the original order in any case. `None` takes
        `"activation"`, which had the least error on the models that were tried, or `"groups"` if
        `groups` is `"dynamic"`.
      groups: `"static"` computes all scales before the first column is rounded. `"dynamic"`
        computes those of a group when the loop reaches it, from columns that are corrected already;
        not with `order="activation"`, nor for scales that are quantized themselves (nvfp4).
      calibrator: computes the scales; `None` takes that of each spec.
      sequential: whether `jqx.ptq` processes layer by layer, each on inputs from the quantized
        layers before it. Otherwise all layers see float inputs, in one pass.
      propagation: how a site compensates for the error of its inputs, if `sequential`. `"qep"`
        corrects the weight before rounding, `"gptaq"` corrects each column during the loop;
        `"none"` does not. Integers that the function computes from floats, such as the expert of a
        token, are those of the quantized function in both. `"qep"` leaves a row as it is if
        its scales would cut the correction off so that it loses.
      strength: how much of that correction is applied, 0 to 1; `None` is .5 for `qep` and .25 for
        `gptaq`.
      ill_conditioned: what to do with a matrix whose `H` no damping makes positive definite:
        `"error"` raises, `"round"` rounds to nearest; the report says why. Inputs that are not
        finite are an error in any case, unless `on_nonfinite="ignore"` leaves them out.
      unsupported: what to do with a weight whose inputs cannot be observed, such as a table that is
        looked up, or one inside a `shard_map`: likewise.
      least_inputs: minimum number of inputs of a matrix for each of its columns. With fewer, it is
        rounded to nearest, and the report says why. An expert that few tokens reach would be fitted
        to what these have in common by chance. `None` is 1 for matrices that are multiplied by at
        once, such as experts, or that only some rows of their site reach, and 0 for others. Rows of
        zeros do not reach a matrix.
      factors: factors of the scales that are tried besides 1. Each scale takes that of the least
        squared error of rounding and clipping, weighted by what later columns cannot make up for.
        Scales that rows or matrices share, and those that are quantized themselves, stay as they
        are. Not with `groups="dynamic"`.
      sweeps: number of sweeps over a matrix after the loop. Each first fits the scales of rows to
        their codes, by least squares, and then takes for each column the codes of least error,
        given all others. Scales that rows or matrices share, and those that are quantized
        themselves, stay as they are.
      weight: weights of the rows of the inputs, as in `jqx.extend.hessian`: a function of the
        values of a batch, such as `lambda tokens: tokens != 0` if 0 is padding. `None` gives all
        rows the same weight.
      offload: whether activations of the batches are kept on the host between stages, or, with
        `"disk"`, in temporary files, if `sequential`. One batch at a time is then on the device.
        That is slower, with the same codes.
      checkpoint: a folder for results so far; `None` stores nothing. After an interruption, a run
        with the same function, plan, options, parameters and batches reads finished matrices from
        it. On the same devices the result is the same, bit for bit.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: a field is out of range or unknown, or fields exclude each other; at run time, the
        checkpoint belongs to another run.

    Source: Frantar et al., arXiv:2210.17323; `qep`: Arai and Ichikawa, arXiv:2504.09629; `gptaq`:
    Li et al., arXiv:2504.02692; the order by groups: GPTQModel; sweeps: Behdin et al.,
    arXiv:2309.01885, and Kim et al., arXiv:2602.02126.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w = jax.random.normal(jax.random.key(0), (64, 8))
      >>> x = jax.random.normal(jax.random.key(1), (256, 8)) @ jnp.ones((8, 64)) + 0.1
      >>> quantize = jqx.ptq(f, jqx.Policy({".*": "int4"}), jqx.algorithms.gptq(), progress=False)
      >>> entry = quantize(w, [x]).details[0]
      >>> entry.after < 0.1 * entry.before
      True
    """

    damping: float | Literal["ledoit-wolf"] = 0.01
    order: Order | None = None
    groups: Literal["static", "dynamic"] = "static"
    calibrator: Calibrator | None = None
    sequential: bool = True
    propagation: Literal["none", "qep", "gptaq"] = "none"
    strength: float | None = None
    ill_conditioned: Literal["error", "round"] = "error"
    unsupported: Unsupported = "error"
    least_inputs: float | None = None
    factors: tuple[float, ...] = ()
    sweeps: int = 0
    weight: Callable[..., Any] | None = None
    offload: Where = False
    checkpoint: Path | None = None
    function: ClassVar[str] = "algorithms.gptq"

    def __post_init__(self) -> None:
        name = "algorithms.gptq"
        fix = "pass one of these; the policy sets the size of groups: the scheme 'int4:group=32'."
        check_fields(name, self, fix, groups=choice("static", "dynamic"))
        check_options(
            name,
            self,
            damping=number(0, 1, above=True) | choice("ledoit-wolf"),
            order=choice("groups", "activation", "given", None),
            propagation=choice(*_STRENGTH),
            strength=number(0, 1) | nothing(),
            ill_conditioned=choice("error", "round"),
            unsupported=choice("error", "round"),
            least_inputs=_LEAST_INPUTS | nothing(),
            factors=_FACTORS,
            sweeps=whole(),
        )
        for clash, *fields in (
            (self.groups == "dynamic" and self.order == "activation", "groups", "order"),
            (self.propagation != "none" and not self.sequential, "propagation", "sequential"),
            (self.propagation == "none" and self.strength is not None, "strength", "propagation"),
            (self.offload and not self.sequential, "offload", "sequential"),
            (bool(self.factors) and self.groups == "dynamic", "factors", "groups"),
        ):
            if clash:
                problem = f"`{fields[0]}` and `{fields[1]}` exclude each other."
                detail = " and ".join(f"{field}={getattr(self, str(field))!r}" for field in fields)
                raise fail(name, problem, given=detail, fix="leave one of them out.")

    @property
    def lazy(self) -> bool:
        """Whether parameters may be lazy, and are read when their site is reached."""
        return self.sequential

    def __call__(self, plan: Plan, params: Any, stats: Any) -> AlgorithmResult:
        """Returns parameters with codes chosen from statistics of float inputs, in one pass."""
        entries: list[MatrixReport] = []
        leaves: dict[str, Any] = {}
        plan.map_weights(lambda weight, x: leaves.setdefault(weight.path, x), params)
        codes: dict[str, QTensor] = {}
        for group in Group.of_plan(plan, {path: x.size for path, x in leaves.items()}):
            grids = Grids.of_group(group, leaves, self.spec_of)
            for same in by_shape(self.matrices(plan, group, leaves, stats or {}, entries)):
                entries += self.solve(same, grids, group.whole)
            codes |= grids.quantized()
        quantized = plan.map_weights(lambda weight, _: codes[weight.path], params)
        return AlgorithmResult(quantized, AlgorithmReport(tuple(entries)))

    def _solve(
        self, matrices: Sequence[Matrix], grids: Grids, spec: QSpec
    ) -> tuple[Stack, Array, list[float | None], list[str]]:
        order = self.order or ("activation" if self.groups == "static" else "groups")
        stack = Stack.of(matrices, grids, spec, order)
        few_reasons = [x.why_few(self.least_inputs) for x in matrices]
        solved = [
            None if is_left else self._factor(matrix, order)
            for matrix, order, is_left in zip(matrices, stack.order, few_reasons, strict=True)
        ]
        good = [i for i, solution in enumerate(solved) if solution is not None]
        reasons = [
            (is_left or "its Hessian is not positive definite") if solution is None else ""
            for solution, is_left in zip(solved, few_reasons, strict=True)
        ]
        for matrix, solution, is_left in zip(matrices, solved, few_reasons, strict=True):
            if solution is None and not is_left:
                self._refuse(matrix)
        rounded = np.zeros_like(stack.w)
        if good:
            factors = [x for x in solved if x is not None]
            rounded[good] = self._rounded([matrices[i] for i in good], stack.of_some(good), factors)
        return stack, rounded, [x and x.damping for x in solved], reasons

    def _factor(self, matrix: Matrix, order: Array) -> Factor | None:
        damping = self.damping
        if damping == "ledoit-wolf":
            damping = ledoit_wolf_damping(matrix.hessian, matrix.rows, matrix.fourth)
        result = factor(matrix.hessian, damping, order=order)
        if result is None or self.propagation == "gptaq":  # gptaq needs float64
            return result
        return result._replace(upper=result.upper.astype(np.float32))

    def _rounded(
        self, matrices: Sequence[Matrix], stack: Stack, factors: Sequence[Factor]
    ) -> Array:
        strength = _STRENGTH[self.propagation] if self.strength is None else self.strength
        w, carried = stack.w, None
        cross = [matrix.drift.cross for matrix in matrices if matrix.drift is not None]
        if cross and (self.propagation == "qep" or self.factors or self.sweeps):
            w = np.stack(
                [
                    matrix.corrected(x, stack.grids.limits(label), strength, solved.damping)
                    for x, label, matrix, solved in zip(
                        w, stack.label, matrices, factors, strict=True
                    )
                ]
            ).astype(np.float32)
        if cross and self.propagation == "gptaq":
            carried = [
                carried_over(solved.upper, d[np.ix_(order, order)], strength)
                for order, d, solved in zip(stack.order, cross, factors, strict=True)
            ]
        start, uppers = w if carried is None else stack.w, [x.upper for x in factors]
        loop = stack.dynamic if self.groups == "dynamic" else stack.static
        solve = partial(loop, start, uppers, carried)
        if self.factors:
            # What rounding a column costs after all later columns made up for it: 1 / [H^-1]_jj of
            # the columns that are left (Optimal Brain Surgeon, Hassibi and Stork, 1993).
            importance = np.empty((len(w), w.shape[-1]), np.float32)
            for row, order, upper in zip(importance, stack.order, uppers, strict=True):
                saliency = np.diagonal(upper).astype(np.float64) ** -2
                row[order] = saliency / saliency.mean()
            stack.fit_scales(w, importance, self.factors)
        rounded = solve()
        if not self.sweeps:
            return rounded
        hessians = [
            damped(matrix.hessian, solved.damping).astype(np.float32)
            for matrix, solved in zip(matrices, factors, strict=True)
        ]
        for _ in range(self.sweeps):
            rounded = stack.swept(w, rounded, hessians)
        return rounded

    def _refuse(self, matrix: Matrix) -> None:
        if self.ill_conditioned == "round":
            return
        bad = int(np.sum(~np.isfinite(matrix.hessian)))
        problem = f"the Hessian of {matrix.name} is not positive definite, however it is damped."
        detail = f"{matrix.rows} inputs of {len(matrix.hessian)} channels; {bad} sums of "
        detail += "their products are not finite"
        fix = "calibrate on batches without NaN and infinities, or pass ill_conditioned='round'."
        raise fail("algorithms.gptq", problem, given=detail, fix=fix)
