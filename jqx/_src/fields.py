"""Checks of the fields of option types: `check_fields` in the `__post_init__` of a dataclass."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .checks import shown
from .errors import fail


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a field may hold.

    Attributes:
      expected: the values in words, for messages.
      is_kind: whether a value is of the right kind; if not, the error is a TypeError.
      holds: whether a value of that kind is in range.
      convert: the value that is kept, such as a Python number in place of one of NumPy.
    """

    expected: str
    is_kind: Callable[[Any], bool]
    holds: Callable[[Any], bool] = lambda value: True
    convert: Callable[[Any], Any] = lambda value: value

    def __or__(self, other: "Rule") -> "Rule":
        """Returns the rule of values that keep one rule or the other."""

        def rule_of(value: Any) -> Rule:
            return self if self.is_kind(value) and self.holds(value) else other

        return Rule(
            f"{self.expected}, or {other.expected}",
            lambda value: self.is_kind(value) or other.is_kind(value),
            lambda value: rule_of(value).is_kind(value) and rule_of(value).holds(value),
            lambda value: rule_of(value).convert(value),
        )


def number(low: float = 0, high: float = math.inf, *, above: bool = False) -> Rule:
    """Returns the rule of finite numbers from `low` to `high`, without `low` itself if `above`."""
    start = f"above {low:g}" if above else f"of {low:g} or more"
    largest = min(high, float(np.finfo(np.float32).max))
    return Rule(
        f"a number {start}" + (f" and at most {high:g}" if high < math.inf else ""),
        lambda x: isinstance(x, (int, float, np.integer, np.floating)) and not _is_bool(x),
        lambda x: (low < x if above else low <= x) and x <= largest,
        float,
    )


def whole(low: int = 0, high: float = 10**6) -> Rule:
    """Returns the rule of integers from `low` to `high`."""
    return Rule(
        f"a whole number of {low} or more, at most {high}",
        lambda n: isinstance(n, (int, np.integer)) and not _is_bool(n),
        lambda n: low <= n <= high,
        int,
    )


def choice(*values: str | None) -> Rule:
    """Returns the rule of a few strings, and None."""
    return Rule(
        ("one of " if len(values) > 1 else "") + ", ".join(map(repr, values)),
        lambda value: value is None or isinstance(value, str),
        lambda value: value in values,
    )


def instance(*kinds: type) -> Rule:
    """Returns the rule of instances of classes."""
    names = " or ".join(kind.__name__ for kind in kinds)
    return Rule(f"of type {names}", lambda value: isinstance(value, kinds))


def flag() -> Rule:
    """Returns the rule of True and False."""
    return Rule("True or False", lambda value: isinstance(value, bool))


def nothing() -> Rule:
    """Returns the rule of None, as in `number() | nothing()`."""
    return Rule("None", lambda value: value is None)


def check_fields(
    function: str, options: Any, fix: str = "leave it out for the default.", **rules: Rule
) -> None:
    """Checks fields of a dataclass, and sets those to which a rule gives another form.

    Args:
      function: the public name of the function or class, for messages.
      options: the dataclass, which may be frozen.
      fix: what to do if a field does not keep its rule.
      **rules: what each field may hold.
    """
    for name, rule in rules.items():
        value = getattr(options, name)
        if not rule.is_kind(value) or not rule.holds(value):
            raise fail(
                function,
                f"`{name}` is out of range.",
                given=f"{name} == {shown(value)}",
                expected=rule.expected,
                fix=fix,
                error=ValueError if rule.is_kind(value) else TypeError,
            )
        converted = rule.convert(value)
        if converted is not value:
            object.__setattr__(options, name, converted)


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


# Fields that were added to a class after values of it had been written as JSON.


_ADDED = "jqx added"


def added(default: Any, **options: Any) -> Any:
    """Returns a dataclass field that is not written while it has its default, so that values
    without it are read and written as before it was added. `options` are those of
    `dataclasses.field`.
    """
    return dataclasses.field(default=default, metadata={_ADDED: True}, **options)


def unwritten(cls: type) -> dict[str, Any]:
    """Returns the defaults of the fields of a class that are not written while they have them."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {field.name: field.default for field in fields if _ADDED in field.metadata}
