"""Matrices of one shape that are rounded together: one loop over their columns, on the device."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import fail
from ..calibrators import Affine
from ..calibrators._shared import per_block
from ..tensor import QSpec
from ..tensor._shared import rounded_to
from ._columns import BLOCK, Columns, round_columns, widened
from ._factor import Order, objective, order_of
from ._grids import Grids
from ._matrices import Matrix, stacked
from ._sweeps import fitted_scales, swept

Array = np.ndarray

_MOST = 2**28
"""Maximum number of bytes that the loop over the columns of several matrices reads."""


def parted(matrices: Sequence[Matrix]) -> Iterator[Sequence[Matrix]]:
    """Splits matrices of one shape into parts that fit into memory, of at least one matrix each."""
    rows, columns = matrices[0].places.shape
    count = max(_MOST // (4 * columns * (columns + rows)), 1)
    for start in range(0, len(matrices), count):
        yield matrices[start : start + count]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices to round, [matrices, rows, columns].

    Attributes:
      places: for each entry the number of its element of the weight.
      w: their values, float32.
      label: for each entry the index of its scale.
      order: the order of columns, [matrices, columns].
      columns: for each column the number of its group, likewise.
      grids: scales and zero points, by index.
      spec: how values are rounded.
    """

    places: Array
    w: Array
    label: Array
    order: Array
    columns: Array
    grids: Grids
    spec: QSpec

    @classmethod
    def of(cls, matrices: Sequence[Matrix], grids: Grids, spec: QSpec, order: Order) -> "Stack":
        """Collects matrices of a weight."""
        places = stacked(matrices)
        label = grids.label(places)
        columns = np.stack([_groups(own) for own in label])
        orders = [
            order_of(matrix.hessian, own, order)
            for matrix, own in zip(matrices, columns, strict=True)
        ]
        return cls(places, grids.floats(places), label, np.stack(orders), columns, grids, spec)

    def of_some(self, which: Sequence[int]) -> "Stack":
        """Returns some of them."""
        if len(which) == len(self.w):
            return self
        own = ("places", "w", "label", "order", "columns")
        return dataclasses.replace(self, **{name: getattr(self, name)[which] for name in own})

    def nearest(self) -> Array:
        """Returns the matrices rounded to nearest with the current scales."""
        scale, zero_point = self.grids.at(self.label)
        return np.array(_nearest(self.w, scale, zero_point, spec=self.spec))

    def static(self, w: Array, upper: list[Array], carried: list[Array] | None) -> Array:
        """Returns the matrices with rounded columns, with the current scales."""
        size = min(BLOCK, w.shape[-1])
        more = -w.shape[-1] % size
        label = np.pad(self._ordered(self.label), ((0, 0), (0, more), (0, 0)), mode="edge")
        affine = Affine(*self.grids.at(label))  # pyright: ignore
        return self._run(w, upper, carried, size, affine)[0]

    def dynamic(self, w: Array, upper: list[Array], carried: list[Array] | None) -> Array:
        """Returns the matrices with rounded columns. Scales are computed during the loop and
        written to the grids.
        """
        runs = np.take_along_axis(self.columns, self.order, 1)
        first = np.diff(runs, prepend=-1) != 0
        starts = np.flatnonzero(first[0])
        sizes = np.diff(starts, append=runs.shape[1])
        size, rows = int(sizes[0]), w.shape[1]
        ranks = np.unique(self.label)
        apart = len(ranks) == len(w) * rows * len(starts)
        own = np.bincount(self.label.ravel(), minlength=len(self.grids.sizes))
        if not (
            self.grids.is_plain
            and apart
            and len(starts) == runs.max() + 1
            and bool(np.all(sizes[:-1] == size))
            and bool(np.all(first == first[0]))
            and bool(np.all(own[ranks] == self.grids.sizes[ranks]))
        ):
            raise fail(
                "algorithms.gptq",
                "scales of this granularity cannot be computed during the loop.",
                given=f"{self.spec} of {rows} rows, {len(starts)} groups of "
                f"{sorted({*sizes.tolist()})} columns",
                expected="groups of one size, with a separate scale for each row, in float or a "
                "power of two",
                fix="pass groups='static'.",
            )
        by_row = per_block({0: size, 1: 1})
        spec = dataclasses.replace(self.spec, granularity=by_row, stacked=())
        rounded, affine = self._run(w, upper, carried, size, None, spec)
        self.grids.put(self._ordered(self.label)[:, starts], affine)
        return rounded

    def searched(
        self,
        w: Array,
        hessians: Sequence[Array],
        factors: Sequence[float],
        solve: Callable[[], Array],
    ) -> Array:
        """Returns the matrices as `solve` rounds them with the best of several scales: each row
        takes the factor of its scales that has the least error. Its scales are written to the
        grids.

        Args:
          w: the matrices, [matrices, rows, columns].
          hessians: the damped Hessian of each.
          factors: factors of the scales that are tried besides 1.
          solve: rounds the matrices with the current scales.
        """

        def lost(rounded: Array) -> Array:
            return np.stack([objective(*x) for x in zip(w - rounded, hessians, strict=True)])

        labels = self._scales_of_rows
        best = solve()
        least, factor = lost(best), np.ones(best.shape[:2])
        start = [None if x is None else self.grids.at(x)[0] for x in labels]
        for own in factors if any(x is not None for x in labels) else ():
            self._scale(labels, start, np.full_like(factor, own))
            rounded = solve()
            error = lost(rounded)
            better = error < least
            best = np.where(better[..., None], rounded, best)
            least, factor = np.where(better, error, least), np.where(better, own, factor)
        self._scale(labels, start, factor)
        return best

    def _scale(self, labels: Sequence[Any], start: Sequence[Any], factor: Array) -> None:
        """Writes scales of rows times a factor, [matrices, rows]."""
        for label, scale, own in zip(labels, start, factor, strict=True):
            if label is not None:
                self.grids.put_scales(label, scale * own[:, None])

    def swept(self, w: Array, rounded: Array, hessians: Sequence[Array]) -> Array:
        """Returns the matrices after a sweep over their columns. Scales of rows are fitted to their
        codes, and written to the grids.

        Args:
          w: the matrices, [matrices, rows, columns].
          rounded: their values before, likewise.
          hessians: the damped Hessian of each.
        """
        found = np.empty_like(rounded)
        for i, (hessian, own) in enumerate(zip(hessians, self._scales_of_rows, strict=True)):
            label, values = self.label[i], rounded[i]
            if own is not None:
                scale, _ = self.grids.at(label)
                units = np.divide(values, scale, out=np.zeros_like(scale), where=scale != 0)
                of_rows = self.grids.at(own)[0], self.columns[i], hessian
                self.grids.put_scales(own, fitted_scales(w[i], units, *of_rows))
                values = units * self.grids.at(label)[0]
            found[i] = swept(w[i], values, *self.grids.at(label), hessian, self.spec)
        return found

    @cached_property
    def _scales_of_rows(self) -> list[Array | None]:
        """For each matrix the indices of its scales, [rows, groups]; `None` if they are not floats,
        or belong to several rows or to other matrices too.
        """
        found = []
        for label, columns in zip(self.label, self.columns, strict=True):
            own = label[:, np.unique(columns, return_index=True)[1]]
            count = np.bincount(label.ravel(), minlength=len(self.grids.sizes))
            is_own = count[own] == self.grids.sizes[own]
            is_apart = np.count_nonzero(count) == own.size and bool(np.all(is_own))
            found.append(own if self.grids.has_floats and is_apart else None)
        return found

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
        more = -count % size
        also = None if carried is None else widened(carried, more)
        group = None if affine is None else np.arange(count + more, dtype=np.int32)
        found = _round_each(
            jnp.asarray(np.pad(self._ordered(w), ((0, 0), (0, more), (0, 0)))),
            jnp.asarray(widened(upper, more, 1)),  # no copy of it remains on the host
            also,
            affine,
            group,
            spec=spec or self.spec,
            size=size,
        )
        rounded = np.empty_like(self.w)
        columns = np.asarray(found.rounded)[:, :count].swapaxes(1, 2)
        np.put_along_axis(rounded, self.order[:, None], columns, 2)
        return rounded, Affine(found.scale, found.zero_point)


def _groups(label: Array) -> Array:
    """Returns for each column of a matrix the number of its group: columns with the same scales."""
    first = label[:1]
    if np.array_equal(label, label[:, :1] + (first - first[0, 0])):
        label = first  # the column part of labels is the same in each row, so one row is enough
    _, first, group = np.unique(label, axis=1, return_index=True, return_inverse=True)
    rank = np.empty(len(first), int)
    rank[np.argsort(first)] = np.arange(len(first))
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
