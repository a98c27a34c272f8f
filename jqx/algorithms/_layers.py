"""A plan quantized layer after layer: each site sees inputs that those before it have made, with
their weights quantized.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._files import Path
from ..transforms import Plan, calibrate_batches
from ..transforms._shared import (
    Address,
    Call,
    Chosen,
    Site,
    TracedOnce,
    arguments_of,
    as_plan,
    contractions,
    count_arguments,
    observed_parts,
    progress_bar,
    tell,
    trace_call,
    weights_of,
)
from ._checkpoint import Checkpoint, Solver, chosen, made_of
from ._elements import Elements, elements_of_sites
from ._grids import Grids, Group
from ._matrices import Drift, Matrix, alike_of, matrices_of, stacked
from ._memory import Memory, bytes_of_activations, bytes_of_sums, bytes_of_weights
from ._once import sites_once
from ._report import AlgorithmReport, MatrixReport
from ._sequential import Frame, Inputs, Stream, Walk
from ._stages import Scope, Steps, whole
from ._sums import Sums

Array = np.ndarray

_COUNTED = 3
"""What a value of 2 bytes and how much it counts, a float32, take at most, beside the value."""


def layer_by_layer(
    solver: Solver,
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Iterable[Any],
    *,
    beside: bool = False,
    offload: bool = False,
    checkpoint: Path | None = None,
    progress: bool = False,
) -> Chosen:
    """Returns the parameters with codes that a solver has chosen site after site.

    A weight that several sites share, or that a loop uses in all of its steps, is chosen first, by
    the sum over its uses of float inputs.

    Args:
      solver: chooses the codes of matrices.
      f: the function.
      plan: the plan.
      params: its parameters, in float.
      batches: as in `calibrate_batches`; all are held.
      beside: whether the float function is run too, so that matrices know how inputs drift.
      offload: whether values of batches are kept on the host between stages.
      checkpoint: the folder of what is chosen already.
      progress: whether to show a bar.
    """
    every, f = list(batches), TracedOnce(f)
    calls = calls_of(f, plan, params, every, solver.weight)
    first = calls[0]
    known = None if checkpoint is None else Checkpoint(checkpoint, made_of(plan, solver, calls))
    sizes = {
        path: leaf.size
        for path, leaf in zip(first.paths, first.leaves, strict=True)
        if path is not None
    }
    groups = Group.of_plan(plan, sizes)
    elements = elements_of_sites(f, plan, groups, params, every[0])
    once = sites_once(plan, groups, first.jaxpr, elements)
    scopes = _scopes(plan, calls, once)
    found = {item.address: item for item in contractions(first) if item.address}
    parts = {
        site.address: {x.about.role: x for x in observed_parts(site, found[site.address])}
        for site in plan.sites
    }
    rest = [site for site in plan.sites if site.address not in once and _is_weighted(plan, site)]
    memory = Memory(
        weights=bytes_of_weights(plan, first.leaves, first.paths, solver.spec_of)
        + sum(x.nbytes for x in elements.values()),
        statistics=max(
            *(bytes_of_sums(parts[here]["activation"], beside) for here in once),
            sum(_bytes_of_all(site, parts[site.address]) for site in rest),
            0,
        ),
        activations=bytes_of_activations(scopes, 1 + beside)
        * (1 if solver.weight is None else _COUNTED),
        offload=offload,
    )
    count = sum(math.prod(x.shape[:-2]) for x in elements.values())
    bar = progress_bar("quantize", "matrix", total=count) if progress else None
    tell(bar, f"quantize: {memory}")

    originals = {
        place: leaf
        for place, (path, leaf) in enumerate(zip(first.paths, first.leaves, strict=True))
        if path is not None
    }
    weights = _Weights(solver, plan, groups, originals, first.paths, known, bar)
    observers = solver.observers[".*"]
    for matrices, group in _shared(f, plan, groups, params, every, rest, observers, progress):
        weights.choose(lambda own=matrices: own, stacked(matrices), group)
    inputs = Sums()

    def at_site(site: Site, steps: Steps, streams: list[Inputs]) -> None:
        side, where = (parts[site.address][role] for role in ("activation", "weight"))
        where = elements[where.key][steps]

        def matrices() -> list[Matrix]:
            total, drift, rows = inputs.sums(streams, side.about)
            seen, found = np.broadcast_to(rows, where.shape[:-2]), []
            for at in np.ndindex(seen.shape):
                lost = None if drift is None else Drift(*(x[at] for x in drift))
                own = (site.name,), steps, at, where[at], total[at], int(seen[at]), lost
                found.append(Matrix(*own))
            return found

        group = next(x for x in groups if plan.weights_in(site)[0] in x.sizes)
        weights.choose(matrices, where.reshape(-1, *where.shape[-2:]), group)

    streams = [Stream(x, offload) for x in (weights.current, originals)[: 1 + beside]]
    frames = []
    for call, scope in zip(calls, scopes, strict=True):
        given = zip(scope.jaxpr.invars, call.leaves, call.paths, strict=True)
        values = {var: x for var, x, path in given if path is None}
        frames.append([Frame(scope, stream, values) for stream in streams])
    Walk(plan, at_site).go(frames)
    for here in sorted(once):
        weights.leave(plan.site_at(here), elements)  # pyright: ignore
    report = AlgorithmReport(tuple(weights.entries), memory)
    return Chosen(weights.quantized(params), report)


def calls_of(
    f: Any, plan: Plan, params: Any, batches: Iterable[Any], weight: Any = None
) -> list[Call]:
    """Returns a function as it is traced for each batch; with a weight it is said of the values of
    a batch how much they count.
    """
    found = []
    for batch in batches:
        arguments = arguments_of(plan, params, batch)
        call = trace_call("ptq", f, plan.parameters, arguments, {})
        if weight is not None:
            counts = weights_of("ptq", weight, plan.params, arguments, {})
            leaves = count_arguments("ptq", counts, plan.params, call, call.leaves)
            call = dataclasses.replace(call, leaves=leaves)
        found.append(call)
    return found


def _scopes(plan: Plan, calls: Sequence[Call], once: set[Address]) -> list[Scope]:
    """Returns the scope of each call; calls of one kind have one."""
    found: dict[int, Scope] = {}
    for call in calls:
        if id(call.jaxpr) not in found:
            as_plan("ptq", plan, call, plan.parameters)  # its sites are those of the plan
            found[id(call.jaxpr)] = whole(plan, call, lambda site: site.address in once)
    return [found[id(call.jaxpr)] for call in calls]


def _is_weighted(plan: Plan, site: Site) -> bool:
    return any(plan.weight_at(operand.path) for operand in site.operands)


def _bytes_of_all(site: Site, parts: Mapping[str, Any]) -> int:
    """Returns the bytes of the sums of a site, of all steps of its scans."""
    if "activation" not in parts:
        return 0
    return bytes_of_sums(parts["activation"]) * math.prod(loop.length for loop in site.loops)


class _Weights:
    """The weights on the way: those that are chosen on their grids, all others in float.

    Attributes:
      current: the leaves of the parameters, by place.
      entries: what is to be reported.
    """

    def __init__(
        self,
        solver: Solver,
        plan: Plan,
        groups: Sequence[Group],
        originals: Mapping[int, Any],
        paths: Sequence[str | None],
        checkpoint: Checkpoint | None,
        bar: Any,
    ):
        self._solver, self._plan, self._checkpoint, self._bar = solver, plan, checkpoint, bar
        self._places = {str(paths[place]): place for place in originals}
        leaves = {path: originals[place] for path, place in self._places.items()}
        self._grids = {
            group.path: Grids.of_group(group, leaves, solver.spec_of) for group in groups
        }
        self.current = dict(originals)
        self.entries: list[MatrixReport] = []

    def choose(self, matrices: Callable[[], Sequence[Matrix]], where: Array, group: Group) -> None:
        """Chooses the codes of matrices of one shape, and writes their values to the parameters.

        Args:
          matrices: makes them, where they are not known already.
          where: their places, [matrices, rows, columns].
          group: whose they are.
        """
        grids, known, solver = self._grids[group.path], self._checkpoint, self._solver
        self.entries += chosen(known, solver, matrices, where, grids, group.whole)
        start = 0
        for path, size in group.sizes.items():
            own = where
            if len(group.sizes) > 1:
                own = where[(where >= start) & (where < start + size)]
            if own.size:
                place, values = self._places[path], grids.values(own)
                self.current[place] = _written(self.current[place], own - start, values)
            start += size
        if self._bar is not None:
            self._bar.update(len(where))

    def leave(self, site: Site, elements: Mapping[str, Elements]) -> None:
        """Reports the matrices of a site that no batch has reached: they are rounded to nearest."""
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
                        sites, step, at, site.path, shape, 0.0, 0.0, None, 0, 0, 0, 0.0
                    )
                    self.entries.append(report)

    def quantized(self, params: Any) -> Any:
        """Returns the parameters with all weights quantized."""
        if self._bar is not None:
            self._bar.close()
        codes = {path: q for grids in self._grids.values() for path, q in grids.quantized().items()}
        return self._plan.map_weights(lambda weight, _: codes[weight.path], params)


def _shared(
    f: Any,
    plan: Plan,
    groups: Sequence[Group],
    params: Any,
    batches: list[Any],
    rest: list[Site],
    observers: Any,
    progress: bool,
) -> Iterable[tuple[list[Matrix], Group]]:
    """Yields the matrices that are not of a site that runs once, with the sums over their uses."""
    if not rest:
        return
    patterns = {re.escape(site.path): observers for site in rest}
    stats = calibrate_batches(f, plan, params, batches, observers=patterns, progress=progress)
    alone = {site.name for site in plan.sites} - {site.name for site in rest}
    used = {path for site in rest for path in plan.weights_in(site)}
    for group in groups:
        if used.isdisjoint(group.sizes):
            continue
        every = matrices_of("algorithms.gptq", plan, group, stats)
        for alike in alike_of(x for x in every if not alone.issuperset(x.sites)):
            yield alike, group


@jax.jit
def _written(x: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    """Returns a parameter with other values at some places."""
    return x.ravel().at[places].set(values.astype(x.dtype)).reshape(x.shape)
