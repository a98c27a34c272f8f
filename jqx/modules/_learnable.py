"""Scales that are to be learned."""

from collections.abc import Mapping
from typing import Any

from .. import gradients
from .._errors import fail, message, some, warn
from ..calibrators import AbsMax, Affine
from ..gradients._shared import moves_limits
from ..tensor import QTensor
from ..transforms import Plan


def check_learnable(learned: Mapping[str, Affine]) -> None:
    """Checks that scales have gradients."""
    fixed = [
        key
        for key, (scale, zero_point) in learned.items()
        if zero_point is not None or isinstance(scale, QTensor) or scale.dtype.itemsize == 1
    ]
    if fixed:
        raise fail(
            "learn_scales",
            "an integer zero point, or a scale in a special format, has no gradient.",
            given=f"zero points or formatted scales at {', '.join(fixed[:4])}",
            expected="symmetric specs with float scales",
            fix="pass symmetric=True in their specs and no block format, or use fix_scales.",
        )


def warn_of_scales_without_gradient(plan: Plan) -> None:
    """Warns of scales that an estimator gives no gradient, or none at the start: those of weights
    by `absmax`, which clips nothing, where only values that are clipped move a scale.
    """
    weights = {weight.key: weight.spec for weight in plan.weights}
    none, later = {}, {}
    for key, spec in {**weights, **plan.static_specs()}.items():
        inside, outside = moves_limits(spec.gradient)
        if not inside and not outside:
            none[key] = _name(spec.gradient)
        elif not inside and key in weights and type(spec.calibrator) is AbsMax:
            later[key] = _name(spec.gradient)
    if none:
        _warn("scales have no gradient, and stay as they are.", none)
    if later:
        _warn(
            "scales of weights start with a gradient of 0: absmax clips no weight, and only values "
            "that are clipped move a scale.",
            later,
        )


def _warn(problem: str, keys: Mapping[str, str]) -> None:
    names = ", ".join(dict.fromkeys(keys.values()))
    warn(
        message(
            "learn_scales",
            problem,
            given=f"gradient {names} at {some(keys)}",
            expected="an estimator with a gradient for scales, such as lsq, lsq_plus, ewgs or pact",
            fix='pass {"gradient": jqx.gradients.lsq} in these specs, or use fix_scales.',
        )
    )


def _name(gradient: Any) -> str:
    """Returns the name of an estimator of jqx, or how another one prints."""
    known = (name for name, value in vars(gradients).items() if value is gradient)
    return next(known, repr(gradient))
