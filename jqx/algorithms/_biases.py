"""Biases that take the shifts of results: parameters that are only added to these results. They are
found in the dataflow.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import Eqn
from ..transforms import Plan, Site
from ..transforms._shared import (
    CONTRACTIONS,
    FORMS,
    Address,
    Call,
    Channels,
    Unstacked,
    addressed,
    arguments_of,
    is_array,
    is_quantized,
)
from ._decisions import body_of
from ._labels import Array


class _Elements(NamedTuple):
    """A view of a parameter.

    Attributes:
      place: index of the parameter among the operands.
      numbers: the numbers of its elements, [steps of each surrounding scan, *shape].
    """

    place: int
    numbers: Array


class _Results(NamedTuple):
    """A sum that contains results of sites, each with its channels."""

    parts: tuple[tuple[Site, Channels], ...]


class _BiasUse(NamedTuple):
    """A bias that is added to results of sites, inside some scans."""

    bias: _Elements
    parts: tuple[tuple[Site, Channels], ...]
    loops: tuple[Address, ...]
    dtype: Any


def into_biases(
    plan: Plan, call: Call, codes: Any, batch: Any, shifts: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Folds shifts into biases. Returns the parameters, and the remaining shifts by the key of the
    result.

    A bias can take a shift if it is a parameter of float32 or wider that the plan does not
    quantize, and is read only once: by a sum with the result of the site, or with a sum of that
    result which nothing else reads.

    Args:
      plan: plan of the function.
      call: the function, traced for a batch.
      codes: the parameters.
      batch: that batch.
      shifts: what must be added to results, as in `ChannelMap.shift`.
    """
    walk = _Walk(plan, set(shifts))
    known = [
        None if path is None else _Elements(i, np.arange(x.size).reshape(x.shape))
        for i, (x, path) in enumerate(zip(call.leaves, call.paths, strict=True))
    ]
    walk.body(call.jaxpr, (), known, ())
    own = Unstacked(plan, codes)
    arguments = arguments_of(plan, own.params, batch)
    leaves, tree = jax.tree.flatten(arguments, is_leaf=is_quantized)
    places = [i for i, x in enumerate(leaves) if is_array(x)]
    left = dict(shifts)
    for use in walk.found:
        leaf = leaves[places[use.bias.place]]
        if is_quantized(leaf) or leaf.dtype != use.dtype or jnp.finfo(leaf.dtype).bits < 32:
            continue
        total = sum(_taken(use, part, shifts[part[0].output_key]) for part in use.parts)
        delta = _delta(use, np.asarray(total), leaf.size)
        if delta is not None:
            moved = np.asarray(leaf, np.float64) + delta.reshape(leaf.shape)
            leaves[places[use.bias.place]] = jnp.asarray(moved, leaf.dtype)
            for site, _ in use.parts:
                del left[site.output_key]
    filled = tree.unflatten(leaves)
    if isinstance(plan.params, int):
        return own.together(filled[plan.params]), left
    return own.together(tuple(filled[i] for i in plan.params)), left


def _taken(use: _BiasUse, part: tuple[Site, Channels], shift: Any) -> Array:
    """Returns a shift on the axes of the sum, after those of the surrounding scans; size 1 along
    axes with one value for all.
    """
    site, channels = part
    x, shape = np.asarray(shift, np.float64), use.bias.numbers.shape
    own = [loop.address for loop in site.loops]
    steps = [n if here in own else 1 for here, n in zip(use.loops, shape, strict=False)]
    rows = x.reshape(-1, *x.shape[len(own) :])
    spread = np.stack([channels.spread(row, shape[len(use.loops) :]) for row in rows])
    return spread.reshape(*steps, *spread.shape[1:])


def _delta(use: _BiasUse, shift: Array, size: int) -> Array | None:
    """Returns what the elements of a bias take, or `None` if one would take two values."""
    numbers = use.bias.numbers
    repeated = [n > 1 and not step for n, step in zip(numbers.shape, numbers.strides, strict=True)]
    alike = [n == 1 for n in shift.shape]
    numbers = numbers[
        tuple(slice(1) if a and b else slice(None) for a, b in zip(repeated, alike, strict=True))
    ]
    wanted, delta = np.broadcast_to(shift, numbers.shape), np.zeros(size)
    delta[numbers] = wanted
    return delta if np.array_equal(delta[numbers], wanted) else None


class _Walk:
    """Follows parameters and results through a function, as long as each is read only once, or by
    slices that are apart.
    """

    def __init__(self, plan: Plan, wanted: set[str]):
        self._plan, self._wanted = plan, wanted
        self.found: list[_BiasUse] = []

    def body(
        self, jaxpr: Any, address: Address, known: Sequence[Any], loops: tuple[Address, ...]
    ) -> list[Any]:
        """Returns the tracked objects of the results of a body."""
        body, _ = _compat.open_jaxpr(jaxpr)
        read = [*(x for eqn in body.eqns for x in eqn.invars), *body.outvars]
        uses = Counter(x for x in read if not _compat.is_literal(x))
        env = dict(zip(body.invars, known, strict=True))

        def of(x: Any) -> Any:
            found = None if _compat.is_literal(x) else env.get(x)
            if found is None or uses[x] == 1:
                return found
            slices = [eqn for eqn in body.eqns if eqn.primitive.name == "slice" and x in eqn.invars]
            is_apart = isinstance(found, _Elements) and len(slices) == uses[x] and _apart(slices)
            return found if is_apart else None

        for here, eqn, marked in addressed(body, address):
            given = [of(x) for x in eqn.invars]
            results = self._results(here, eqn, marked, given, loops)
            env.update(zip(eqn.outvars, results, strict=False))
        return [of(x) for x in body.outvars]

    def _results(
        self,
        here: Address,
        eqn: Eqn,
        marked: bool,
        given: list[Any],
        loops: tuple[Address, ...],
    ) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            site = self._plan.site_at(here) if marked else None
            if site is None or site.output_key not in self._wanted or site.output is not None:
                return ()
            place = next(i for i, x in enumerate(site.operands) if x.role == "weight")
            return [_Results(((site, Channels.of_result(eqn, place)),))]
        if name == "add":
            return [self._added(eqn, given, loops)]
        if name in _VIEWS and isinstance(given[0], _Elements):
            numbers = _VIEWS[name](given[0].numbers, eqn, len(loops))
            return [given[0]._replace(numbers=numbers)]
        if name == "scan":
            count, carried = _compat.scan_counts(eqn)
            length = eqn.params["length"]
            inside = [_each(x, length, len(loops)) for x in given[:count]]
            inside += [None] * carried
            inside += [x if isinstance(x, _Elements) else None for x in given[count + carried :]]
            self.body(eqn.params["jaxpr"], here, inside, (*loops, here))
        elif name in FORMS and name not in ("while", "cond", "shard_map"):
            body = body_of(eqn)
            if len(_compat.open_jaxpr(body)[0].invars) == len(given):
                return self.body(body, here, given, loops)
        return ()

    def _added(self, eqn: Eqn, given: list[Any], loops: tuple[Address, ...]) -> Any:
        """Returns the tracked object of a sum; records a bias in it."""
        out = eqn.outvars[0].aval
        whole = [x.aval.shape == out.shape for x in eqn.invars]
        results = [
            x for x, fits in zip(given, whole, strict=True) if isinstance(x, _Results) and fits
        ]
        biases = [x for x in given if isinstance(x, _Elements)]
        if not results:
            return None
        if biases:
            bias = biases[0]
            shape = (*bias.numbers.shape[: len(loops)], *out.shape)
            bias = bias._replace(numbers=np.broadcast_to(bias.numbers, shape))
            self.found.append(_BiasUse(bias, results[0].parts, loops, out.dtype))
            return None
        return _Results(tuple(part for x in results for part in x.parts))


def _each(x: Any, length: int, axis: int) -> Any:
    """Returns a constant as each step of a scan reads it."""
    if not isinstance(x, _Elements):
        return None
    shape = (*x.numbers.shape[:axis], length, *x.numbers.shape[axis:])
    return x._replace(numbers=np.broadcast_to(np.expand_dims(x.numbers, axis), shape))


def _broadcast(x: Array, eqn: Eqn, loops: int) -> Array:
    shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    lead = x.shape[:loops]
    own = [1] * len(shape)
    for axis, n in zip(axes, x.shape[loops:], strict=True):
        own[axis] = n
    return np.broadcast_to(x.reshape(*lead, *own), (*lead, *shape))


def _reshaped(x: Array, eqn: Eqn, loops: int) -> Array:
    return x.reshape((*x.shape[:loops], *eqn.outvars[0].aval.shape))


def _taken_by(eqn: Eqn) -> tuple[slice, ...]:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (None,) * len(starts)
    return tuple(map(slice, starts, limits, strides))


def _apart(slices: Sequence[Eqn]) -> bool:
    """Whether no two slices of one value take the same element."""
    seen = np.zeros(slices[0].invars[0].aval.shape, np.int8)
    for eqn in slices:
        seen[_taken_by(eqn)] += 1
    return seen.max(initial=0) <= 1


_VIEWS = {
    "slice": lambda x, eqn, loops: x[(slice(None),) * loops + _taken_by(eqn)],
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "transpose": lambda x, eqn, loops: x.transpose(
        *range(loops), *(loops + axis for axis in eqn.params["permutation"])
    ),
}
"""The effect of views on the numbers of elements, after the axes of surrounding scans."""
