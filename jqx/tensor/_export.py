"""QTensors in functions that `jax.export` serializes: their static fields as JSON."""

import json
from typing import Any, NamedTuple

from jax import export
from jax.typing import DTypeLike

from .._checks import as_dtype, require_that
from ..numerics import QType, as_qtype, format_of
from ._json import NONE, check_version, record_from_json, to_json
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
    """Registers QTensor, whose file imports this one."""
    export.register_pytree_node_serialization(
        cls,
        serialized_name="jqx.QTensor",
        serialize_auxdata=_write,
        deserialize_auxdata=_read,
    )


def _write(fields: Any) -> bytes:
    static = _Static(*fields)
    form = format_of(static.qtype)
    require_that(
        values_dtype(static.layout, form).name not in _UNSUPPORTED,
        error=ValueError,
        function="QTensor",
        problem=f"jax.export cannot serialize {form.name} values.",
        given=f"a QTensor of {form.name}, one code an element",
        expected="packed storage: codes in bytes",
        mend="pass q.pack() in place of q, when the function is exported and when it is called; "
        "with zero points, which stay unpacked, take another format, such as numerics.uint3.",
    )
    return json.dumps({"version": _VERSION, **to_json("QTensor", static, _Static)}).encode()


def _read(data: bytes) -> tuple:
    fields = check_version("QTensor", json.loads(data), _VERSION)
    static = record_from_json("QTensor", fields, _Static, NONE, "QTensor")
    return (
        as_qtype("QTensor", "qtype", static.qtype, "Quantized"),
        as_dtype("QTensor", "dtype", static.dtype),
        static.blocks,
        static.layout,
    )
