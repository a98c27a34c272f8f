"""Where scales of static activations and outputs come from."""

from typing import Any, Literal

from .._checks import require_that
from ..policy import Policy

Scales = Literal["calibrated", "dynamic"]
"""What `scales=` takes: the scales of a calibration, or those of the values at hand."""


def check_scales(function: str, scales: Any) -> None:
    """Checks an argument `scales`."""
    require_that(
        isinstance(scales, str) and scales in ("calibrated", "dynamic"),
        error=ValueError,
        function=function,
        problem="`scales` is not known.",
        given=f"scales == {scales!r}",
        expected="'calibrated' or 'dynamic'",
        mend="leave it out where static activations are calibrated; pass 'dynamic' to take their "
        "scales from the values at hand.",
    )


def needs_calibration(policy: Policy) -> bool:
    """Whether a rule of a policy has a static activation or output."""
    specs = [spec for rule in policy.rules for spec in (rule.activation, rule.output)]
    return any(spec is not None and not spec.dynamic for spec in specs)


def check_calibrated(function: str, missing: list[str], where: str) -> None:
    """Checks that no static activation or output is without a scale."""
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    require_that(
        not missing,
        error=ValueError,
        function=function,
        problem="static activations or outputs have no scale.",
        given=f"{where}, without statistics or a scale: {', '.join(missing[:4])}{more}",
        expected="statistics of a calibration, or a fixed scale, for each",
        mend="call the module in Mode.CALIBRATE on typical inputs first, keeping the statistics; "
        'or, where none has any, pass scales="dynamic" to take all from the values at hand.',
    )
