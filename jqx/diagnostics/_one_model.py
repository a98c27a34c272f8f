"""Whether measurements are of one model and plan: their paths and formats."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .._errors import message, some
from ..transforms import Plan
from ._assignment import Assignment
from ._comparison import Comparison
from ._explain import Explanation
from ._report import Report
from ._schemes import scheme_of_site
from ._sensitivity import Sensitivities, Sensitivity

Formats = Mapping[str, set[str]]
"""For each path, how the contractions on it are quantized."""

_AXES = re.compile(r"(per_axis|along) ?\([^)]*\)")
_STEPS = re.compile(r"\[\d+:\d+\]$")

_MENDS = {
    "comparison": "pass jqx.compare(f, quantized)(params, *batch).",
    "explanation": "pass jqx.explain(f, quantized.params, *batch, plan=quantized.plan).",
    "sensitivities": "pass jqx.diagnostics.sensitivity(f, quantized.plan)(params, *batches), or "
    "what was measured with another plan of the same function and parameters.",
    "assignment": "pass what jqx.diagnostics.search found for the same function and parameters.",
}


def formats_of(plan: Plan) -> Formats:
    """Returns how the sites of a plan are quantized."""
    return _gathered((site.path, scheme_of_site(site)) for site in plan.sites)


def check_one_model(plan: Plan | None, report: Report | None, given: Mapping[str, Any]) -> None:
    """Checks that what a dashboard is given is of one model.

    A comparison, and an explanation with a plan, must have the paths and formats of the plan of the
    model. Sensitivities and what a search found may have other formats, but only paths of the
    model. Without a plan, the comparison or the explanation takes its place.

    Args:
      plan: the plan of the model, if it is known.
      report: its report, if it is known.
      given: comparison, sensitivities, explanation and assignment by name; `None` where missing.
    """
    exact = {
        name: formats
        for name in ("comparison", "explanation")
        if (formats := _formats_in(given[name])) is not None
    }
    loose = [name for name in given if name not in exact]
    if plan is not None:
        first, formats = "the plan of the model", formats_of(plan)
        left = {item.path for item in (*plan.skipped, *plan.unreached)}
        known = {*formats, *left, *(weight.path for weight in plan.weights)}
    elif exact:
        name = next(iter(exact))
        first, formats = f"the {name}", exact.pop(name)
        known = {*formats, *_paths_of(given["explanation"])}
        if report is not None:
            _check_report(report, name, formats)
    else:
        first, formats = "the report", {}
        known = {weight.path for weight in report.weights} if report else set()
    for name, own in exact.items():
        _check_formats(name, own, first, formats)
    for name in loose:
        paths = _paths_of(given[name])
        if paths and known:
            _check_paths(name, paths, first, known, either_way=plan is None)


def of_another_plan(found: Sensitivities, plan: Plan) -> set[str]:
    """Returns the paths that were measured with other formats than those of a plan."""
    formats = formats_of(plan)

    def differs(row: Sensitivity) -> bool:
        own = set(map(_without_axes, row.scheme.split("; ")))
        return not own <= set(map(_without_axes, formats.get(row.path, ())))

    return {row.path for row in found.ranked if row.scheme and differs(row)}


def _gathered(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path, scheme in pairs:
        found.setdefault(path, set()).add(scheme)
    return found


def _formats_in(found: Any) -> dict[str, set[str]] | None:
    """Returns the formats of a comparison, or of an explanation that was made with a plan."""
    if isinstance(found, Comparison):
        return _gathered((site.path, site.scheme) for site in found.sites)
    if isinstance(found, Explanation) and any(site.plan for site in found.sites):
        left = ("left in float", "quantized already")
        return _gathered((x.path, x.plan) for x in found.sites if not x.plan.startswith(left))
    return None


def _paths_of(found: Any) -> list[str]:
    if isinstance(found, Sensitivities):
        return [row.path for row in found.ranked]
    if isinstance(found, Explanation):
        return [site.path for site in found.sites]
    return list(found.schemes) if isinstance(found, Assignment) else []


def _check_formats(name: str, own: Formats, first: str, formats: Formats) -> None:
    missing = [path for path in formats if path not in own]
    for path in [*own, *missing]:
        here, there = own.get(path, set()), formats.get(path, set())
        pairs = [set(map(_without_axes, schemes)) for schemes in (here, there)]
        if pairs[0] != pairs[1] and "" not in here | there:
            raise _error(
                name,
                f"`{name}` is of another plan than {first}.",
                f"{path or '(argument)'} as {_all(here)} in `{name}`",
                f"{_all(there)}, as in {first}",
            )


def _check_report(report: Report, name: str, formats: Formats) -> None:
    """Checks that each weight of a report has its number format at one of its sites."""
    for weight in report.weights:
        found = [own for path, own in formats.items() if weight.path in (path, *path.split("+"))]
        schemes = {scheme for own in found for scheme in own}
        operands = [operand for scheme in schemes for operand in scheme.split(" x ")]
        kinds = {operand.split()[0] for operand in operands if operand}
        if not found or (kinds and weight.scheme.split()[0] not in kinds):
            raise _error(
                name,
                f"`{name}` is of another plan than the report.",
                f"{weight.path or '(argument)'} as {_all(schemes)} in `{name}`",
                f"{weight.scheme}, as in the report",
            )


def _check_paths(
    name: str, paths: Iterable[str], first: str, known: set[str], either_way: bool
) -> None:
    """Checks that paths are known; or, if `either_way`, that all known ones are among them."""
    wholes = {*known, *(_STEPS.sub("", path) for path in known)}
    unknown = [path for path in paths if not _is_part(path, wholes)]
    own = {part for path in paths for part in (path, *path.split("+"), _STEPS.sub("", path))}
    if not unknown or (either_way and all(_is_part(path, own) for path in known)):
        return
    raise _error(
        name,
        f"`{name}` is of another model.",
        f"the paths {some(map(repr, unknown), 3)} in `{name}`",
        f"paths of {first}, such as {', '.join(map(repr, sorted(known)[:3]))}",
    )


def _is_part(path: str, known: set[str]) -> bool:
    """Returns whether a path is known, whole or in parts, or each of the paths that it joins."""
    return any(
        all(part in known or _STEPS.sub("", part) in known for part in parts)
        for parts in ([path], path.split("+"))
    )


def _without_axes(scheme: str) -> str:
    """Returns a scheme without numbers of axes, which differ where batches have more axes."""
    return _AXES.sub(r"\1", scheme)


def _all(schemes: Iterable[str]) -> str:
    return " and ".join(sorted(schemes)) or "float, or no contraction,"


def _error(name: str, problem: str, given: str, expected: str) -> ValueError:
    return ValueError(
        message("diagnostics.dashboard", problem, given=given, expected=expected, fix=_MENDS[name])
    )
