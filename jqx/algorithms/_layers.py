"""A plan quantized layer after layer: each site sees inputs that those before it have made, with
their weights quantized.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from .. import _compat
from ..observers import hessian, places
from ..observers._shared import HessianStats, gram
from ..tensor import QSpec
from ..transforms import Plan, calibrate_batches
from ..transforms._shared import (
    FORMS,
    Address,
    Chosen,
    Site,
    TracedOnce,
    Weight,
    addressed,
    arguments_of,
    as_plan,
    contractions,
    elements_of,
    observed_parts,
    progress_bar,
    trace_call,
)
from ._report import AlgorithmReport, MatrixReport
from ._sequential import Frame, Inputs, Walk
from ._stages import Scope, Steps, body_of, whole
from ._weight import OBSERVERS, Drift, Grids, Matrix, matrices_of

Array = np.ndarray


class Solver(Protocol):
    """Chooses the codes of one matrix."""

    def spec_of(self, spec: QSpec) -> QSpec:
        """Returns the spec by whose calibrator scales are found."""
        ...

    def solve(self, matrix: Matrix, grids: Grids, weight: Weight) -> MatrixReport:
        """Rounds the elements of a matrix, in place, and returns what is to be reported."""
        ...


def layer_by_layer(
    solver: Solver,
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Iterable[Any],
    *,
    beside: bool = False,
    progress: bool = False,
) -> Chosen:
    """Returns the parameters with codes that a solver has chosen site after site.

    A weight that several sites share, or that a loop uses in all of its steps, is chosen first, by
    the sum over its uses of float inputs.

    Args:
      solver: chooses the codes of one matrix.
      f: the function.
      plan: the plan.
      params: its parameters, in float.
      batches: as in `calibrate_batches`; all are held.
      beside: whether the float function is run too, so that matrices know how inputs drift.
      progress: whether to show a bar.
    """
    every, f = list(batches), TracedOnce(f)
    calls = [
        trace_call("ptq", f, plan.parameters, arguments_of(plan, params, batch), {})
        for batch in every
    ]
    first = calls[0]
    known = elements_of(f, plan, params, every[0], [".*"])
    elements = {key.removesuffix(f"@{places}"): np.asarray(x) for key, x in known.items()}
    once = _once(plan, first.jaxpr, elements)
    originals = {
        place: leaf
        for place, (path, leaf) in enumerate(zip(first.paths, first.leaves, strict=True))
        if path is not None
    }
    count = sum(math.prod(x.shape[:-2]) for x in elements.values())
    bar = progress_bar("quantize", "matrix", total=count) if progress else None
    weights = _Weights(solver, plan, originals, first.paths, bar)
    for matrix, weight in _shared(f, plan, params, every, once, progress):
        weights.choose(matrix, weight)

    items = {item.address: item for item in contractions(first) if item.address}
    parts = {here: observed_parts(plan.site_at(here), items[here]) for here in once}  # pyright: ignore
    inputs = _Sums()

    def at_site(site: Site, steps: Steps, own: Inputs, floats: Inputs | None) -> None:
        side, part = (
            next(x for x in parts[site.address] if x.about.role == role)
            for role in ("activation", "weight")
        )
        total, drift, rows = inputs.sums(own, floats, side.about)
        where = elements[part.key][steps]
        for at in np.ndindex(where.shape[:-2]):
            lost = None if drift is None else Drift(*(x[at] for x in drift))
            seen = int(np.broadcast_to(rows, where.shape[:-2])[at])
            matrix = Matrix((site.name,), (*steps, *at), where[at], total[at], seen, lost)
            weights.choose(matrix, _weight_of(plan, site))

    scopes: dict[int, Scope] = {}  # batches of one kind have one jaxpr
    frames = []
    for call in calls:
        if id(call.jaxpr) not in scopes:
            as_plan("ptq", plan, call, plan.parameters)  # its sites are those of the plan
            scopes[id(call.jaxpr)] = whole(plan, call, lambda site: site.address in once)
        scope = scopes[id(call.jaxpr)]
        given = zip(scope.jaxpr.invars, call.leaves, call.paths, strict=True)
        frames.append(Frame(scope, {var: x for var, x, path in given if path is None}))
    floats = [Frame(frame.scope, dict(frame.values)) for frame in frames] if beside else None
    Walk(plan, weights.current, at_site, originals).go(frames, floats)
    for here in sorted(once):
        weights.leave(plan.site_at(here), elements)  # pyright: ignore
    return Chosen(weights.quantized(params), AlgorithmReport(tuple(weights.entries)))


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
        originals: Mapping[int, Any],
        paths: Sequence[str | None],
        bar: Any = None,
    ):
        self._solver, self._plan, self._bar = solver, plan, bar
        self._places = {paths[place]: place for place in originals}
        self._grids = {
            weight.path: Grids.of(originals[self._places[weight.path]], solver.spec_of(weight.spec))
            for weight in plan.weights
        }
        self.current = dict(originals)
        self.entries: list[MatrixReport] = []

    def choose(self, matrix: Matrix, weight: Weight) -> None:
        """Chooses the codes of a matrix, and writes their values to the parameters."""
        grids, place = self._grids[weight.path], self._places[weight.path]
        self.entries.append(self._solver.solve(matrix, grids, weight))
        values = grids.values[matrix.places]
        self.current[place] = _written(self.current[place], matrix.places, values)
        if self._bar is not None:
            self._bar.update()

    def leave(self, site: Site, elements: Mapping[str, Array]) -> None:
        """Reports the matrices of a site that no batch has reached: they are rounded to nearest."""
        known = {(entry.sites, entry.step) for entry in self.entries}
        for operand in site.operands:
            for step in np.ndindex(elements.get(operand.key, np.empty((0, 0, 0))).shape[:-2]):
                shape, sites = elements[operand.key][step].shape, (site.name,)
                if (sites, step) not in known:
                    rounded = MatrixReport(
                        sites, step, str(operand.path), shape, 0.0, 0.0, None, 0, 0, 0, 0.0
                    )
                    self.entries.append(rounded)

    def quantized(self, params: Any) -> Any:
        """Returns the parameters with all weights quantized."""
        if self._bar is not None:
            self._bar.close()
        return self._plan.map_weights(
            lambda weight, _: self._grids[weight.path].quantized(weight.spec), params
        )


def _weight_of(plan: Plan, site: Site) -> Weight:
    weight = next(plan.weight_at(x.path) for x in site.operands if x.path is not None)
    assert weight is not None
    return weight


def _shared(
    f: Any, plan: Plan, params: Any, batches: list[Any], once: set[Address], progress: bool
) -> Iterable[tuple[Matrix, Weight]]:
    """Yields the matrices that are not of a site that runs once, with the sums over their uses."""
    rest = [
        site
        for site in plan.sites
        if site.address not in once and any(plan.weight_at(x.path) for x in site.operands)
    ]
    if not rest:
        return
    patterns = {re.escape(site.path): OBSERVERS[".*"] for site in rest}
    stats = calibrate_batches(f, plan, params, batches, observers=patterns, progress=progress)
    alone = {site.name for site in plan.sites if site.address in once}
    for path in dict.fromkeys(x.path for site in rest for x in site.operands):
        weight = plan.weight_at(path)
        if weight is None:
            continue
        for matrix in matrices_of("algorithms.gptq", plan, weight, stats):
            if not alone.issuperset(matrix.sites):
                yield matrix, weight


def _once(plan: Plan, jaxpr: Any, elements: Mapping[str, Array]) -> set[Address]:
    """Returns the addresses of the sites that run once for each part of their weight: all scans
    around step over it, and no other site multiplies by the same elements.
    """
    apart = _apart(plan, elements)
    found: set[Address] = set()

    def look(jaxpr: Any, address: Address, scans: tuple[Address, ...]) -> None:
        body, _ = _compat.open_jaxpr(jaxpr)
        for here, eqn, marked in addressed(body, address):
            site, name = plan.site_at(here), eqn.primitive.name
            if site is not None:
                weights = sum(x.path is not None for x in site.operands)
                loops = tuple(loop.address for loop in site.loops)
                if here in apart and weights == 1 and loops == scans:
                    found.add(here)
            elif not marked or name in ("while", "shard_map"):
                continue
            elif name == "cond":
                for i, branch in enumerate(eqn.params["branches"]):
                    look(branch, (*here, i), scans)
            elif name == "scan":
                look(eqn.params["jaxpr"], here, (*scans, here))
            elif name in FORMS:
                look(body_of(eqn), here, scans)

    look(jaxpr, (), ())
    return found


def _apart(plan: Plan, elements: Mapping[str, Array]) -> set[Address]:
    """Returns the addresses of the sites that share no element of their weight with another."""
    found: set[Address] = set()
    for weight in plan.weights:
        mine = [
            (site.address, elements.get(operand.key))
            for site in plan.sites
            for operand in site.operands
            if operand.path == weight.path
        ]
        known = [(here, own) for here, own in mine if own is not None]
        if not known or len(known) < len(mine):
            continue
        uses = np.zeros(1 + max(int(own.max(initial=0)) for _, own in known), np.int32)
        for _, own in known:
            uses[own] += 1
        found |= {here for here, own in known if np.all(uses[own] == 1)}
    return found


class _Sums:
    """Sums of products of inputs: once for sites that read the same ones one after another."""

    def __init__(self) -> None:
        self._last: tuple[Inputs, Any, Any] | None = None

    def sums(self, inputs: Inputs, floats: Inputs | None, about: Any) -> Any:
        """Returns the sum of `x x^T` over batches, float64 [*batch, channels, channels], the drift
        from float inputs, where there are any, and how many rows there were, of each matrix.
        """
        kind = dataclasses.replace(about, path="")
        if self._last is not None and kind == self._last[1] and _same(inputs, self._last[0]):
            return self._last[2]
        found = [_observed(*own, about=about) for own in inputs]
        rows = sum(np.asarray(each.rows, np.int64) for each in found)
        total, drift = _total(each.products for each in found), None
        if floats is not None:
            both = [_drift(x[0], *own, about=about) for x, own in zip(floats, inputs, strict=True)]
            drift = Drift(*map(_total, zip(*both, strict=True)))
        self._last = inputs, kind, (total, drift, rows)
        return self._last[2]


def _same(a: Inputs, b: Inputs) -> bool:
    """Whether inputs are the very same arrays."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return len(a) == len(b) and all(x is y for x, y in pairs)


def _total(parts: Iterable[jax.Array]) -> Array:
    """Returns the sum of what batches give, in float64."""
    first, *rest = parts
    total = np.array(first, np.float64)
    for part in rest:
        total += np.asarray(part)
    return total


@partial(jax.jit, static_argnames="about")
def _observed(x: jax.Array, sizes: jax.Array | None = None, *, about: Any) -> HessianStats:
    return hessian.observe(x, dataclasses.replace(about, sizes=sizes))


@partial(jax.jit, static_argnames="about")
def _drift(
    exact: jax.Array, x: jax.Array, sizes: jax.Array | None = None, *, about: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns what `Drift` holds, of one batch."""
    lost, site = exact - x, dataclasses.replace(about, sizes=sizes)
    return gram(lost, x, site), gram(lost, lost, site)


@jax.jit
def _written(x: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    """Returns a parameter with other values at some places."""
    return x.ravel().at[places].set(values.astype(x.dtype)).reshape(x.shape)
