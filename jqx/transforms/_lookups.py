"""Tells lookups in weights from reads of other values. In a jaxpr both are gathers, but only
lookups are contractions.

An index such as `h[:, -1]` is traced as a slice, and as a gather if a size of `h` is symbolic. So
reads must not count in addresses: a function then has the same addresses for all sizes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export, lax

from .. import _compat
from .._compat import Eqn
from ._origin import Address, Origin
from .primitives import CONTRACTIONS, FORMS, VIEWS

Origins = Sequence[Origin | None]

_INSIDE = lax.GatherScatterMode.PROMISE_IN_BOUNDS


class _Read(dict[str, Any]):
    """The parameters of an equation that reads a value which is not a weight. Equations that JAX
    or jqx derives from it keep them.
    """


def is_lookup_or_product(eqn: Eqn) -> bool:
    """Whether an equation is a contraction: no gather is that is marked as a read."""
    return eqn.primitive.name in CONTRACTIONS and not isinstance(eqn.params, _Read)


def with_reads(jaxpr: Any, origins: Origins) -> Any:
    """Returns an open jaxpr, given the weights among its operands, in which every gather of another
    value is marked; the same object if there is none.
    """
    holding: dict[int, bool] = {}
    return _marked(jaxpr, origins, holding)[0] if _holds_lookup(jaxpr, holding) else jaxpr


def without_reads(jaxpr: Any) -> Any:
    """Returns an open jaxpr in which no gather is marked, as plans of jqx 0.1 count."""
    return _with_eqns(jaxpr, [_unmarked(eqn) for eqn in jaxpr.eqns])


def _unmarked(eqn: Eqn) -> Eqn:
    if isinstance(eqn.params, _Read):
        return eqn.replace(params=dict(eqn.params))
    return _compat.with_bodies(eqn, without_reads)


def _holds_lookup(jaxpr: Any, known: dict[int, bool]) -> bool:
    if id(jaxpr) not in known:
        known[id(jaxpr)] = any(
            _needs_weight(eqn)
            or any(_holds_lookup(body, known) for body in _compat.sub_jaxprs(eqn))
            for eqn in jaxpr.eqns
        )
    return known[id(jaxpr)]


def _needs_weight(eqn: Eqn) -> bool:
    name = eqn.primitive.name
    return name in CONTRACTIONS and CONTRACTIONS[name].needs_weight


def _marked(
    jaxpr: Any, origins: Origins, holding: dict[int, bool]
) -> tuple[Any, list[Origin | None]]:
    """Returns a jaxpr with marks, and the origins of its results."""
    env: dict[Any, Origin | None] = dict(zip(jaxpr.invars, origins, strict=True))

    def origin_of(atom: Any) -> Origin | None:
        return None if _compat.is_literal(atom) else env.get(atom)

    eqns, made = [], dict[Any, Eqn]()
    for eqn in jaxpr.eqns:
        known = tuple(map(origin_of, eqn.invars))
        name, results = eqn.primitive.name, ()
        made.update(dict.fromkeys(eqn.outvars, eqn))
        if _needs_weight(eqn):
            views = [] if known[0] is None else _static_index(eqn, made)
            for view in views:
                own = VIEWS[view.primitive.name].track(view, [origin_of(view.invars[0])])
                env.update(zip(view.outvars, own, strict=True))
            if views:
                eqns += views
                continue
            is_read = known[0] is None or _is_symbolic(eqn)
            eqns.append(eqn.replace(params=_Read(eqn.params)) if is_read else eqn)
            continue
        bodies = list(_compat.sub_jaxprs(eqn))
        holds = any(_holds_lookup(body, holding) for body in bodies)
        if holds or any(known):
            if name in FORMS and bodies:
                inside = _Inside(holding)
                results = FORMS[name].track(eqn, known, inside)
                new = inside.bodies
            else:
                new = {id(x): _marked(x, [None] * len(x.invars), holding)[0] for x in bodies}
                if name in VIEWS:
                    results = VIEWS[name].track(eqn, known)
            if holds:
                eqn = _compat.with_bodies(eqn, lambda body, new=new: new.get(id(body), body))
            env.update(zip(eqn.outvars, results, strict=False))
        eqns.append(eqn)
    return _with_eqns(jaxpr, eqns), [origin_of(atom) for atom in jaxpr.outvars]


def _is_symbolic(eqn: Eqn) -> bool:
    """Whether a lookup is in a value with symbolic sizes, which no weight has: an index of a weight
    that is repeated for each row of a batch.
    """
    return any(map(export.is_symbolic_dim, eqn.invars[0].aval.shape))


def _static_index(eqn: Eqn, made: Mapping[Any, Eqn]) -> list[Eqn]:
    """Returns a gather at one static index of a value with symbolic sizes as what JAX traces for
    known sizes, a slice without some axes; none if it is another gather.
    """
    numbers, starts = eqn.params["dimension_numbers"], _constant(eqn.invars[1], made)
    is_one = starts is not None and starts.shape == (len(numbers.start_index_map),)
    if starts is None or not (is_one and _is_symbolic(eqn) and eqn.params["mode"] == _INSIDE):
        return []
    begin = dict(zip(numbers.start_index_map, starts.tolist(), strict=True))
    sizes = enumerate(eqn.params["slice_sizes"])
    ends = [(begin.get(axis, 0), begin.get(axis, 0) + n) for axis, n in sizes]
    (x, _), (y,) = eqn.invars, eqn.outvars

    def view(x: jax.Array) -> jax.Array:
        part = lax.slice(x, *zip(*ends, strict=True))
        return lax.squeeze(part, numbers.collapsed_slice_dims)

    traced, _ = _compat.trace(view, jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype))
    named = {traced.invars[0]: x, traced.outvars[0]: y}
    return [
        own.replace(
            invars=[named.get(v, v) for v in own.invars],
            outvars=[named.get(v, v) for v in own.outvars],
        )
        for own in traced.eqns
    ]


def _constant(atom: Any, made: Mapping[Any, Eqn]) -> np.ndarray | None:
    """Returns an index that is made of numbers alone; `None` for others."""
    if _compat.is_literal(atom):
        return np.asarray(atom.val)
    eqn = made.get(atom)
    parts = [] if eqn is None else [_constant(x, made) for x in eqn.invars]
    known = [x for x in parts if x is not None]
    if eqn is None or not known or len(known) < len(parts):
        return None
    if eqn.primitive.name == "broadcast_in_dim" and len(atom.aval.shape) == 1:
        return np.broadcast_to(known[0], atom.aval.shape)
    return np.concatenate(known) if eqn.primitive.name == "concatenate" else None


def _with_eqns(jaxpr: Any, eqns: Sequence[Eqn]) -> Any:
    changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr.replace(eqns=list(eqns)) if changed else jaxpr


class _Inside:
    """Marks the functions inside an equation."""

    here: Address = ()

    def __init__(self, holding: dict[int, bool]):
        self.bodies: dict[int, Any] = {}
        self._holding = holding

    def enter(self, jaxpr: Any, known: Origins, part: Address = ()) -> list[Origin | None]:
        body, _ = _compat.open_jaxpr(jaxpr)
        self.bodies[id(body)], results = _marked(body, known, self._holding)
        return results

    def leave(self, jaxpr: Any, reason: str) -> None:
        body, _ = _compat.open_jaxpr(jaxpr)
        self.enter(body, [None] * len(body.invars))
