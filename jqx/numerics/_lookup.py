"""From what a user passes as `qtype=`, a JAX dtype or a `QType`, to the format."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from .._checks import as_dtype, require_that
from ._e8m0 import E8M0, e8m0
from ._integers import INTEGERS, integer_of
from ._minifloats import MINIFLOATS, minifloat_of
from ._qtype import QType

DTYPES = (*INTEGERS, *MINIFLOATS, E8M0.name)
"""Names of the JAX dtypes that are number formats."""


def format_of(qtype: DTypeLike | QType) -> QType:
    """Returns the format that a dtype, or a `QType` itself, stands for."""
    if isinstance(qtype, QType):
        return qtype
    dtype = jnp.dtype(qtype)
    if dtype == E8M0:
        return e8m0
    return minifloat_of(dtype) or integer_of(dtype)


def as_qtype(function: str, argument: str, qtype: Any, role: str) -> jnp.dtype | QType:
    """Returns a dtype object, or the `QType` given, after checking that it is a number format.

    A `QType` that JAX has a dtype for becomes that dtype, so that both compare equal.
    """
    if isinstance(qtype, QType):
        same = qtype.storage.name in DTYPES and format_of(qtype.storage) == qtype
        return qtype.storage if same else qtype
    dtype = as_dtype(function, argument, qtype)
    require_that(
        dtype.name in DTYPES,
        error=TypeError,
        function=function,
        problem=f"{role} element type ({dtype.name}) must be a quantized type.",
        given=f"{argument} is {dtype.name}",
        expected=f"a jqx.numerics.QType, or one of {', '.join(DTYPES)}",
        mend="pass one of these dtypes, such as jnp.int8, or a format of jqx.numerics.",
    )
    return dtype


def name_of_qtype(qtype: DTypeLike | QType) -> str:
    """Returns the name of a format."""
    return format_of(qtype).name
