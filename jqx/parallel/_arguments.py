"""Checks of the arguments of collectives, at trace time."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._checks import (
    as_array,
    as_real,
    check_dtype,
    check_flags,
    check_integer,
    shown,
)
from .._errors import fail
from ..calibrators import absmax
from ..calibrators._shared import PerGroup, PerTensor
from ..numerics import Block, format_of
from ..tensor import QSpec
from ..tensor._shared import needed_spec
from ._hadamard import sizes_of
from ._sums import SUMS
from ._wire import Wire


def array_of(function: str, x: ArrayLike) -> jax.Array:
    """Returns the array to send, after checking that it holds floats of at most 32 bits."""
    x = as_real(function, "x", x)
    if x.dtype == jnp.float64:
        raise fail(
            function,
            "sums are computed in float32, which cannot hold float64.",
            given="x.dtype == float64",
            expected="float16, bfloat16 or float32",
            fix="convert it: x.astype(jnp.float32).",
            error=TypeError,
        )
    return x


def count_of(function: str, axis_name: Any) -> int:
    """Returns the number of devices along an axis."""
    try:
        return lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError):
        raise fail(
            function,
            "`axis_name` is not an axis here.",
            given=f"axis_name == {shown(axis_name)}",
            expected="an axis of the mesh of the surrounding jax.shard_map, or a tuple of axes",
            fix="call it inside jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...).",
            error=NameError,
        ) from None


def wires_of(
    function: str,
    spec: QSpec | str,
    backward: QSpec | str | None,
    hadamard: bool,
    key: jax.Array | None,
) -> dict[str, Wire]:
    """Returns how messages are sent, and how those of the cotangent are."""
    check_flags(function, hadamard=hadamard)
    _check_key(function, key)
    wire = back = _wire_of(function, "spec", spec, hadamard, key is not None)
    if backward is not None:
        back = _wire_of(function, "backward", backward, hadamard, key is not None)
    return {"wire": wire, "back": back}


def error_of(function: str, error: ArrayLike | None, x: jax.Array) -> jax.Array | None:
    """Returns the state of error feedback, an array like `x` in float32."""
    if error is None:
        return None
    error = as_array(function, "error", error)
    fix = "start with error=jnp.zeros(x.shape, jnp.float32), and pass what each call returns."
    if error.shape != x.shape:
        raise fail(
            function,
            "`error` does not have the shape of `x`.",
            given=f"error.shape == {error.shape}",
            expected=f"shape {x.shape}",
            fix=fix,
        )
    check_dtype(function, "error", error, jnp.float32, of="its")
    return error


def check_form(function: str, form: Any) -> None:
    """Checks the name of the form of a sum."""
    if not (isinstance(form, str) and form in SUMS):
        raise fail(
            function,
            "`form` is unknown.",
            given=f"form == {shown(form)}",
            expected=" or ".join(map(repr, SUMS)),
            fix='leave it out, or pass form="ring".',
        )


def axis_of(function: str, argument: str, axis: Any, rank: int) -> int:
    """Returns an axis of an array, counted from the front."""
    found = check_integer(function, argument, axis)
    if not -rank <= found < rank:
        raise fail(
            function,
            f"`{argument}` is not a valid axis.",
            given=f"{argument} == {found}, for {rank} axes",
            expected=f"an integer in [{-rank}, {rank - 1}]"
            if rank
            else "an array of one axis or more",
            fix="pass an axis that the array has.",
        )
    return found % rank


def check_parts(function: str, argument: str, length: int, count: int, tiled: bool) -> None:
    """Checks that an axis can be split into one part for each device."""
    if not (length % count == 0 if tiled else length == count):
        raise fail(
            function,
            f"the length of axis `{argument}` does not fit the number of devices.",
            given=f"{length} elements for {count} devices",
            expected=f"a multiple of {count}" if tiled else f"{count}; with tiled=True a multiple",
            fix="pad the array along it" if tiled else "pass tiled=True, or reshape the array.",
        )


def pairs_of(function: str, perm: Any, count: int) -> tuple[tuple[int, int], ...]:
    """Returns (source, destination) pairs, after checking that no device occurs twice as either."""
    given = perm if isinstance(perm, Sequence) else (perm,)
    pairs = tuple(tuple(p) if isinstance(p, Sequence) else (p,) for p in given)
    ends = [[end for pair in pairs for end in pair[i : i + 1]] for i in (0, 1)]
    if not (
        all(len(pair) == 2 for pair in pairs)
        and all(type(end) is int and 0 <= end < count for pair in pairs for end in pair)
        and all(len(set(side)) == len(side) for side in ends)
    ):
        raise fail(
            function,
            "`perm` is not a list of (source, destination) pairs.",
            given=f"perm == {shown(perm)}",
            expected=f"pairs (source, destination) of integers in [0, {count}), each source and "
            f"each "
            "destination once",
            fix=f"pass for example [(i, (i + 1) % {count}) for i in range({count})].",
        )
    return tuple((pair[0], pair[-1]) for pair in pairs)


def _wire_of(
    function: str, argument: str, given: QSpec | str, hadamard: bool, stochastic: bool
) -> Wire:
    spec = needed_spec(function, argument, given, "array")
    granularity, form = spec.granularity, format_of(spec.qtype)
    if not isinstance(granularity, (PerGroup, PerTensor)):
        raise fail(
            function,
            "scales belong to messages, which have no axes.",
            given=f"`{argument}` with granularity {granularity}",
            expected="jqx.per_group(size), runs of a message, or jqx.per_tensor(), one scale a "
            "message",
            fix=f"pass for example jqx.QSpec({form.name!r}, jqx.per_group(256)).",
        )
    if not form.low < 0 < form.high and spec.symmetric:
        raise fail(
            function,
            f"{form.name} does not have both negative and positive numbers.",
            given=f"{argument} == {spec}",
            expected="a format with negative and positive numbers, or a zero point",
            fix="pass int8, or symmetric=False if the format can have zero points.",
        )
    if stochastic:
        clips = not spec.symmetric or spec.calibrator != absmax or isinstance(form, Block)
        if clips:
            raise fail(
                function,
                "stochastic rounding is biased if values are clipped.",
                given=f"a key, and {argument} == {spec}",
                expected="a symmetric spec with the calibrator absmax, and not in a block format",
                fix="drop key, or symmetric=False and calibrator=.",
            )
    if hadamard:
        known = isinstance(granularity, PerGroup) and sizes_of(granularity.size)
        if not known:
            raise fail(
                function,
                "there is no Hadamard matrix of the group size.",
                given=f"hadamard=True, and {argument} with granularity {granularity}",
                expected="jqx.per_group(size), size a power of two, or 4 n for most n",
                fix="pass jqx.per_group(256), or hadamard=False.",
            )
    return Wire(spec, hadamard)


def _check_key(function: str, key: Any) -> None:
    if key is None:
        return
    typed = jnp.issubdtype(getattr(key, "dtype", jnp.float32), jax.dtypes.prng_key)
    if not (typed and key.shape == ()):
        raise fail(
            function,
            "`key` is not a random key.",
            given=f"keys of shape {key.shape}" if typed else f"key == {shown(key)}",
            expected="one key from jax.random.key(...), or None to round to nearest",
            fix="pass key=jax.random.key(0), a new one for each step.",
            error=TypeError,
        )
