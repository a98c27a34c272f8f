"""A weight as the matrices that sites multiply by, each with the Hessian of its inputs."""

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from .._errors import fail, message
from ..observers import Hessian, ObservedSite, hessian, places
from ..observers._shared import Weight, has_rows
from ..transforms import Plan, Site
from ..transforms._shared import flags_of
from ._factor import objective
from ._few import reached, why_few
from ._grids import Group
from ._report import UNKNOWN, MatrixReport, effective, name_of

Array = np.ndarray

Unsupported = Literal["error", "round"]
"""What to do with a weight whose inputs cannot be observed."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix that sites multiply by, with statistics of its inputs.

    Attributes:
      sites: their names.
      step: the number of the step in each scan over the weight around the site, such as a layer.
      at: the index among matrices that are multiplied by at once, such as an expert or a group of
        a convolution; `()` if there is only one.
      places: for each entry the number of its element of the weight, [rows, columns].
      hessian: sum of `x x^T` of the inputs, float64 [columns, columns].
      rows: number of inputs.
      drift: how the inputs differ from those of the float function, if that is known.
      total: number of rows at the site; those of zeros, or of other experts, are no inputs.
      fourth: sum of `|x|^4` of the inputs.
    """

    sites: tuple[str, ...]
    step: tuple[int, ...]
    at: tuple[int, ...]
    places: Array
    hessian: Array
    rows: int
    drift: "Drift | None" = None
    total: int = 0
    fourth: float = 0.0

    def why_few(self, least: float | None = None) -> str:
        """Returns why there are too few inputs; empty if there are enough. `least` is how many each
        column needs; `None` is 1 for matrices that are multiplied by at once, or that only some
        rows reach, and 0 for others.
        """
        channels, is_part = self.places.shape[1], bool(self.at) or self.rows < self.total
        least = float(is_part) if least is None else least
        return why_few(self.rows, channels) if self.rows < max(least * channels, 1) else ""

    @property
    def name(self) -> str:
        """Its name in reports."""
        return name_of(self.sites, (*self.step, *self.at))

    def loss(self, w: Array, rounded: Array) -> Array:
        """Returns the squared error of each row of the result, summed over the inputs: of `rounded`
        on the actual inputs, relative to `w` on those of the float function.
        """
        lost = w - rounded
        error = objective(lost, self.hessian)
        if self.drift is None:
            return error
        mixed = np.einsum("nk,nk->n", w @ self.drift.cross, lost)
        return error + 2 * mixed + objective(w, self.drift.own)


class Drift(NamedTuple):
    """How inputs differ from those of the float function, `d = float - quantized`.

    Attributes:
      cross: sum of `d x^T`, where `x` are the quantized inputs, float64 [columns, columns].
      own: sum of `d d^T`.
    """

    cross: Array
    own: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WhereKnown(Hessian):
    """The Hessian of sites that have one, which are those whose rows are rows of their operand."""

    def looks_at(self, site: ObservedSite) -> bool:
        return super().looks_at(site) and has_rows(site)

    def __str__(self) -> str:
        return str(hessian)


def observers_of(weight: Weight | None, unsupported: Unsupported) -> Mapping[str, Any]:
    """Returns what must be recorded for all sites, for `matrices_of`."""
    observed = hessian if unsupported == "error" else _WhereKnown()
    return {".*": (observed(weight=weight), places)}


def matrices_of(function: str, plan: Plan, group: Group, stats: Mapping[str, Any]) -> list[Matrix]:
    """Returns the matrices of weights. Sites that multiply by the same elements share one, with the
    sum of their Hessians.
    """
    found: dict[bytes, Matrix] = {}
    flags = flags_of(stats)
    for site in plan.sites:
        mine = [x for x in site.operands if x.path in group.sizes]
        if not mine:
            continue
        others = [x for x in site.operands if x.path is None]
        known = stats.get(f"{mine[0].key}@{places}")
        seen = stats.get(f"{others[0].key}@{hessian}") if others else None
        if known is None or seen is None:
            raise _refusal(function, site)
        products = np.asarray(seen.products)
        elements = group.numbers(plan.weights_in(site), np.asarray(known))
        rows = np.broadcast_to(np.asarray(seen.rows), products.shape[:-2])
        rows, totals = counted(rows, reached(flags.get(others[0].key), site.op))
        for step in np.ndindex(elements.shape[:-2]):
            own, gram = np.ascontiguousarray(elements[step]), products[step].astype(np.float64)
            depth = len(site.loops)
            count, total = int(rows[step]), int(totals[step])
            where = (site.name,), step[:depth], step[depth:], own
            new = Matrix(*where, gram, count, total=total, fourth=float(seen.fourth[step]))
            old = found.get(own.tobytes())
            if old is not None:
                new = dataclasses.replace(
                    old,
                    sites=tuple(dict.fromkeys((*old.sites, *new.sites))),
                    hessian=old.hessian + new.hessian,
                    rows=old.rows + new.rows,
                    total=old.total + new.total,
                    fourth=old.fourth + new.fourth,
                )
            found[own.tobytes()] = new
    _check_apart(function, group.path, list(found.values()))
    return list(found.values())


def counted(rows: Array, counts: Array | None) -> tuple[Array, Array]:
    """Returns the number of inputs of matrices and of rows at their site, from the sum of the
    weights of rows, [*steps, *matrices], and from what `reached` returns.
    """
    if counts is None:
        return rows, rows
    return np.minimum(rows, counts[..., 0]), np.broadcast_to(counts[..., 1], rows.shape)


def settled(
    matrices: Sequence[Matrix],
    path: str,
    w: Array,
    nearest: Array,
    rounded: Array,
    damping: Sequence[float | None],
    start: float,
    why: Sequence[str] | None = None,
) -> tuple[Array, list[MatrixReport]]:
    """Returns rounded matrices, with rows rounded to nearest where that has a smaller error, and
    the report of each.

    Args:
      matrices: matrices of one shape.
      path: path of their weight.
      w: their values, [matrices, rows, columns].
      nearest: the values rounded to nearest.
      rounded: the values as they were chosen.
      damping: damping of the Hessian of each.
      start: the start time, from `time.perf_counter`.
      why: why some were rounded to nearest; empty for others.
    """
    lost = [
        (matrix.loss(x, y), matrix.loss(x, z))
        for matrix, x, y, z in zip(matrices, w, nearest, rounded, strict=True)
    ]
    worse = np.array([~(after <= before) for before, after in lost])
    seconds = (time.perf_counter() - start) / len(matrices)
    entries = [
        MatrixReport(
            sites=matrix.sites,
            step=matrix.step,
            at=matrix.at,
            path=path,
            shape=(matrix.places.shape[0], matrix.places.shape[1]),
            before=float(before.sum()) / max(matrix.rows, 1),
            after=float(np.where(kept, before, after).sum()) / max(matrix.rows, 1),
            damping=own,
            inputs=matrix.rows,
            dead=int(np.sum(np.diagonal(matrix.hessian) <= 0)),
            kept=int(kept.sum()),
            seconds=seconds,
            why=reason,
            rank=effective(
                np.trace(matrix.hessian), float(np.vdot(matrix.hessian, matrix.hessian))
            ),
            effective_inputs=effective(np.trace(matrix.hessian), matrix.fourth),
        )
        for matrix, own, reason, kept, (before, after) in zip(
            matrices, damping, why or [""] * len(matrices), worse, lost, strict=True
        )
    ]
    return np.where(worse[..., None], nearest, rounded), entries


def unknown(plan: Plan, group: Group, shape: tuple[int, ...]) -> MatrixReport:
    """Returns the report of weights whose matrices are not known: rounded to nearest."""
    sites = [x.name for x in plan.sites if not set(group.sizes).isdisjoint(plan.weights_in(x))]
    rows, columns = math.prod(shape[:-1]), math.prod(shape[-1:])
    return MatrixReport(
        tuple(sites), (), (), group.path, (rows, columns), 0.0, 0.0, None, 0, 0, 0, 0.0, UNKNOWN
    )


def stacked(matrices: Sequence[Matrix]) -> Array:
    """Returns the element numbers of matrices of one shape, [matrices, rows, columns]."""
    return np.stack([matrix.places for matrix in matrices])


def by_shape(matrices: Iterable[Matrix]) -> list[list[Matrix]]:
    """Groups matrices by shape."""
    found: dict[tuple[int, ...], list[Matrix]] = {}
    for matrix in matrices:
        found.setdefault(matrix.places.shape, []).append(matrix)
    return list(found.values())


def _refusal(function: str, site: Site) -> NotImplementedError:
    return NotImplementedError(
        message(
            function,
            f"the inputs of {site.name!r} were not observed.",
            given=f"the weight {site.path!r} in a {site.op}",
            expected="a product of an activation and a weight whose elements can be located, not "
            "inside a shard_map; statistics of jqx.observers.hessian and "
            "jqx.observers.places",
            fix="pass the statistics of calibrate_batches(..., observers=algorithm.observers); "
            "replace a shard_map by jit over sharded arrays while codes are chosen; or add a "
            "rule that leaves that site in float.",
        )
    )


def _check_apart(function: str, path: str, matrices: list[Matrix]) -> None:
    """Raises if two matrices share some of their elements."""
    if not matrices:  # in a scan of no steps
        return
    elements = np.concatenate([matrix.places.ravel() for matrix in matrices])
    if np.bincount(elements).max() == 1:
        return
    raise fail(
        function,
        f"sites multiply by the weight {path!r} in different ways.",
        given=", ".join(matrix.name for matrix in matrices[:4]),
        expected="sites that contract the same axes of it, or have no element in common",
        fix="add a rule that leaves it in float.",
        error=NotImplementedError,
    )
