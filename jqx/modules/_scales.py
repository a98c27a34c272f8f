"""Sources of the scales of static activations and outputs."""

from typing import Any, Literal

from .._errors import fail, some
from ..policy import Policy

Scales = Literal["calibrated", "dynamic"]
"""Values of `scales=`: the scales of a calibration, or those of the values of the call."""


def check_scales(function: str, scales: Any) -> None:
    """Checks an argument `scales`."""
    if not (isinstance(scales, str) and scales in ("calibrated", "dynamic")):
        raise fail(
            function,
            "`scales` is unknown.",
            given=f"scales == {scales!r}",
            expected="'calibrated' or 'dynamic'",
            fix="leave it out if static activations are calibrated; pass 'dynamic' to compute "
            "their "
            "scales from the values of the call.",
        )


def needs_calibration(policy: Policy) -> bool:
    """Returns whether a rule of a policy has a static activation or output."""
    specs = [spec for rule in policy.rules for spec in (rule.activation, rule.output)]
    return any(spec is not None and not spec.dynamic for spec in specs)


def check_calibrated(function: str, missing: list[str], where: str) -> None:
    """Checks that every static activation and output has a scale."""
    if missing:
        raise fail(
            function,
            "static activations or outputs have no scale.",
            given=f"{where}, without statistics or a scale: {some(missing)}",
            expected="statistics of a calibration or a fixed scale for each",
            fix="call the module in Mode.CALIBRATE on typical inputs first, keeping the "
            "statistics; "
            'or, if no site has any, pass scales="dynamic": scales from the values of the call.',
        )
