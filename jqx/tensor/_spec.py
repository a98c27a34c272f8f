"""QSpec: how one operand is quantized."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from .._checks import check_instance, require_that
from ..calibrators import Calibrator, Granularity, absmax, per_tensor
from ..gradients import GradientEstimator, check_estimator, ste
from ..numerics import RoundMode, as_quantized_type, is_signed
from ..ops import check_round_mode

_PER_TENSOR = per_tensor()


@dataclasses.dataclass(frozen=True)
class QSpec:
    """How one operand is quantized: a format, who shares a scale, and how the scale is found.

    Attributes:
      qtype: integer dtype of up to 32 bits.
      granularity: which elements share a scale: `jqx.per_tensor()`, `jqx.per_axis(...)`, or, where
        a contraction says which axes it keeps, `jqx.per_channel()` and `jqx.per_token()`.
      symmetric: whether the zero point is zero; needs a signed `qtype`.
      calibrator: finds the range, a value of `jqx.calibrators`.
      dynamic: for activations, whether the range is found anew from the values at hand.
      round_mode: one of the nine modes.
      gradient: the estimator used where the quantization is simulated, a value of `jqx.gradients`.

    Raises:
      TypeError: a field is not of its kind.
      ValueError: `qtype` is unsigned and `symmetric` is left at True.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.QSpec(jnp.int8, jqx.per_axis(1)).granularity.scale_shape((3, 4))
      (1, 4)
    """

    qtype: DTypeLike
    granularity: Granularity = _PER_TENSOR
    symmetric: bool = True
    calibrator: Calibrator = absmax
    dynamic: bool = False
    round_mode: RoundMode = RoundMode.NEAREST_TOWARD_EVEN
    gradient: GradientEstimator = ste

    def __post_init__(self) -> None:
        qtype = as_quantized_type("QSpec", "qtype", self.qtype, "Quantized")
        object.__setattr__(self, "qtype", qtype)
        check_round_mode("QSpec", self.round_mode)
        check_estimator("QSpec", self.gradient)
        for field, method in [("granularity", "scale_shape"), ("calibrator", "observe")]:
            value = getattr(self, field)
            require_that(
                callable(getattr(value, method, None)) and not isinstance(value, type),
                error=TypeError,
                function="QSpec",
                problem=f"`{field}` is not a {field}.",
                given=f"an object of type {type(value).__name__}",
                expected=f"a value with a method {method}",
                mend="pass for example jqx.per_tensor()."
                if field == "granularity"
                else "pass for example jqx.calibrators.absmax.",
            )
        for field in ("symmetric", "dynamic"):
            check_instance(
                "QSpec",
                field,
                getattr(self, field),
                bool,
                mend=f"pass {field}=True or {field}=False.",
            )
        require_that(
            is_signed(qtype) or not self.symmetric,
            error=ValueError,
            function="QSpec",
            problem=f"an unsigned format ({qtype.name}) cannot be symmetric about zero.",
            given=f"qtype {qtype.name}, symmetric=True",
            expected="a signed qtype, or symmetric=False",
            mend=f"pass symmetric=False, or qtype=jnp.{qtype.name.removeprefix('u')}.",
        )

    def resolve(self, rank: int, kept: Sequence[int]) -> "QSpec":
        """Returns the spec at a site, its granularity absolute."""
        return dataclasses.replace(self, granularity=self.granularity.resolve(rank, kept))

    def __str__(self) -> str:
        parts = [jnp.dtype(self.qtype).name, str(self.granularity)]
        if not self.symmetric:
            parts.append("asymmetric")
        if self.calibrator != absmax:
            parts.append(str(self.calibrator))
        if self.dynamic:
            parts.append("dynamic")
        return " ".join(parts)
