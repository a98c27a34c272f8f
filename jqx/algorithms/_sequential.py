"""Layer after layer: the weights of each site are chosen by inputs that those before it, quantized,
have made.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from .. import _compat
from ..transforms import Plan
from ..transforms._shared import Address, Site
from ._stages import Params, Scope, Stage, Steps, body_of


@dataclasses.dataclass
class Frame:
    """One batch in one scope.

    Attributes:
      scope: the scope.
      values: of the batch, by variable.
    """

    scope: Scope
    values: dict[Any, Any]

    def read(self, atoms: Sequence[Any], params: Params, steps: Steps) -> list[Any]:
        """Returns values, of the batch or of parameters."""
        own = [x for x in atoms if not self.scope.is_of_batch(x)]
        made = iter(self.scope.values(own, params, steps) if own else ())
        return [self.values[x] if self.scope.is_of_batch(x) else next(made) for x in atoms]

    def run(self, stage: Stage, params: Params, steps: Steps) -> None:
        """Runs a stage that holds no site."""
        if not stage.eqns:
            return
        given = [self.values[x] for x in stage.reads]
        self.put(stage, self.scope.run(stage, params, steps, given))

    def enter(self, stage: Stage, body: Any, atoms: Sequence[Any], part: Address = ()) -> "Frame":
        """Returns the frame of a function inside of an equation, of these operands."""
        own = self.scope.is_of_batch
        scope = self.scope.inside(stage, body, [None if own(x) else x for x in atoms], part)
        given = zip(scope.jaxpr.invars, atoms, strict=True)
        return Frame(scope, {var: self.values[x] for var, x in given if own(x)})

    def put(self, stage: Stage, results: Sequence[Any]) -> None:
        """Keeps the results of a stage, and drops what nothing reads any more."""
        for var in stage.last:
            self.values.pop(var, None)
        self.values.update(zip(stage.gives, results, strict=True))


Inputs = list[list[Any]]
"""What a site reads beside its weight, of each batch: the activation, and sizes of groups."""

Solve = Callable[[Site, Steps, Inputs, Inputs | None], None]
"""Chooses the weight of a site in one step, by the inputs of each batch, and writes it to the
parameters; beside them the same of the float function, where it is run too."""


class Walk:
    """Runs a function stage after stage on all batches.

    Attributes:
      plan: the plan.
      params: the leaves of the parameters, by place: `solve` writes to it.
      solve: is called at each site.
      original: the float parameters, where the float function is run beside; else `None`.
    """

    def __init__(self, plan: Plan, params: Params, solve: Solve, original: Params | None = None):
        self.plan, self.params, self.solve, self.original = plan, params, solve, original

    def go(self, frames: list[Frame], floats: list[Frame] | None, steps: Steps = ()) -> None:
        """Runs all stages of a scope: of frames of one function, traced for batches of any size."""
        for stages in zip(*(frame.scope.stages for frame in frames), strict=True):
            run = {
                "run": self._run,
                "site": self._site,
                "inline": self._inline,
                "scan": self._scan,
                "branch": self._branch,
            }[stages[0].kind]
            run(stages, frames, floats, steps)

    def _run(self, stages: Any, frames: Any, floats: Any, steps: Steps) -> None:
        for stage, frame in zip(stages, frames, strict=True):
            frame.run(stage, self.params, steps)
        for stage, frame in zip(stages, floats or (), strict=False):
            frame.run(stage, self.original or {}, steps)

    def _site(self, stages: Any, frames: Any, floats: Any, steps: Steps) -> None:
        site = self.plan.site_at(stages[0].here)
        assert site is not None
        place = next(i for i, x in enumerate(site.operands) if x.path is None)

        def inputs(frames: Any, params: Any) -> Inputs:
            found = []
            for stage, frame in zip(stages, frames, strict=True):
                atoms = stage.eqns[0].invars
                found.append(frame.read([atoms[place], *atoms[2:]], params, steps))
            return found

        own = inputs(frames, self.params)
        self.solve(site, steps, own, inputs(floats, self.original) if floats else None)
        self._run(stages, frames, floats, steps)

    def _inline(self, stages: Any, frames: Any, floats: Any, steps: Steps) -> None:
        def enter(frame: Frame, stage: Stage) -> Frame:
            (eqn,) = stage.eqns
            return frame.enter(stage, body_of(eqn), eqn.invars)

        inner = [enter(frame, stage) for frame, stage in zip(frames, stages, strict=True)]
        beside = [enter(f, s) for f, s in zip(floats, stages, strict=True)] if floats else None
        self.go(inner, beside, steps)
        self._leave(stages, frames, inner, self.params, steps)
        if floats:
            self._leave(stages, floats, beside, self.original, steps)

    def _leave(self, stages: Any, frames: Any, inner: Any, params: Any, steps: Steps) -> None:
        for stage, frame, own in zip(stages, frames, inner, strict=True):
            results = own.read(own.scope.jaxpr.outvars, params, steps)
            self._keep(stage, frame, results)

    def _keep(self, stage: Stage, frame: Frame, results: Sequence[Any]) -> None:
        named = dict(zip(stage.eqns[0].outvars, results, strict=True))
        frame.put(stage, [named[var] for var in stage.gives])

    def _scan(self, stages: Any, frames: Any, floats: Any, steps: Steps) -> None:
        eqn = stages[0].eqns[0]
        length, backwards = eqn.params["length"], eqn.params["reverse"]
        both = [_Scanned.of(f, s, self.params, steps) for f, s in zip(frames, stages, strict=True)]
        beside = (
            [_Scanned.of(f, s, self.original, steps) for f, s in zip(floats, stages, strict=True)]
            if floats
            else None
        )
        for i in reversed(range(length)) if backwards else range(length):
            here = (*steps, i)
            inner = [x.step(i) for x in both]
            second = [x.step(i) for x in beside] if beside else None
            self.go(inner, second, here)
            for x, frame in zip(both, inner, strict=True):
                x.take(frame, self.params, here)
            for x, frame in zip(beside or (), second or (), strict=True):
                x.take(frame, self.original, here)
        for x in (*both, *(beside or ())):
            self._keep(x.stage, x.frame, x.results(backwards))

    def _branch(self, stages: Any, frames: Any, floats: Any, steps: Steps) -> None:
        chosen = [
            int(frame.read(stage.eqns[0].invars[:1], self.params, steps)[0])
            for frame, stage in zip(frames, stages, strict=True)
        ]
        count = len(stages[0].eqns[0].params["branches"])
        chosen = [min(max(i, 0), count - 1) for i in chosen]

        def enter(frame: Frame, stage: Stage, i: int) -> Frame:
            (eqn,) = stage.eqns
            return frame.enter(stage, eqn.params["branches"][i], eqn.invars[1:], (i,))

        for i in range(count):
            at = [k for k, place in enumerate(chosen) if place == i]
            if not at:
                continue
            own = [stages[k] for k in at]
            inner = [enter(frames[k], stages[k], i) for k in at]
            beside = [enter(floats[k], stages[k], i) for k in at] if floats else None
            self.go(inner, beside, steps)
            self._leave(own, [frames[k] for k in at], inner, self.params, steps)
            if floats:
                self._leave(own, [floats[k] for k in at], beside, self.original, steps)


@dataclasses.dataclass
class _Scanned:
    """A scan over weights of one batch, step by step."""

    frame: Frame
    stage: Stage
    scope: Scope
    consts: dict[Any, Any]
    carry: list[Any]
    xs: dict[Any, Any]
    ys: list[list[Any]]

    @classmethod
    def of(cls, frame: Frame, stage: Stage, params: Any, steps: Steps) -> "_Scanned":
        eqn = stage.eqns[0]
        consts, count = _compat.scan_counts(eqn)
        first = consts + count
        own = frame.scope.is_of_batch
        carried = range(consts, first)
        atoms = [None if own(x) or i in carried else x for i, x in enumerate(eqn.invars)]
        stepped = range(first, len(eqn.invars))
        scope = frame.scope.inside(stage, eqn.params["jaxpr"], atoms, stepped=stepped)
        named = list(zip(scope.jaxpr.invars, eqn.invars, strict=True))
        shared = {var: frame.values[x] for var, x in named[:consts] if own(x)}
        xs = {var: frame.values[x] for var, x in named[first:] if own(x)}
        carry = frame.read([x for _, x in named[consts:first]], params, steps)
        return cls(frame, stage, scope, shared, carry, xs, [])

    def step(self, i: int) -> Frame:
        """Returns the frame of one step."""
        consts, count = _compat.scan_counts(self.stage.eqns[0])
        carried = zip(self.scope.jaxpr.invars[consts : consts + count], self.carry, strict=True)
        return Frame(
            self.scope, {**self.consts, **dict(carried), **{v: x[i] for v, x in self.xs.items()}}
        )

    def take(self, frame: Frame, params: Any, steps: Steps) -> None:
        """Takes the results of a step."""
        results = frame.read(self.scope.jaxpr.outvars, params, steps)
        self.carry = results[: len(self.carry)]
        self.ys.append(results[len(self.carry) :])

    def results(self, backwards: bool) -> list[Any]:
        """Returns the results of the scan."""
        rows = self.ys[::-1] if backwards else self.ys
        return [*self.carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]
