"""Follows intervals through a jaxpr: its equations, the functions that they call, branches."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .. import _compat
from .._compat import Eqn
from ..calibrators import Affine
from ..tensor import QTensor
from ..transforms import Plan
from ..transforms._shared import Address, addressed, view
from ._accumulators import at_site, of_output
from ._interval_arrays import RULES
from ._interval_loops import literal, scan, while_loop
from ._interval_notes import Notes
from ._intervals import (
    Bounds,
    Interval,
    any_of,
    hull,
    is_integer,
    limits,
    of_value,
    rounded,
    summed,
)

_BODY = {
    **dict.fromkeys(("jit", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
"""The parameter in which a primitive that calls one function on its operands holds it."""


@dataclasses.dataclass(frozen=True)
class Follower:
    """Follows intervals through the equations of a planned function.

    Attributes:
      plan: the plan with the sites.
      affines: static scales, by key.
      notes: collects the findings.
      axes: sizes of the mesh axes of the enclosing `shard_map`s.
      line: source line of the enclosing call, for equations without one.
    """

    plan: Plan
    affines: Mapping[str, Affine]
    notes: Notes
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    line: str = ""

    def run(
        self,
        jaxpr: Any,
        args: Sequence[Interval],
        address: Address = (),
        also: Sequence[Any] = (),
        consts: Sequence[Any] = (),
    ) -> list[Interval]:
        """Returns the intervals of the results of a jaxpr, and of further values inside it."""
        body, own = _compat.open_jaxpr(jaxpr)
        env = dict(zip(body.constvars, map(of_value, own or consts), strict=True))
        env.update(zip(body.invars, args, strict=True))

        def read(atom: Any) -> Interval:
            return literal(atom) if _compat.is_literal(atom) else env[atom]

        for here, eqn, marked in addressed(body, address):
            operands = [read(atom) for atom in eqn.invars]
            results = self._evaluate(eqn, operands, here, marked)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in (*body.outvars, *also)]

    def _evaluate(
        self, eqn: Eqn, xs: list[Interval], here: Address, marked: bool
    ) -> list[Interval]:
        name = eqn.primitive.name
        site = self.plan.site_at(here) if marked else None
        if site is not None:
            xs = at_site(site, eqn, xs, self.affines, self.notes.sites)
            (result,) = self._ruled(eqn, xs)
            return [of_output(site, result, self.affines, eqn.outvars[0].aval)]
        if name in _FORMS:
            inside = dataclasses.replace(self, line=self._line(eqn))
            return _FORMS[name](inside, eqn, xs, here)
        if any(x.codes is not None for x in xs):
            seen = _view(eqn, xs)
            if seen is not None:
                return seen
        found = self._from_the_end(xs) if name == "select_n" else None
        if found is not None:
            return [found]
        results = self._plain(eqn, xs)
        if name in ("lt", "add") and is_integer(eqn.invars[0].aval.dtype):
            x, n = xs
            if n.low == n.high >= 0:
                results = [dataclasses.replace(results[0], about=(name, x, n.low, eqn))]
        return results

    def _from_the_end(self, xs: Sequence[Interval]) -> Interval | None:
        """Returns `where(i < 0, i + n, i)`, JAX's index normalization: the sum is used only if `i`
        is negative, and does not overflow then.
        """
        match [x.about for x in xs]:
            case [("lt", x, 0, _), _, ("add", y, n, added)] if x is y is xs[1] and not x.is_known:
                self.notes.overflows.pop(id(added), None)
                parts = [Interval(x.low + n, min(x.high, -1) + n)] if x.low < 0 else []
                parts += [Interval(max(x.low, 0), x.high)] if x.high >= 0 else []
                return hull(parts)
        return None

    def _plain(self, eqn: Eqn, xs: list[Interval]) -> list[Interval]:
        """Applies the rule of a primitive; if all operands are known, also computes it."""
        name = eqn.primitive.name
        whole = all(x.is_known for x in xs) and not eqn.effects
        if whole and name != "broadcast_in_dim" and not any(True for _ in _compat.sub_jaxprs(eqn)):
            if name in RULES and is_integer(eqn.outvars[0].aval.dtype):
                self._ruled(eqn, xs)  # records overflows
            return [of_value(x) for x in _computed(eqn, xs)]
        if name not in RULES:
            self.notes.unknown.setdefault(name, self._line(eqn))
            return any_of(eqn)
        return self._ruled(eqn, xs)

    def _ruled(self, eqn: Eqn, xs: list[Interval]) -> list[Interval]:
        found = RULES[eqn.primitive.name](eqn, xs)
        every = found if isinstance(found, list) else [found]
        return [self._settled(eqn, x, v.aval) for x, v in zip(every, eqn.outvars, strict=True)]

    def _line(self, eqn: Eqn) -> str:
        return _compat.line_of(eqn) or self.line

    def _settled(self, eqn: Eqn, found: Bounds | Interval, aval: Any) -> Interval:
        """Rounds bounds, or records that an integer dtype cannot hold them."""
        if not is_integer(aval.dtype):
            return found if isinstance(found, Interval) else rounded(found, aval.dtype)
        low, high = limits(aval.dtype)
        if low <= found.low and found.high <= high:
            return found if isinstance(found, Interval) else Interval(found.low, found.high)
        self.notes.overflow(eqn, self._line(eqn), found.low, found.high)
        return Interval(low, high)

    def aside(self) -> "Follower":
        """Returns a follower that records nothing, for trial steps."""
        return dataclasses.replace(self, notes=Notes())


def _computed(eqn: Eqn, xs: Sequence[Interval]) -> list[Any]:
    with _compat.equation_context(eqn):
        return _compat.bind(eqn, [_array(x, v) for x, v in zip(xs, eqn.invars, strict=True)])


def _array(x: Interval, atom: Any) -> Any:
    if x.value is not None:
        return x.value
    return jnp.full(atom.aval.shape, x.low, atom.aval.dtype)


def _view(eqn: Eqn, xs: Sequence[Interval]) -> list[Interval] | None:
    """Evaluates a view of quantized weights; `None` if the equation is not a view."""
    if not all(x.is_known for x in xs):
        return None
    operands = [
        _array(x, v) if x.codes is None else x.codes for x, v in zip(xs, eqn.invars, strict=True)
    ]
    seen = view(eqn, operands)
    if seen is None:
        return None
    return [
        dataclasses.replace(of_value(real), codes=q if isinstance(q, QTensor) else None)
        for q, real in zip(seen, _computed(eqn, xs), strict=True)
    ]


def _call(self: Follower, eqn: Eqn, xs: list[Interval], here: Address) -> list[Interval]:
    return self.run(eqn.params[_BODY[eqn.primitive.name]], xs, here)


def _cond(self: Follower, eqn: Eqn, xs: list[Interval], here: Address) -> list[Interval]:
    """Follows the branches that may be taken."""
    which, *rest = xs
    branches = eqn.params["branches"]
    last = len(branches) - 1
    first, end = (min(max(i, 0), last) for i in (which.low, which.high))
    taken = [self.run(branches[i], rest, (*here, i)) for i in range(first, end + 1)]
    return [hull(parts) for parts in zip(*taken, strict=True)]


def _shard_map(self: Follower, eqn: Eqn, xs: list[Interval], here: Address) -> list[Interval]:
    """Follows the function on a device, which gets a part of what is split."""
    sizes = dict(eqn.params["mesh"].shape)
    parts = [
        x if not any(spec) else x.hull_only()
        for x, spec in zip(xs, eqn.params["in_specs"], strict=True)
    ]
    inside = dataclasses.replace(self, axes={**self.axes, **sizes})
    return [x.hull_only() for x in inside.run(eqn.params["jaxpr"], parts, here)]


def _psum(self: Follower, eqn: Eqn, xs: list[Interval], here: Address) -> list[Interval]:
    axes = [axis for axis in eqn.params["axes"] if axis in self.axes]
    count = math.prod(self.axes[axis] for axis in axes)
    return [
        self._settled(eqn, summed(x.hull_only(), count), v.aval)
        for x, v in zip(xs, eqn.outvars, strict=True)
    ]


_FORMS: dict[str, Callable[..., list[Interval]]] = {
    **dict.fromkeys(_BODY, _call),
    "cond": _cond,
    "scan": scan,
    "while": while_loop,
    "shard_map": _shard_map,
    **dict.fromkeys(("psum", "psum_invariant"), _psum),
}
