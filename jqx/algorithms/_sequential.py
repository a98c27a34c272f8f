"""Layer-by-layer runs: the weights of each site are chosen from inputs that the quantized layers
before it produce.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from ..transforms import Plan, Site
from ..transforms._shared import alike, spread, value_of
from ._leaves import Leaves
from ._offload import Offload, on_device
from ._stages import Scope, Stage, Steps


@dataclasses.dataclass(frozen=True)
class Stream:
    """One run of the function, with its own parameters.

    Attributes:
      params: their leaves, as they are at each stage.
      offload: keeps values of batches between stages.
    """

    params: Leaves
    offload: Offload


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
        own = [x for x in atoms if not self.scope.is_of_batch(x)]
        leaves = self.stream.params.some(self.scope.needs(own)) if own else {}
        made = iter(self.scope.values(own, leaves, steps) if own else ())
        return [self.values[x] if self.scope.is_of_batch(x) else next(made) for x in atoms]

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
        given = [on_device(self.values[x]) for x in stage.reads]
        leaves = self.stream.params.some(self.scope.read_by(stage))
        results, made = self.scope.run(stage, leaves, steps, given, decided, records)
        jax.block_until_ready(results)  # temporaries of several batches must not coexist
        self.put(stage, results)
        return made

    def enter(self, stage: Stage, branch: int | None = None) -> "Frame":
        """Returns the frame of the function inside an equation, or of a branch of it."""
        scope, operands = self.scope.entered(stage, branch)
        values = {var: self.values[x] for var, x in operands.items()}
        inner = Frame(scope, self.stream, values, self.batch)
        self.drop(stage)
        return inner

    def results(self, steps: Steps) -> list[Any]:
        """Returns the results of the scope after all its stages have run."""
        return self.read(self.scope.jaxpr.outvars, steps)

    def leave(self, stage: Stage, results: Sequence[Any]) -> None:
        """Keeps the results of a stage that was entered."""
        named = dict(zip(stage.eqns[0].outvars, results, strict=True))
        self.put(stage, [named[var] for var in stage.gives])

    def put(self, stage: Stage, results: Sequence[Any]) -> None:
        """Keeps the results of a stage that others read, and drops values with no more readers."""
        self.values.update(zip(stage.gives, map(self.stream.offload.kept, results), strict=True))
        self.drop(stage)

    def drop(self, stage: Stage) -> None:
        """Drops values that nothing reads after a stage."""
        for var in stage.last:
            self.values.pop(var, None)


Batch = Sequence[Frame]
"""One batch in one scope: its frame in each stream."""

Inputs = list[list[Any]]
"""The operands of a site other than its weight, for each batch, as they are kept: the activation,
and sizes of groups.
"""

Solve = Callable[[Site, Steps, list[Inputs]], None]
"""Chooses the weight of a site in one step from its inputs in each stream, and writes it to the
parameters of the first stream.
"""

Pairs = list[tuple[Stage, Batch]]
"""A stage for each batch: of one function, traced for batches of any size."""


class Walk:
    """Runs a function stage by stage, each on all batches and in all streams.

    Attributes:
      plan: the plan.
      solve: called at each site.
      reached: the indices of the batches that the current site is reached by.
    """

    def __init__(self, plan: Plan, solve: Solve):
        self.plan, self.solve, self.reached = plan, solve, list[int]()
        self._kinds = {
            "run": self._run,
            "site": self._site,
            "inline": self._inside,
            "scan": self._scan,
            "branch": self._branch,
        }

    def go(self, batches: Sequence[Batch], steps: Steps = ()) -> None:
        """Runs all stages of a scope."""
        for stages in zip(*(batch[0].scope.stages for batch in batches), strict=True):
            self._kinds[stages[0].kind](list(zip(stages, batches, strict=True)), steps)

    def _run(self, pairs: Pairs, steps: Steps) -> None:
        for stage, (first, *others) in pairs:
            decided = first.run(stage, steps, records=bool(others))
            for frame in others:
                frame.run(stage, steps, decided)

    def _site(self, pairs: Pairs, steps: Steps) -> None:
        site = self.plan.site_at(pairs[0][0].here)
        assert site is not None
        place = next(i for i, x in enumerate(site.operands) if x.path is None)

        def inputs(stage: Stage, frame: Frame) -> list[Any]:
            atoms = stage.eqns[0].invars
            return frame.read([atoms[place], *atoms[2:]], steps)

        def of_streams() -> list[Inputs]:
            read = [[inputs(stage, frame) for frame in batch] for stage, batch in pairs]
            return [list(own) for own in zip(*read, strict=True)]

        streams, self.reached = of_streams(), [batch[0].batch for _, batch in pairs]
        for frame in pairs[0][1]:
            frame.stream.params.some(())
        self.solve(site, steps, streams)
        del streams  # the inputs of a batch are freed when its product is done
        self._run(pairs, steps)

    def _inside(self, pairs: Pairs, steps: Steps, branch: int | None = None) -> None:
        """Runs the function inside an equation, or a branch of it."""
        inner = [[frame.enter(stage, branch) for frame in batch] for stage, batch in pairs]
        self.go(inner, steps)
        for (stage, batch), frames in zip(pairs, inner, strict=True):
            for frame, own in zip(batch, frames, strict=True):
                frame.leave(stage, own.results(steps))

    def _branch(self, pairs: Pairs, steps: Steps) -> None:
        """Runs the branch that the first stream takes, in all streams."""
        taken: dict[int, Pairs] = {}
        for stage, batch in pairs:
            (eqn,) = stage.eqns
            (chosen,) = map(on_device, batch[0].read(eqn.invars[:1], steps))
            last = len(eqn.params["branches"]) - 1
            i = min(max(int(value_of(chosen)), 0), last)
            taken.setdefault(i, []).append((stage, batch))
        for i in sorted(taken):
            self._inside(taken[i], steps, i)

    def _scan(self, pairs: Pairs, steps: Steps) -> None:
        params = pairs[0][0].eqns[0].params
        order = range(params["length"])
        scans = [[Scan(frame, stage, steps) for frame in batch] for stage, batch in pairs]
        for i in reversed(order) if params["reverse"] else order:
            self._step(scans, i, steps)
        for each in scans:
            for scan in each:
                scan.leave()

    def _step(self, scans: "list[list[Scan]]", i: int, steps: Steps) -> None:
        here = (*steps, i)
        inner = [[scan.step(i) for scan in each] for each in scans]
        self.go(inner, here)
        for each, frames in zip(scans, inner, strict=True):
            for scan, frame in zip(each, frames, strict=True):
                scan.take(frame.results(here))


class Scan:
    """A scan over weights in one frame, step by step."""

    def __init__(self, frame: Frame, stage: Stage, steps: Steps):
        self.frame, self.stage, (eqn,) = frame, stage, stage.eqns
        self.scope, operands = frame.scope.stepped(stage)
        consts, count = _compat.scan_counts(eqn)
        inner = self.scope.jaxpr.invars
        self._carried = inner[consts : consts + count]
        self._carry = frame.read(eqn.invars[consts : consts + count], steps)
        own = {var: frame.values[x] for var, x in operands.items()}
        self._consts = {var: own[var] for var in inner[:consts] if var in own}
        self._xs = {var: own[var] for var in inner[consts + count :] if var in own}
        self._rows: list[list[Any]] = []
        frame.drop(stage)

    def step(self, i: int) -> Frame:
        """Returns the frame of one step."""
        carried = zip(self._carried, self._carry, strict=True)
        xs = {
            var: jax.tree.map(lambda x: x[i], spread(on_device(x))) for var, x in self._xs.items()
        }
        values = {**self._consts, **dict(carried), **xs}
        frame = Frame(self.scope, self.frame.stream, values, self.frame.batch)
        self._carry = []
        return frame

    def take(self, results: Sequence[Any]) -> None:
        """Takes the results of a step."""
        kept = list(map(self.frame.stream.offload.kept, results))
        self._carry, row = kept[: len(self._carried)], kept[len(self._carried) :]
        self._rows.append(row)

    def leave(self) -> None:
        """Passes the results to the surrounding frame."""
        (eqn,) = self.stage.eqns
        rows = self._rows[::-1] if eqn.params["reverse"] else self._rows
        columns = (_stacked(list(map(on_device, x))) for x in zip(*rows, strict=True))
        results = [*self._carry, *columns]
        self._consts, self._xs, self._carry, self._rows = {}, {}, [], []
        self.frame.leave(self.stage, results)


def _stacked(rows: Sequence[Any]) -> Any:
    """Stacks the values of all steps along a new leading axis."""
    return jax.tree.map(lambda *x: jnp.stack(x), *alike(rows))
