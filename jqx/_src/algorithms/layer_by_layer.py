"""Quantizes a plan layer by layer: each site sees inputs from the sites before it, whose weights
are quantized already.
"""

import dataclasses
import json
import math
import re
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import shown
from ..errors import fail
from ..files import Path
from ..gradients.estimators import ste
from ..statistics.calibrators import Calibrator
from ..statistics.statistics import (
    HessianStats,
    flags,
    gram,
    has_rows,
    hessian,
    without_nonfinite,
)
from ..tensor.segments import Lazy
from ..tensor.spec import QSpec
from ..transforms.algorithm import AlgorithmResult
from ..transforms.calibrate import calibrate_batches, progress_bar, tell
from ..transforms.plan import Plan, Site, Weight
from ..transforms.quantize_params import check_finite_weight
from ..transforms.row_counts import count_operand, is_counted, value_of
from ..transforms.stats import OnNonfinite, check_finite, check_mode, observed_parts, warn_left_out
from ..transforms.trace import Call, TracedOnce
from ..transforms.views import Address
from .engine import Inputs, Stream, Traced, Walk, calibrate_stages
from .grids import Grids, Group, calibrated, sites_once
from .interface import (
    UNKNOWN,
    UNREACHED,
    AlgorithmReport,
    MatrixReport,
    left_rounded,
    name_of,
    reached,
)
from .matrices import (
    Drift,
    Matrix,
    Unsupported,
    by_shape,
    counted,
    matrices_of,
    observers_of,
    parted,
    settled,
    stacked,
)
from .stages import Scope, Steps
from .store import (
    Checkpoint,
    CodeStore,
    InFiles,
    InMemory,
    Memory,
    Offload,
    Where,
    bytes_of_activations,
    bytes_of_sums,
    bytes_of_weights,
    digest,
    on_device,
)

Array = np.ndarray


# Sums over batches of products of the inputs of a site, which GPTQ needs.


class Sums:
    """Sums of products of inputs, computed once for consecutive sites with the same inputs.

    Attributes:
      function: the name of the algorithm, for errors.
      ignores: whether rows are left out that are not finite.
      left_out: the flags of such rows, by the name of the site.
      batches: the indices of batches that have some.
    """

    def __init__(self, function: str, ignores: bool, has_all_rows: bool) -> None:
        self.function, self.ignores, self._shape = function, ignores, () if has_all_rows else None
        self.left_out: dict[str, Array] = {}
        self.batches: dict[int, None] = {}
        self._last: tuple[list[Any], Any, Any] | None = None

    def sums(
        self, streams: list[Inputs], observed_site: Any, name: str, batches: Sequence[int]
    ) -> Any:
        """Returns the sum of `x x^T` over batches, float64 [*batch, channels, channels], the drift
        from float inputs, if there are any, and for each matrix the number of rows that reach it,
        the number of rows at the site, and the sum of `|x|^4`. `name` is that of the site in its
        step; `batches` are the indices of the batches.
        """
        kind, arrays = dataclasses.replace(observed_site, path=""), jax.tree.leaves(streams)
        counts = any(is_counted(x) for stream in streams for batch in stream for x in batch)
        observed_site = observed_site if counts else kind  # one program for all equal sites
        previous = self._last
        if previous is not None and kind == previous[1] and len(previous[0]) == len(arrays):
            if all(a() is b for a, b in zip(previous[0], arrays, strict=True)):
                return previous[2]
        self._last = None
        # Batch by batch, so that only one is on the device.
        quantized, *floats = (
            (list(map(on_device, batch)) for batch in quantized) for quantized in streams
        )
        total, drift, rows = None, None, (0, 0, 0)
        for batch_index, x in zip(batches, quantized, strict=True):
            exact = [next(stream)[0] for stream in floats]
            stats, drift_parts, flags = _observed(
                exact, *x, observed_site=observed_site, ignores=self.ignores, shape=self._shape
            )
            flags = np.asarray(flags)
            if flags[..., :2].any():
                if not self.ignores:
                    check_finite(self.function, {name: flags}, batch_index)
                self.left_out[name] = self.left_out.get(name, 0) + flags
                self.batches[batch_index] = None
            batch_rows = np.asarray(stats.rows, np.float64)
            batch_rows = np.broadcast_to(batch_rows, stats.products.shape[:-2])
            batch_rows = (
                *counted(batch_rows, reached(flags, observed_site.op)),
                np.asarray(stats.fourth, np.float64),
            )
            total, rows = _added(total, stats.products), tuple(map(np.add, rows, batch_rows))
            if drift_parts is not None:
                drift = Drift(*map(_added, drift or (None, None), drift_parts))
        # Arrays that nothing else holds are not kept for this.
        self._last = list(map(weakref.ref, arrays)), kind, (total, drift, rows)
        return self._last[2]

    def warn(self) -> None:
        """Warns of rows that were left out."""
        warn_left_out(self.function, self.left_out, sorted(self.batches))


def _added(total: Array | None, part: jax.Array) -> Array:
    """Adds the part of one batch to a sum, in float64."""
    if total is None:
        return np.array(part, np.float64)
    total += np.asarray(part)
    return total


@partial(jax.jit, static_argnames=("observed_site", "ignores", "shape"))
def _observed(
    exact: list[Any], x: Any, sizes: Any = None, *, observed_site: Any, ignores: bool, shape: Any
) -> tuple[HessianStats, tuple[jax.Array, jax.Array] | None, jax.Array]:
    """Returns the sums of one batch, the contents of its `Drift` if there is a float input, and
    flags of both inputs.
    """

    def counts_of(x: Any) -> jax.Array:
        return count_operand("algorithms.gptq", observed_site.path, x, shape)

    weights = counts_of(x) if is_counted(x) else None
    site = dataclasses.replace(observed_site, sizes=value_of(sizes), weights=weights)
    values = [value_of(z) for z in (x, *exact)]
    flagged = reduce(jnp.maximum, (flags.observe(z, site) for z in values))
    if ignores:
        for z in exact:  # rows of the float function that do not count
            if is_counted(z) and z.is_known:
                counts = counts_of(z)
                weights = jnp.ones_like(counts) if site.weights is None else site.weights
                site = dataclasses.replace(site, weights=jnp.minimum(weights, counts))
        for i, z in enumerate(values):
            values[i], site = without_nonfinite(z, site)
    quantized, drift = values[0], None
    if exact:
        difference = values[1] - quantized
        drift = gram(difference, quantized, site), gram(difference, difference, site)
    return hessian.observe(quantized, site), drift, flagged


# The run over the sites.


_COUNTED = 3
"""Bytes of a 2-byte value and its float32 row weight, relative to the value alone; at most."""


class LayerByLayer:
    """An algorithm that chooses the codes of the matrices of a plan, site by site. Its `repr` shows
    all options that codes depend on.

    Attributes:
      function: name of the function, for errors.
      calibrator: computes the scales; `None` takes that of each spec.
      sequential: whether sites are processed one by one. Otherwise all see float inputs.
      propagation: how a weight makes up for the error of its inputs; `"none"` if it does not.
      unsupported: what to do with weights whose inputs cannot be observed.
      weight: weights of the rows of inputs, a function of the values of a batch; or `None`.
      offload: whether values of batches are kept on the host, or on disk, between stages.
      checkpoint: the folder of the results so far.
    """

    function: ClassVar[str]
    sequential: Any = True
    calibrator: Calibrator | None
    propagation: Any
    unsupported: Unsupported
    weight: Callable[..., Any] | None
    offload: Where
    checkpoint: Path | None

    @property
    def observers(self) -> Mapping[str, Any]:
        """What is recorded for sites whose weights are chosen before all others."""
        return observers_of(self.weight, self.unsupported)

    def spec_of(self, spec: QSpec) -> QSpec:
        """Returns a spec with the calibrator that computes scales."""
        return calibrated(spec, self.calibrator)

    def matrices(
        self,
        plan: Plan,
        group: Group,
        leaves: Mapping[str, Any],
        stats: Mapping[str, Any],
        entries: list[MatrixReport],
    ) -> list[Matrix]:
        """Returns the matrices of weights, from statistics. If these are not known, and that is no
        error, there are none, and the report says so.
        """
        try:
            return matrices_of(self.function, plan, group, stats)
        except NotImplementedError:
            if self.unsupported == "error":
                raise
        sites = [x.name for x in plan.sites if not {*group.sizes}.isdisjoint(plan.weights_in(x))]
        *rows, columns = leaves[next(iter(group.sizes))].shape or (1,)
        shape = math.prod(rows), columns
        entries.append(left_rounded(tuple(sites), (), (), group.path, shape, UNKNOWN))
        return []

    def solve(self, matrices: Sequence[Matrix], grids: Grids, weight: Weight) -> list[MatrixReport]:
        """Rounds the elements of matrices of one shape, in place, and returns a report of each."""
        entries: list[MatrixReport] = []
        for part in parted(matrices):
            start = time.perf_counter()
            solved = self._solve(part, grids, self.spec_of(weight.spec))
            stack, rounded, damping, reasons = solved
            nearest = stack.nearest()  # with scales that the solver may have computed
            values = stack.w, nearest, rounded
            rounded, reports = settled(part, weight.path, *values, damping, reasons, start)
            grids.write(stack.element_ids, rounded)
            entries += reports
        return entries

    def _solve(
        self, matrices: Sequence[Matrix], grids: Grids, spec: QSpec
    ) -> tuple[Any, Array, Sequence[float | None], Sequence[str]]:
        """Rounds matrices that fit into memory together. Returns their `Stack`, their values on the
        grid, the damping of each Hessian, and why some are to be rounded to nearest; empty for
        others.
        """
        raise NotImplementedError

    def run(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> AlgorithmResult:
        """Returns the parameters with codes that are chosen site by site, and a report.

        A weight that several sites share, or that a loop uses in all of its steps, is processed
        first, with the sum over its uses of float inputs.
        """
        f = TracedOnce(f)
        run = _Run(self, f, plan, params, list(batches), on_nonfinite)
        return run.chosen(f, params, progress)

    def digests(self, plan: Plan, calls: Sequence[Call]) -> dict[str, str]:
        """Returns digests of everything that the codes of a run depend on, by name, except the
        version of JAX and the devices. `calls` are the function, traced for each batch.
        """
        without_places: Any = {"offload": False, "checkpoint": None}
        functions = {id(call.jaxpr): call for call in calls}.values()
        weights = [(x.path, dataclasses.replace(x.spec, gradient=ste)) for x in plan.weights]
        first_leaves = list(zip(calls[0].leaves, calls[0].paths, strict=True))
        batches = [
            [x for x, path in zip(call.leaves, call.paths, strict=True) if path is None]
            for call in calls
        ]
        parts = {
            "function": [(call.jaxpr, call.consts) for call in functions],
            "plan": [plan.fingerprint, weights],
            "options": dataclasses.replace(self, **without_places),  # type: ignore[type-var]
            "parameters": [(x, path) for x, path in first_leaves if path is not None],
            "batches": batches,
        }
        return {name: digest(x) for name, x in parts.items()}


class _Run(Walk):
    """A run over the sites. Weights with chosen codes are on their grids, all others in float.

    Attributes:
      entries: the entries of the report.
    """

    def __init__(
        self,
        solver: LayerByLayer,
        f: TracedOnce,
        plan: Plan,
        params: Any,
        batches: list[Any],
        on_nonfinite: OnNonfinite,
    ):
        ignores = check_mode(solver.function, on_nonfinite)
        traced = Traced.of(f, plan, params, batches, solver.weight, lazy=True, ignores=ignores)
        super().__init__(traced.plan)
        self._solver, self._traced, self._batches = solver, traced, batches
        self._on_nonfinite, self.entries = on_nonfinite, list[MatrixReport]()
        self._inputs = Sums(solver.function, ignores, solver.weight is None)
        call, originals = traced.calls[0], traced.originals
        lazy = [x for x, i in traced.leaf_indices.items() if isinstance(originals[i], Lazy)]
        self._unread, self._checkpoint, self._bar, self._count = set(lazy), None, None, 0
        digests = None
        if solver.checkpoint is not None or lazy:
            digests = solver.digests(self.plan, traced.calls)
        if solver.checkpoint is not None:
            for path in lazy:
                leaf = originals[traced.leaf_indices[path]]
                if not leaf.source:
                    problem = f"the checkpoint cannot identify the leaf {path!r}, {shown(leaf)}."
                    fix = "give it a `source` that identifies its values, as archive.lazy does, or "
                    fix += "leave `checkpoint` out."
                    raise fail(solver.function, problem, fix=fix)
            self._checkpoint = Checkpoint(solver.function, solver.checkpoint, digests or {})
        self._parts = {
            site.address: {
                x.observed.role: x for x in observed_parts(site, traced.items[site.address])
            }
            for site in self.plan.sites
        }
        once = set[Address]()
        if solver.sequential:
            once = sites_once(self.plan, traced.groups, call.jaxpr, traced.elements)
        sites = (self.plan.site_at(address) for address in sorted(once))
        self._once = {x.address: x for x in sites if x is not None and self._is_known(x)}
        self._offload = Offload(solver.offload)
        self._code_store, self._current = self._stores(digests if lazy else None)

    def _is_known(self, site: Site) -> bool:
        """Whether the sums of inputs of a site are known; an error may be raised later if not."""
        activation = self._parts[site.address].get("activation")
        is_refused = self._solver.unsupported == "error"
        return activation is not None and (is_refused or has_rows(activation.observed))

    def _stores(self, digests: Mapping[str, str] | None) -> tuple[CodeStore, Stream]:
        """Returns the store of grids, and the parameters as they are at each stage. `digests` are
        those of lazy parameters.
        """
        traced, current = self._traced, dict(self._traced.originals)
        if digests is None:
            grids = traced.grids(self._solver.spec_of)
            return InMemory(grids), Stream(current, self._offload)
        leaves = {path: traced.originals[i] for path, i in traced.leaf_indices.items()}
        is_known = all(not isinstance(x, Lazy) or x.source for x in leaves.values())
        source = json.dumps(digests) if is_known else ""
        code_store = InFiles(self._checkpoint, traced.groups, leaves, self._solver.spec_of, source)
        for group in traced.groups:
            current.update(
                {traced.leaf_indices[path]: code_store.current(path) for path in group.sizes}
            )
        return code_store, Stream(current, self._offload)

    def chosen(self, f: Any, params: Any, progress: bool) -> AlgorithmResult:
        """Returns the parameters with codes, and a report."""
        traced = self._traced
        scopes = traced.scopes(lambda site: site.address in self._once, returns=False)
        shared_sites = [
            site
            for site in self.plan.sites
            if site.address not in self._once
            and any(self.plan.weight_at(x.path) for x in site.operands)
        ]
        memory = self._memory(scopes, shared_sites) if self._solver.sequential else None
        count = sum(math.prod(x.shape[:-2]) for x in traced.elements.values())
        self._bar = progress_bar("quantize", "matrix", total=count) if progress else None
        if memory is not None:
            tell(self._bar, f"quantize: {memory}")
        if shared_sites:
            self._choose_shared(f, params, shared_sites, progress)
        streams = self._current, Stream(dict(traced.originals), self._offload)
        self.go(traced.frames(scopes, streams[: 1 + self._has_float]))
        for site in self._once.values():
            self._leave(site)
        self._inputs.warn()
        if self._bar is not None:
            self._bar.close()
        codes = self._code_store.quantized()
        weights = self.plan.map_weights(lambda weight, _: codes[weight.path], params)
        return AlgorithmResult(weights, AlgorithmReport(tuple(self.entries), memory))

    @property
    def _has_float(self) -> bool:
        """Whether the float function runs too, so that the drift of inputs is known."""
        return self._solver.propagation != "none"

    def _memory(self, scopes: Sequence[Scope], shared_sites: Sequence[Site]) -> Memory:
        """Returns the memory that the run needs."""
        solver, traced, call = self._solver, self._traced, self._traced.calls[0]
        shared_sums = (
            bytes_of_sums(self._parts[site.address]["activation"])
            * math.prod(loop.length for loop in site.loops)
            for site in shared_sites
            if self._is_known(site)
        )
        once = (self._parts[address]["activation"] for address in self._once)
        activations = bytes_of_activations(scopes, 1 + self._has_float)
        return Memory(
            weights=bytes_of_weights(self.plan, call.leaves, call.paths, solver.spec_of)
            + sum(x.nbytes for x in traced.elements.values()),
            statistics=max(*(bytes_of_sums(x, self._has_float) for x in once), sum(shared_sums), 0),
            activations=activations * (1 if solver.weight is None else _COUNTED),
            offload=solver.offload,
        )

    def _choose_shared(
        self, f: Any, params: Any, shared_sites: Sequence[Site], progress: bool
    ) -> None:
        """Chooses the codes of weights whose sites do not run once, by the sums over their uses. A
        weight whose sums are not known is rounded to nearest.
        """
        solver, plan, traced = self._solver, self.plan, self._traced
        known_sites, observers = filter(self._is_known, shared_sites), solver.observers[".*"]
        patterns = {re.escape(site.path): observers for site in known_sites}
        stats, options = {}, {"observers": patterns, "progress": progress}
        options["on_nonfinite"] = self._on_nonfinite
        if patterns and self._unread:
            options["weight"] = solver.weight
            stats = calibrate_stages(f, plan, params, self._batches, **options)
        elif patterns:
            stats = calibrate_batches(f, plan, params, self._batches, **options)
        single_sites = {x.name for x in plan.sites} - {x.name for x in shared_sites}
        used = {path for site in shared_sites for path in plan.weights_in(site)}
        for group in traced.groups:
            if used.isdisjoint(group.sizes):
                continue
            leaves = {path: traced.originals[traced.leaf_indices[path]] for path in group.sizes}
            matrices = solver.matrices(plan, group, leaves, stats, self.entries)
            for same in by_shape(x for x in matrices if not single_sites.issuperset(x.sites)):
                self._choose(lambda same=same: same, stacked(same), group)

    def solve(self, site: Site, steps: Steps, streams: list[Inputs]) -> None:
        """Chooses the codes of a site in one step."""
        side, where = (self._parts[site.address][role] for role in ("activation", "weight"))
        where = self._traced.elements[where.key][steps]

        def matrices() -> list[Matrix]:
            name = name_of([side.key], steps)
            total, drift, rows = self._inputs.sums(streams, side.observed, name, self.reached)
            inputs_of, rows_of, fourths = (np.broadcast_to(x, where.shape[:-2]) for x in rows)
            return [
                Matrix(
                    (site.name,),
                    steps,
                    index,
                    where[index],
                    total[index],
                    int(inputs_of[index]),
                    None if drift is None else Drift(*(x[index] for x in drift)),
                    int(rows_of[index]),
                    float(fourths[index]),
                )
                for index in np.ndindex(where.shape[:-2])
            ]

        group = self._traced.group_of(self.plan.weights_in(site)[0])
        self._choose(matrices, where.reshape(-1, *where.shape[-2:]), group)

    def _choose(self, matrices: Callable[[], Sequence[Matrix]], where: Array, group: Group) -> None:
        """Chooses the codes of matrices of one shape, and writes their values to the parameters.

        Args:
          matrices: returns them; called only if no checkpoint has their codes.
          where: the numbers of their elements, [matrices, rows, columns].
          group: the weights that they belong to.
        """
        leaf_indices = {path: self._traced.leaf_indices[path] for path in group.sizes}
        leaves = self._current.some([*leaf_indices.values()])
        for path, i in leaf_indices.items():
            if path in self._unread:  # lazy weights are checked when they are read
                self._unread.remove(path)
                check_finite_weight(self._solver.function, leaves[i], path)
        grids = self._code_store.take(group, {path: leaves[i] for path, i in leaf_indices.items()})
        self.entries += self._resumed_or_rounded(matrices, where, grids, group.whole)
        start = 0
        for path, size in group.sizes.items():
            numbers = where
            if len(group.sizes) > 1:
                numbers = where[(where >= start) & (where < start + size)]
            if numbers.size:
                self._current.write(leaf_indices[path], numbers - start, grids.values(numbers))
            start += size
        self._code_store.put(group, grids, where)
        if self._bar is not None:
            self._bar.update(len(where))

    def _resumed_or_rounded(
        self,
        matrices: Callable[[], Sequence[Matrix]],
        element_ids: Array,
        grids: Grids,
        weight: Weight,
    ) -> list[MatrixReport]:
        """Rounds matrices of one shape, in place, and returns their reports: from the checkpoint if
        it has them, in the order in which they were chosen, otherwise by the solver.
        """
        if self._checkpoint is None:
            return self._solver.solve(matrices(), grids, weight)
        name, self._count = f"{self._count:06}", self._count + 1
        labels = np.flatnonzero(np.bincount(grids.label(element_ids).ravel()))
        stored = self._checkpoint.get(name)
        if stored is None:
            entries = self._solver.solve(matrices(), grids, weight)
            report = json.dumps([dataclasses.asdict(entry) for entry in entries])
            codes = grids.codes[element_ids]
            arrays = {"report": np.array(report), "places": element_ids}
            arrays["codes"] = codes.view(f"u{codes.dtype.itemsize}")
            arrays["scale"], zero_point = grids.at(labels)
            self._checkpoint.put(
                name, arrays if zero_point is None else arrays | {"zero_point": zero_point}
            )
            return entries
        shapes = {key: x.shape for key, x in stored.items()}
        is_whole = {"report", "places", "codes", "scale"} <= {*shapes}
        if not (is_whole and np.array_equal(stored["places"], element_ids)):
            detail = f"arrays of {shapes}, and not matrices of {element_ids.shape}"
            raise self._checkpoint.refusal(name, detail)
        grids.codes[element_ids] = stored["codes"].view(grids.codes.dtype)
        grids.scale[labels] = stored["scale"]
        if grids.zero_point is not None:
            grids.zero_point[labels] = stored["zero_point"]
        entries: Any = json.loads(str(stored["report"]))
        for entry in entries:  # lists of JSON are tuples
            entry |= {name: tuple(x) for name, x in entry.items() if isinstance(x, list)}
        return [MatrixReport(**entry) for entry in entries]

    def _leave(self, site: Site) -> None:
        """Reports the matrices of a site that no batch reached: they are rounded to nearest."""
        reported = {(entry.sites, entry.step, entry.at) for entry in self.entries}
        for operand in site.operands:
            if operand.key not in self._traced.elements:
                continue
            *stack, rows, columns = self._traced.elements[operand.key].shape
            for index in np.ndindex(*stack):
                matrix = (site.name,), index[: len(site.loops)], index[len(site.loops) :]
                if matrix not in reported:
                    self.entries.append(
                        left_rounded(*matrix, site.path, (rows, columns), UNREACHED)
                    )
