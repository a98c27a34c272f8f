"""Conversion of a `qtype=` argument (a JAX dtype, a `QType` or a name) to a format."""

import contextlib
import dataclasses
import difflib
import functools
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..checks import as_dtype, shown
from ..errors import fail
from .exact import RoundMode, exponent_of, power_of_two, times_power_of_two
from .minifloats import MINIFLOATS, minifloat_of
from .qtype import INTEGERS, QType, integer_of

# E8M0: powers of two from 2**-127 to 2**127, and NaN; the scale format of OCP Microscaling.
#
# Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.4.


E8M0 = jnp.dtype(jnp.float8_e8m0fnu)


@dataclasses.dataclass(frozen=True)
class PowerOfTwo(QType):
    """The 8 exponent bits of a float32, without sign and mantissa; stored as float8_e8m0fnu.

    There is neither zero nor infinity. Numbers that are too small, including zero, become 2**-127;
    numbers that are too large become 2**127. Negative numbers and NaN become NaN. Nearest modes
    round to the nearest value, with ties at 1.5 * 2**n; the even neighbour is the one with the even
    code.
    """

    @property
    def name(self) -> str:
        return E8M0.name

    @property
    def bits(self) -> int:
        return 8

    @property
    def storage(self) -> jnp.dtype:
        return E8M0

    @property
    def low(self) -> float:
        return 2.0**-127

    @property
    def high(self) -> float:
        return 2.0**127

    @property
    def levels(self) -> int:
        return 255

    def round(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        codes = self.encode(y, mode)
        if y.dtype == jnp.float32:
            return self.decode(codes)
        nan = jnp.full(y.shape, jnp.nan, y.dtype)
        return jnp.where(jnp.isnan(codes), nan, power_of_two(exponent_of_e8m0(codes), y.dtype))

    def encode(self, y: jax.Array, mode: RoundMode) -> jax.Array:
        exponent = jnp.clip(exponent_of(y), -127, 127)
        fraction = times_power_of_two(y, -exponent)
        one, tie = np.asarray(1, y.dtype), np.asarray(1.5, y.dtype)
        match mode:
            case RoundMode.UP | RoundMode.TOWARD_INFINITY:
                up = fraction > one
            case RoundMode.DOWN | RoundMode.TOWARD_ZERO:
                up = jnp.zeros(y.shape, bool)
            case RoundMode.NEAREST_UPWARD | RoundMode.NEAREST_TOWARD_INFINITY:
                up = fraction >= tie
            case RoundMode.NEAREST_DOWNWARD | RoundMode.NEAREST_TOWARD_ZERO:
                up = fraction > tie
            case RoundMode.NEAREST_TOWARD_EVEN:
                odd = (exponent & 1) == 0  # the code is exponent + 127
                up = (fraction > tie) | ((fraction == tie) & odd)
        code = jnp.clip(exponent + up.astype(jnp.int32) + 127, 0, 254)
        code = jnp.where((y >= 0) & ~jnp.isnan(y), code, 255)
        return lax.bitcast_convert_type(code.astype(jnp.uint8), E8M0)

    def decode(self, codes: jax.Array) -> jax.Array:
        code = self.to_bits(codes).astype(jnp.int32)
        # 2**-127 is a subnormal float32, and 255 the exponent of infinity.
        bits = jnp.where(code == 0, 1 << 22, jnp.where(code == 255, 0x7FC00000, code << 23))
        return lax.bitcast_convert_type(bits, jnp.float32)


e8m0 = PowerOfTwo()


def exponent_of_e8m0(scale: jax.Array) -> jax.Array:
    """Returns the exponents, from -127 to 127, of powers of two; 128 for NaN."""
    return lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32) - 127


def times_e8m0(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x * scale`, exact except for a subnormal result; `scale` broadcasts to `x`.

    2**-127, which XLA would flush to zero, is applied in two factors.
    """
    code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    bits = jnp.where(code == 255, 0x7FC00000, jnp.maximum(code, 1) << 23)
    y = x * lax.bitcast_convert_type(bits, jnp.float32).astype(x.dtype)
    return jnp.where(code == 0, y * np.asarray(0.5, x.dtype), y)


DTYPES = (*INTEGERS, *MINIFLOATS, E8M0.name)
"""Names of the JAX dtypes that are number formats."""

SHORT = {"mxfp8": "mxfp8_e4m3", "fp8": "float8_e4m3fn"}
"""Short names of formats, as in presets."""


@functools.cache
def formats_by_name() -> Mapping[str, jnp.dtype | QType]:
    """Returns the formats by name: the dtypes of JAX, and those that `jqx.numerics` exports."""
    exported = vars(importlib.import_module("jqx.numerics"))
    named = {name: value for name, value in exported.items() if isinstance(value, QType)}
    named |= {name: jnp.dtype(name) for name in DTYPES}
    return named | {name: named[full] for name, full in SHORT.items()}


def format_of(qtype: DTypeLike | QType) -> QType:
    """Returns the format of a dtype, a `QType` or a name."""
    if isinstance(qtype, str):
        qtype = formats_by_name().get(qtype, qtype)
    if isinstance(qtype, QType):
        return qtype
    dtype = jnp.dtype(qtype)
    if dtype == E8M0:
        return e8m0
    return minifloat_of(dtype) or integer_of(dtype)


def as_qtype(function: str, argument: str, qtype: Any, role: str) -> jnp.dtype | QType:
    """Returns a dtype object, or the `QType` given, after checking that it is a number format.

    A `QType` with a JAX dtype becomes that dtype, so that both compare equal. A name becomes the
    dtype, or the value of `jqx.numerics`, with that name.
    """
    if isinstance(qtype, str):
        qtype = _named(function, argument, qtype)
    if isinstance(qtype, QType):
        is_dtype = qtype.storage.name in DTYPES and format_of(qtype.storage) == qtype
        return qtype.storage if is_dtype else qtype
    dtype = as_dtype(function, argument, qtype)
    if dtype.name not in DTYPES:
        problem = f"{role} element type ({dtype.name}) must be a quantized type."
        fix = f"pass as {argument} a jqx.extend.QType, or one of {', '.join(DTYPES)}."
        raise fail(function, problem, fix=fix, error=TypeError)
    return dtype


def name_of_qtype(qtype: DTypeLike | QType) -> str:
    """Returns the name of a format."""
    return format_of(qtype).name


def _named(function: str, argument: str, name: str) -> jnp.dtype | QType:
    """Returns the format with a name, or the dtype with that name even if it is not a format."""
    formats = formats_by_name()
    if name in formats:
        return formats[name]
    with contextlib.suppress(Exception):  # NumPy parses the string
        dtype = jnp.dtype(name)
        if dtype.name == name:
            return dtype
    fix = "pass one of these, such as 'int8'."
    if ":" in name:
        fix = f"a scheme is a whole spec: pass it as jqx.Rule('.*', weight={name!r})."
    close = difflib.get_close_matches(name, formats, n=1)
    raise fail(
        function,
        f"`{argument}` is not a dtype or the name of a format: {shown(name)}.",
        expected=f"a dtype, a jqx.extend.QType, or one of {', '.join(formats)}",
        fix=f"pass {close[0]!r}." if close and ":" not in name else fix,
        error=TypeError,
    )
