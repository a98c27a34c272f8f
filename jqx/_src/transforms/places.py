"""The positions of weights' elements in the matrices that contractions multiply by. They are found
by passing the number of each element through the views of a function.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..compat import Eqn
from ..errors import fail
from ..tensor.qtensor import QTensor
from .plan import Plan
from .rules import CONTRACTIONS, VIEWS
from .stats import Entry
from .trace import Call
from .views import SHARDINGS, Loop
from .walk import Body, Domain, Followed, Where, walk

_SAME = {"convert_element_type", "copy", "div", "mul", "neg", "stop_gradient", *SHARDINGS}
"""Views that leave every element in place."""


@dataclass(frozen=True)
class _Elements:
    """A weight, or several joined, seen through views.

    Attributes:
      sizes: the size of each weight, by path.
      elements: returns for each element of the value its number in the weight, int32; elements of a
        second weight are numbered after those of the first.
      loops: number of leading axes that are steps of the enclosing scans.
    """

    sizes: dict[str, int]
    elements: Callable[[], jax.Array]
    loops: int = 0

    def step_of(self, loop: Loop) -> "_Elements":
        """The value in one step of a scan over the leading axis."""
        return replace(self, loops=self.loops + 1)

    def among(self, sizes: dict[str, int]) -> "_Elements":
        """Returns the same value, numbered among the weights of `sizes`."""
        if [*sizes] == [*self.sizes]:
            return self

        def numbers() -> jax.Array:
            return jnp.asarray(renumbered(self.elements(), self.sizes, sizes), jnp.int32)

        return _Elements(sizes, numbers, self.loops)


def renumbered(elements: Any, starts_of: Mapping[str, int], others: Mapping[str, int]) -> Any:
    """Converts the numbers of elements of some weights, given their sizes by path, to the numbers
    that they have among others.
    """
    starts = np.cumsum([0, *others.values()])[:-1]
    start = dict(zip(others, starts.tolist(), strict=True))
    ends, moved, end = [], [], 0
    for path, size in starts_of.items():
        moved.append(start[path] - end)
        end += size
        ends.append(end)
    xp = np if isinstance(elements, np.ndarray) else jnp
    which = xp.searchsorted(xp.asarray(ends, elements.dtype), elements, side="right")
    return elements + xp.asarray(moved, elements.dtype)[which]


Known = Sequence[_Elements | None]


def places_of(
    plan: Plan, call: Call, entries: Sequence[Entry]
) -> dict[str, Callable[[], jax.Array]]:
    """Returns for each entry that has one the function that computes its statistics of
    `jqx.observers.places`.
    """
    if not entries:
        return {}
    follower = _Follower(plan)
    named = zip(call.leaves, call.paths, strict=True)
    leaves = [None if plan.weight_at(path) is None else _whole(path, leaf) for leaf, path in named]
    walk(follower, call.jaxpr, leaves)
    makers = {}
    for entry in entries:
        elements = follower.makers.get(entry.part.key)
        observed = entry.part.observed
        is_product = observed.op in ("dot_general", "ragged_dot") or observed.patches is not None
        if elements is not None and is_product:
            makers[entry.key] = partial(_rows, elements, observed.rows, len(entry.site.loops))
    return makers


def _rows(elements: Callable[[], jax.Array], rows: Callable[[Any], Any], loops: int) -> jax.Array:
    for _ in range(loops):
        rows = jax.vmap(rows)
    return rows(elements())


def _whole(path: Any, leaf: Any) -> _Elements:
    _check_numbers(path, leaf.size)

    def elements() -> jax.Array:
        return jnp.arange(leaf.size, dtype=jnp.int32).reshape(leaf.shape)

    return _Elements({path: leaf.size}, elements)


def _check_numbers(path: str, size: int) -> None:
    if size >= 2**31:
        problem = f"the weight {path!r} has {size} elements, more than int32 can number."
        fix = "split it: let rules select steps of the scan over it, such as 'layers[:16]'."
        raise fail("observers.places", problem, fix=fix, error=NotImplementedError)


@dataclass
class _Follower(Followed[_Elements]):
    """Follows the elements of weights, and collects those that sites multiply by."""

    plan: Plan
    makers: dict[str, Callable[[], jax.Array]] = field(default_factory=dict)

    def evaluate(
        self, eqn: Eqn, values: list[_Elements | None], where: Where
    ) -> Sequence[_Elements | None]:
        name = eqn.primitive.name
        if not self.enters(eqn, values, where) or (name not in CONTRACTIONS and name not in VIEWS):
            return super().evaluate(eqn, values, where)
        if name in VIEWS:
            return _viewed(eqn, values)
        site = self.plan.site_at(where.address) if where.is_marked else None
        for operand, x in zip(site.operands if site else (), values, strict=False):
            if x is None or site is None or operand.path is None:
                continue
            paths = self.plan.weights_in(site)
            if set(paths) == set(x.sizes):
                self.makers[operand.key] = x.among({p: x.sizes[p] for p in paths}).elements
        return super().evaluate(eqn, values, where)

    def body(
        self, eqn: Eqn, body: Body, values: list[_Elements | None], where: Where
    ) -> tuple[Domain[_Elements | None], list[_Elements | None]]:
        if eqn.primitive.name == "shard_map":  # each device has only a part
            return self, [None] * len(values)
        return super().body(eqn, body, values, where)


def _viewed(eqn: Eqn, inputs: Known) -> Sequence[_Elements | None]:
    """Returns the result of a view of weights; nothing if it reads other values as well."""
    weights = [x for x in inputs if x is not None]
    weight = weights[0]
    if eqn.primitive.name == "optimization_barrier":
        return inputs
    if eqn.primitive.name in _SAME:
        return [weight] * len(eqn.outvars)
    others = any(
        x is None and not compat.is_literal(v) for x, v in zip(inputs, eqn.invars, strict=True)
    )
    if others or len({x.loops for x in weights}) > 1:
        return [None] * len(eqn.outvars)
    sizes = {path: size for x in weights for path, size in x.sizes.items()}
    _check_numbers("+".join(sizes), sum(sizes.values()))
    weights = [x.among(sizes) for x in weights]
    literals = [None if x is not None else v.val for x, v in zip(inputs, eqn.invars, strict=True)]

    def view(*elements: jax.Array) -> list[jax.Array]:
        numbers = iter(elements)
        operands = [_as_codes(next(numbers)) if x is None else x for x in literals]
        return [q.values for q in VIEWS[eqn.primitive.name].apply(eqn, operands)]

    for _ in range(weight.loops):
        view = jax.vmap(view)

    def result(index: int) -> jax.Array:
        return view(*(x.elements() for x in weights))[index]

    return [_Elements(sizes, partial(result, i), weight.loops) for i in range(len(eqn.outvars))]


def _as_codes(elements: jax.Array) -> QTensor:
    """Returns the numbers of elements as codes, so that views move them as they move codes."""
    return QTensor(elements, jnp.ones((1,) * elements.ndim), qtype=jnp.dtype("int32"))
