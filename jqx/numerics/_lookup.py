"""Conversion of a `qtype=` argument (a JAX dtype, a `QType` or a name) to a format."""

import contextlib
import difflib
import functools
import sys
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from .._checks import as_dtype, shown
from .._errors import fail
from ._e8m0 import E8M0, e8m0
from ._integers import INTEGERS, integer_of
from ._minifloats import MINIFLOATS, minifloat_of
from ._qtype import QType

DTYPES = (*INTEGERS, *MINIFLOATS, E8M0.name)
"""Names of the JAX dtypes that are number formats."""

SHORT = {"mxfp8": "mxfp8_e4m3", "fp8": "float8_e4m3fn"}
"""Short names of formats, as in presets."""


@functools.cache
def formats_by_name() -> Mapping[str, jnp.dtype | QType]:
    """Returns the formats by name: the dtypes of JAX, and those that `jqx.numerics` exports."""
    exported = vars(sys.modules[__name__.rpartition(".")[0]])
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
        same = qtype.storage.name in DTYPES and format_of(qtype.storage) == qtype
        return qtype.storage if same else qtype
    dtype = as_dtype(function, argument, qtype)
    if dtype.name not in DTYPES:
        raise fail(
            function,
            f"{role} element type ({dtype.name}) must be a quantized type.",
            given=f"{argument} is {dtype.name}",
            expected=f"a jqx.numerics.QType, or one of {', '.join(DTYPES)}",
            fix="pass one of these dtypes, such as jnp.int8, or a format of jqx.numerics.",
            error=TypeError,
        )
    return dtype


def name_of_qtype(qtype: DTypeLike | QType) -> str:
    """Returns the name of a format."""
    return format_of(qtype).name


def _named(function: str, argument: str, name: str) -> jnp.dtype | QType:
    """Returns the format with a name, or the dtype with that name even if it is not a format."""
    known = formats_by_name()
    if name in known:
        return known[name]
    with contextlib.suppress(Exception):  # NumPy parses the string
        dtype = jnp.dtype(name)
        if dtype.name == name:
            return dtype
    fix = "pass one of these, such as 'int8'."
    if ":" in name:
        fix = f"a scheme is a whole spec: pass it as jqx.Rule('.*', weight={name!r})."
    close = difflib.get_close_matches(name, known, n=1)
    raise fail(
        function,
        f"`{argument}` is not a dtype or the name of a format.",
        given=f"{argument} = {shown(name)}",
        expected=f"a dtype, a jqx.numerics.QType, or one of {', '.join(known)}",
        fix=f"pass {close[0]!r}." if close and ":" not in name else fix,
        error=TypeError,
    )
