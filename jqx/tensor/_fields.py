"""Checks of the fields of a QTensor: the dtypes of the leaves, and shapes that fit each other."""

from typing import Any, NoReturn

import jax
import numpy as np

from .._checks import check_real, shown
from .._errors import fail
from ..numerics import Integer, format_of
from ..numerics._shared import E8M0, packed_length
from ._layout import KERNELS, Layout, Packing, has_int8_layout, has_uint4_layout, values_dtype
from ._order import check_order


def check_leaves(q: Any) -> None:
    form = format_of(q.qtype)
    for name in ("values", "scale", "zero_point", "offset", "order"):
        leaf = getattr(q, name)
        if not (hasattr(leaf, "shape") or (leaf is None and name not in ("values", "scale"))):
            raise fail(
                "QTensor",
                f"`{name}` is not an array.",
                given=f"an object of type {type(leaf).__name__}",
                expected="an array",
                fix=f"pass jnp.asarray({name}).",
                error=TypeError,
            )
    if q.zero_point is not None and not isinstance(form, Integer):
        raise fail(
            "QTensor",
            f"{form.name} has no zero point.",
            given=f"zero_point of shape {q.zero_point.shape}",
            expected="zero_point=None, or an integer qtype",
            fix="drop the zero point.",
        )
    check_dtypes("QTensor", q)


_CHANGED = (
    " If jax.tree.map, an optimizer or a moving average changed the codes: apply it to float "
    "parameters, or let it skip QTensors with is_leaf=lambda x: isinstance(x, jqx.QTensor)."
)


def check_dtypes(function: str, q: Any, where: str = "") -> None:
    """Checks that the leaves have the dtypes of codes and scales, wherever a QTensor is used: a map
    over the leaves of a tree may have changed them. A leaf without a dtype passes.
    """
    if hasattr(q.scale, "qtype"):
        check_dtypes(function, q.scale, where)
    elif getattr(q.scale, "dtype", E8M0) != E8M0:
        check_real(function, f"`scale` element type{where}", q.scale.dtype)
    if hasattr(q.offset, "qtype"):
        check_dtypes(function, q.offset, where)
    elif hasattr(q.offset, "dtype"):
        check_real(function, f"`offset` element type{where}", q.offset.dtype)
    name = wrong_codes(q)
    if name is not None:
        form, dtype = format_of(q.qtype), getattr(q, name).dtype
        expected = _dtypes(q)[name]
        raise fail(
            function,
            f"`{name}`{where} does not hold codes of `qtype`.",
            given=f"{name}.dtype == {dtype.name}",
            expected=f"{name}.dtype == {expected.name}, the codes of {form.name}",
            fix=f"convert {name}, or pass the qtype of its codes.{_CHANGED}",
            error=TypeError,
        )


def wrong_codes(q: Any) -> str | None:
    """Returns the name of a leaf whose dtype is not that of codes; `None` if there is none."""
    known = {name: getattr(getattr(q, name), "dtype", None) for name in _CODES}
    if known["values"] is None and known["zero_point"] is None:
        return None
    expected = _dtypes(q)
    return next(
        (n for n, dtype in known.items() if dtype is not None and dtype != expected[n]), None
    )


_CODES = ("values", "zero_point")


def _dtypes(q: Any) -> dict[str, Any]:
    """Returns the dtypes of the leaves that hold codes."""
    form = format_of(q.qtype)
    return {"values": values_dtype(q.layout, form), "zero_point": form.storage}


def check_blocks(blocks: Any) -> None:
    """Checks that `blocks` is a tuple of triples of positive integers."""
    if not (isinstance(blocks, tuple) and all(map(_is_block, blocks))):
        raise fail(
            "QTensor",
            "`blocks` does not describe block sizes.",
            given=f"blocks == {shown(blocks)}",
            expected="a tuple of (length, number of blocks, block size)",
            fix="leave it out if the number of blocks divides the length; else pass for "
            "example ((100, 4, 32),).",
        )


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, tuple)
        and len(block) == 3
        and all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in block)
        and min(block) > 0
    )


def check_layout(q: Any) -> None:
    """Checks that `layout` is a layout, and that the format allows it."""
    layout, form = q.layout, format_of(q.qtype)
    if layout is None:
        return
    if not (
        isinstance(layout, Layout)
        and isinstance(layout.packing, Packing | None)
        and all(type(number) is int for number in layout.packing or ())
        and isinstance(layout.swapped, bool)
        and isinstance(layout.int8, bool)
        and isinstance(layout.uint4, bool)
        and layout.kernel in ("", *KERNELS)
    ):
        raise fail(
            "QTensor",
            "`layout` is not a layout.",
            given=f"layout == {layout!r}"
            if isinstance(q.layout, Layout)
            else f"an object of type {type(layout).__name__}",
            expected="None, or a jqx.tensor.Layout",
            fix="leave it out; QTensor.pack and QTensor.pack_for set it.",
            error=TypeError,
        )
    packed = layout.packing is not None
    if not (
        packed + layout.int8 + layout.uint4 <= 1
        and (form.bits < 8 or not packed)
        and (has_int8_layout(form) or not layout.int8)
        and (has_uint4_layout(form) or not layout.uint4)
    ):
        raise fail(
            "QTensor",
            f"codes of {form.name} cannot have this layout.",
            given=f"layout == {layout!r}",
            expected="packed for less than 8 bits, int8 for integers of up to 8 bits other than "
            "int8, "
            "or uint4 for other codes of up to 4 bits",
            fix="leave it out; QTensor.pack and QTensor.pack_for set it.",
        )


def check_shapes(q: Any) -> None:
    form = format_of(q.qtype)
    if q.layout is not None:
        _check_layout_shape(q, q.layout, form.bits)
    shape, scale = q.shape, q.scale.shape
    known = {(n, m) for n, m, size in q.blocks if size > 0 and m == -(-n // size)}
    fits = len(scale) == len(shape) and all(
        m in (1, n) or (n, m) in known or (m > 0 and n % m == 0)
        for n, m in zip(shape, scale, strict=True)
    )
    if not fits:
        raise fail(
            "QTensor",
            "`scale` does not fit `values`.",
            given=f"scale.shape == {scale}, values.shape == {shape}"
            + (f", blocks == {q.blocks}" if q.blocks else ""),
            expected="the rank of values, each dim 1, that of values, or a number of blocks that "
            "divides it",
            fix="reshape scale: values's size along the axes they share, 1 elsewhere.",
        )
    for name in ("zero_point", "offset"):
        if getattr(q, name) is not None:
            check_zero_point("QTensor", getattr(q, name), q.scale, name)
    if q.order is not None:
        check_order(q)


def _check_layout_shape(q: Any, layout: Layout, bits: int) -> None:
    shape = q.values.shape
    given = f"values.shape == {shape}, layout == {layout!r}"
    if len(shape) < 2 and layout.swapped:
        raise fail(
            "QTensor",
            "`values` do not have two axes to be swapped.",
            given=given,
            fix="map tensors with a layout over leading axes only, or call q.unpack() first.",
        )
    if layout.packing is None:
        return
    axis, stored = layout.packing.axis, layout.stored_axis
    count = packed_length(layout.packing.length, bits)
    if not -len(shape) <= axis < 0 or shape[stored] != count:
        raise fail(
            "QTensor",
            "`values` do not have the packed shape.",
            given=given,
            expected=f"{count} bytes along axis {stored}",
            fix="make packed tensors with QTensor.pack.",
        )


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether `shape` has the rank of `full`, and each dim is 1 or that of `full`."""
    return len(shape) == len(full) and all(m in (1, n) for m, n in zip(shape, full, strict=True))


def check_zero_point(
    function: str, zero_point: jax.Array, scale: Any, name: str = "zero_point"
) -> None:
    """Checks that a zero point, or an offset, broadcasts to its scale."""
    shape, full = zero_point.shape, scale.shape
    if not broadcasts(shape, full):
        raise fail(
            function,
            f"`{name}` does not fit `scale`.",
            given=f"{name}.shape == {shape}, scale.shape == {full}",
            expected="the rank of scale, each dim 1 or that of scale",
            fix=f"reshape {name}: scale's size along the axes they share, 1 elsewhere.",
        )


def refuse_as_array(function: str, problem: str, x: Any, fix: str) -> NoReturn:
    """Raises, because the caller must choose between the codes and the real array."""
    raise fail(function, problem, given=repr(x), expected="an array", fix=fix, error=TypeError)
