"""Scales that are to be learned."""

from collections.abc import Mapping

from .._checks import require_that
from ..calibrators import Affine
from ..tensor import QTensor


def check_learnable(learned: Mapping[str, Affine]) -> None:
    """Checks that scales have gradients."""
    fixed = [
        key
        for key, (scale, zero_point) in learned.items()
        if zero_point is not None or isinstance(scale, QTensor) or scale.dtype.itemsize == 1
    ]
    require_that(
        not fixed,
        error=ValueError,
        function="learn_scales",
        problem="an integer zero point, or a scale in a special format, has no gradient.",
        given=f"zero points or formatted scales at {', '.join(fixed[:4])}",
        expected="symmetric specs with float scales",
        mend="pass symmetric=True in their specs and no block format, or use fix_scales.",
    )
