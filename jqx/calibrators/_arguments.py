"""Checks of the arguments of calibrators and granularities."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import export

from .._checks import check_instance, check_integer, is_at_least, shown
from .._errors import fail

_LARGEST = float(np.finfo(np.float32).max)

_MOST = 2**20


def check_number(
    function: str, argument: str, value: Any, holds: Callable[[float], bool], expected: str
) -> float:
    """Returns `value` as a float, after checking that float32 can hold it and that it `holds`."""
    if not (
        isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    ):
        raise fail(
            function,
            f"`{argument}` must be a number.",
            given=f"an object of type {type(value).__name__}",
            expected=f"a Python number, {expected}",
            fix=f"pass the number itself as {argument}.",
            error=TypeError,
        )
    if not (abs(value) <= _LARGEST and holds(float(value))):
        raise fail(
            function,
            f"`{argument}` is out of range.",
            given=f"{argument} == {shown(value)}",
            expected=f"a finite number, {expected}",
            fix=f"choose {argument} from that range.",
        )
    return float(value)


def check_count(function: str, argument: str, value: Any, least: int) -> int:
    """Returns `value` as an integer, after checking that it is at least `least` and not absurdly
    large for a number of steps, bins or candidates.
    """
    value = check_integer(function, argument, value)
    if not least <= value <= _MOST:
        raise fail(
            function,
            f"`{argument}` is too {'small' if value < least else 'large'}.",
            given=f"{argument} == {shown(value)}",
            expected=f"{least} or more, {_MOST} at most",
            fix=f"pass for example {argument}={least}.",
        )
    return value


def check_integers(function: str, argument: str, given: Any, count: int | None = None) -> Any:
    """Returns integers as a tuple, after checking their type and their number."""
    fits = isinstance(given, (tuple, list)) and count in (None, len(given))
    if not (
        fits and all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in given)
    ):
        raise fail(
            function,
            f"`{argument}` must hold integers.",
            given=f"{argument} == {shown(given)}",
            expected="pairs of an axis and a size"
            if count
            else "axis numbers, as in per_axis(0, 2)",
            fix="pass the numbers themselves.",
            error=TypeError,
        )
    return tuple(map(int, given))


def check_group_size(size: Any) -> int:
    """Returns the size of a group, after checking it."""
    size = check_integer("per_group", "size", size)
    if not 1 <= size < 2**31:
        raise fail(
            "per_group",
            "a group has no elements." if size < 1 else "a group has too many elements.",
            given=f"size == {shown(size)}",
            expected="a size of 1 or more",
            fix="pass for example per_group(32).",
        )
    return size


def check_tail(function: str, tail: Any) -> None:
    """Checks that `tail` is a bool."""
    check_instance(function, "tail", tail, bool, fix="pass tail=True or tail=False.")


def check_size_known(
    function: str, granularity: object, shape: Sequence[int], axis: int, size: int
) -> None:
    """Checks that an axis with more than one block of `size` has no symbolic size, as `jax.export`
    has them.
    """
    n = shape[axis]
    if size == 1 or not export.is_symbolic_dim(n) or not is_at_least(n, size + 1):
        return
    raise fail(
        function,
        f"axis {axis} has a symbolic size, so its blocks are not known.",
        given=f"{granularity} for shape {tuple(shape)}",
        expected="blocks along axes of a known size",
        fix="use one scale per token, channel or tensor there, or export with a known size.",
    )
