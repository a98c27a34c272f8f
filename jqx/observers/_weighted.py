"""Observers of rows that may count more or less, or not at all, such as padding."""

import dataclasses
from typing import Any, Self

from .._errors import fail
from ._observer import Observer, Weight


def check_weight(function: str, weight: Any) -> None:
    """Checks that a weight is a function, or `None`."""
    if weight is not None and not callable(weight):
        raise fail(
            function,
            "`weight` is not a function.",
            given=f"an object of type {type(weight).__name__}",
            expected="a function of the inputs of a batch that returns how much its rows count",
            fix="pass for example weight=lambda tokens: tokens != 0.",
            error=TypeError,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighted(Observer):
    """An observer of rows. Calling it with a `weight` returns one that weights the rows.

    `weight` is called with the arguments of the calibrated function, without its parameters: with
    the inputs of a batch. It returns booleans or non-negative numbers in the shape of the leading
    axes of at least one of these arguments, such as `[batch, tokens]`. An axis may have size 1 if
    all along it count the same. The weights apply to the rows of all arguments that begin with
    these axes.

    Rows are followed through the function, for example where axes are merged or rows are sorted by
    expert. A value made of several rows counts as much as the row that counts most. This holds for
    attention, pooling, and products with zeros and ones that select rows. It counts no more than
    the value it is joined with, such as the token of the query. A row that is made of parameters
    alone counts 1. Rows that count 0 have no influence, not even by a NaN.

    Attributes:
      weight: such a function, or `None` if all rows count 1.
    """

    weight: Weight | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        check_weight(f"observers.{str(self).partition('(')[0]}", self.weight)

    def __call__(self, *, weight: Any) -> Self:
        """Returns the observer with weighted rows."""
        return dataclasses.replace(self, weight=weight)
