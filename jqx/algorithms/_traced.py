"""A function traced for batches, with the weights that its plan quantizes."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..tensor import QSpec
from ..tensor._shared import read
from ..transforms import Plan, Site
from ..transforms._shared import (
    Address,
    Call,
    TracedOnce,
    arguments_of,
    as_plan,
    count_arguments,
    every_row,
    tainted,
    trace_call,
    weights_of,
)
from ._elements import Elements, elements_of_sites
from ._grids import Grids, Group
from ._programs import Programs
from ._sequential import Frame, Stream
from ._stages import Scope, whole


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced for batches.

    Attributes:
      plan: the plan.
      calls: the call of each batch.
      originals: the leaves of the parameters, by their index among the operands.
      places: these indices, by path.
      groups: the weights.
      elements: which of their elements each site multiplies by, by the key of its operand.
      ignores: whether rows that are not finite are left out.
    """

    plan: Plan
    calls: list[Call]
    originals: Mapping[int, Any]
    places: Mapping[str, int]
    groups: list[Group]
    elements: Mapping[str, Elements]
    ignores: bool = False

    @classmethod
    def of(
        cls,
        f: TracedOnce,
        plan: Plan,
        params: Any,
        batches: Sequence[Any],
        weight: Any,
        *,
        lazy: bool = False,
        ignores: bool = False,
    ) -> "Traced":
        """Traces a function. `weight` returns the weights of the rows of batches; `lazy` allows
        `Lazy` leaves; with `ignores` rows are left out that are not finite.
        """
        weight = every_row if ignores and weight is None else weight
        calls = calls_of(f, plan, params, batches, weight, lazy=lazy, ignores=ignores)
        first = calls[0]
        plan = as_plan("ptq", plan, first, plan.parameters)
        places = {path: i for i, path in enumerate(first.paths) if path is not None}
        originals = {i: first.leaves[i] for i in places.values()}
        groups = Group.of_plan(plan, {path: originals[i].size for path, i in places.items()})
        elements = elements_of_sites(plan, first, groups)
        return cls(plan, calls, originals, places, groups, elements, ignores)

    def grids(self, spec_of: Callable[[QSpec], QSpec]) -> dict[str, Grids]:
        """Returns the grids of all weights, rounded to nearest, by the paths of their groups."""
        leaves = {path: self.originals[place] for path, place in self.places.items()}
        return {group.path: Grids.of_group(group, leaves, spec_of) for group in self.groups}

    def group_of(self, path: str) -> Group:
        """Returns the group of a weight."""
        return next(x for x in self.groups if path in x.sizes)

    def scopes(
        self,
        own: Callable[[Site], bool],
        blocks: Mapping[Address, Any] | None = None,
        *,
        returns: bool = True,
    ) -> list[Scope]:
        """Returns the scope of each call; equal calls share one. See `whole`."""
        found: dict[int, Scope] = {}
        programs = Programs()
        for call in self.calls:
            if id(call.jaxpr) not in found:
                as_plan("ptq", self.plan, call, self.plan.parameters)
                options = blocks, programs, returns, self.ignores
                found[id(call.jaxpr)] = whole(self.plan, call, own, *options)
        return [found[id(call.jaxpr)] for call in self.calls]

    def frames(self, scopes: Sequence[Scope], streams: Sequence[Stream]) -> list[list[Frame]]:
        """Returns each batch in all streams, before any stage has run."""
        frames = []
        for place, (call, scope) in enumerate(zip(self.calls, scopes, strict=True)):
            given = zip(scope.jaxpr.invars, call.leaves, call.paths, strict=True)
            values = {var: x for var, x, path in given if path is None}
            frames.append([Frame(scope, stream, values, place) for stream in streams])
        return frames


def calls_of(
    f: Any,
    plan: Plan,
    params: Any,
    batches: Iterable[Any],
    weight: Any = None,
    *,
    lazy: bool = False,
    ignores: bool = False,
) -> list[Call]:
    """Returns a function traced for each batch. With a weight, the values of a batch carry the
    weights of their rows. Numbers among the parameters are read if leaves may be `lazy`.
    """
    found = []
    for batch in batches:
        arguments = arguments_of(plan, params, batch)
        call = trace_call("ptq", f, plan.parameters, arguments, {}, lazy=lazy)
        named = zip(call.leaves, call.paths, strict=True)
        call = dataclasses.replace(
            call, leaves=[read(x) if path is None else x for x, path in named]
        )
        if weight is not None:
            counts = weights_of("ptq", weight, plan.params, arguments, {})
            leaves = count_arguments("ptq", counts, plan.params, call, call.leaves)
            leaves = list(map(tainted, leaves)) if ignores else leaves
            call = dataclasses.replace(call, leaves=leaves)
        found.append(call)
    return found
