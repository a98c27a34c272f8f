"""Block formats: elements of a small format in blocks, with one scale in a scale format per block.

MX: blocks of 32 with a power of two in E8M0 as scale. By the OCP rule, it is the power of two of
the largest magnitude, divided by the power of two of the largest number of the element format:

    scale = 2**(floor(log2(max |x|)) - floor(log2(high)))

NVFP4: blocks of 16 of e2m1, with scales in e4m3 and one float32 scale for the tensor.

Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6.3; NVIDIA, "Pretraining
Large Language Models with NVFP4", arXiv:2509.25149, appendix B; for a unit of 4/3 Egiazarian et
al., "Bridging the Gap Between Promise and Performance for Microscaling FP4 Quantization",
arXiv:2509.23202.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..checks import check_fields, check_instance, number, whole
from ..errors import fail
from .exact import RoundMode, exponent_of
from .lookup import E8M0, as_qtype, format_of
from .minifloats import float6_e2m3fn, float6_e3m2fn
from .qtype import Integer, QType


@dataclasses.dataclass(frozen=True)
class Block(QType):
    """Elements in blocks of `size`. Each block has a scale, which is stored in `scale_qtype`.

    Attributes:
      element: dtype or `QType` of the elements.
      size: how many elements share a scale; for 2-D blocks, the product of both sizes.
      label: the name of the format.
      scale_qtype: float8_e8m0fnu for scales by the OCP rule (a power of two), or another minifloat
        dtype, whose scales are relative to one float32 scale of the tensor, or of each tensor in a
        stack.
      unit: a number that multiplies all elements; 2**-6 makes an int8 the fixed-point number of
        MXINT8. With 4/3, the largest element of e2m1 is 8 times a power of two, which the OCP rule
        never clips: this is the 3/4 rule of MR-GPTQ. MXFP4 files cannot store such a unit.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: `size` is below 1, or `unit` is not from 2**-64 to 2**64.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> x = jnp.linspace(-1.0, 1.0, 64).reshape(1, 64)
      >>> jqx.QTensor.quantize(x, jqx.QSpec(jqx.numerics.mxfp4, jqx.per_block({1: 32}))).scale
      Array([[0.25, 0.25]], dtype=float8_e8m0fnu)
      >>> jqx.numerics.Block(jnp.float4_e2m1fn, 32, "mxfp4_wide", unit=4 / 3).high
      8.0
    """

    element: DTypeLike | QType
    size: int
    label: str = "block"
    scale_qtype: DTypeLike = E8M0
    unit: float = 1.0

    def __post_init__(self) -> None:
        function = "numerics.Block"
        object.__setattr__(self, "element", as_qtype(function, "element", self.element, "Block"))
        check_fields(function, self, "pass for example 32.", size=whole(1, 2**31 - 1))
        check_instance(function, "label", self.label, str, fix="pass a name, such as 'mine'.")
        fix = "pass a number from 2**-64 to 2**64, such as 1.0."
        check_fields(function, self, fix, unit=number(2.0**-64, 2.0**64))
        scale = as_qtype(function, "scale_qtype", self.scale_qtype, "Scale")
        object.__setattr__(self, "scale_qtype", scale)
        if isinstance(scale, QType) or not jnp.issubdtype(scale, jnp.floating):
            name = format_of(scale).name
            problem = f"`scale_qtype` ({name}) is not a float format with a JAX dtype."
            fix = "pass a float dtype, such as jnp.float8_e8m0fnu or jnp.float8_e4m3fn."
            raise fail(function, problem, fix=fix, error=TypeError)
        if isinstance(self.element, Block):
            problem = f"`element` is the block format {self.element.name}."
            fix = "pass the element format of that block format."
            raise fail(function, problem, fix=fix, error=TypeError)

    @property
    def elements(self) -> QType:
        """The format of the elements."""
        return format_of(self.element)

    @property
    def name(self) -> str:
        return self.label

    @property
    def two_level(self) -> bool:
        """Whether the scales are themselves quantized, with float32 scales."""
        return self.scale_qtype != E8M0

    @property
    def bits(self) -> int:
        return self.elements.bits

    @property
    def storage(self) -> jnp.dtype:
        return self.elements.storage

    @property
    def low(self) -> float:
        return self.elements.low * self.unit

    @property
    def high(self) -> float:
        return self.elements.high * self.unit

    @property
    def levels(self) -> int:
        return self.elements.levels

    @property
    def code_range(self) -> tuple[int, int] | None:
        return self.elements.code_range

    def scale_of(self, largest: jax.Array) -> jax.Array:
        """Returns the scale of a block: by the OCP rule in E8M0, else `largest / high`."""
        if self.two_level:
            return super().scale_of(largest)
        largest_exponent = math.frexp(self.elements.high)[1] + math.frexp(self.unit)[1] - 2
        exponent = exponent_of(largest) - largest_exponent
        code = jnp.where(jnp.isnan(largest), 255, jnp.clip(exponent + 127, 0, 254))
        return lax.bitcast_convert_type(code.astype(jnp.uint8), E8M0)

    def round(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        unit = np.asarray(self.unit, y.dtype)
        return self.elements.round(y / unit, mode) * unit

    def encode(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        return self.elements.encode(y / np.asarray(self.unit, y.dtype), mode)

    def encode_bits(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        return self.elements.encode_bits(y / np.asarray(self.unit, y.dtype), mode)

    def to_bits(self, codes: jax.Array) -> jax.Array:
        return self.elements.to_bits(codes)

    def from_bits(self, bits: jax.Array) -> jax.Array:
        return self.elements.from_bits(bits)

    def decode(self, codes: jax.Array) -> jax.Array:
        return self.elements.decode(codes) * np.float32(self.unit)


mxfp8_e4m3: Block = Block(jnp.float8_e4m3fn, 32, "mxfp8_e4m3")
mxfp8_e5m2: Block = Block(jnp.float8_e5m2, 32, "mxfp8_e5m2")
mxfp6_e2m3: Block = Block(float6_e2m3fn, 32, "mxfp6_e2m3")
mxfp6_e3m2: Block = Block(float6_e3m2fn, 32, "mxfp6_e3m2")
mxfp4: Block = Block(jnp.float4_e2m1fn, 32, "mxfp4")
mxint8: Block = Block(Integer(8, narrow=True), 32, "mxint8", unit=2.0**-6)
nvfp4: Block = Block(jnp.float4_e2m1fn, 16, "nvfp4", scale_qtype=jnp.float8_e4m3fn)
