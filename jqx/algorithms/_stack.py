"""Matrices of one shape, rounded together: one loop over their columns, on the device."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import require_that
from ..calibrators import Affine
from ..calibrators._shared import per_block
from ..tensor import QSpec
from ..tensor._shared import rounded_to
from ._columns import BLOCK, Columns, round_columns
from ._factor import Order, order_of
from ._grids import Grids
from ._matrices import Matrix, stacked

Array = np.ndarray

_MOST = 2**28
"""Bytes that the loop over the columns of several matrices reads, at most."""


def parted(matrices: Sequence[Matrix]) -> Iterator[Sequence[Matrix]]:
    """Yields matrices of one shape, as many at once as there is room for, at least one."""
    rows, columns = matrices[0].places.shape
    count = max(_MOST // (4 * columns * (columns + rows)), 1)
    for start in range(0, len(matrices), count):
        yield matrices[start : start + count]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices that are to be rounded, [matrices, rows, columns].

    Attributes:
      places: for each entry the element of the weight that it is.
      w: their values, float32.
      label: of each the index of its scale.
      order: of columns, [matrices, columns].
      columns: of each column the number of its group, likewise.
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
        """Reads matrices of a weight."""
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
        """Returns the matrices rounded to nearest with the scales as they are."""
        scale, zero_point = self.grids.at(self.label)
        return np.array(_nearest(self.w, scale, zero_point, spec=self.spec))

    def static(self, w: Array, upper: list[Array], carried: list[Array] | None) -> Array:
        """Returns the matrices with their columns rounded, with the scales as they are."""
        size = min(BLOCK, w.shape[-1])
        more = -w.shape[-1] % size
        label = np.pad(self._ordered(self.label), ((0, 0), (0, more), (0, 0)), mode="edge")
        affine = Affine(*self.grids.at(label))  # pyright: ignore
        return self._run(w, upper, carried, size, affine)[0]

    def dynamic(self, w: Array, upper: list[Array], carried: list[Array] | None) -> Array:
        """Returns the matrices with their columns rounded, with scales that are found on the way,
        and writes these.
        """
        runs = np.take_along_axis(self.columns, self.order, 1)
        first = np.diff(runs, prepend=-1) != 0
        starts = np.flatnonzero(first[0])
        sizes = np.diff(starts, append=runs.shape[1])
        size, rows = int(sizes[0]), w.shape[1]
        ranks = np.unique(self.label)
        apart = len(ranks) == len(w) * rows * len(starts)
        own = np.bincount(self.label.ravel(), minlength=len(self.grids.sizes))
        require_that(
            self.grids.is_plain
            and apart
            and len(starts) == runs.max() + 1
            and bool(np.all(sizes[:-1] == size))
            and bool(np.all(first == first[0]))
            and bool(np.all(own[ranks] == self.grids.sizes[ranks])),
            error=ValueError,
            function="algorithms.gptq",
            problem="these scales cannot be found on the way.",
            given=f"{self.spec} of {rows} rows, {len(starts)} groups of "
            f"{sorted({*sizes.tolist()})} columns",
            expected="groups of one size, of which each row has a scale of its own, in float or a "
            "power of two",
            mend="pass groups='static'.",
        )
        by_row = per_block({0: size, 1: 1})
        spec = dataclasses.replace(self.spec, granularity=by_row, stacked=())
        rounded, affine = self._run(w, upper, carried, size, None, spec)
        self.grids.put(self._ordered(self.label)[:, starts], affine)
        return rounded

    def _ordered(self, x: Array) -> Array:
        """Returns matrices with their columns first, in the order in which they are rounded."""
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
        """Runs the loop on whole blocks: columns of zeros are added behind."""
        count = w.shape[-1]
        more = -count % size
        also = None if carried is None else _widened(carried, more)
        group = None if affine is None else np.arange(count + more, dtype=np.int32)
        found = _round_each(
            jnp.asarray(np.pad(self._ordered(w), ((0, 0), (0, more), (0, 0)))),
            jnp.asarray(_widened(upper, more, 1)),  # no copy of it stays on the host
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
    """Returns of each column of a matrix the number of its group: columns of the same scales."""
    first = label[:1]
    if np.array_equal(label, label[:, :1] + (first - first[0, 0])):
        label = first  # rows differ by what all columns share: one tells them apart
    _, first, group = np.unique(label, axis=1, return_index=True, return_inverse=True)
    rank = np.empty(len(first), int)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[group.ravel()]


def _widened(each: Sequence[Array], more: int, diagonal: float = 0) -> Array:
    """Returns matrices as one array in float32, with more rows and columns of zeros but for their
    diagonal.
    """
    size = len(each[0])
    wide = np.zeros((len(each), size + more, size + more), np.float32)
    for to, x in zip(wide, each, strict=True):
        to[:size, :size] = x
    own = np.arange(size, size + more)
    wide[:, own, own] = diagonal
    return wide


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
    """Rounds the columns of each matrix; `group` is that of all."""

    def one(w: Any, upper: Any, carried: Any, affine: Any) -> Columns:
        return round_columns(w, upper, carried, affine, group, spec=spec, size=size)  # type: ignore[arg-type]

    return jax.vmap(one)(w, upper, carried, affine)


_nearest = jax.jit(rounded_to, static_argnames="spec")
