"""What `search` may spend: bytes, bits per weight, or an error."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Bytes:
    """A budget: the maximum number of bytes of the weights of the plan, with their scales."""

    limit: float


@dataclasses.dataclass(frozen=True)
class Bits:
    """A budget: the maximum mean bits per weight of the plan.

    Scales count, and zero points: int4 in groups of 32 with a float32 scale each takes 5 bits a
    weight, so `Bits(4)` excludes it.
    """

    limit: float


@dataclasses.dataclass(frozen=True)
class Error:
    """A budget: the maximum of the metric."""

    limit: float


def bytes_of(budget: Bytes | Bits | Error, count: float) -> float:
    """Returns the maximum bytes of `count` weights; infinite for a budget of the metric."""
    if isinstance(budget, Error):
        return math.inf
    return budget.limit / 8 * count if isinstance(budget, Bits) else budget.limit


def in_words(budget: Bytes | Bits | Error) -> str:
    """Returns a budget with its unit, such as `at most 5 bits a weight`."""
    if isinstance(budget, Bytes):
        return f"at most {budget.limit:,.0f} bytes"
    if isinstance(budget, Bits):
        return f"at most {budget.limit:.4g} bits a weight"
    return f"a metric of at most {budget.limit:.4g}"
