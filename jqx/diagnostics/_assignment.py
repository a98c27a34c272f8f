"""The result of `search`: a scheme for each weight."""

import dataclasses
from typing import Any, NamedTuple

from .._table import Table, Tabular
from ..policy import Policy
from ._budgets import Bits, Bytes, Error, in_words


class Point(NamedTuple):
    """One assignment of the front: no other has both fewer bytes and less error.

    Attributes:
      bytes: bytes of the weights of the plan, with their scales.
      error: sum of the costs of the parts.
      schemes: scheme of each unit, in order.
    """

    bytes: float
    error: float
    schemes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Assignment(Tabular):
    """The result of `search`. Prints as a table.

    Attributes:
      policy: a policy with a rule for each path only.
      schemes: name of the scheme of each path.
      bytes: bytes of the weights of the plan, with their scales, packed.
      bits: mean bits per weight of the plan, scales included, as `Bits` counts them.
      predicted: sum of the costs of the parts; for one candidate on all weights, or a greedy
        search, the metric of the whole.
      measured: metric of the whole.
      uniform: bytes and measured metric of each candidate on all paths.
      front: the best assignments for any number of bytes, by predicted error; for a greedy search,
        its intermediate assignments.
      budget: the budget that `search` was given.
    """

    policy: Policy
    schemes: dict[str, str]
    bytes: float
    bits: float
    predicted: float
    measured: float
    uniform: dict[str, tuple[float, float]]
    front: tuple[Point, ...]
    budget: Bytes | Bits | Error | None = None

    def table(self) -> Table:
        """Returns the rows as text."""
        rows = [(path or "(argument)", scheme) for path, scheme in self.schemes.items()]
        lines = [
            f"{name}: {bits:.2f} bits a weight ({size:,.0f} bytes), metric {x:.4g}"
            for name, bits, size, x in wholes(self)
        ]
        lines[0] += f" ({self.predicted:.4g} predicted)"
        budget = "" if self.budget is None else f"budget: {in_words(self.budget)}; "
        lines.append(f"{budget}bits and bytes are of the weights of the plan with their scales")
        return Table(("path", "scheme"), tuple(rows), "\n".join(lines), texts=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for `json.dumps`, without the policy."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        front = [point._asdict() for point in self.front]
        given = self.budget
        budget = None if given is None else {type(given).__name__.lower(): given.limit}
        policy = [str(rule) for rule in self.policy.rules]
        return {**fields, "front": front, "policy": policy, "budget": budget}


def wholes(found: Assignment) -> list[tuple[str, float, float, float]]:
    """Returns name, bits per weight, bytes and measured metric of an assignment, and of each
    candidate on all weights.
    """
    each = {"this mixture": (found.bytes, found.measured)}
    each |= {f"{name} on all": pair for name, pair in found.uniform.items()}
    return [(name, size / found.bytes * found.bits, size, x) for name, (size, x) in each.items()]
