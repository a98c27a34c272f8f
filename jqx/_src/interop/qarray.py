"""`qwix.QArray`, which tokamax takes too, from and to QTensors."""

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from ... import QTensor
from ..checks import check_instance, shown
from ..errors import fail
from ..numerics.lookup import format_of

_NAMED = {"int3": jnp.int4, "int5": jnp.int8, "int6": jnp.int8, "int7": jnp.int8, "nf4": jnp.uint4}
"""Formats that Qwix knows by name, and the dtype of their codes there."""


def from_qarray(x: Any) -> QTensor:
    """Returns the QTensor with the codes, scales and zero points of a `qwix.QArray`.

    Tiles of Qwix are blocks in jqx. Nothing is copied, except codes that jqx has in another dtype:
    of `"nf4"`, and of `"int2"` and `"int3"`, which Qwix has in int4.

    Args:
      x: a `qwix.QArray`, or an object with `qvalue`, `scale`, `zero_point` and `qtype`.

    Returns:
      A QTensor whose real array has the dtype of the scale, as in Qwix.

    Raises:
      TypeError: if `x` has no such fields, or its scale is no array of floats.
      ValueError: if jqx has no such format: mxfp8, mxfp4 and nvfp4 with scales in a float dtype.

    Example:
      >>> import jax.numpy as jnp, jqx
      >>> from types import SimpleNamespace
      >>> codes, scale = jnp.ones((4, 2), jnp.int8), jnp.ones((2, 2))
      >>> x = SimpleNamespace(qvalue=codes, scale=scale, zero_point=None, qtype=jnp.int8)
      >>> jqx.interop.from_qarray(x)
      QTensor(int8[4, 2] per_block({0: 2, 1: 1}), scale float32[2, 2], dtype=float32, 24 bytes)
    """
    if not all(hasattr(x, name) for name in ("qvalue", "scale", "zero_point", "qtype")):
        problem, given = "`x` is no qwix.QArray.", type(x).__name__
        fix = "pass the result of qwix.quantize."
        raise fail("interop.from_qarray", problem, given=given, fix=fix, error=TypeError)
    fix = "quantize qwix.dequantize(x) again: jqx.QTensor.quantize(x, jqx.QSpec(...))."
    try:
        name = x.qtype if isinstance(x.qtype, str) else jnp.dtype(x.qtype).name
        storage = format_of(name).storage
    except (TypeError, ValueError):
        problem = f"`x` has a format that jqx does not know: {shown(x.qtype)}."
        raise fail("interop.from_qarray", problem, fix=fix) from None
    if name in ("mxfp8", "mxfp4", "nvfp4"):
        problem = f"the scales of {name} are floats in Qwix, and have a format of their own in jqx."
        raise fail("interop.from_qarray", problem, fix=fix)
    values, zero_point = _stored(x.qvalue, x.zero_point, storage)
    return QTensor(values, x.scale, zero_point, qtype=name, dtype=x.scale.dtype)


def to_qarray(q: QTensor) -> Any:
    """Returns the `qwix.QArray` with the codes, scales and zero points of a QTensor.

    Nothing is copied if the codes are in the default layout; others are unpacked. A QArray stands
    for an array in the dtype of its scale, whatever `q.dtype` is. `to_qarray(from_qarray(x))` is
    `x`, except that `"int2"` becomes `jnp.int2`.

    Args:
      q: a QTensor of integers, of 8-bit or 4-bit floats, or in nf4.

    Raises:
      TypeError: if `q` is no QTensor.
      ValueError: if Qwix has no such format, or `q` has an offset, an order, or a smaller block at
        the end.
      ImportError: if Qwix is not installed.
    """
    fix = "pass a QTensor, such as jqx.QTensor.quantize(x, 'int8')."
    check_instance("interop.to_qarray", "q", q, QTensor, fix=fix)
    form = format_of(q.qtype)
    is_named = form in map(format_of, _NAMED)
    if not is_named and not (isinstance(q.qtype, np.dtype) and q.qtype.itemsize == 1):
        problem = f"Qwix has no format {form.name}."
        raise fail("interop.to_qarray", problem, fix="quantize to int8, int4, nf4 or a float8.")
    for what, is_there in (
        ("an offset", q.offset is not None),
        ("an order", q.order is not None),
        ("a last block that is smaller", bool(q.blocks)),
        ("a quantized scale", isinstance(q.scale, QTensor)),
    ):
        if is_there:
            problem, fix = f"`q` has {what}, which Qwix lacks.", "quantize q.dequantize() again."
            raise fail("interop.to_qarray", problem, given=str(q), fix=fix)
    try:
        package = importlib.import_module("qwix")
    except ImportError as error:
        problem = "Qwix is not installed, whose QArray is returned."
        fix = "pip install qwix"
        raise fail("interop.to_qarray", problem, fix=fix, error=ImportError) from error
    q, name = q.unpack(), format_of(q.qtype).name
    storage = _NAMED.get(name, q.values.dtype)
    values, zero_point = _stored(q.values, q.zero_point, storage)
    return package.QArray(values, q.scale, zero_point, name if is_named else q.qtype)


def _stored(values: Any, zero_point: Any, dtype: Any) -> tuple[Any, Any]:
    """Returns codes and zero points in the dtype of the other library."""
    if values.dtype == dtype:
        return values, zero_point
    return values.astype(dtype), None if zero_point is None else zero_point.astype(dtype)
