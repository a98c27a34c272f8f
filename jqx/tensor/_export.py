"""Serialization of QTensors by `jax.export`: their static fields as JSON."""

import json
from typing import Any, NamedTuple

from jax import export
from jax.typing import DTypeLike

from .._checks import as_dtype
from .._errors import fail
from ..numerics import QType, format_of
from ..numerics._shared import as_qtype
from ._json import NONE, Values, check_version, record_from_json, to_json
from ._layout import Layout, values_dtype

_VERSION = 1
_UNSUPPORTED = ("int2", "uint2")
"""Dtypes for which JAX has no serializer (0.10.2 to 0.12.0)."""


class _Static(NamedTuple):
    """The static fields of a QTensor, in the order in which it flattens."""

    qtype: DTypeLike | QType
    dtype: DTypeLike
    blocks: tuple[tuple[int, int, int], ...]
    layout: Layout | None


def make_exportable(cls: type) -> None:
    """Registers QTensor. (Its file imports this one.)"""
    export.register_pytree_node_serialization(
        cls,
        serialized_name="jqx.QTensor",
        serialize_auxdata=_write,
        deserialize_auxdata=_read,
    )


def fields_to_json(function: str, q: Any, values: Values = NONE) -> dict[str, Any]:
    """Returns the static fields of a QTensor as JSON; `values` are objects of the user."""
    static = _Static(q.qtype, q.dtype, q.blocks, q.layout)
    return {"version": _VERSION, **to_json(function, static, _Static, values)}


def fields_from_json(
    function: str, data: Any, values: Values = NONE, where: str = "QTensor"
) -> dict[str, Any]:
    """Inverts `fields_to_json`: returns the fields by name. Errors name the place `where`."""
    fields = check_version(function, data, _VERSION)
    static = record_from_json(function, fields, _Static, values, where)
    return {
        "qtype": as_qtype(function, "qtype", static.qtype, "Quantized"),
        "dtype": as_dtype(function, "dtype", static.dtype),
        "blocks": static.blocks,
        "layout": static.layout,
    }


def _write(fields: Any) -> bytes:
    static = _Static(*fields)
    form = format_of(static.qtype)
    if values_dtype(static.layout, form).name in _UNSUPPORTED:
        raise fail(
            "QTensor",
            f"jax.export cannot serialize {form.name} values.",
            given=f"a QTensor of {form.name}, one code an element",
            expected="packed storage: codes in bytes",
            fix="pass q.pack() in place of q, when the function is exported and when it is called; "
            "with zero points, which stay unpacked, use another format, such as numerics.uint3.",
        )
    return json.dumps(fields_to_json("QTensor", static)).encode()


def _read(data: bytes) -> tuple:
    return tuple(fields_from_json("QTensor", json.loads(data)).values())
