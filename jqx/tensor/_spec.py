"""QSpec: how one operand is quantized."""

import dataclasses
from collections.abc import Sequence

from jax.typing import DTypeLike

from .._checks import check_instance, require_that
from ..calibrators import (
    Calibrator,
    Granularity,
    PerGroup,
    absmax,
    is_without_blocks,
    per_group,
    per_tensor,
)
from ..gradients import Gradient, check_estimator, ste
from ..numerics import Block, Integer, Numerics, QType, RoundMode, as_qtype, format_of, ngraph
from ..ops import check_round_mode, check_symmetric

_PER_TENSOR = per_tensor()


@dataclasses.dataclass(frozen=True)
class QSpec:
    """How one operand is quantized: a format, who shares a scale, and how the scale is found.

    Attributes:
      qtype: a number format: a dtype such as `jnp.int8` or `jnp.float8_e4m3fn`, or a value of
        `jqx.numerics`.
      granularity: which elements share a scale: `jqx.per_tensor()`, `jqx.per_axis(...)`,
        `jqx.per_block(...)`, or, where a contraction says which axes it keeps, `jqx.per_channel()`,
        `jqx.per_token()` and `jqx.per_group(size)`. `None` means per tensor; for a block format,
        groups of its size.
      symmetric: whether the zero point is zero; formats other than integers have none.
      calibrator: finds the range, a value of `jqx.calibrators`.
      dynamic: for activations, whether the range is found anew from the values at hand.
      round_mode: one of the nine modes; `None` takes that of `numerics`.
      gradient: the estimator used where the quantization is simulated, a value of `jqx.gradients`.
      numerics: the runtime whose integer arithmetic is followed, a value of `jqx.numerics` such as
        `jqx.numerics.torchao`.

    Raises:
      TypeError: a field is not of its kind.
      ValueError: `qtype` is unsigned and `symmetric` is left at True, or has no zero point and it
        is False; a block format is to have another block size; the estimator does not fit the
        format.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.QSpec(jnp.int8, jqx.per_axis(1)).granularity.scale_shape((3, 4))
      (1, 4)
      >>> str(jqx.QSpec(jqx.numerics.mxfp4))
      'mxfp4 per_group(32)'
    """

    qtype: DTypeLike | QType
    granularity: Granularity = None  # type: ignore[assignment]  # resolved below
    symmetric: bool = True
    calibrator: Calibrator = absmax
    dynamic: bool = False
    round_mode: RoundMode | None = None
    gradient: Gradient = ste
    numerics: Numerics = ngraph

    def __post_init__(self) -> None:
        qtype = as_qtype("QSpec", "qtype", self.qtype, "Quantized")
        object.__setattr__(self, "qtype", qtype)
        form = format_of(qtype)
        if self.granularity is None:
            of_blocks = isinstance(form, Block)
            default = per_group(form.size) if of_blocks else _PER_TENSOR
            object.__setattr__(self, "granularity", default)
        if self.round_mode is not None:
            check_round_mode("QSpec", self.round_mode)
        check_estimator("QSpec", self.gradient, uniform=form.uniform)
        require_that(
            callable(getattr(self.granularity, "groups", None))
            and not isinstance(self.granularity, type),
            error=TypeError,
            function="QSpec",
            problem="`granularity` is not a granularity.",
            given=f"an object of type {type(self.granularity).__name__}",
            expected="a value with a method groups",
            mend="pass for example jqx.per_tensor().",
        )
        check_instance(
            "QSpec",
            "calibrator",
            self.calibrator,
            Calibrator,
            mend="pass for example jqx.calibrators.absmax.",
        )
        check_instance(
            "QSpec", "numerics", self.numerics, Numerics, mend="pass for example jqx.numerics.onnx."
        )
        require_that(
            isinstance(form, Integer) or self.numerics == ngraph,
            error=ValueError,
            function="QSpec",
            problem="`numerics` are those of integer formats.",
            given=f"numerics {self.numerics} for {form.name}",
            expected="an integer qtype",
            mend="drop numerics, or pass an integer qtype.",
        )
        for field in ("symmetric", "dynamic"):
            check_instance(
                "QSpec",
                field,
                getattr(self, field),
                bool,
                mend=f"pass {field}=True or {field}=False.",
            )
        check_symmetric("QSpec", qtype, self.symmetric)
        if isinstance(form, Block):
            _check_blocks(form, self.granularity)

    @property
    def rounding(self) -> RoundMode:
        """The round mode: the one given, or that of `numerics`."""
        return self.round_mode or self.numerics.round_mode

    def resolve(self, rank: int, kept: Sequence[int]) -> "QSpec":
        """Returns the spec at a site, its granularity absolute."""
        return dataclasses.replace(self, granularity=self.granularity.resolve(rank, kept))

    def __str__(self) -> str:
        parts = [format_of(self.qtype).name, str(self.granularity)]
        if not self.symmetric:
            parts.append("asymmetric")
        if self.calibrator != absmax:
            parts.append(str(self.calibrator))
        if self.dynamic:
            parts.append("dynamic")
        if self.numerics != ngraph:
            parts.append(str(self.numerics))
        return " ".join(parts)


def _check_blocks(form: Block, granularity: Granularity) -> None:
    """Checks what can be known of a block size without an array."""
    other = isinstance(granularity, PerGroup) and granularity.size != form.size
    require_that(
        not other and not is_without_blocks(granularity),
        error=ValueError,
        function="QSpec",
        problem=f"{form.name} has blocks of {form.size} elements.",
        given=f"granularity {granularity}",
        expected=f"per_group({form.size}), or per_block of {form.size} elements",
        mend="leave granularity out, or pass one of these.",
    )
