"""Raises the errors of `convert` when planning, with the name of the weight."""

from .. import _compat
from .._errors import message
from ..policy._shared import pattern_of
from ._codes import Escape
from ._convert import check_converts
from ._offers import known_values
from ._plan import Plan
from ._reach import followed
from ._trace import Call


class Unsupported(NotImplementedError, ValueError):
    """A policy quantizes a weight that reaches an operation without a quantized form."""


def check_reach(function: str, call: Call, plan: Plan) -> None:
    """Raises if a weight of a plan reaches an operation without a quantized form."""
    codes, _ = followed(call, {weight.path for weight in plan.weights})
    if codes.escapes:
        escape = codes.escapes[0]
        known = id(escape.eqn) in known_values(call).inner
        raise _refusal(
            function, plan, escape, "use jqx.hoist, or ptq(hoist='all'); " if known else ""
        )
    if codes.mixed:  # whether their formats agree is known only when the call is traced
        try:
            check_converts(call, plan)
        except NotImplementedError as error:
            raise _refusal(function, plan, codes.mixed[0]) from error


def _refusal(function: str, plan: Plan, escape: Escape, fix: str = "") -> Unsupported:
    path = min(escape.paths)
    weight = next(weight for weight in plan.weights if weight.path == path)
    where = f", in scope {escape.scope}" if escape.scope else ""
    return Unsupported(
        message(
            function,
            f"the weight {path!r}, which the policy quantizes, {escape.how}.",
            given=f"{weight.spec}{_compat.at_line_of(escape.eqn)}{where}",
            expected="contractions, views such as transpose, reshape and slice, and updates",
            fix=f"{fix}leave it in float with jqx.Rule({pattern_of(path)!r}) first in the "
            'policy; or pass unsupported="dequantize" to both jqx.make_plan and jqx.convert.',
        )
    )
