"""What the fields of a QTensor must be: dtypes of the leaves, and shapes that fit each other."""

from typing import Any

import jax
import jax.numpy as jnp

from .._checks import check_real, require_that
from ..numerics import E8M0, Integer, format_of, packed_length


def check_leaves(q: Any) -> None:
    form = format_of(q.qtype)
    for name in ("values", "scale", "zero_point"):
        leaf = getattr(q, name)
        require_that(
            hasattr(leaf, "shape") or (leaf is None and name == "zero_point"),
            error=TypeError,
            function="QTensor",
            problem=f"`{name}` is not an array.",
            given=f"an object of type {type(leaf).__name__}",
            expected="an array",
            mend=f"pass jnp.asarray({name}).",
        )
    if q.scale.dtype != E8M0:
        check_real("QTensor", "`scale` element type", q.scale.dtype)
    storage = form.storage
    codes = {"values": (q.values, storage if q.layout is None else jnp.dtype(jnp.uint8))}
    if q.zero_point is not None:
        codes["zero_point"] = (q.zero_point, storage)
        require_that(
            isinstance(form, Integer),
            error=ValueError,
            function="QTensor",
            problem=f"{form.name} has no zero point.",
            given=f"zero_point of shape {q.zero_point.shape}",
            expected="zero_point=None, or an integer qtype",
            mend="drop the zero point.",
        )
    for name, (array, expected) in codes.items():
        require_that(
            array.dtype == expected,
            error=TypeError,
            function="QTensor",
            problem=f"`{name}` does not hold codes of `qtype`.",
            given=f"{name}.dtype == {array.dtype.name}",
            expected=f"{name}.dtype == {expected.name}, the codes of {form.name}",
            mend=f"convert {name}, or pass the qtype that it has.",
        )


def check_blocks(blocks: Any) -> None:
    """Checks that `blocks` is a tuple of triples of positive integers."""
    require_that(
        isinstance(blocks, tuple)
        and all(isinstance(b, tuple) and len(b) == 3 and min(b) > 0 for b in blocks),
        error=ValueError,
        function="QTensor",
        problem="`blocks` does not tell block sizes.",
        given=f"blocks == {blocks!r}",
        expected="a tuple of (length, number of blocks, block size)",
        mend="leave it out where the number of blocks divides the length; else pass for example "
        "((100, 4, 32),).",
    )


def check_shapes(q: Any) -> None:
    form = format_of(q.qtype)
    if q.layout is not None:
        axis, length = q.layout
        require_that(
            -q.values.ndim <= axis < 0 and q.values.shape[axis] == packed_length(length, form.bits),
            error=ValueError,
            function="QTensor",
            problem="`values` do not have the packed shape.",
            given=f"values.shape == {q.values.shape}, layout == {q.layout}",
            expected=f"{packed_length(length, form.bits)} bytes along axis {axis}",
            mend="make packed tensors with QTensor.pack.",
        )
    shape, scale = q.shape, q.scale.shape
    known = {(n, m) for n, m, size in q.blocks if size > 0 and m == -(-n // size)}
    fits = len(scale) == len(shape) and all(
        m in (1, n) or (n, m) in known or (m > 0 and n % m == 0)
        for n, m in zip(shape, scale, strict=True)
    )
    require_that(
        fits,
        error=ValueError,
        function="QTensor",
        problem="`scale` does not fit `values`.",
        given=f"scale.shape == {scale}, values.shape == {shape}"
        + (f", blocks == {q.blocks}" if q.blocks else ""),
        expected="the rank of values, each dim 1, that of values, or a number of blocks that "
        "divides it",
        mend="reshape scale: values's size along the axes they share, 1 elsewhere.",
    )
    if q.zero_point is not None:
        check_zero_point("QTensor", q.zero_point, q.scale)


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether `shape` has the rank of `full`, and each dim is 1 or that of `full`."""
    return len(shape) == len(full) and all(m in (1, n) for m, n in zip(shape, full, strict=True))


def check_zero_point(function: str, zero_point: jax.Array, scale: Any) -> None:
    shape, full = zero_point.shape, scale.shape
    require_that(
        broadcasts(shape, full),
        error=ValueError,
        function=function,
        problem="`zero_point` does not fit `scale`.",
        given=f"zero_point.shape == {shape}, scale.shape == {full}",
        expected="the rank of scale, each dim 1 or that of scale",
        mend="reshape zero_point: scale's size along the axes they share, 1 elsewhere.",
    )
