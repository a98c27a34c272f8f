"""Checks `affines=` against the plan, before anything is traced."""

from collections.abc import Mapping
from typing import Any, Literal

from .._errors import fail, some
from ..calibrators import Affine
from ._affine_checks import Planned, check_entries

GivenAffines = Mapping[str, Affine] | Literal["dynamic"] | None
"""The values that `affines=` of a transform takes."""

DYNAMIC = "dynamic"
"""Takes scales from the current values where a spec is static."""


def check_affines(
    function: str, plan: Planned, affines: Mapping[str, Affine] | None
) -> dict[str, Affine]:
    """Returns the given scales, or an empty dict for `None`. Raises if the plan does not have one
    of them, or if the scale of a static activation or output is missing.
    """
    if affines is None:
        return {}
    kind = f"an object of type {type(affines).__name__}"
    if not isinstance(affines, Mapping):
        raise fail(
            function,
            "`affines` is not a dict of scales.",
            given=f"affines == {affines!r}" if isinstance(affines, str) else kind,
            expected="what jqx.affines(plan, stats) returns",
            fix=_fix(function, affines),
            error=TypeError,
        )
    static = set(plan.static_specs())
    unknown = sorted(set(affines) - static - {weight.key for weight in plan.weights})
    missing = sorted(static - set(affines))
    if unknown or missing:
        raise fail(
            function,
            "`affines` does not fit the plan.",
            given=f"{len(affines)} entries; unknown: {some(unknown)}; missing: {some(missing)}",
            expected="an entry for every static activation of the plan, and no others",
            fix="compute it with jqx.affines(plan, stats).",
        )
    check_entries(function, plan, affines)
    return dict(affines)


def _fix(function: str, affines: Any) -> str:
    """Returns how to fix what was passed in place of scales."""
    if isinstance(affines, tuple):
        return (
            "take the statistics, out, stats = jqx.calibrate(f, plan)(params, x), and pass "
            "jqx.affines(plan, stats)."
        )
    if function != "quantize_params" and not isinstance(affines, (str, list)):
        return f"arguments of f come second: jqx.{function}(f, plan, affines)(params, x)."
    return "compute it with jqx.affines(plan, stats)."


def required_affines(function: str, plan: Planned, affines: GivenAffines) -> dict[str, Affine]:
    """Returns the scales that a function runs with: none for `"dynamic"`, otherwise those given.
    Raises if a static activation or output has none.
    """
    if isinstance(affines, str) and affines == DYNAMIC:
        return {}
    given = check_affines(function, plan, affines)
    missing = sorted(set(plan.static_specs()) - set(given))
    if missing:
        raise fail(
            function,
            "static activations or outputs have no scale.",
            given=f"affines == None; without a scale: {some(missing)}",
            expected="an entry for every static activation and output of the plan",
            fix="calibrate, and pass affines=jqx.affines(plan, jqx.calibrate_batches(f, plan, "
            "params, "
            'batches)); or pass affines="dynamic" to compute every scale from the current values.',
        )
    return given
