"""The integer number formats: which dtypes are quantized types, and their ranges."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from .._checks import as_dtype, require_that

INTEGERS = (
    *("int2", "int4", "int8", "int16", "int32"),
    *("uint2", "uint4", "uint8", "uint16", "uint32"),
)


def is_quantized_type(dtype: DTypeLike) -> bool:
    """Whether `dtype` is an integer format that values can be quantized to."""
    return jnp.dtype(dtype).name in INTEGERS


def as_quantized_type(function: str, argument: str, dtype: Any, role: str) -> jnp.dtype:
    """Returns `dtype` as a dtype object, after checking that it is a quantized type."""
    dtype = as_dtype(function, argument, dtype)
    require_that(
        is_quantized_type(dtype),
        error=TypeError,
        function=function,
        problem=f"{role} element type ({dtype.name}) must be a quantized type.",
        given=f"{argument} is {dtype.name}",
        expected=f"one of {', '.join(INTEGERS)}",
        mend="pass one of these dtypes, such as jnp.int8.",
    )
    return dtype


def integer_range(qtype: DTypeLike) -> tuple[int, int]:
    """Returns the smallest and the largest code of an integer format."""
    info = jnp.iinfo(qtype)
    return int(info.min), int(info.max)


def is_signed(qtype: DTypeLike) -> bool:
    """Whether an integer format has negative codes."""
    return integer_range(qtype)[0] < 0


def bit_width(qtype: DTypeLike) -> int:
    """Returns the number of bits of one code."""
    return int(jnp.iinfo(qtype).bits)
