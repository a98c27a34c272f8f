"""Quantizes a plan layer by layer: each site sees inputs from the sites before it, whose weights
are quantized already.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import re
import weakref
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import shown
from ..errors import fail
from ..files import Path, Replacement, as_path
from ..gradients.estimators import ste
from ..statistics.calibrators import Calibrator
from ..statistics.statistics import (
    HessianStats,
    ObservedSite,
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
from ..transforms.trace import Call, TracedOnce, is_array
from .engine import Inputs, Leaves, Stream, Traced, Walk, calibrate_stages
from .grids import Grids, Group, calibrated, sites_once
from .interface import UNREACHED, AlgorithmReport, MatrixReport, left_rounded, name_of, reached
from .matrices import (
    Drift,
    Matrix,
    Unsupported,
    by_shape,
    counted,
    matrices_of,
    observers_of,
    parted,
    stacked,
    unknown,
)
from .stages import Scope, Steps
from .store import (
    CodeStore,
    InFiles,
    InMemory,
    Memory,
    Offload,
    Where,
    bytes_of_activations,
    bytes_of_sums,
    bytes_of_weights,
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
    site = _with_rows(observed_site, x, sizes, shape)
    values = [value_of(z) for z in (x, *exact)]
    flagged = reduce(jnp.maximum, (flags.observe(z, site) for z in values))
    if ignores:
        for z in exact:  # rows of the float function that do not count
            if is_counted(z) and z.is_known:
                counts = count_operand("algorithms.gptq", observed_site.path, z, shape)
                weights = jnp.ones_like(counts) if site.weights is None else site.weights
                site = dataclasses.replace(site, weights=jnp.minimum(weights, counts))
        for i, z in enumerate(values):
            values[i], site = without_nonfinite(z, site)
    quantized, drift = values[0], None
    if exact:
        difference = values[1] - quantized
        drift = gram(difference, quantized, site), gram(difference, difference, site)
    return hessian.observe(quantized, site), drift, flagged


def _with_rows(observed_site: ObservedSite, x: Any, sizes: Any, shape: Any) -> ObservedSite:
    """Returns the site with sizes of groups and weights of rows, for observers."""
    counts = (
        count_operand("algorithms.gptq", observed_site.path, x, shape) if is_counted(x) else None
    )
    return dataclasses.replace(observed_site, sizes=value_of(sizes), weights=counts)


# Checkpoints: results so far in a folder, from which an interrupted run continues.


NAME = "checkpoint.json"


class Checkpoint:
    """Matrices with chosen codes, in the order in which they were chosen.

    Matrices that are chosen together share one file, which is written as a whole. A run with the
    same inputs processes them in the same order.

    Args:
      function: name of the function, for errors.
      path: the folder; it is created if necessary.
      made_of: digests of everything that the codes depend on, by name.

    Raises:
      OSError: the folder cannot be created or written to.
      ValueError: the folder holds something else, or the results of another run.
    """

    def __init__(self, function: str, path: Path, made_of: Mapping[str, str]):
        self._function, self.folder, self._count = function, as_path(function, path), 0
        name, stored = os.path.join(self.folder, NAME), None
        try:
            os.makedirs(self.folder, exist_ok=True)
            is_new = not os.listdir(self.folder)
        except OSError:
            is_new = False
        if is_new:
            self._write(name, json.dumps(made_of, indent=1).encode())
        with contextlib.suppress(OSError, ValueError), open(name, "rb") as file:
            stored = json.load(file)
        if not isinstance(stored, dict):
            problem = f"`checkpoint` is not a checkpoint folder: it has no readable {NAME}."
            fix = "pass the folder of an interrupted run, or one that is empty or new."
            raise fail(function, problem, given=repr(self.folder), fix=fix)
        differ = [name for name in made_of if stored.get(name) != made_of[name]]
        if differ:
            problem = "the checkpoint belongs to another run."
            detail = f"{self.folder!r}, made with other {', '.join(differ)}"
            fix = "pass another folder, or delete this one to start again."
            raise fail(function, problem, given=detail, fix=fix)

    def read(self, grids: Grids, element_ids: Array) -> list[MatrixReport] | None:
        """Writes the next matrices to a weight and returns their report, if the checkpoint has
        them.
        """
        path = self._path()
        if not os.path.exists(path):
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in ("places", "codes", "scale", "report")}
                zero_point = file["zero_point"] if "zero_point" in file else None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            arrays, zero_point, contents = None, None, str(error)
        else:
            contents = f"matrices of {arrays['places'].shape}"
        if not (arrays is not None and np.array_equal(arrays["places"], element_ids)):
            problem = "a file of the checkpoint is not what this run wrote."
            detail = f"{path!r}: {contents}, and not matrices of {element_ids.shape}"
            fix = "delete that file and those with higher numbers."
            raise fail(self._function, problem, given=detail, fix=fix)
        assert arrays is not None
        label = _labels(grids, element_ids)
        grids.codes[element_ids] = arrays["codes"].view(grids.codes.dtype)
        grids.scale[label] = arrays["scale"]
        if grids.zero_point is not None:
            grids.zero_point[label] = zero_point
        self._count += 1
        entries: Any = json.loads(str(arrays["report"]))
        for entry in entries:  # lists of JSON are tuples
            entry |= {name: tuple(x) for name, x in entry.items() if isinstance(x, list)}
        return [MatrixReport(**entry) for entry in entries]

    def write(self, grids: Grids, element_ids: Array, entries: Sequence[MatrixReport]) -> None:
        """Writes matrices that were just chosen."""
        scale, zero_point = grids.at(_labels(grids, element_ids))
        codes = grids.codes[element_ids]  # as integers: files support only NumPy's own dtypes
        codes = codes.view(f"u{codes.dtype.itemsize}")
        arrays: dict[str, Any] = {"places": element_ids, "codes": codes, "scale": scale}
        if zero_point is not None:
            arrays["zero_point"] = zero_point
        report = json.dumps([dataclasses.asdict(entry) for entry in entries])
        data = io.BytesIO()
        np.savez(data, report=np.array(report), **arrays)
        self._write(self._path(), data.getbuffer())
        self._count += 1

    def _write(self, path: str, data: Any) -> None:
        with Replacement(self._function, path) as file:
            file.write(0, data)
            file.commit()

    def _path(self) -> str:
        return os.path.join(self.folder, f"{self._count:06}.npz")


def chosen(
    checkpoint: Checkpoint | None,
    solver: "LayerByLayer",
    matrices: Callable[[], Sequence[Matrix]],
    element_ids: Array,
    grids: Grids,
    weight: Weight,
) -> list[MatrixReport]:
    """Rounds matrices of one shape, in place, and returns their reports: from a checkpoint if it
    has them, otherwise by a solver.
    """
    stored = None if checkpoint is None else checkpoint.read(grids, element_ids)
    if stored is not None:
        return stored
    entries = solver.solve(matrices(), grids, weight)
    if checkpoint is not None:
        checkpoint.write(grids, element_ids, entries)
    return entries


def _labels(grids: Grids, element_ids: Array) -> Array:
    """Returns the distinct indices of the scales of some elements."""
    return np.flatnonzero(np.bincount(grids.label(element_ids).ravel()))


def made_of(plan: Plan, solver: Any, calls: Sequence[Call]) -> dict[str, str]:
    """Returns digests of everything that the codes of a run depend on, by name, except the version
    of JAX and the devices.

    Args:
      plan: the plan.
      solver: chooses the codes.
      calls: the function, traced for each batch.
    """
    functions = {id(call.jaxpr): call for call in calls}.values()
    weights = [(x.path, dataclasses.replace(x.spec, gradient=ste)) for x in plan.weights]
    first_leaves = list(zip(calls[0].leaves, calls[0].paths, strict=True))
    batches = [
        [x for x, path in zip(call.leaves, call.paths, strict=True) if path is None]
        for call in calls
    ]
    return {
        "function": digest([(call.jaxpr, call.consts) for call in functions]),
        "plan": digest([plan.fingerprint, weights]),
        "options": digest(solver),
        "parameters": digest([(x, path) for x, path in first_leaves if path is not None]),
        "batches": digest(batches),
    }


def digest(tree: Any) -> str:
    """Returns a digest of the leaves of a pytree, and of its structure."""
    leaves, structure = jax.tree.flatten(tree)
    sha = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if not is_array(leaf):
            sha.update(re.sub(r" at 0x[0-9a-f]+", "", repr(leaf)).encode())
            continue
        if isinstance(leaf, Lazy):
            sha.update(f"{leaf.dtype}{leaf.shape}{leaf.source}".encode())
            continue
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        x = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        sha.update(f"{x.dtype}{x.shape}".encode())
        sha.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


# The run over the sites.


_COUNTED = 3
"""Bytes of a 2-byte value and its float32 row weight, relative to the value alone; at most."""


class LayerByLayer:
    """An algorithm that chooses the codes of the matrices of a plan, site by site. Its `repr` shows
    all options that codes depend on.

    Attributes:
      function: name of the function, for errors.
      calibrator: computes the scales; `None` takes that of each spec.
      propagation: how a weight makes up for the error of its inputs; `"none"` if it does not.
      unsupported: what to do with weights whose inputs cannot be observed.
      weight: weights of the rows of inputs, a function of the values of a batch; or `None`.
      offload: whether values of batches are kept on the host, or on disk, between stages.
      checkpoint: the folder of the results so far.
    """

    function: ClassVar[str]
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

    def solve(self, matrices: Sequence[Matrix], grids: Grids, weight: Weight) -> list[MatrixReport]:
        """Rounds the elements of matrices of one shape, in place, and returns a report of each."""
        spec = self.spec_of(weight.spec)
        return [x for part in parted(matrices) for x in self._solve(part, grids, weight.path, spec)]

    def _solve(
        self, matrices: Sequence[Matrix], grids: Grids, path: str, spec: QSpec
    ) -> list[MatrixReport]:
        """Rounds matrices that fit into memory together."""
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
        f = f if isinstance(f, TracedOnce) else TracedOnce(f)
        run = _Run(self, f, plan, params, list(batches), on_nonfinite)
        return run.chosen(f, params, progress)

    def made_of(self, plan: Plan, calls: Sequence[Call]) -> dict[str, str]:
        """Returns digests of everything that the codes of a run depend on."""
        options: Any = {"offload": False, "checkpoint": None}
        return made_of(plan, dataclasses.replace(self, **options), calls)  # type: ignore[type-var]


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
        call, lazy = traced.calls[0], [path for path in traced.leaf_indices if self._is_lazy(path)]
        self._unread, self._checkpoint, self._bar = set(lazy), None, None
        digests = None
        if solver.checkpoint is not None or lazy:
            digests = solver.made_of(self.plan, traced.calls)
        if solver.checkpoint is not None:
            for path in lazy:
                leaf = traced.originals[traced.leaf_indices[path]]
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
        once = sites_once(self.plan, traced.groups, call.jaxpr, traced.elements)
        sites = (self.plan.site_at(address) for address in sorted(once))
        self._once = {x.address: x for x in sites if x is not None and self._is_known(x)}
        self._shelf, self._current = self._stores(digests if lazy else None)

    def _is_lazy(self, path: str) -> bool:
        """Whether a leaf is read when it is needed."""
        return isinstance(self._traced.originals[self._traced.leaf_indices[path]], Lazy)

    def _is_known(self, site: Site) -> bool:
        """Whether the sums of inputs of a site are known; an error may be raised later if not."""
        activation = self._parts[site.address].get("activation")
        is_refused = self._solver.unsupported == "error"
        return activation is not None and (is_refused or has_rows(activation.observed))

    def _stores(self, digests: Mapping[str, str] | None) -> tuple[CodeStore, Leaves]:
        """Returns the store of grids, and the parameters as they are at each stage. `digests` are
        those of lazy parameters.
        """
        traced, current = self._traced, dict(self._traced.originals)
        if digests is None:
            return InMemory(traced.grids(self._solver.spec_of)), Leaves(current)
        leaves = {path: traced.originals[i] for path, i in traced.leaf_indices.items()}
        is_known = all(not isinstance(x, Lazy) or x.source for x in leaves.values())
        source = json.dumps(digests) if is_known else ""
        folder = None if self._checkpoint is None else self._checkpoint.folder
        code_store = InFiles(folder, traced.groups, leaves, self._solver.spec_of, source)
        for group in traced.groups:
            current.update(
                {traced.leaf_indices[path]: code_store.current(path) for path in group.sizes}
            )
        return code_store, Leaves(current)

    def chosen(self, f: Any, params: Any, progress: bool) -> AlgorithmResult:
        """Returns the parameters with codes, and a report."""
        solver, traced = self._solver, self._traced
        scopes = traced.scopes(lambda site: site.address in self._once, returns=False)
        shared_sites = [
            site
            for site in self.plan.sites
            if site.address not in self._once
            and any(self.plan.weight_at(x.path) for x in site.operands)
        ]
        memory = self._memory(scopes, shared_sites)
        count = sum(math.prod(x.shape[:-2]) for x in traced.elements.values())
        self._bar = progress_bar("quantize", "matrix", total=count) if progress else None
        tell(self._bar, f"quantize: {memory}")
        if shared_sites:
            self._choose_shared(f, params, shared_sites, progress)
        leaves, offload = (self._current, Leaves(dict(traced.originals))), Offload(solver.offload)
        streams = [Stream(x, offload) for x in leaves[: 1 + self._has_float]]
        self.go(traced.frames(scopes, streams))
        for site in self._once.values():
            self._leave(site)
        self._inputs.warn()
        if self._bar is not None:
            self._bar.close()
        codes = self._shelf.quantized()
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
            try:
                matrices = matrices_of(solver.function, plan, group, stats)
            except NotImplementedError:
                if solver.unsupported == "error":
                    raise
                shape = traced.originals[traced.leaf_indices[next(iter(group.sizes))]].shape
                self.entries.append(unknown(plan, group, shape))
                continue
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
        grids = self._shelf.take(group, {path: leaves[i] for path, i in leaf_indices.items()})
        self.entries += chosen(self._checkpoint, self._solver, matrices, where, grids, group.whole)
        start = 0
        for path, size in group.sizes.items():
            numbers = where
            if len(group.sizes) > 1:
                numbers = where[(where >= start) & (where < start + size)]
            if numbers.size:
                self._current.write(leaf_indices[path], numbers - start, grids.values(numbers))
            start += size
        self._shelf.put(group, grids, where)
        if self._bar is not None:
            self._bar.update(len(where))

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
