"""A weight as the matrices that sites multiply by, each with the Hessian of its inputs."""

import dataclasses
import functools
import importlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..errors import fail
from ..statistics.statistics import Hessian, ObservedSite, RowWeight, has_rows, hessian, places
from ..transforms.plan import Plan, Site
from ..transforms.stats import flags_of
from .grids import Group
from .interface import MatrixReport, effective, name_of, reached, why_few

Array = np.ndarray


@functools.cache
def linalg() -> Any:
    """Returns the factorizations of SciPy, imported at first use: `import jqx` stays fast."""
    return importlib.import_module("scipy.linalg")


# What GPTQ computes from a Hessian: an order of columns, and the triangular factor of its inverse,
# in float64 on the host.


Order = Literal["given", "activation", "groups"]


_LEAST, _MOST = 1e-6, 1e6
"""Limits of the damping by Ledoit and Wolf."""


class Factor(NamedTuple):
    """The inverse of a damped Hessian.

    Attributes:
      upper: upper triangular; `upper.T @ upper` is the inverse.
      damping: what was added to the diagonal, relative to its mean.
    """

    upper: Array
    damping: float


def damped(hessian: Array, damping: float) -> Array:
    """Returns a Hessian plus a multiple of the mean of its diagonal. The diagonal entries of dead
    channels, which no input reached, are 1.
    """
    result = np.array(hessian)
    np.fill_diagonal(result, damped_diagonal(np.diagonal(hessian), damping))
    return result


def damped_diagonal(diagonal: Array, damping: float) -> Array:
    """Returns the diagonal of such a Hessian, given its own."""
    dead = diagonal <= 0
    mean = diagonal[~dead].mean() if not dead.all() else 1.0
    return np.where(dead, 1, diagonal + damping * mean)


def ledoit_wolf_damping(hessian: Array, rows: float, fourth: float) -> float:
    """Returns the damping of least expected error for a Hessian of so many independent inputs
    (Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance matrices",
    Journal of Multivariate Analysis 88, 2004).

    Their estimate is a mean of `S`, the mean of `x x'`, and of a multiple of the identity, with
    weights by how far `S` is expected to be from what infinitely many inputs give, and by how far
    it is from that multiple. It is 1e-6 at least, and 1e6 at most.

    Args:
      hessian: sum of `x x'` over the inputs.
      rows: number of inputs.
      fourth: sum of `|x|^4`.
    """
    diagonal = np.diagonal(hessian) / rows
    live = diagonal > 0
    squares = float(np.vdot(hessian, hessian)) / rows**2
    from_identity = squares - live.sum() * diagonal[live].mean() ** 2 if live.any() else 0.0
    from_truth = (fourth / rows - squares) / rows
    if from_identity <= from_truth:  # also of one input, or of none
        return _MOST
    return float(np.clip(from_truth / (from_identity - from_truth), _LEAST, _MOST))


def factor(
    hessian: Array, damping: float, limit: float = 1.0, order: Array | None = None
) -> Factor | None:
    """Returns the factor of the inverse of a damped Hessian, with the least damping that makes it
    positive definite: `damping`, then ten times as much each time, up to `limit`, or once if it is
    larger. `None` if that is not enough. `order` is the order of channels in the factor; `None`
    keeps it.
    """
    order = np.arange(len(hessian)) if order is None else order
    back = order[::-1]
    limit = max(limit, damping)
    while damping <= limit:
        # Each array replaces the one before, so that only one exists besides the Hessian.
        work = hessian.T[np.ix_(back, back)].T
        np.fill_diagonal(work, damped_diagonal(np.diagonal(hessian)[order], damping)[::-1])
        try:
            work = linalg().cholesky(work, lower=True, overwrite_a=True, check_finite=True)
        except (linalg().LinAlgError, ValueError):
            damping *= 10
            continue
        # Reversed, the Hessian is L L.T. So it is R R.T with R = L[::-1, ::-1], upper triangular.
        (invert,) = linalg().get_lapack_funcs(("trtri",), (work,))
        inverse, _ = invert(work, lower=True, overwrite_c=True)
        return Factor(inverse[::-1, ::-1], damping)
    return None


def order_of(hessian: Array, group: Array, order: Order) -> Array:
    """Returns the order in which columns are rounded.

    `activation`: columns of the largest inputs first; each stays in its group. `groups`: the same
    inside each group, and groups ordered by their largest input, with a smaller group last, so that
    each group stays together (group-aware reordering).
    """
    count = len(group)
    if order == "given":
        return np.arange(count)
    weight = np.nan_to_num(np.diagonal(hessian))
    if order == "activation":
        return np.argsort(-weight, kind="stable")
    size = np.bincount(group)
    largest = np.full(len(size), -np.inf)
    np.maximum.at(largest, group, weight)
    is_small = size < size.max()
    rank = np.empty(len(size), int)
    rank[np.lexsort((-largest, is_small))] = np.arange(len(size))
    return np.lexsort((-weight, rank[group]))


def carried_over(upper: Array, cross: Array, strength: float) -> Array:
    """Returns what GPTAQ adds to the columns after a rounded one. `cross` is the sum of
    `(float - quantized) quantized.T` of inputs.
    """
    return strength * np.triu(cross @ upper.T, 1) @ upper


def corrected(w: Array, hessian: Array, cross: Array, strength: float, damping: float) -> Array:
    """Returns a matrix [rows, columns] corrected for quantized inputs (Arai and Ichikawa,
    "Quantization Error Propagation", arXiv:2504.09629).
    """
    solved = linalg().solve(damped(hessian, damping), cross.T, assume_a="pos").T
    return w + strength * w @ solved


def objective(difference: Array, hessian: Array) -> Array:
    """Returns `d @ hessian @ d` for each row `d`: its squared error over the inputs."""
    return np.einsum("nk,nk->n", difference @ hessian, difference)


Unsupported = Literal["error", "round"]
"""What to do with a weight whose inputs cannot be observed."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix that sites multiply by, with statistics of its inputs.

    Attributes:
      sites: their names.
      step: the number of the step in each scan over the weight around the site, such as a layer.
      index: the index among matrices that are multiplied by at once, such as an expert or a group
        of a convolution; `()` if there is only one.
      element_ids: for each entry the number of its element of the weight, [rows, columns].
      hessian: sum of `x x^T` of the inputs, float64 [columns, columns].
      rows: number of inputs.
      drift: how the inputs differ from those of the float function, if that is known.
      total: number of rows at the site; those of zeros, or of other experts, are no inputs.
      fourth: sum of `|x|^4` of the inputs.
    """

    sites: tuple[str, ...]
    step: tuple[int, ...]
    index: tuple[int, ...]
    element_ids: Array
    hessian: Array
    rows: int
    drift: "Drift | None" = None
    total: int = 0
    fourth: float = 0.0

    def why_few(self, per_column: float | None = None) -> str:
        """Returns why there are too few inputs; empty if there are enough. Each column needs
        `per_column`; `None` is 1 for matrices that are multiplied by at once, or that only some
        rows reach, and 0 for others.
        """
        channels, is_part = self.element_ids.shape[1], bool(self.index) or self.rows < self.total
        per_column = float(is_part) if per_column is None else per_column
        return why_few(self.rows, channels) if self.rows < max(per_column * channels, 1) else ""

    @property
    def name(self) -> str:
        """Its name in reports."""
        return name_of(self.sites, (*self.step, *self.index))

    def losses(self, w: Array, *candidates: Array) -> list[Array]:
        """Returns, for each candidate, the squared error of each row of the result, summed over the
        inputs: of the candidate on the actual inputs, relative to `w` on those of the float
        function.
        """
        errors = [objective(w - candidate, self.hessian) for candidate in candidates]
        if self.drift is None:
            return errors
        crossed, start = w @ self.drift.cross, objective(w, self.drift.gram)
        changes = [2 * np.einsum("nk,nk->n", crossed, w - candidate) for candidate in candidates]
        return [start + error + change for error, change in zip(errors, changes, strict=True)]

    def corrected(
        self, w: Array, limits: tuple[Array, Array], strength: float, damping: float
    ) -> Array:
        """Returns a matrix corrected for the error of its inputs, but for rows that would lose by
        it within the limits of their scales.

        A few massive activations can ask for corrections beyond these limits, which cancel each
        other in the product. Rounding clips them, and GPTQ would make up for that with all other
        columns.
        """
        assert self.drift is not None
        target = corrected(w, self.hessian, self.drift.cross, strength, damping)
        low, high = limits
        held = np.clip(target, np.minimum(low, w), np.maximum(high, w))
        # Without clipping no row loses: the error falls by at least strength * (2 - strength) times
        # w C (H + damping)^-1 C' w', which is not negative.
        clipped = np.flatnonzero((held != target).any(1))
        difference = w[clipped] - held[clipped]
        change = objective(difference, self.hessian)
        change += 2 * np.einsum("nk,nk->n", w[clipped] @ self.drift.cross, difference)
        worse = clipped[change > 0]
        target[worse] = w[worse]
        return target


class Drift(NamedTuple):
    """How inputs differ from those of the float function, `d = float - quantized`.

    Attributes:
      cross: sum of `d x^T`, where `x` are the quantized inputs, float64 [columns, columns].
      gram: sum of `d d^T`.
    """

    cross: Array
    gram: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WhereKnown(Hessian):
    """The Hessian of sites that have one, which are those whose rows are rows of their operand."""

    def looks_at(self, site: ObservedSite) -> bool:
        return super().looks_at(site) and has_rows(site)

    def __str__(self) -> str:
        return str(hessian)


def observers_of(weight: RowWeight | None, unsupported: Unsupported) -> Mapping[str, Any]:
    """Returns what must be recorded for all sites, for `matrices_of`."""
    observed = hessian if unsupported == "error" else _WhereKnown()
    return {".*": (observed(weight=weight), places)}


def matrices_of(function: str, plan: Plan, group: Group, stats: Mapping[str, Any]) -> list[Matrix]:
    """Returns the matrices of weights. Sites that multiply by the same elements share one, with the
    sum of their Hessians.
    """
    by_elements: dict[bytes, Matrix] = {}
    flags = flags_of(stats)
    for site in plan.sites:
        mine = [x for x in site.operands if x.path in group.sizes]
        if not mine:
            continue
        others = [x for x in site.operands if x.path is None]
        place_numbers = stats.get(f"{mine[0].key}@{places}")
        sums = stats.get(f"{others[0].key}@{hessian}") if others else None
        if place_numbers is None or sums is None:
            raise _refusal(function, site)
        products = np.asarray(sums.products)
        elements = group.numbers(plan.weights_in(site), np.asarray(place_numbers))
        rows = np.broadcast_to(np.asarray(sums.rows), products.shape[:-2])
        rows, totals = counted(rows, reached(flags.get(others[0].key), site.op))
        for step in np.ndindex(elements.shape[:-2]):
            numbers, gram = np.ascontiguousarray(elements[step]), products[step].astype(np.float64)
            depth = len(site.loops)
            count, total = int(rows[step]), int(totals[step])
            where = (site.name,), step[:depth], step[depth:], numbers
            new = Matrix(*where, gram, count, total=total, fourth=float(sums.fourth[step]))
            old = by_elements.get(numbers.tobytes())
            if old is not None:
                new = dataclasses.replace(
                    old,
                    sites=tuple(dict.fromkeys((*old.sites, *new.sites))),
                    hessian=old.hessian + new.hessian,
                    rows=old.rows + new.rows,
                    total=old.total + new.total,
                    fourth=old.fourth + new.fourth,
                )
            by_elements[numbers.tobytes()] = new
    _check_apart(function, group.path, list(by_elements.values()))
    return list(by_elements.values())


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
    reasons: Sequence[str],
    start: float,
) -> tuple[Array, list[MatrixReport]]:
    """Returns rounded matrices, with matrices rounded to nearest for a reason, and rows where that
    has a smaller error; and the report of each.

    Args:
      matrices: matrices of one shape.
      path: path of their weight.
      w: their values, [matrices, rows, columns].
      nearest: the values rounded to nearest.
      rounded: the values as they were chosen.
      damping: damping of the Hessian of each.
      reasons: why some are rounded to nearest; empty for others.
      start: the start time, from `time.perf_counter`.
    """
    rounded = np.where(np.array(reasons)[:, None, None] == "", rounded, nearest)
    losses = [
        matrix.losses(x, y, z)
        for matrix, x, y, z in zip(matrices, w, nearest, rounded, strict=True)
    ]
    worse = np.array([~(chosen_loss <= nearest_loss) for nearest_loss, chosen_loss in losses])
    seconds = (time.perf_counter() - start) / len(matrices)
    entries = [
        MatrixReport(
            sites=matrix.sites,
            step=matrix.step,
            at=matrix.index,
            path=path,
            shape=(matrix.element_ids.shape[0], matrix.element_ids.shape[1]),
            before=float(nearest_loss.sum()) / max(matrix.rows, 1),
            after=float(np.where(is_worse, nearest_loss, chosen_loss).sum()) / max(matrix.rows, 1),
            damping=added,
            inputs=matrix.rows,
            dead=int(np.sum(np.diagonal(matrix.hessian) <= 0)),
            kept=int(is_worse.sum()),
            seconds=seconds,
            why=reason,
            rank=effective(
                np.trace(matrix.hessian), float(np.vdot(matrix.hessian, matrix.hessian))
            ),
            effective_inputs=effective(np.trace(matrix.hessian), matrix.fourth),
        )
        for matrix, added, reason, is_worse, (nearest_loss, chosen_loss) in zip(
            matrices, damping, reasons, worse, losses, strict=True
        )
    ]
    return np.where(worse[..., None], nearest, rounded), entries


def stacked(matrices: Sequence[Matrix]) -> Array:
    """Returns the element numbers of matrices of one shape, [matrices, rows, columns]."""
    return np.stack([matrix.element_ids for matrix in matrices])


_LOOP_BYTES = 2**28
"""Maximum number of bytes that the loop over the columns of several matrices reads."""


def parted(matrices: Sequence[Matrix]) -> Iterator[Sequence[Matrix]]:
    """Splits matrices of one shape into parts that fit into memory, of at least one matrix each."""
    rows, columns = matrices[0].element_ids.shape
    count = max(_LOOP_BYTES // (4 * columns * (columns + rows)), 1)
    for start in range(0, len(matrices), count):
        yield matrices[start : start + count]


def by_shape(matrices: Iterable[Matrix]) -> list[list[Matrix]]:
    """Groups matrices by shape."""
    groups: dict[tuple[int, ...], list[Matrix]] = {}
    for matrix in matrices:
        groups.setdefault(matrix.element_ids.shape, []).append(matrix)
    return list(groups.values())


def _refusal(function: str, site: Site) -> Exception:
    problem = f"the inputs of {site.name!r}, in a {site.op}, were not observed: only products of "
    problem += "an activation and a weight whose elements can be located are, none in a shard_map."
    fix = "pass the statistics of calibrate_batches(..., observers=algorithm.observers); replace a "
    fix += "shard_map by jit over sharded arrays; or add a rule that leaves that site in float."
    return fail(function, problem, fix=fix, error=NotImplementedError)


def _check_apart(function: str, path: str, matrices: list[Matrix]) -> None:
    """Raises if two matrices share some of their elements."""
    if not matrices:  # in a scan of no steps
        return
    elements = np.concatenate([matrix.element_ids.ravel() for matrix in matrices])
    if np.bincount(elements).max() > 1:
        names = ", ".join(matrix.name for matrix in matrices[:4])
        problem = f"sites multiply by the weight {path!r} in different ways, over other axes: "
        fix = "add a rule that leaves it in float."
        raise fail(function, f"{problem}{names}.", fix=fix, error=NotImplementedError)
