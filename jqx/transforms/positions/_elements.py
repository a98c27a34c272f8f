"""Elements, reductions and orders along other axes than that of positions."""

from collections.abc import Sequence
from typing import Any

from ... import _compat
from ..._compat import Eqn
from ._steps import At, Steps


def each(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Elements of one place of all operands."""
    axis, product, values = steps.alike(eqn, xs)
    return [At(x, axis, product) for x in _compat.bind(eqn, values)]


def reduced(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Sums, maxima and places of maxima along other axes."""
    (x,) = xs
    axes = eqn.params["axes"]
    if x.axis in axes:
        raise steps.over(eqn, x)
    axis = x.axis - sum(i < x.axis for i in axes)
    return [At(y, axis, x.product) for y in _compat.bind(eqn, [x.value])]


def along(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Cumulative sums; over positions they are computed of all up to this one."""
    (x,) = xs
    if x.axis != eqn.params["axis"]:
        return each(steps, eqn, xs)
    if x.product is not None or eqn.params["reverse"]:
        raise steps.over(eqn, x)
    return [At(steps.at(y, x.axis), x.axis) for y in _compat.bind(eqn, [steps.whole(x)])]


def ordered(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Orders along another axis."""
    last = eqn.invars[0].aval.ndim - 1
    along = eqn.params.get("dimension", eqn.params.get("axis", last))
    axis, product, values = steps.alike(eqn, xs)
    if axis == along % (last + 1):
        raise steps.over(eqn, At(values[0], axis, product))
    return [At(x, axis, product) for x in _compat.bind(eqn, values)]


_ELEMENTS = """
abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp conj convert_element_type copy
copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow
is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not or pow real
reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
sin sinh sqrt square stop_gradient sub tan tanh xor
"""

ELEMENTS: dict[str, Any] = {
    **dict.fromkeys(_ELEMENTS.split(), each),
    **dict.fromkeys(
        ("argmax", "argmin", *(f"reduce_{x}" for x in ("and", "max", "min", "or", "prod", "sum"))),
        reduced,
    ),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), along),
    **dict.fromkeys(("sort", "top_k"), ordered),
}
