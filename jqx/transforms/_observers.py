"""Checks `observers=`, and matches observers with the sites of a plan."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .._checks import check_instance, check_pattern
from .._errors import fail, message, some
from ..calibrators import Calibrator
from ..observers import Observer
from ..observers._shared import Calibrated
from ._plan import Plan
from ._site import Site

GivenObservers = Mapping[str, Observer | Calibrator | Sequence[Observer | Calibrator]] | None
"""The type of `observers=` of a transform: observers by paths of sites."""

Checked = tuple[tuple[str, tuple[Observer, ...]], ...]
"""The same as pairs, in which calibrators are wrapped as observers."""


def check_observers(function: str, observers: GivenObservers) -> Checked:
    """Returns `observers=` as pairs, after checking that it is a dict of observers."""
    if observers is None:
        return ()
    fix = "pass for example observers={'.*': jqx.observers.hessian}."
    check_instance(function, "observers", observers, Mapping, fix=fix)
    checked = []
    for pattern, value in observers.items():
        name = f"observers[{pattern!r}]"
        check_pattern(function, f"a key of observers, {pattern!r},", pattern, fix=fix)
        each = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        if not each:
            raise fail(
                function,
                f"`{name}` records nothing.",
                given=repr(value),
                expected="an observer, or a tuple of observers",
                fix="drop that entry.",
            )
        checked.append((pattern, tuple(_as_observer(function, name, item) for item in each)))
    return tuple(checked)


def _as_observer(function: str, name: str, value: Any) -> Observer:
    fix = "pass a jqx.observers.Observer, a jqx.calibrators.Calibrator, or a tuple of them."
    check_instance(function, name, value, (Observer, Calibrator), fix=fix)
    try:
        hash(value)
    except TypeError:
        raise fail(
            function,
            f"`{name}` cannot be hashed.",
            given=f"a {type(value).__name__}",
            expected="a frozen value: two equal observers record the same",
            fix="write it with @dataclasses.dataclass(frozen=True).",
            error=TypeError,
        ) from None
    return Calibrated(value) if isinstance(value, Calibrator) else value


def is_for(pattern: str, plan: Plan, path: str) -> bool:
    """Whether a regular expression matches the path of a site, or of the weight that this path is a
    part of.
    """
    return any(re.fullmatch(pattern, own) for own in {path, plan.whole_of(path)})


def observers_of(function: str, plan: Plan, given: Checked) -> list[tuple[Site, list[Observer]]]:
    """Returns the sites of a plan, each with the observers whose regular expression matches its
    path, or the path of the weight that its path is a part of. Raises if an expression matches
    nothing, or two observers of a site have the same name.
    """
    for pattern, _ in given:
        if not any(is_for(pattern, plan, site.path) for site in plan.sites):
            raise ValueError(_unmatched(function, plan, pattern))
    found = []
    for site in plan.sites:
        matching = [each for pattern, each in given if is_for(pattern, plan, site.path)]
        wanted = list(dict.fromkeys(observer for each in matching for observer in each))
        names = [str(observer) for observer in wanted]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise fail(
                function,
                "two observers of one site have the same name.",
                given=f"{twice!r} more than once at {site.path!r}",
                expected="observers that differ in str(observer), which names their statistics",
                fix="let __str__ of the observer show its parameters.",
            )
        found.append((site, wanted))
    return found


def _unmatched(function: str, plan: Plan, pattern: str) -> str:
    paths = list(dict.fromkeys(site.path for site in plan.sites))
    skipped = next((skip for skip in plan.skipped if re.fullmatch(pattern, skip.path)), None)
    fix = "correct the regular expression, or drop it; it is matched in full."
    if skipped is not None:
        fix = "calibrate with a plan that quantizes it: what stays in float is not observed."
    at = f"; {skipped.path!r} is skipped: {skipped.reason}" if skipped is not None else ""
    return message(
        function,
        "an observer matches no site of the plan.",
        given=f"observers[{pattern!r}]{at}",
        expected=f"a match; paths are: {some([repr(path) for path in paths])}",
        fix=fix,
    )


def keys_of(function: str, plan: Plan, given: Checked) -> dict[str, tuple[Site, Observer]]:
    """Returns the possible keys of observers' entries, each with its site and observer."""
    return {
        f"{key}@{observer}": (site, observer)
        for site, observers in observers_of(function, plan, given)
        for key in site.keys
        for observer in observers
    }


def without_observers(
    plan: Plan, stats: Mapping[str, Any], known: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns the entries of statistics that belong to no observer: they are not known, and their
    keys are not those of observers of the plan.
    """
    static = plan.static_specs()
    names = {key for site in plan.sites for key in site.keys}

    def is_observed(key: str) -> bool:
        ends = [i for i, letter in enumerate(key) if letter == "@"]
        return key not in static and (key in known or any(key[:i] in names for i in ends))

    return {key: value for key, value in stats.items() if not is_observed(key)}
