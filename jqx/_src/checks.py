"""Checks of rank, shape, dtype and axes of public arguments. Assertions of chex are used where they
exist, with our message.
"""

import contextlib
import difflib
import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import InconclusiveDimensionOperation
from jax.typing import ArrayLike, DTypeLike

from .errors import fail

FLOATS = ("float16", "bfloat16", "float32", "float64")


def require(
    assertion: str,
    *args: Any,
    error: type[Exception],
    function: str,
    problem: str,
    given: str,
    expected: str,
    fix: str,
) -> None:
    """Runs an assertion of chex and raises `error` with a four-part message if it fails. The
    assertion is given by name, so that chex is imported only on first use and `import jqx` is fast.
    """
    try:
        getattr(importlib.import_module("chex"), assertion)(*args)
    except AssertionError:
        raise fail(
            function, problem, given=given, expected=expected, fix=fix, error=error
        ) from None


def check_instance(
    function: str, argument: str, value: Any, kind: type | tuple[type, ...], *, fix: str
) -> None:
    """Checks that `value` is an instance of a class, or of one of several."""
    if isinstance(value, kind):
        return
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join(map(_with_article, kinds))
    raise fail(
        function,
        f"`{argument}` is not {names}.",
        given=shown_as(argument, value),
        fix=fix,
        error=TypeError,
    )


def check_pattern(function: str, argument: str, pattern: Any, *, fix: str = "") -> re.Pattern[str]:
    """Returns a compiled regular expression, after checking that it is valid."""
    check_instance(function, argument, pattern, str, fix=fix or "pass a regular expression.")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise fail(
            function,
            f"`{argument}` is not a regular expression.",
            given=f"{pattern!r}: {error}",
            expected="a pattern that Python's re accepts",
            fix="escape special characters with a backslash; re.escape(path) matches one path.",
        ) from None


def shown(value: Any, limit: int = 200) -> str:
    """Returns a value as shown in messages: an array as its type, long text truncated."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an object of type {type(value).__name__}"
    try:
        text = repr(value)
    except Exception:  # an integer with more digits than Python prints; an object of a user
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def shown_as(argument: str, value: Any) -> str:
    """Returns the value of an argument as shown in messages: an object as its type."""
    if isinstance(value, (str, int, float, type(None))):
        return f"{argument} == {shown(value)}"
    return f"an object of type {type(value).__name__}"


def _with_article(kind: type) -> str:
    if kind is type(None):
        return "None"
    return f"{'an' if kind.__name__[0] in 'AEIOUaeio' else 'a'} {kind.__name__}"


def name_of(dtype: DTypeLike) -> str:
    """Returns the name of a dtype, for messages; another object is shown as its type."""
    try:
        return jnp.dtype(dtype).name
    except Exception:  # NumPy asks the object for a dtype, and parses the result
        return f"an object of type {type(dtype).__name__}"


def as_dtype(function: str, argument: str, dtype: Any) -> jnp.dtype:
    """Returns `dtype` as a dtype object, or raises a TypeError that names the argument."""
    try:
        found = jnp.dtype(dtype)
    except Exception:  # NumPy asks the object for a dtype, and parses the result
        found = None
    # NumPy reads None as float64, and "i4" as an int32: a user of jqx means neither.
    if found is None or dtype is None or (isinstance(dtype, str) and dtype != found.name):
        raise fail(
            function,
            f"`{argument}` is not a dtype.",
            given=f"{argument} = {shown(dtype)}",
            expected="a JAX dtype, such as jnp.int8",
            fix="pass the dtype object itself.",
            error=TypeError,
        )
    return found


def as_real(function: str, argument: str, x: ArrayLike) -> jax.Array:
    """Returns `x` as an array, after checking that it is floating point."""
    x = as_array(function, argument, x)
    check_real(function, f"`{argument}` element type", x.dtype, given=f"{argument}.dtype == ")
    return x


def is_real(dtype: DTypeLike) -> bool:
    """Whether a dtype is floating point, of 16 bits or more: those of fewer bits are formats."""
    return name_of(dtype) in FLOATS


def check_real(function: str, what: str, dtype: DTypeLike, *, given: str = "") -> None:
    """Checks that a dtype is floating point."""
    name = name_of(dtype)
    if not is_real(dtype):
        raise fail(
            function,
            f"{what} ({name}) must be a floating point number.",
            given=given + name,
            expected=f"one of {', '.join(FLOATS)}",
            fix="use one of these dtypes, such as jnp.float32.",
            error=TypeError,
        )


def as_array(function: str, argument: str, x: Any) -> jax.Array:
    """Returns `x` as an array, or raises a TypeError that names the argument."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        raise fail(
            function,
            f"`{argument}` is not an array.",
            given=f"an object of type {type(x).__name__}",
            expected="an array or a number",
            fix=f"pass {argument} as a jax.Array.",
            error=TypeError,
        ) from None


def as_integers(function: str, argument: str, x: Any) -> jax.Array:
    """Returns integers as an array, after checking that they are. Where JAX would wrap 64-bit
    integers of NumPy to 32 bits, those that do not fit become the nearest number that does.
    """
    if not isinstance(x, jax.Array):
        with contextlib.suppress(Exception):  # objects that NumPy cannot read are refused below
            host = np.asarray(x)
            kind = jax.dtypes.canonicalize_dtype(host.dtype)
            if jnp.issubdtype(kind, jnp.integer) and kind != host.dtype:
                own, other = np.iinfo(kind), np.iinfo(host.dtype)
                x = np.clip(host, max(own.min, other.min), own.max).astype(kind)
    x = as_array(function, argument, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        problem = f"`{argument}` are not integers, but {name_of(x.dtype)}."
        raise fail(function, problem, fix="convert them: x.astype(jnp.int32).", error=TypeError)
    return x


def as_signed(indices: jax.Array, n: Any) -> jax.Array:
    """Returns indices as int32 (or int64 if they have 64 bits). Indices that may overflow the
    signed dtype are clamped to `n`.
    """
    signed = jnp.dtype(jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32)
    if jnp.iinfo(indices.dtype).max > jnp.iinfo(signed).max:
        indices = jnp.minimum(indices, n)
    return indices.astype(signed)


def as_count(integers: jax.Array, most: Any) -> jax.Array:
    """Returns integers of any dtype in `[0, most]`, int32."""
    return jnp.clip(as_signed(integers, most), 0, most).astype(jnp.int32)


def as_like(function: str, argument: str, x: Any, dtype: DTypeLike) -> jax.Array:
    """Returns `x` as an array; a Python number takes `dtype`, anything else keeps its dtype."""
    if isinstance(x, (bool, int, float)) and not isinstance(x, np.generic):
        return jnp.asarray(x, dtype)
    return as_array(function, argument, x)


def check_integer(function: str, argument: str, value: Any) -> int:
    """Returns `value` as a Python integer, after checking that it is an integer and not a bool."""
    if not (isinstance(value, (int, np.integer)) and not isinstance(value, bool)):
        raise fail(
            function,
            f"`{argument}` must be an integer.",
            given=f"an object of type {type(value).__name__}",
            expected="a static Python integer",
            fix=f"pass a number, such as {argument}=1.",
            error=TypeError,
        )
    return int(value)


def check_flags(function: str, **flags: Any) -> None:
    """Checks that options are bools."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise fail(
                function,
                f"`{name}` is not a bool.",
                given=f"{name} == {shown(value)}",
                expected="True or False",
                fix="pass one of these.",
                error=TypeError,
            )


def check_dtype(function: str, argument: str, x: jax.Array, dtype: Any, *, of: str) -> None:
    """Checks that `x` has exactly `dtype`, which is the dtype of `of`."""
    require(
        "assert_type",
        x,
        dtype,
        error=TypeError,
        function=function,
        problem=f"`{argument}` element type ({x.dtype.name}) must match {of} element type "
        f"({name_of(dtype)}).",
        given=f"{argument}.dtype == {x.dtype.name}",
        expected=f"{argument}.dtype == {name_of(dtype)}",
        fix=f"convert it: {argument}.astype(jnp.{name_of(dtype)}).",
    )


def is_at_least(size: Any, limit: int) -> bool:
    """Whether a size is at least `limit`; for a symbolic size, whether it may be."""
    try:
        return bool(size >= limit)
    except InconclusiveDimensionOperation:
        return True


def normalize_axes(
    function: str, axes: int | Sequence[int], rank: int, *, argument: str = "axes"
) -> tuple[int, ...]:
    """Returns the distinct axes in increasing order, each in `[0, rank)`."""
    given = axes
    axes = tuple(axes) if isinstance(axes, (Sequence, set, frozenset)) else (axes,)
    for axis in axes:
        if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
            raise fail(
                function,
                f"`{argument}` must hold integers.",
                given=f"an object of type {type(axis).__name__}"
                if hasattr(axis, "dtype")
                else f"{argument} == {given!r}",
                expected="an integer or a sequence of integers",
                fix=f"pass axis numbers, such as {argument}=(0,).",
                error=TypeError,
            )
        if not -rank <= axis < rank:
            raise fail(
                function,
                f"Quantization axis ({axis}) must be less than input shape rank ({rank}).",
                given=f"{argument} == {given!r}, rank {rank}",
                expected=f"every axis in [{-rank}, {rank - 1}]" if rank else "no axes for rank 0",
                fix="choose an axis that the input has.",
            )
    return tuple(sorted({int(axis) % rank for axis in axes}))


# Errors in four parts for calls with unknown or missing arguments. Python's own errors name
# neither the existing arguments nor the likely intention.


_Called = TypeVar("_Called", bound=Callable[..., Any])


def called(
    function: str, fix: str = "", instead: Callable[[str], str | None] | None = None
) -> Callable[[_Called], _Called]:
    """Returns a decorator for a public function or class with this name.

    A call that fits has no extra cost. Any other call is a TypeError that lists the arguments.

    Args:
      function: its public name, without `jqx.`.
      fix: the most likely intention of a call that does not fit.
      instead: what to write in the place of an argument that does not exist, by its name; `None`
        if there is no such advice.
    """

    def decorate(f: Any) -> Any:
        signature = inspect.signature(f)
        if isinstance(f, type):
            f.__init__ = _checked(f.__init__, signature, 1, function, fix, instead)
            return f
        own = next(iter(signature.parameters), "") in ("cls", "self")
        if own:
            _, *rest = signature.parameters.values()
            signature = signature.replace(parameters=rest)
        return _checked(f, signature, int(own), function, fix, instead)

    return decorate


def _checked(
    f: Any, signature: inspect.Signature, own: int, function: str, fix: str, instead: Any
) -> Any:
    """Returns `f`, which rejects calls that do not fit; its first `own` arguments do not count."""

    def refuse(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        _check_call(function, signature, args[own:], kwargs, fix, instead)

    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except TypeError:
            refuse(args, kwargs)
            raise

    # With the globals of its module, so that doctest finds it there.
    same = types.FunctionType(checked.__code__, f.__globals__, closure=checked.__closure__)
    return functools.update_wrapper(same, f)


def _check_call(
    function: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fix: str,
    instead: Callable[[str], str | None] | None,
) -> None:
    """Raises if arguments do not fit a signature."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        problem = f"{error}."
    else:
        return
    names = list(signature.parameters)
    unknown = [name for name in kwargs if name not in names]
    advice = [text for name in unknown if instead and (text := instead(name))]
    close = [(name, difflib.get_close_matches(name, names, n=1)) for name in unknown]
    meant = [f"{name}= is called {found[0]}=" for name, found in close if found]
    if advice or meant:
        fix = advice[0] if advice else f"{', '.join(meant)}."
    given = [f"{len(args)} arguments by position"] if args or not kwargs else []
    given += [f"{name}=" for name in kwargs]
    raise fail(
        function,
        problem,
        given=", ".join(given),
        expected=f"{function}({', '.join(map(_shown, signature.parameters.values()))})",
        fix=fix or "pass these arguments, by name.",
        error=TypeError,
    ) from None


def _shown(parameter: inspect.Parameter) -> str:
    """Returns a parameter as shown in a signature: one with a default as `name=...`."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    needed = parameter.default is parameter.empty
    return parameter.name if needed else f"{parameter.name}=..."
