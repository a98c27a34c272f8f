"""Checks of the entries of `affines=`: dtypes, ranks and axes of scales and zero points."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .._checks import FLOATS, name_of
from .._errors import fail
from ..calibrators import Affine
from ..numerics import Integer, format_of
from ..numerics._shared import E8M0
from ..tensor import QSpec
from ..tensor._shared import check_zero_point

_MEND = "compute it with jqx.affines(plan, stats), or pass arrays as that returns them."


class Planned(Protocol):
    """The part of a plan that is read."""

    @property
    def weights(self) -> tuple[Any, ...]: ...

    def static_specs(self) -> dict[str, QSpec]: ...

    def site_of_key(self, key: str) -> Any: ...


def check_entries(function: str, plan: Planned, affines: Mapping[str, Any]) -> None:
    """Checks the type, dtypes and rank of every entry, and that its parts fit each other."""
    specs = plan.static_specs()
    weights = {weight.key: weight.spec for weight in plan.weights}
    for key, affine in affines.items():
        spec = specs.get(key) or weights[key]
        scale, zero_point = _parts(function, key, affine)
        _check_scale(function, key, scale)
        if zero_point is not None:
            _check_zero_point(function, key, zero_point, scale, spec)
        if key in specs:
            _check_rank(function, key, scale, plan.site_of_key(key))


def check_sums(
    function: str, site: Any, kept: Sequence[Sequence[int]], shapes: Sequence[Any], affines: Any
) -> None:
    """Checks that no scale of a site has an entry for each index that its contraction sums over:
    such a scale cannot be moved out of the sum.

    Args:
      function: name of the calling function, for messages.
      site: the contraction.
      kept: the axes of each operand that the result keeps.
      shapes: shapes of the operands.
      affines: scales by key, as the site uses them.
    """
    for operand, axes, shape in zip(site.operands, kept, shapes, strict=False):
        affine = affines.get(operand.key) if operand.role == "activation" else None
        if affine is None:
            continue
        scale = tuple(affine[0].shape)
        summed = [
            axis
            for axis, (m, n) in enumerate(zip(scale, shape, strict=False))
            if axis not in axes and m != 1 and m == n
        ]
        if not summed:
            continue
        own = tuple(operand.spec.granularity.scale_shape(shape))
        summed = [axis for axis in summed if scale[axis] != own[axis]]
        if summed:
            raise fail(
                function,
                f"the scale of {operand.key!r} varies along a contracted axis: it cannot be "
                "moved out of the sum.",
                given=f"scale {scale} for an operand of shape {tuple(shape)}, axes {summed} "
                f"contracted",
                expected=f"size 1 along these axes, as in {own}",
                fix="reduce the scale along these axes, or compute it by jqx.affines(plan, stats).",
            )


def _parts(function: str, key: str, affine: Any) -> tuple[Any, Any]:
    pair = isinstance(affine, (tuple, list)) and len(affine) == 2
    fits = pair and (isinstance(affine, Affine) or not hasattr(affine, "_fields"))
    if not fits:
        raise fail(
            function,
            f"`affines[{key!r}]` is not a scale and zero point.",
            given=f"an object of type {type(affine).__name__}",
            expected="a jqx.calibrators.Affine, or a pair",
            fix="these are statistics: pass jqx.affines(plan, stats)."
            if hasattr(affine, "_fields")
            else _MEND,
            error=TypeError,
        )
    return affine[0], affine[1]


def _check_scale(function: str, key: str, scale: Any) -> None:
    is_array = hasattr(scale, "shape") and hasattr(scale, "dtype")
    known = is_array and (name_of(scale.dtype) in FLOATS or scale.dtype == E8M0)
    if not known:
        raise fail(
            function,
            f"the scale of {key!r} is not an array of floats.",
            given=f"dtype {name_of(scale.dtype)}" if is_array else f"a {type(scale).__name__}",
            expected=f"an array of {', '.join(FLOATS)}, or of {E8M0.name}",
            fix=_MEND,
            error=TypeError,
        )


def _check_zero_point(function: str, key: str, zero_point: Any, scale: Any, spec: QSpec) -> None:
    form = format_of(spec.qtype)
    is_array = hasattr(zero_point, "shape") and hasattr(zero_point, "dtype")
    if not (isinstance(form, Integer) and is_array and zero_point.dtype == form.storage):
        raise fail(
            function,
            f"the zero point of {key!r} does not hold codes of {form.name}.",
            given=f"dtype {name_of(zero_point.dtype)}"
            if is_array
            else f"a {type(zero_point).__name__}",
            expected=f"an array of {form.storage.name}" if isinstance(form, Integer) else "None",
            fix=_MEND,
            error=TypeError,
        )
    check_zero_point(function, zero_point, scale)


def _check_rank(function: str, key: str, scale: Any, site: Any) -> None:
    steps = tuple(loop.length for loop in site.loops)
    rank = len(steps) + len(site.scale_shape(key))
    shape = tuple(scale.shape)
    if not (len(shape) == rank and shape[: len(steps)] == steps):
        raise fail(
            function,
            f"the scale of {key!r} does not have the axes of its array.",
            given=f"scale.shape == {shape}",
            expected=f"{rank} axes"
            + (f", the first of sizes {steps}, one per step" if steps else ""),
            fix="give it size 1 along the axes that share a scale.",
        )
