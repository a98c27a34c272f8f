"""Quantizes a plan layer by layer: each site sees inputs from the sites before it, whose weights
are quantized already.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .._checks import shown
from .._errors import fail
from .._files import Path
from ..observers._shared import has_rows
from ..tensor._shared import Lazy, has_lazy
from ..transforms import Plan, Site, calibrate_batches
from ..transforms._shared import (
    Chosen,
    OnNonfinite,
    TracedOnce,
    check_finite_weight,
    check_mode,
    contractions,
    observed_parts,
    progress_bar,
    tell,
)
from ._checkpoint import Checkpoint, Solver, chosen, made_of
from ._elements import Elements
from ._few import UNREACHED
from ._grids import Group
from ._leaves import Leaves
from ._matrices import Drift, Matrix, by_shape, matrices_of, stacked, unknown
from ._memory import Memory, bytes_of_activations, bytes_of_sums, bytes_of_weights
from ._offload import Offload, Where
from ._once import sites_once
from ._report import AlgorithmReport, MatrixReport, name_of
from ._sequential import Inputs, Stream, Walk
from ._shelf import InFiles, InMemory, Shelf
from ._stages import Steps
from ._sums import Sums
from ._traced import Traced
from ._watch import calibrate_stages

Array = np.ndarray

_COUNTED = 3
"""Bytes of a 2-byte value and its float32 row weight, relative to the value alone; at most."""


def layer_by_layer(
    solver: Solver,
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Iterable[Any],
    *,
    with_float: bool = False,
    offload: Where = False,
    checkpoint: Path | None = None,
    progress: bool = False,
    on_nonfinite: OnNonfinite = "error",
) -> Chosen:
    """Returns the parameters with codes that a solver chooses site by site.

    A weight that several sites share, or that a loop uses in all of its steps, is processed first,
    with the sum over its uses of float inputs.

    Args:
      solver: chooses the codes of matrices.
      f: the function.
      plan: the plan.
      params: its parameters, in float.
      batches: as in `calibrate_batches`; all are held.
      with_float: whether to run the float function too, so that the drift of inputs is known.
      offload: whether values of batches are kept on the host, or on disk, between stages.
      checkpoint: the folder of the results so far.
      progress: whether to show a progress bar.
      on_nonfinite: as in `calibrate_batches`.
    """
    every, f = list(batches), TracedOnce(f)
    ignores = check_mode(solver.function, on_nonfinite)
    traced = Traced.of(f, plan, params, every, solver.weight, lazy=True, ignores=ignores)
    plan, first, groups, elements = traced.plan, traced.calls[0], traced.groups, traced.elements
    known, digests = None, None
    is_lazy = has_lazy(list(traced.originals.values()))
    if checkpoint is not None or is_lazy:
        digests = made_of(plan, solver, traced.calls)
    if checkpoint is not None:
        _check_known(solver.function, traced)
        known = Checkpoint(solver.function, checkpoint, digests or {})
    found = {item.address: item for item in contractions(first) if item.address}
    parts = {
        site.address: {x.about.role: x for x in observed_parts(site, found[site.address])}
        for site in plan.sites
    }

    def is_known(site: Site) -> bool:
        """Whether the sums of inputs of a site are known; if not, reports it or raises."""
        activation = parts[site.address].get("activation")
        is_refused = solver.unsupported == "error"
        return activation is not None and (is_refused or has_rows(activation.about))

    once = sites_once(plan, groups, first.jaxpr, elements)
    once = {here for here in once if is_known(plan.site_at(here))}  # pyright: ignore
    scopes = traced.scopes(lambda site: site.address in once, returns=False)
    rest = [site for site in plan.sites if site.address not in once and _is_weighted(plan, site)]
    memory = Memory(
        weights=bytes_of_weights(plan, first.leaves, first.paths, solver.spec_of)
        + sum(x.nbytes for x in elements.values()),
        statistics=max(
            *(bytes_of_sums(parts[here]["activation"], with_float) for here in once),
            sum(_bytes_of_all(site, parts[site.address]) for site in rest if is_known(site)),
            0,
        ),
        activations=bytes_of_activations(scopes, 1 + with_float)
        * (1 if solver.weight is None else _COUNTED),
        offload=offload,
    )
    count = sum(math.prod(x.shape[:-2]) for x in elements.values())
    bar = progress_bar("quantize", "matrix", total=count) if progress else None
    tell(bar, f"quantize: {memory}")

    shelf, current = _shelf(solver, traced, known, digests if is_lazy else None)
    weights = _Weights(solver, traced, shelf, current, known, bar)
    for matrices, group in _shared(
        solver, f, plan, groups, params, every, rest, is_known, is_lazy, progress, on_nonfinite
    ):
        if matrices:
            weights.choose(lambda own=matrices: own, stacked(matrices), group)
        else:
            shape = traced.originals[traced.places[next(iter(group.sizes))]].shape
            weights.entries.append(unknown(plan, group, shape))
    inputs = Sums(solver.function, ignores, solver.weight is None)

    def at_site(site: Site, steps: Steps, streams: list[Inputs]) -> None:
        side, where = (parts[site.address][role] for role in ("activation", "weight"))
        where = elements[where.key][steps]

        def matrices() -> list[Matrix]:
            where_at = name_of([side.key], steps)
            total, drift, rows = inputs.sums(streams, side.about, where_at, walk.reached)
            seen, found = [np.broadcast_to(x, where.shape[:-2]) for x in rows], []
            for at in np.ndindex(where.shape[:-2]):
                lost = None if drift is None else Drift(*(x[at] for x in drift))
                *counts, fourth = (float(x[at]) for x in seen)
                count, rows_here = map(int, counts)
                own = (site.name,), steps, at, where[at], total[at], count, lost, rows_here, fourth
                found.append(Matrix(*own))
            return found

        group = traced.group_of(plan.weights_in(site)[0])
        weights.choose(matrices, where.reshape(-1, *where.shape[-2:]), group)

    both = current, Leaves(dict(traced.originals))
    keeper = Offload(offload)
    streams = [Stream(x, keeper) for x in both[: 1 + with_float]]
    walk = Walk(plan, at_site)
    walk.go(traced.frames(scopes, streams))
    for here in sorted(once):
        weights.leave(plan.site_at(here), elements)  # pyright: ignore
    inputs.warn()
    report = AlgorithmReport(tuple(weights.entries), memory)
    weights.close()
    codes = shelf.quantized()
    return Chosen(plan.map_weights(lambda weight, _: codes[weight.path], params), report)


def _check_known(function: str, traced: Traced) -> None:
    """Raises if a checkpoint could not identify the parameters."""
    for path, place in traced.places.items():
        leaf = traced.originals[place]
        if isinstance(leaf, Lazy) and not leaf.source:
            raise fail(
                function,
                "the checkpoint cannot identify these parameters.",
                given=f"the leaf {path!r}, {shown(leaf)}, without a source",
                expected="leaves whose `source` identifies their values, such as those of "
                "archive.lazy",
                fix="give it a source, or leave `checkpoint` out.",
            )


def _shelf(
    solver: Solver,
    traced: Traced,
    checkpoint: Checkpoint | None,
    digests: Mapping[str, str] | None,
) -> tuple[Shelf, Leaves]:
    """Returns the store of grids, and the parameters as they are at each stage. `digests` are
    those of lazy parameters.
    """
    leaves = {path: traced.originals[place] for path, place in traced.places.items()}
    if digests is None:
        return InMemory(traced.grids(solver.spec_of)), Leaves(dict(traced.originals))
    is_known = all(not isinstance(x, Lazy) or x.source for x in leaves.values())
    source = json.dumps(digests) if is_known else ""
    folder = None if checkpoint is None else checkpoint.folder
    shelf = InFiles(folder, traced.groups, leaves, solver.spec_of, source)
    current = dict(traced.originals)
    for group in traced.groups:
        current.update({traced.places[path]: shelf.current(path) for path in group.sizes})
    return shelf, Leaves(current)


def _is_weighted(plan: Plan, site: Site) -> bool:
    return any(plan.weight_at(operand.path) for operand in site.operands)


def _bytes_of_all(site: Site, parts: Mapping[str, Any]) -> int:
    """Returns the bytes of the sums of a site, over all steps of its scans."""
    if "activation" not in parts:
        return 0
    return bytes_of_sums(parts["activation"]) * math.prod(loop.length for loop in site.loops)


class _Weights:
    """The weights during a run: those with chosen codes on their grids, all others in float.

    Attributes:
      entries: the entries of the report.
    """

    def __init__(
        self,
        solver: Solver,
        traced: Traced,
        shelf: Shelf,
        current: Leaves,
        checkpoint: Checkpoint | None,
        bar: Any,
    ):
        self._solver, self._checkpoint, self._bar = solver, checkpoint, bar
        self._places, self._shelf, self._current = traced.places, shelf, current
        self.entries: list[MatrixReport] = []
        lazy = [x for x, i in self._places.items() if isinstance(traced.originals[i], Lazy)]
        self._unread = set(lazy)

    def choose(self, matrices: Callable[[], Sequence[Matrix]], where: Array, group: Group) -> None:
        """Chooses the codes of matrices of one shape, and writes their values to the parameters.

        Args:
          matrices: returns them; called only if no checkpoint has their codes.
          where: the numbers of their elements, [matrices, rows, columns].
          group: the weights that they belong to.
        """
        places = {path: self._places[path] for path in group.sizes}
        leaves = self._current.some([*places.values()])
        for path, i in places.items():
            if path in self._unread:  # lazy weights are checked when they are read
                self._unread.remove(path)
                check_finite_weight(self._solver.function, leaves[i], path)
        grids = self._shelf.take(group, {path: leaves[i] for path, i in places.items()})
        known, solver = self._checkpoint, self._solver
        self.entries += chosen(known, solver, matrices, where, grids, group.whole)
        start = 0
        for path, size in group.sizes.items():
            own = where
            if len(group.sizes) > 1:
                own = where[(where >= start) & (where < start + size)]
            if own.size:
                self._current.write(places[path], own - start, grids.values(own))
            start += size
        self._shelf.put(group, grids, where)
        if self._bar is not None:
            self._bar.update(len(where))

    def leave(self, site: Site, elements: Mapping[str, Elements]) -> None:
        """Reports the matrices of a site that no batch reached: they are rounded to nearest."""
        known = {(entry.sites, entry.step, entry.at) for entry in self.entries}
        for operand in site.operands:
            if operand.key not in elements:
                continue
            *stack, rows, columns = elements[operand.key].shape
            for index in np.ndindex(*stack):
                step, at = index[: len(site.loops)], index[len(site.loops) :]
                sites, shape = (site.name,), (rows, columns)
                if (sites, step, at) not in known:
                    report = MatrixReport(
                        sites, step, at, site.path, shape, 0.0, 0.0, None, 0, 0, 0, 0.0, UNREACHED
                    )
                    self.entries.append(report)

    def close(self) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()


def _shared(
    solver: Solver,
    f: Any,
    plan: Plan,
    groups: Sequence[Group],
    params: Any,
    batches: list[Any],
    rest: list[Site],
    is_known: Callable[[Site], bool],
    is_lazy: bool,
    progress: bool,
    on_nonfinite: OnNonfinite,
) -> Iterable[tuple[list[Matrix], Group]]:
    """Yields the matrices of sites that do not run once, with the sums over their uses; none for a
    weight whose sums are not known.
    """
    if not rest:
        return
    patterns = {re.escape(site.path): solver.observers[".*"] for site in rest if is_known(site)}
    stats, observed = {}, {"observers": patterns, "progress": progress}
    observed["on_nonfinite"] = on_nonfinite
    if patterns and is_lazy:
        observed["weight"] = solver.weight
        stats = calibrate_stages(f, plan, params, batches, **observed)
    elif patterns:
        stats = calibrate_batches(f, plan, params, batches, **observed)
    alone = {site.name for site in plan.sites} - {site.name for site in rest}
    used = {path for site in rest for path in plan.weights_in(site)}
    for group in groups:
        if used.isdisjoint(group.sizes):
            continue
        try:
            every = matrices_of(solver.function, plan, group, stats)
        except NotImplementedError:
            if solver.unsupported == "error":
                raise
            yield [], group
            continue
        for same in by_shape(x for x in every if not alone.issuperset(x.sites)):
            yield same, group
