"""Sources of the scales of static activations and outputs."""

from typing import Any, Literal

from .._checks import require_that
from .._errors import some
from ..policy import Policy

Scales = Literal["calibrated", "dynamic"]
"""Values of `scales=`: the scales of a calibration, or those of the values of the call."""


def check_scales(function: str, scales: Any) -> None:
    """Checks an argument `scales`."""
    require_that(
        isinstance(scales, str) and scales in ("calibrated", "dynamic"),
        error=ValueError,
        function=function,
        problem="`scales` is unknown.",
        given=f"scales == {scales!r}",
        expected="'calibrated' or 'dynamic'",
        mend="leave it out if static activations are calibrated; pass 'dynamic' to compute their "
        "scales from the values of the call.",
    )


def needs_calibration(policy: Policy) -> bool:
    """Returns whether a rule of a policy has a static activation or output."""
    specs = [spec for rule in policy.rules for spec in (rule.activation, rule.output)]
    return any(spec is not None and not spec.dynamic for spec in specs)


def check_calibrated(function: str, missing: list[str], where: str) -> None:
    """Checks that every static activation and output has a scale."""
    require_that(
        not missing,
        error=ValueError,
        function=function,
        problem="static activations or outputs have no scale.",
        given=f"{where}, without statistics or a scale: {some(missing)}",
        expected="statistics of a calibration or a fixed scale for each",
        mend="call the module in Mode.CALIBRATE on typical inputs first, keeping the statistics; "
        'or, if no site has any, pass scales="dynamic": scales from the values of the call.',
    )
