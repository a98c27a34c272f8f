"""`Numerics`: the integer arithmetic of another runtime, bit for bit.

Runtimes agree on the formulas `round(x / scale) + zero_point` and `scale = range / steps`, but
differ in the order of the roundings. Each field describes one such difference. They are tested
against the runtimes that can be installed, except for infinite ranges, subnormals and NaN, which
the runtimes leave undefined.
"""

import dataclasses
import enum
import math

from ..checks import check_instance
from ..errors import fail
from .exact import RoundMode


class SymmetricRange(enum.Enum):
    """The divisor of the largest magnitude for a symmetric scale."""

    LIMIT = "limit"
    """The largest code, 127 of an int8."""
    HALF = "half"
    """Half of the range of codes, 127.5 of an int8."""
    SIGNED = "signed"
    """The magnitude of the smallest code, 128 of an int8; the scale is negative if the number with
    the largest magnitude is positive."""
    COVER = "cover"
    """Each side is divided by its own limit, and the larger scale is used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """The arithmetic of a runtime: where and how it rounds.

    Attributes:
      round_mode: how quotients, and the zero point of a range, are rounded to integers.
      zero_point_first: whether the zero point is added before the rounding, not after it.
      reciprocal: whether `x / scale` is `x * (1 / scale)`, with two roundings.
      narrow: whether symmetric codes exclude the smallest code.
      symmetric_range: the divisor of the largest magnitude for a symmetric scale.
      reciprocal_steps: whether a range is multiplied by the reciprocal of the number of steps.
      rounded_offset: whether the zero point of a range is `qmin - round(low / scale)`, not
        `round(qmin - low / scale)`.
      min_scale: scales of smaller magnitude, and zero, are replaced by `small_scale`.
      small_scale: see `min_scale`.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: `min_scale` is negative or `small_scale` is not positive.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec(jnp.int8, numerics=jqx.numerics.torchao)
      >>> jqx.QTensor.quantize(jnp.array([0.5, -1.0, 1.0]), spec).values
      Array([  64, -127,  127], dtype=int8)
    """

    round_mode: RoundMode = RoundMode.NEAREST_TOWARD_EVEN
    zero_point_first: bool = False
    reciprocal: bool = False
    narrow: bool = False
    symmetric_range: SymmetricRange = SymmetricRange.LIMIT
    reciprocal_steps: bool = False
    rounded_offset: bool = False
    min_scale: float = 0.0
    small_scale: float = 1.0

    def __post_init__(self) -> None:
        name = "numerics.Numerics"
        for field in dataclasses.fields(self):
            kind, fix = type(field.default), f"pass for example {field.name}={field.default}."
            check_instance(
                "numerics.Numerics", field.name, getattr(self, field.name), kind, fix=fix
            )
        if not (0 <= self.min_scale < math.inf and 0 < self.small_scale < math.inf):
            problem = f"scales must be positive and finite: {self.min_scale}, {self.small_scale}."
            fix = "pass the smallest scale of the runtime, or leave them at 0.0 and 1.0."
            raise fail(name, problem, fix=fix)

    def __str__(self) -> str:
        return next((name for name, runtime in _NAMES.items() if runtime == self), repr(self))


ngraph: Numerics = Numerics()
"""nGraph v0 Quantize, whose round mode is an attribute; the scale of a range is defined by jqx."""

onnx: Numerics = Numerics()
"""ONNX QuantizeLinear and DynamicQuantizeLinear, as onnxruntime computes them."""

openvino: Numerics = Numerics(
    zero_point_first=True,
    symmetric_range=SymmetricRange.SIGNED,
    rounded_offset=True,
    min_scale=2.0**-23,
    small_scale=2.0**-23,
)
"""Integer weights of OpenVINO models, as NNCF compresses them. Use `calibrators.minmax` for the
range, because the sign of a scale depends on the number with the largest magnitude. (FakeQuantize
is not an affine quantization: see `jqx.fake_quantize`.)"""

onednn: Numerics = Numerics(zero_point_first=True)
"""oneDNN Graph Quantize and DynamicQuantize as specified, with a division."""

onednn_runtime: Numerics = Numerics(zero_point_first=True, reciprocal=True)
"""oneDNN Graph Quantize and DynamicQuantize as its library computes them, with a reciprocal."""

tflite: Numerics = Numerics(round_mode=RoundMode.NEAREST_TOWARD_INFINITY, narrow=True)
"""The reference kernels of TFLite and its specification of symmetric weights. Its other kernels
(XNNPACK, optimized) round differently."""

torchao: Numerics = Numerics(
    reciprocal=True,
    symmetric_range=SymmetricRange.HALF,
    rounded_offset=True,
    min_scale=2.0**-23,
    small_scale=2.0**-23,
)
"""The affine quantization primitives of torchao, with the eps of its int8 configurations."""

qwix: Numerics = Numerics(
    zero_point_first=True,
    reciprocal=True,
    symmetric_range=SymmetricRange.HALF,
    reciprocal_steps=True,
    min_scale=2.0**-63,
)
"""Arrays of qwix quantized per channel, as XLA on CPU computes its divisions by broadcast scales.
"""

_NAMES = {
    "ngraph": ngraph,
    "openvino": openvino,
    "onednn": onednn,
    "onednn_runtime": onednn_runtime,
    "tflite": tflite,
    "torchao": torchao,
    "qwix": qwix,
}
