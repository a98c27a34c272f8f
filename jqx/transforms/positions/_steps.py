"""Evaluates a jaxpr at one position."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import _compat
from ..._compat import Eqn
from .._evaluate import evaluate

Array = jax.Array


class Unable(NotImplementedError):
    """The function cannot be evaluated one position at a time; the text says why."""


class Turn(Exception):
    """The other operand of a product holds the queries."""

    def __init__(self, product: int):
        super().__init__()
        self.product = product


@dataclasses.dataclass(frozen=True, eq=False)
class At:
    """A value at one position.

    Attributes:
      value: of size 1 along the axis of positions.
      axis: the axis of positions.
      product: the product of positions with positions that it comes from, in which this axis was
        taken for that of queries; `None` if there is none.
    """

    value: Array
    axis: int
    product: int | None = None


class Steps:
    """Evaluates a jaxpr at one position.

    Args:
      rules: how each primitive is evaluated, by name.
      place: the position.
      length: how many positions there are.
      turned: the products, by the `id` of their equations, whose right operand holds the queries.
      given: the arguments that are the same at all positions.
      kept: what is kept of earlier positions, in the order in which it is needed; `None` to find
        what it is at first.
      parts: the parts of stacked arguments, in the same way.
    """

    def __init__(
        self,
        rules: "Rules",
        place: Any,
        length: int,
        turned: frozenset[int],
        given: Sequence[Any],
        kept: list[Array] | None = None,
        parts: list[Array] | None = None,
    ):
        self.rules, self.place, self.length, self.turned = rules, place, length, turned
        self._given, self._kept, self._parts = {id(x) for x in given}, kept, parts
        self.new: list[Array] = []
        self.parts: list[Array] = []
        self._whole: dict[tuple[int, tuple[int, ...]], tuple[At, Array]] = {}

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr."""
        return evaluate(jaxpr, consts, args, self._results)

    def _results(self, eqn: Eqn, operands: list[Any]) -> list[Any]:
        if not any(isinstance(x, At) for x in operands):
            return _compat.bind(eqn, operands)
        if eqn.primitive.name not in self.rules:
            raise self.unable(eqn, f"{eqn.primitive.name} has no rule")
        return self.rules[eqn.primitive.name](self, eqn, operands)

    def unable(self, eqn: Eqn, why: str) -> Unable:
        """Returns an error with the shapes of the operands."""
        shapes = ", ".join(str(atom.aval) for atom in eqn.invars)
        return Unable(f"{why} (of {shapes})")

    def over(self, eqn: Eqn, x: At) -> Exception:
        """Returns what to raise where an equation is not computed position by position."""
        if x.product is not None:
            return Turn(x.product)
        return self.unable(eqn, f"{eqn.primitive.name} combines positions")

    def at(self, x: Any, axis: int) -> Any:
        """Returns the part of an array at the position; numbers have no positions."""
        if jnp.ndim(x) == 0:
            return x
        return lax.dynamic_slice_in_dim(x, self.place, 1, axis)

    def whole(self, x: At, order: tuple[int, ...] | None = None) -> Array:
        """Returns a value at all positions up to this one, which is kept, with zeros at others, and
        with its axes in another order, if one is given.
        """
        order = tuple(range(x.value.ndim)) if order is None else order
        if (id(x), order) not in self._whole:
            value, axis = lax.transpose(x.value, order), order.index(x.axis)
            shape = list(value.shape)
            shape[axis] = self.length
            starts: list[Any] = [0] * len(shape)
            starts[axis] = self.place
            write = partial(lax.dynamic_update_slice, update=value, start_indices=starts)
            self._whole[id(x), order] = x, self.keep(jnp.zeros(shape, value.dtype), write)
        return self._whole[id(x), order][1]

    def keep(self, first: Any, change: Callable[[Any], Any]) -> Any:
        """Returns what is kept, changed at this position; before the first one, `first`."""
        new = first if self._kept is None else change(self._kept.pop(0))
        self.new.append(new)
        return new

    def part(self, x: Array, i: int) -> Array:
        """Returns a part of a stack; that of an argument is taken once, for all positions."""
        if id(x) not in self._given:
            return x[i]
        self.parts.append(x[i] if self._parts is None else self._parts.pop(0))
        return self.parts[-1]

    def alike(self, eqn: Eqn, xs: Sequence[Any]) -> tuple[int, int | None, list[Any]]:
        """Returns the axis of positions, and operands at this position."""
        own = [x for x in xs if isinstance(x, At)]
        known = [x for x in own if x.product is not None]
        axes = list(dict.fromkeys(x.axis for x in own))
        product = known[0].product if known else None
        axis = (known or own)[0].axis
        if len(axes) > 1 and not known:  # as the comparison of the segments of positions
            product, axis = id(eqn), axes[id(eqn) in self.turned]
        for x in known:
            if x.axis != axis and x.product is not None:
                raise Turn(x.product)
        xs = [self.whole(x) if isinstance(x, At) and x.axis != axis else x for x in xs]
        return axis, product, [x.value if isinstance(x, At) else self.at(x, axis) for x in xs]


Rules = Mapping[str, Callable[[Steps, Eqn, Sequence[Any]], list[Any]]]
"""For each primitive a rule, which gets an equation with a value at one position."""
