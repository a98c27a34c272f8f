"""The display of a QTensor: format, shape, granularity and bytes, never contents."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._html import pairs_html
from .._treescope import constructor
from ..numerics._shared import name_of_qtype
from ._fields import wrong_codes
from ._order import permuted_axis


def text(q: Any) -> str:
    """Returns the `repr` of a QTensor, whatever its leaves are."""
    name, dtype = name_of_qtype(q.qtype), jnp.dtype(q.dtype).name
    if not _has_arrays(q):
        return f"QTensor({name} of {_leaf(q.values)}, scale {_leaf(q.scale)}, dtype={dtype})"
    wrong = wrong_codes(q)
    if wrong is not None:
        part = f"{wrong} {_leaf(getattr(q, wrong))}"
        return f"QTensor({part}, which are no codes of {name}, scale {_leaf(q.scale)})"
    zero = "" if q.zero_point is None else f", zero_point {_leaf(q.zero_point)}"
    zero += "" if q.offset is None else f", offset {_leaf(q.offset)}"
    layout = "" if q.layout is None else f" {q.layout}"
    if q.order is not None and hasattr(q.order, "shape"):
        layout += f" permuted along axis {permuted_axis(q.order)}"
    return (
        f"QTensor({name}{list(q.shape)} {q.groups}{layout}, scale {_leaf(q.scale)}{zero}, "
        f"dtype={dtype}, {_grouped(q.nbytes)} bytes)"
    )


def as_html(q: Any) -> str:
    """Returns the HTML that a notebook shows for a QTensor, whatever its leaves are."""
    name, dtype = name_of_qtype(q.qtype), jnp.dtype(q.dtype).name
    if not _has_arrays(q) or wrong_codes(q) is not None:
        return pairs_html([("", text(q))], "QTensor")
    known = isinstance(q.size, int) and isinstance(q.nbytes, int) and q.size > 0
    bits = f", {8 * q.nbytes / q.size:.2f} bits for each of {q.size:,} numbers" if known else ""
    layout = [] if q.layout is None else [("laid out", str(q.layout))]
    parts = [("zero points", q.zero_point), ("offsets", q.offset), ("order", q.order)]
    return pairs_html(
        [
            ("format", f"{name} {q.groups}"),
            ("stands for", f"{dtype}{list(q.shape)}"),
            ("codes", _leaf(q.values)),
            *layout,
            ("scales", _leaf(q.scale)),
            *((name, _leaf(part)) for name, part in parts if part is not None),
            ("bytes", f"{_grouped(q.nbytes)}{bits}"),
        ],
        "QTensor",
    )


def treescope_tree(q: Any, path: str | None, subtree_renderer: Any) -> Any:
    """Returns what treescope shows for a QTensor."""
    summary = {}
    if _has_arrays(q):
        summary = {"shape": q.shape, "granularity": str(q.groups), "nbytes": q.nbytes}
    fields = {f.name: getattr(q, f.name) for f in dataclasses.fields(q) if f.init}
    return constructor(q, summary | fields, path, subtree_renderer)


def _has_arrays(q: Any) -> bool:
    return all(map(_is_array, (q.values, q.scale)))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")  # a dtype has a shape too


def _grouped(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else str(number)  # it may be symbolic


def _leaf(leaf: Any) -> str:
    if not _is_array(leaf):
        return repr(leaf)
    name = name_of_qtype(leaf.qtype) if hasattr(leaf, "qtype") else leaf.dtype.name
    name = "float0" if leaf.dtype == jax.dtypes.float0 else name  # in a gradient
    return f"{name}{list(leaf.shape)}"
