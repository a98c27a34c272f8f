"""Operands of the oneDNN ops: element types, shapes, and how they line up with the values."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._checks import as_array, check_integer, name_of, normalize_axes, require
from .._errors import fail

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def check_type(function: str, argument: str, dtype: Any, allowed: tuple[str, ...]) -> None:
    if name_of(dtype) not in allowed:
        raise fail(
            function,
            f"`{argument}` has an element type that the operation does not take.",
            given=f"{argument}: {name_of(dtype)}",
            expected=f"one of {', '.join(allowed)}",
            fix=f"convert {argument} to one of these.",
            error=TypeError,
        )


def typed(function: str, argument: str, x: ArrayLike, allowed: tuple[str, ...]) -> jax.Array:
    x = as_array(function, argument, x)
    check_type(function, argument, x.dtype, allowed)
    return x


def attributes(function: str, scales: Any, zps: Any) -> tuple[jax.Array, jax.Array | None]:
    """Checks the attributes of an op with fixed parameters, and returns them as arrays."""
    if zps is not None:
        given = np.asarray(zps)
        info = np.iinfo(np.int32)
        if not (
            given.dtype.kind in "iu" and bool(np.all((given >= info.min) & (given <= info.max)))
        ):
            raise fail(
                function,
                "`zps` must hold 32-bit integers.",
                given=f"zps of dtype {given.dtype}",
                expected=f"integers in [{info.min}, {info.max}]",
                fix="round them, or pass None for zero.",
            )
    return jnp.asarray(scales, jnp.float32), None if zps is None else jnp.asarray(zps, jnp.int32)


def operands_of(
    function: str,
    x: jax.Array,
    scales: ArrayLike,
    zps: ArrayLike | None,
    floats: tuple[str, ...],
    integers: tuple[str, ...],
    granularity: str,
    axis: int,
    per_group: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Checks 1-D scales and zero points and lines them up with `x`."""
    operands = _typed_pair(function, scales, zps, floats, integers)
    known = (
        ("per_tensor", "per_channel", "per_group") if per_group else ("per_tensor", "per_channel")
    )
    if granularity not in known:
        raise fail(
            function,
            "`granularity` is unknown.",
            given=f"granularity == {granularity!r}",
            expected=f"one of {', '.join(known)}",
            fix="pass one of these strings; oneDNN calls the attribute qtype.",
        )
    shape = [1] * x.ndim
    if granularity == "per_channel":
        axis = check_integer(function, "axis", axis)
        (axis,) = normalize_axes(function, axis, x.ndim, argument="axis")
        shape[axis] = x.shape[axis]
    length = 1 if granularity == "per_tensor" else shape[axis]
    _check_shapes(
        function,
        operands,
        (length,),
        "be 1-D with one element per " + ("tensor" if granularity == "per_tensor" else "channel"),
        f"x.shape == {x.shape}, granularity == {granularity!r}, axis == {axis}",
        "choose another granularity or axis",
    )
    lined_up = {name: operand.reshape(shape) for name, operand in operands.items()}
    return lined_up["scales"], lined_up.get("zps")


def group_operands(
    function: str,
    q: jax.Array,
    scales: ArrayLike,
    zps: ArrayLike | None,
    floats: tuple[str, ...],
    integers: tuple[str, ...],
    group_shape: Sequence[int] | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Checks scales and zero points of groups and repeats each over its group."""
    group = tuple(group_shape) if isinstance(group_shape, Sequence) else ()
    if not (
        len(group) == q.ndim
        and all(
            isinstance(g, (int, np.integer)) and not isinstance(g, bool) and g >= 1 for g in group
        )
        and all(n % g == 0 for n, g in zip(q.shape, group, strict=True))
    ):
        raise fail(
            function,
            "`group_shape` does not divide the shape of `q`.",
            given=f"group_shape == {group_shape!r}, q.shape == {q.shape}",
            expected="one group size per axis of q, each dividing that axis",
            fix="pass for example group_shape=(1, 32) for blocks of 32 along the last of two axes.",
        )
    expected = tuple(n // g for n, g in zip(q.shape, group, strict=True))
    operands = _typed_pair(function, scales, zps, floats, integers)
    _check_shapes(
        function,
        operands,
        expected,
        "hold one element per group",
        f"q.shape == {q.shape}, group_shape == {group}",
        "choose another group_shape",
    )
    for dim, size in enumerate(group):
        operands = {name: jnp.repeat(array, size, axis=dim) for name, array in operands.items()}
    return operands["scales"], operands.get("zps")


def _typed_pair(
    function: str,
    scales: ArrayLike,
    zps: ArrayLike | None,
    floats: tuple[str, ...],
    integers: tuple[str, ...],
) -> dict[str, jax.Array]:
    """Returns the parameters that are given, by name, after checking their element types."""
    operands = {"scales": typed(function, "scales", scales, floats)}
    if zps is not None:
        operands["zps"] = typed(function, "zps", zps, integers)
    return operands


def _check_shapes(
    function: str,
    operands: dict[str, jax.Array],
    expected: tuple[int, ...],
    rule: str,
    given: str,
    fix: str,
) -> None:
    """Checks that every parameter has the expected shape, which `rule` describes in words."""
    for name, operand in operands.items():
        require(
            "assert_shape",
            operand,
            expected,
            error=ValueError,
            function=function,
            problem=f"`{name}` must {rule}.",
            given=f"{name}.shape == {operand.shape}, {given}",
            expected=f"{name}.shape == {expected}",
            fix=f"reshape {name}, or {fix}.",
        )
