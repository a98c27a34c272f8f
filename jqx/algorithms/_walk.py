"""Walks through a traced function with other objects in place of its values: step by step through
scans, into both branches, and into all functions that are called once.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._compat import Eqn
from ..transforms._shared import FORMS, Address, addressed
from ._decisions import body_of
from ._labels import Known, is_key, with_line
from ._stages import Steps

_MOST = 256
"""Number of steps to follow in a scan that does not step over parameters."""


class Walk:
    """Walks through a jaxpr. Subclasses define what happens to values. Values that do not depend on
    arguments are `Known`, and are computed.
    """

    def evaluate(self, eqn: Eqn, given: list[Any], here: Address, steps: Steps) -> Sequence[Any]:
        """Returns the results of an equation without inner functions."""
        raise NotImplementedError

    def stopped(self, eqn: Eqn, given: Sequence[Any], reason: str = "") -> list[Any]:
        """Returns the results of an equation that is not entered."""
        raise NotImplementedError

    def joined(self, values: Sequence[Any], reason: str) -> Any:
        """Joins the values of several branches into one."""
        raise NotImplementedError

    def stacked(self, rows: Sequence[Any]) -> Any:
        """Joins the values of all steps of a scan into one; not all of them are known."""
        raise NotImplementedError

    def empty(self, shape: Sequence[int]) -> Any:
        """Returns a result of a scan without steps."""
        raise NotImplementedError

    def step_of(self, x: Any, i: int) -> Any:
        """Returns the part of a value that a step of a scan reads; the value is not known."""
        raise NotImplementedError

    def is_parameter(self, x: Any) -> bool:
        """Whether a value is a parameter."""
        raise NotImplementedError

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        given: Sequence[Any],
        address: Address = (),
        steps: Steps = (),
    ) -> list[Any]:
        """Returns the results of an open jaxpr."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, given, strict=True))

        def read(atom: Any) -> Any:
            return Known(atom.val) if _compat.is_literal(atom) else env[atom]

        for here, eqn, marked in addressed(jaxpr, address):
            inside = here if marked else (*here, -1)
            results = self._results(eqn, list(map(read, eqn.invars)), inside, steps)
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _results(self, eqn: Eqn, given: list[Any], here: Address, steps: Steps) -> Sequence[Any]:
        known = [x.value for x in given if isinstance(x, Known)]
        if len(known) == len(given) and not eqn.effects:
            return [Known(x) for x in _compat.bind(eqn, known)]
        if eqn.primitive.name in FORMS:
            return self._form(eqn, given, here, steps)
        return self.evaluate(eqn, given, here, steps)

    def _form(self, eqn: Eqn, given: list[Any], here: Address, steps: Steps) -> Sequence[Any]:
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, given, here, steps)
        if name == "cond":
            index, *operands = given
            branches = [
                self._inside(branch, operands, (*here, i), steps)
                for i, branch in enumerate(eqn.params["branches"])
            ]
            if isinstance(index, Known):
                return branches[int(np.clip(int(index.value), 0, len(branches) - 1))]
            reason = with_line(eqn)
            return [self.joined(x, reason) for x in zip(*branches, strict=True)]
        if name in ("while", "shard_map"):
            return self.stopped(eqn, given)
        return self._inside(body_of(eqn), given, here, steps)

    def _inside(self, body: Any, given: Sequence[Any], here: Address, steps: Steps) -> list[Any]:
        inner, consts = _compat.open_jaxpr(body)
        return self.run(inner, [Known(x) for x in consts], given, here, steps)

    def _scan(self, eqn: Eqn, given: list[Any], here: Address, steps: Steps) -> Sequence[Any]:
        """Goes through a scan step by step."""
        consts, count = _compat.scan_counts(eqn)
        carried = slice(consts, consts + count)
        shared, carry, stacked = given[:consts], given[carried], given[carried.stop :]
        order, rows = range(eqn.params["length"]), []
        if len(order) > _MOST and not any(map(self.is_parameter, stacked)):
            return self.stopped(eqn, given, f"a scan of {len(order)} steps")
        for i in reversed(order) if eqn.params["reverse"] else order:
            own = [
                Known(_rows(x.value)[i]) if isinstance(x, Known) else self.step_of(x, i)
                for x in stacked
            ]
            results = self._inside(eqn.params["jaxpr"], [*shared, *carry, *own], here, (*steps, i))
            carry = results[:count]
            rows.append(results[count:])
        rows = rows[::-1] if eqn.params["reverse"] else rows
        if not rows:
            return [*carry, *(self.empty(v.aval.shape) for v in eqn.outvars[count:])]
        return [*carry, *(self._all_steps(each) for each in zip(*rows, strict=True))]

    def _all_steps(self, rows: Sequence[Any]) -> Any:
        if all(isinstance(x, Known) for x in rows):
            stack = jnp.stack if is_key(rows[0].value) else np.stack
            return Known(stack([_rows(x.value) for x in rows]))
        return self.stacked(rows)


def _rows(x: Any) -> Any:
    """Returns an array on the host; typed keys are left as they are."""
    return x if is_key(x) else np.asarray(x)
