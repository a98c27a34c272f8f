"""Observers of rows that may count more or less, or not at all: padding, for example."""

import dataclasses
from typing import Any, Self

from .._checks import require_that
from ._observer import Observer, Weight


def check_weight(function: str, weight: Any) -> None:
    """Checks that a weight is a function, or `None`."""
    require_that(
        weight is None or callable(weight),
        error=TypeError,
        function=function,
        problem="`weight` is not a function.",
        given=f"an object of type {type(weight).__name__}",
        expected="a function of what a batch has, that returns how much its rows count",
        mend="pass for example weight=lambda tokens: tokens != 0.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighted(Observer):
    """An observer of rows; called with a `weight` it returns one that counts them by it.

    `weight` is called with the arguments of the function that is calibrated, less its parameters:
    with what a batch has. It returns booleans, or numbers from 0, of the leading axes of at least
    one of these arguments, such as `[batch, tokens]`, size 1 where all along an axis count alike;
    the rows of all arguments that begin with these axes count as it says. Rows are followed through
    the function: axes that are merged, experts that they are sorted by. What is made of several
    rows, as by attention and pooling, and by products with zeros and ones that pick some, counts as
    much as the one of them that counts most, and no more than what it is joined with, as the token
    that asks. A row that parameters alone have made counts 1. Rows that count 0 leave no trace, not
    even a NaN.

    Attributes:
      weight: such a function, or `None`, where all rows count 1.
    """

    weight: Weight | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        check_weight(f"observers.{str(self).partition('(')[0]}", self.weight)

    def __call__(self, *, weight: Any) -> Self:
        """Returns the observer that counts rows by a weight."""
        return dataclasses.replace(self, weight=weight)
