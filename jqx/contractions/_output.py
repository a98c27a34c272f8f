"""Quantized results of contractions."""

from collections.abc import Sequence
from typing import Any

import jax

from .._checks import is_at_least
from .._errors import fail
from ..calibrators import Affine
from ..tensor import QSpec, QTensor
from ._bare import check_bare
from ._how._blocks import shares_scale
from ._integers._bytes import is_byte, longest
from ._integers._requantize import Requantization, requantize_float

Asked = QSpec | str | tuple[QSpec | str, Affine] | Requantization
Output = Asked | None
"""A spec or scheme whose calibrator finds the scale, one with a given scale and zero point, or
integer factors.
"""


def as_asked(function: str, y: jax.Array, output: Any) -> Any:
    """Returns a float result as it is, or quantized by `output`."""
    return y if output is None else requantize_float(y, output, function)


def check_requantized(
    function: str,
    lhs: Any,
    rhs: Any,
    summed: tuple[Sequence[int], Sequence[int]],
    products: int,
    dtype: Any,
) -> None:
    """Checks that each result of a contraction is one int32 sum, so that it can be requantized."""
    check_bare(function, lhs, rhs, what=", which int32 sums cannot have")
    if not (is_byte(lhs) and is_byte(rhs)):
        raise fail(
            function,
            "`output` requantizes int32 sums, but these operands do not have int32 sums.",
            given=" and ".join(
                repr(x) if isinstance(x, QTensor) else "an array" for x in (lhs, rhs)
            ),
            expected="two QTensors of integer formats of 8 bits or fewer",
            fix="quantize both, or pass a QSpec as output.",
            error=TypeError,
        )
    shared = all(shares_scale(q, axes) for q, axes in zip((lhs, rhs), summed, strict=True))
    if not (shared and not is_at_least(products, longest(lhs, rhs) + 1)):
        raise fail(
            function,
            "a result does not fit in one int32 sum.",
            given=f"scales {lhs.scale.shape} and {rhs.scale.shape}, {products} products",
            expected=f"no blocks along summed axes, and at most {longest(lhs, rhs)} products",
            fix="quantize without blocks along them, or pass a QSpec as output.",
        )
    if dtype is not None:
        raise fail(
            function,
            "`preferred_element_type` has no effect on a requantized result.",
            given=f"preferred_element_type == {dtype}",
            expected="None with output=Requantization",
            fix="leave it out; Requantization has the dtype of the real result.",
        )
