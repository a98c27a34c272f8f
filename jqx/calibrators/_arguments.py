"""Checks of the numbers that a calibrator is made with."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .._checks import check_integer, require_that


def check_number(
    function: str, argument: str, value: Any, holds: Callable[[float], bool], expected: str
) -> float:
    """Returns `value` as a float, after checking that it is a finite number for which `holds`."""
    require_that(
        isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool),
        error=TypeError,
        function=function,
        problem=f"`{argument}` must be a number.",
        given=f"an object of type {type(value).__name__}",
        expected=f"a Python number, {expected}",
        mend=f"pass the number itself as {argument}.",
    )
    require_that(
        math.isfinite(value) and holds(float(value)),
        error=ValueError,
        function=function,
        problem=f"`{argument}` is out of range.",
        given=f"{argument} == {float(value)}",
        expected=f"a finite number, {expected}",
        mend=f"choose {argument} from that range.",
    )
    return float(value)


def check_count(function: str, argument: str, value: Any, least: int) -> int:
    """Returns `value` as an integer, after checking that it is at least `least`."""
    value = check_integer(function, argument, value)
    require_that(
        value >= least,
        error=ValueError,
        function=function,
        problem=f"`{argument}` is too small.",
        given=f"{argument} == {value}",
        expected=f"{least} or more",
        mend=f"pass for example {argument}={least}.",
    )
    return value
