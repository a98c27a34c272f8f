"""Layer-by-layer runs: the weights of each site are chosen from inputs that the quantized layers
before it produce.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..errors import fail
from ..statistics.statistics import Observer, RowWeight
from ..tensor.segments import Lazy, read
from ..tensor.spec import QSpec
from ..transforms.calibrate import arguments_of, progress_bar
from ..transforms.find import Found
from ..transforms.make_plan import as_plan, with_contractions
from ..transforms.plan import Plan, Site
from ..transforms.quantize_params import dequantize_params
from ..transforms.row_counts import (
    alike,
    count_arguments,
    count_operand,
    every_row,
    spread,
    tainted,
    value_of,
    weights_of,
)
from ..transforms.stats import (
    FLAGS,
    Entries,
    Entry,
    GivenObservers,
    OnNonfinite,
    Stats,
    check_finite,
    check_mode,
    check_observers,
    entries_of,
    places_of,
    warn_left_out,
    with_flags,
)
from ..transforms.trace import Call, TracedOnce, trace_call
from ..transforms.views import Address
from ..transforms.walk import bodies, carried
from .grids import Elements, Grids, Group, elements_of_sites, reached_sites
from .interface import name_of
from .stages import Division, Scope, Source, Stage, Steps
from .store import Offload, on_device

# The parameters of a function that runs stage by stage. Lazy leaves are read when a stage, or the
# choice of their codes, needs them, and dropped when the next one needs others.


class Stream:
    """One run of the function, with its own parameters.

    Args:
      leaves: the leaves of the parameters, by their index among the operands of the function, as
        they are at each stage; stored without a copy.
      offload: keeps values of batches between stages.
    """

    def __init__(self, leaves: dict[int, Any], offload: Offload):
        self._given, self.offload = leaves, offload
        self._held: dict[int, Any] = {}

    def some(self, leaf_indices: Collection[int]) -> dict[int, Any]:
        """Returns some leaves as arrays, and drops the arrays of all other lazy leaves."""
        self._held = {i: x for i, x in self._held.items() if i in leaf_indices}
        return {i: self._read(i) for i in sorted(leaf_indices)}

    def write(self, leaf_index: int, where: Any, values: Any) -> None:
        """Writes values to some elements of a leaf. For a lazy leaf they are kept only until other
        leaves are read; the source of the leaf must return them when it is read again.
        """
        to = self._held if isinstance(self._given[leaf_index], Lazy) else self._given
        to[leaf_index] = _written(self._read(leaf_index), where, values)

    def _read(self, leaf_index: int) -> Any:
        leaf = self._given[leaf_index]
        if not isinstance(leaf, Lazy):
            return leaf
        if leaf_index not in self._held:
            self._held[leaf_index] = leaf.read()
        return self._held[leaf_index]


@jax.jit
def _written(x: jax.Array, element_ids: jax.Array, values: jax.Array) -> jax.Array:
    """Returns a parameter with new values at some elements."""

    def written(x: jax.Array, element_ids: jax.Array, values: jax.Array) -> jax.Array:
        return x.ravel().at[element_ids].set(values.astype(x.dtype)).reshape(x.shape)

    return compat.as_type_of(x, written, x, element_ids, values)


class Frame:
    """One batch of one stream in one scope.

    Attributes:
      scope: the scope.
      stream: the stream.
      values: values of the batch, by variable, as they are kept.
      batch: the index of the batch.
    """

    def __init__(self, scope: Scope, stream: Stream, values: Mapping[Any, Any], batch: int = 0):
        self.scope, self.stream, self.batch = scope, stream, batch
        self.values = {var: stream.offload.kept(x) for var, x in values.items()}

    def read(self, atoms: Sequence[Any], steps: Steps) -> list[Any]:
        """Returns values as they are kept: values of the batch, or computed from parameters."""
        param_atoms = [x for x in atoms if not self.scope.is_of_batch(x)]
        leaves = self.stream.some(self.scope.needs(param_atoms)) if param_atoms else {}
        computed = iter(self.scope.values(param_atoms, leaves, steps) if param_atoms else ())
        return [self.values[x] if self.scope.is_of_batch(x) else next(computed) for x in atoms]

    def run(
        self,
        stage: Stage,
        steps: Steps,
        decided: Sequence[Any] | None = None,
        *,
        records: bool = False,
    ) -> list[Any]:
        """Runs a stage without sites. Returns what it decides, if `records`."""
        if not stage.eqns:
            return []
        operands = [on_device(self.values[x]) for x in stage.reads]
        leaves = self.stream.some(self.scope.read_by(stage))
        results, decisions = self.scope.run(stage, leaves, steps, operands, decided, records)
        jax.block_until_ready(results)  # temporaries of several batches must not coexist
        self.put(stage, results)
        return decisions

    def results(self, steps: Steps) -> list[Any]:
        """Returns the results of the scope after all its stages have run."""
        return self.read(self.scope.jaxpr.outvars, steps)

    def put(self, stage: Stage, results: Sequence[Any]) -> None:
        """Keeps the results of a stage that others read, and drops values with no more readers."""
        self.values.update(zip(stage.gives, map(self.stream.offload.kept, results), strict=True))
        self.drop(stage)

    def drop(self, stage: Stage) -> None:
        """Drops values that nothing reads after a stage."""
        for var in stage.released:
            self.values.pop(var, None)


Batch = Sequence[Frame]
"""One batch in one scope: its frame in each stream."""

Inputs = list[list[Any]]
"""The operands of a site other than its weight, for each batch, as they are kept: the activation,
and sizes of groups.
"""

Pairs = list[tuple[Stage, Batch]]
"""A stage for each batch: of one function, traced for batches of any size."""


class Walk:
    """Runs a function stage by stage, each on all batches and in all streams.

    Attributes:
      plan: the plan.
      reached: the indices of the batches that the current site is reached by.
    """

    def __init__(self, plan: Plan):
        self.plan, self.reached = plan, list[int]()
        self._kinds = {
            "run": self._run,
            "site": self._site,
            "inline": self._inside,
            "scan": self._inside,
            "branch": self._branch,
        }

    def solve(self, site: Site, steps: Steps, streams: list[Inputs]) -> None:
        """Chooses the weight of a site in one step from its inputs in each stream, and writes it to
        the parameters of the first stream.
        """
        raise NotImplementedError

    def go(self, batches: Sequence[Batch], steps: Steps = ()) -> None:
        """Runs all stages of a scope."""
        for stages in zip(*(batch[0].scope.stages for batch in batches), strict=True):
            self._kinds[stages[0].kind](list(zip(stages, batches, strict=True)), steps)

    def _run(self, pairs: Pairs, steps: Steps) -> None:
        for stage, (leader, *others) in pairs:
            decided = leader.run(stage, steps, records=bool(others))
            for frame in others:
                frame.run(stage, steps, decided)

    def _site(self, pairs: Pairs, steps: Steps) -> None:
        site = self.plan.site_at(pairs[0][0].here)
        assert site is not None
        argnum = next(i for i, x in enumerate(site.operands) if x.path is None)

        def inputs(stage: Stage, frame: Frame) -> list[Any]:
            atoms = stage.eqns[0].invars
            return frame.read([atoms[argnum], *atoms[2:]], steps)

        read = [[inputs(stage, frame) for frame in batch] for stage, batch in pairs]
        streams = [list(stream_inputs) for stream_inputs in zip(*read, strict=True)]
        del read  # the inputs of a batch are freed when its product is done
        self.reached = [batch[0].batch for _, batch in pairs]
        for frame in pairs[0][1]:
            frame.stream.some(())
        self.solve(site, steps, streams)
        del streams
        self._run(pairs, steps)

    def _inside(self, pairs: Pairs, steps: Steps, branch: int = -1) -> None:
        """Runs the function inside an equation, a branch of it, or each step of a scan."""
        inside = [
            [Entered(frame, stage, steps, branch) for frame in batch] for stage, batch in pairs
        ]
        for i in inside[0][0].order:
            self._step(inside, i, steps)
        for frames in inside:
            for entered in frames:
                entered.leave()

    def _step(self, inside: "list[list[Entered]]", i: int | None, steps: Steps) -> None:
        inner_steps = steps if i is None else (*steps, i)
        inner = [[entered.step(i) for entered in frames] for frames in inside]
        self.go(inner, inner_steps)
        for frames, inner_frames in zip(inside, inner, strict=True):
            for entered, frame in zip(frames, inner_frames, strict=True):
                entered.take(frame.results(inner_steps))

    def _branch(self, pairs: Pairs, steps: Steps) -> None:
        """Runs the branch that the first stream takes, in all streams."""
        taken: dict[int, Pairs] = {}
        for stage, batch in pairs:
            (eqn,) = stage.eqns
            (branch_index,) = map(on_device, batch[0].read(eqn.invars[:1], steps))
            last_branch = len(eqn.params["branches"]) - 1
            i = min(max(int(value_of(branch_index)), 0), last_branch)
            taken.setdefault(i, []).append((stage, batch))
        for i in sorted(taken):
            self._inside(taken[i], steps, i)


class Entered:
    """The function inside an equation in one frame, which runs once, or in each step of a scan.

    Attributes:
      order: the numbers of the steps, in the order in which they run; `None` for the only one.
    """

    def __init__(self, frame: Frame, stage: Stage, steps: Steps, branch: int):
        self.frame, self.stage, (eqn,) = frame, stage, stage.eqns
        self.scope, operands = frame.scope.entered(stage, branch)
        state, length = carried(eqn), eqn.params.get("length")
        self._is_scan, self.order = eqn.primitive.name == "scan", [None]
        if self._is_scan:
            self.order = range(length)[:: -1 if eqn.params["reverse"] else 1]
        self._carried: list[Any] = []
        self._consts, self._xs = dict[Any, Any](), dict[Any, Any]()
        for var, i in zip(self.scope.jaxpr.invars, bodies(eqn)[branch].operands, strict=True):
            if state.start <= i < state.stop:
                self._carried.append(var)
            elif var in operands:
                values = self._xs if i >= state.stop and self._is_scan else self._consts
                values[var] = frame.values[operands[var]]
        self._carry = frame.read(eqn.invars[state], steps)
        self._rows: list[list[Any]] = []
        frame.drop(stage)

    def step(self, i: int | None) -> Frame:
        """Returns the frame of one step."""
        carry = zip(self._carried, self._carry, strict=True)
        xs = {
            var: jax.tree.map(lambda x: x[i], spread(on_device(x))) for var, x in self._xs.items()
        }
        values = {**self._consts, **dict(carry), **xs}
        frame = Frame(self.scope, self.frame.stream, values, self.frame.batch)
        self._carry, self._consts = [], self._consts if self._is_scan else {}
        return frame

    def take(self, results: Sequence[Any]) -> None:
        """Takes the results of a step."""
        offloaded = list(map(self.frame.stream.offload.kept, results))
        self._carry, row = offloaded[: len(self._carried)], offloaded[len(self._carried) :]
        self._rows.append(row)

    def leave(self) -> None:
        """Passes the results to the surrounding frame, those that no carry holds as one array."""
        (eqn,) = self.stage.eqns
        results = self._rows[0]
        if self._is_scan:
            rows = self._rows[::-1] if eqn.params["reverse"] else self._rows
            columns = (_stacked(list(map(on_device, x))) for x in zip(*rows, strict=True))
            results = [*self._carry, *columns]
        self._consts, self._xs, self._carry, self._rows = {}, {}, [], []
        named = dict(zip(eqn.outvars, results, strict=True))
        self.frame.put(self.stage, [named[var] for var in self.stage.gives])


def _stacked(rows: Sequence[Any]) -> Any:
    """Stacks the values of all steps along a new leading axis."""
    return jax.tree.map(lambda *x: jnp.stack(x), *alike(rows))


# A function traced for batches, with the weights that its plan quantizes.


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced for batches.

    Attributes:
      plan: the plan.
      calls: the call of each batch.
      items: the contractions of the first call, by address.
      originals: the leaves of the parameters, by their index among the operands.
      leaf_indices: these indices, by path.
      groups: the weights.
      elements: which of their elements each site multiplies by, by the key of its operand.
      ignores: whether rows that are not finite are left out.
    """

    plan: Plan
    calls: list[Call]
    items: Mapping[Address, Found]
    originals: Mapping[int, Any]
    leaf_indices: Mapping[str, int]
    groups: list[Group]
    elements: Mapping[str, Elements]
    ignores: bool = False

    @classmethod
    def of(
        cls,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Sequence[Any],
        weight: Any,
        *,
        lazy: bool = False,
        ignores: bool = False,
    ) -> "Traced":
        """Traces a function. `weight` returns the weights of the rows of batches, and their values
        carry these; `lazy` allows `Lazy` leaves; `ignores` leaves out rows that are not finite.
        """
        weight = every_row if ignores and weight is None else weight
        f = TracedOnce(f)
        calls = []
        for batch in batches:
            arguments = arguments_of(plan, params, batch)
            call = trace_call("ptq", f, plan.parameters, arguments, {}, lazy=lazy)
            named = zip(call.leaves, call.paths, strict=True)
            # Numbers among the parameters are read.
            leaves = [read(x) if path is None else x for x, path in named]
            if weight is not None:
                counts = weights_of("ptq", weight, plan.params, arguments, {})
                leaves = count_arguments("ptq", counts, plan.params, call, leaves)
                leaves = list(map(tainted, leaves)) if ignores else leaves
            calls.append(dataclasses.replace(call, leaves=leaves))
        first_call = calls[0]
        plan, found = with_contractions("ptq", plan, first_call, plan.parameters)
        items = {x.address: x for x in found if x.address}
        leaf_indices = {path: i for i, path in enumerate(first_call.paths) if path is not None}
        originals = {i: first_call.leaves[i] for i in leaf_indices.values()}
        groups = Group.of_plan(plan, {path: originals[i].size for path, i in leaf_indices.items()})
        elements = elements_of_sites(plan, first_call, items, groups)
        return cls(plan, calls, items, originals, leaf_indices, groups, elements, ignores)

    def grids(self, spec_of: Callable[[QSpec], QSpec]) -> dict[str, Grids]:
        """Returns the grids of all weights, rounded to nearest, by the paths of their groups."""
        leaves = {
            path: self.originals[leaf_index] for path, leaf_index in self.leaf_indices.items()
        }
        return {group.path: Grids.of_group(group, leaves, spec_of) for group in self.groups}

    def group_of(self, path: str) -> Group:
        """Returns the group of a weight."""
        return next(x for x in self.groups if path in x.sizes)

    def scopes(
        self,
        is_own_site: Callable[[Site], bool],
        blocks: Mapping[Address, Any] | None = None,
        *,
        returns: bool = True,
    ) -> list[Scope]:
        """Returns the scope of each call; equal calls share one. Arguments as in `Division`."""
        scope_of_jaxpr: dict[int, Scope] = {}
        division = Division(self.plan, is_own_site, blocks or {}, returns, self.ignores)
        for call in self.calls:
            if id(call.jaxpr) not in scope_of_jaxpr:
                if call.jaxpr is not self.calls[0].jaxpr:
                    as_plan("ptq", self.plan, call, self.plan.parameters)
                operands = enumerate(zip(call.jaxpr.invars, call.paths, strict=True))
                sources = {var: Source(None, i) for i, (var, path) in operands if path is not None}
                scope = Scope(division, call.jaxpr, call.consts, sources)
                scope_of_jaxpr[id(call.jaxpr)] = scope
        return [scope_of_jaxpr[id(call.jaxpr)] for call in self.calls]

    def frames(self, scopes: Sequence[Scope], streams: Sequence[Stream]) -> list[list[Frame]]:
        """Returns each batch in all streams, before any stage has run."""
        frames = []
        for batch_index, (call, scope) in enumerate(zip(self.calls, scopes, strict=True)):
            operands = zip(scope.jaxpr.invars, call.leaves, call.paths, strict=True)
            values = {var: x for var, x, path in operands if path is None}
            frames.append([Frame(scope, stream, values, batch_index) for stream in streams])
        return frames


# Calibration stage by stage, for functions whose leaves are read when a stage needs them.


def calibrate_stages(
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Iterable[Any],
    *,
    observers: GivenObservers = None,
    weight: RowWeight | None = None,
    on_nonfinite: OnNonfinite = "error",
    progress: bool = True,
) -> Stats:
    """Returns the statistics of `calibrate_batches` for parameters that may be `Lazy`. Each stage
    runs on all batches before the next one, and reads the leaves that it needs. Activations are
    those of `calibrate_batches`, except for rounding where XLA fuses differently.

    Args:
      f: the function.
      plan: the plan.
      params: its parameters.
      batches: as in `calibrate_batches`; all are held.
      observers: as in `calibrate_batches`.
      weight: as in `calibrate_batches`; observers with a weight of their own have the same.
      on_nonfinite: as in `calibrate_batches`.
      progress: whether to show a progress bar.

    Raises:
      NotImplementedError: an observed site is inside a loop other than a scan, or a `shard_map`,
        which runs as a whole.
    """
    ignores = check_mode("ptq", on_nonfinite)
    params = dequantize_params(params)
    traced = Traced.of(f, plan, params, list(batches), weight, lazy=True, ignores=ignores)
    weight = every_row if ignores and weight is None else weight
    plan, first_call = traced.plan, traced.calls[0]
    checked = check_observers("ptq", observers)
    items = [*traced.items.values()]
    entries = entries_of("ptq", plan, first_call.jaxpr, items, checked, weight)
    scans = {
        site.address: tuple(x.address for x in forms if x.name == "scan")
        for site, forms in reached_sites(plan, first_call.jaxpr)
    }
    beyond = [x.site for x in entries.recorded.values() if x.site.address not in scans]
    if beyond:
        problem = "the inputs of a site cannot be observed between stages, and its parameters are "
        problem += "lazy."
        detail = f"{[site.name for site in beyond[:4]]}, in a while loop or a shard_map, with a "
        detail += "static scale, or a weight that is used more than once"
        fix = "read the parameters, jax.tree.map(lambda x: x.read(), params), give these sites "
        fix += "dynamic scales, or add a rule that leaves such a weight in float."
        error = NotImplementedError
        raise fail("ptq", problem, given=detail, fix=fix, error=error)
    needed = any(x.part.argnum < 0 for x in entries.recorded.values())
    scopes = traced.scopes(lambda site: site.address in scans, returns=needed)
    bar = progress_bar("calibrate", "site", total=len(entries.recorded)) if progress else None
    watch = _Watch(plan, entries, scans, bar, ignores)
    stream = Stream(dict(traced.originals), Offload(False))
    watch.go(traced.frames(scopes, [stream]))
    if bar is not None:
        bar.close()
    stats_of_entry = {key: watch.stats_of(entry) for key, entry in entries.recorded.items()}
    stats = with_flags(
        {key: stats_of_entry[entry_key] for key, entry_key in entries.shared.items()}, ignores
    )
    warn_left_out("ptq", stats.left_out)
    element_stats = places_of(plan, first_call, entries.places)
    stats.update({key: make() for key, make in element_stats.items()})
    return stats


class _Watch(Walk):
    """Runs a function stage by stage, and records the operands and results of its sites."""

    def __init__(
        self,
        plan: Plan,
        entries: Entries,
        scans: dict[Address, tuple[Address, ...]],
        bar: Any,
        ignores: bool,
    ):
        super().__init__(plan)
        self._ignores = ignores
        self._entries, self._scans, self._bar = entries, scans, bar
        self._seen: dict[str, dict[Steps, Any]] = {key: {} for key in entries.recorded}

    def _site(self, pairs: Pairs, steps: Steps) -> None:
        entries = self._entries.at(pairs[0][0].here)
        for stage, (frame,) in pairs:
            (eqn,) = stage.eqns
            argnums = {x.part.argnum for x in entries if x.part.argnum >= 0}
            argnums |= {2} if eqn.primitive.name == "ragged_dot_general" and entries else set()
            atoms = {argnum: eqn.invars[argnum] for argnum in sorted(argnums)}
            read = dict(zip(atoms, frame.read([*atoms.values()], steps), strict=True))
            frame.run(stage, steps)
            read[-1] = frame.values.get(eqn.outvars[0])
            for entry in entries:
                if read[entry.part.argnum] is not None:
                    x, sizes = (on_device(read.get(i)) for i in (entry.part.argnum, 2))
                    self._put(entry, steps, x, value_of(sizes), frame.batch)
        if self._bar is not None and not any(steps):
            self._bar.update(len(entries))

    def _put(self, entry: Entry, steps: Steps, x: Any, sizes: Any, batch: int) -> None:
        weights = None
        if entry.weight is not None:
            shape = () if entry.weight is every_row else None
            weights = count_operand("ptq", entry.site.name, x, shape)
        loops = {loop.address for loop in entry.site.loops}
        around = zip(self._scans[entry.site.address], steps, strict=True)
        loop_steps = tuple(int(step) for address, step in around if address in loops)
        observed_site = replace(entry.part.observed, path="")  # one program for all equal sites
        same = replace(
            entry, key="", part=entry.part._replace(key="", observed=observed_site), site=None
        )
        values = jnp.asarray(value_of(x))
        batch_stats = _observed(values, sizes, weights, entry=same, leaves_out=self._ignores)
        if FLAGS in entry.key and not self._ignores:
            check_finite("ptq", {name_of([entry.part.key], steps): batch_stats}, batch)
        stats = self._seen[entry.key]
        if loop_steps in stats:
            batch_stats = _merged(stats[loop_steps], batch_stats, observer=entry.observer)
        stats[loop_steps] = batch_stats

    def stats_of(self, entry: Entry) -> Any:
        """Returns the recorded statistics, with a leading axis for each scan over the weight."""
        lengths = tuple(loop.length for loop in entry.site.loops)
        stats_of_step = self._seen[entry.key]
        all_stats = [
            stats_of_step[loop_steps] if loop_steps in stats_of_step else entry.empty()
            for loop_steps in np.ndindex(lengths)
        ]
        if not lengths:
            return all_stats[0]
        with compat.intermediates():
            return jax.tree.map(lambda *x: jnp.stack(x).reshape(lengths + x[0].shape), *all_stats)


@compat.intermediates()
@partial(jax.jit, static_argnames=("entry", "leaves_out"))
def _observed(x: jax.Array, sizes: Any, weights: Any, *, entry: Entry, leaves_out: bool) -> Any:
    return entry.observe(x, sizes, weights, leaves_out)


@compat.intermediates()
@partial(jax.jit, static_argnames="observer")
def _merged(a: Any, b: Any, *, observer: Observer) -> Any:
    return observer.merge(a, b)
