"""Checks of the types, shapes, dtypes and axes of public arguments, by chex where it has them."""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import math
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


def holds(assertion: str, *args: Any) -> bool:
    """Whether an assertion of chex holds. It is given by name, so that chex is imported by the
    first check and `import jqx` stays fast.
    """
    try:
        getattr(importlib.import_module("chex"), assertion)(*args)
    except AssertionError:
        return False
    return True


def check_instance(
    function: str, argument: str, value: Any, kind: type | tuple[type, ...], *, fix: str
) -> None:
    """Checks that `value` is an instance of a class, or of one of several."""
    if not isinstance(value, kind):
        names = " or ".join(map(_with_article, kind if isinstance(kind, tuple) else (kind,)))
        problem = f"`{argument}` is not {names}."
        raise fail(function, problem, given=shown_as(argument, value), fix=fix, error=TypeError)


def check_pattern(function: str, argument: str, pattern: Any, *, fix: str = "") -> re.Pattern[str]:
    """Returns a compiled regular expression, after checking that it is valid."""
    check_instance(function, argument, pattern, str, fix=fix or "pass a regular expression.")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise fail(
            function,
            f"`{argument}` is not a regular expression: {pattern!r}, {error}.",
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
    # NumPy asks an object for a dtype, and parses the result. It reads None as float64, and "i4" as
    # an int32: a user of jqx means neither.
    with contextlib.suppress(Exception):
        parsed = jnp.dtype(dtype)
        if dtype is not None and not (isinstance(dtype, str) and dtype != parsed.name):
            return parsed
    raise fail(
        function,
        f"`{argument}` is not a dtype.",
        given=f"{argument} = {shown(dtype)}",
        fix="pass the dtype object itself, such as jnp.int8.",
        error=TypeError,
    )


def as_real(function: str, argument: str, x: ArrayLike) -> jax.Array:
    """Returns `x` as an array, after checking that it is floating point."""
    x = as_array(function, argument, x)
    check_real(function, f"`{argument}` element type", x.dtype)
    return x


def is_real(dtype: DTypeLike) -> bool:
    """Whether a dtype is floating point, of 16 bits or more: those of fewer bits are formats."""
    return name_of(dtype) in FLOATS


def check_real(function: str, subject: str, dtype: DTypeLike) -> None:
    """Checks that a dtype is floating point."""
    if not is_real(dtype):
        raise fail(
            function,
            f"{subject} ({name_of(dtype)}) must be a floating point number.",
            fix=f"convert it to one of {', '.join(FLOATS)}.",
            error=TypeError,
        )


def as_array(function: str, argument: str, x: Any) -> jax.Array:
    """Returns `x` as an array, or raises a TypeError that names the argument."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        raise fail(
            function,
            f"`{argument}` is not an array, but an object of type {type(x).__name__}.",
            fix=f"pass {argument} as a jax.Array, or as a number.",
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
                low, high = np.iinfo(kind).min, np.iinfo(kind).max
                x = np.clip(host, max(low, np.iinfo(host.dtype).min), high).astype(kind)
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


def as_count(integers: jax.Array, limit: Any) -> jax.Array:
    """Returns integers of any dtype in `[0, limit]`, int32."""
    return jnp.clip(as_signed(integers, limit), 0, limit).astype(jnp.int32)


def as_like(function: str, argument: str, x: Any, dtype: DTypeLike) -> jax.Array:
    """Returns `x` as an array; a Python number takes `dtype`, anything else keeps its dtype."""
    if isinstance(x, (bool, int, float)) and not isinstance(x, np.generic):
        return jnp.asarray(x, dtype)
    return as_array(function, argument, x)


def check_integer(function: str, argument: str, value: Any) -> int:
    """Returns `value` as a Python integer, after checking that it is an integer and not a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise fail(
            function,
            f"`{argument}` must be an integer, not an object of type {type(value).__name__}.",
            fix=f"pass a Python number, such as {argument}=1.",
            error=TypeError,
        )
    return int(value)


def check_flags(function: str, **flags: Any) -> None:
    """Checks that options are bools."""
    for name, value in flags.items():
        check_instance(function, name, value, bool, fix=f"pass {name}=True or {name}=False.")


def check_dtype(function: str, argument: str, x: jax.Array, dtype: Any, *, of: str) -> None:
    """Checks that `x` has exactly `dtype`, which is the dtype of `of`."""
    if not holds("assert_type", x, dtype):
        name, own = name_of(dtype), x.dtype.name
        raise fail(
            function,
            f"`{argument}` element type ({own}) must match {of} element type ({name}).",
            fix=f"convert it: {argument}.astype(jnp.{name}).",
            error=TypeError,
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
    numbers = tuple(axes) if isinstance(axes, (Sequence, set, frozenset)) else (axes,)
    for axis in numbers:
        if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
            raise fail(
                function,
                f"`{argument}` must hold integers.",
                given=shown_as(argument, axis if hasattr(axis, "dtype") else repr(axes)),
                fix=f"pass axis numbers, such as {argument}=(0,).",
                error=TypeError,
            )
        if not -rank <= axis < rank:
            allowed = f"axes in [{-rank}, {rank - 1}]" if rank else "no axes"
            raise fail(
                function,
                f"Quantization axis ({axis}) must be less than input shape rank ({rank}).",
                given=f"{argument} == {axes!r}",
                fix=f"choose an axis that the input has: rank {rank} has {allowed}.",
            )
    return tuple(sorted({int(axis) % rank for axis in numbers}))


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
        is_method = next(iter(signature.parameters), "") in ("cls", "self")
        if is_method:
            _, *parameters = signature.parameters.values()
            signature = signature.replace(parameters=parameters)
        return _checked(f, signature, int(is_method), function, fix, instead)

    return decorate


def _checked(
    f: Any, signature: inspect.Signature, skip: int, function: str, fix: str, instead: Any
) -> Any:
    """Returns `f`, which rejects calls that do not fit; its first `skip` arguments do not count."""

    def check_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        _check_call(function, signature, args[skip:], kwargs, fix, instead)

    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except TypeError:
            check_call(args, kwargs)
            raise

    # With the globals of its module, so that doctest finds it there.
    copied = types.FunctionType(checked.__code__, f.__globals__, closure=checked.__closure__)
    return functools.update_wrapper(copied, f)


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
    renamed = [f"{name}= is called {matches[0]}=" for name, matches in close if matches]
    if advice or renamed:
        fix = advice[0] if advice else f"{', '.join(renamed)}."
    passed = [f"{len(args)} arguments by position"] if args or not kwargs else []
    raise fail(
        function,
        problem,
        given=", ".join([*passed, *(f"{name}=" for name in kwargs)]),
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
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}=..."


# Checks of the fields of option types: `check_fields` in the `__post_init__` of a dataclass.


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a field may hold.

    Attributes:
      expected: the values in words, for messages.
      is_kind: whether a value is of the right kind; if not, the error is a TypeError.
      holds: whether a value of that kind is in range.
      convert: the value that is kept, such as a Python number in place of one of NumPy.
    """

    expected: str
    is_kind: Callable[[Any], bool]
    holds: Callable[[Any], bool] = lambda value: True
    convert: Callable[[Any], Any] = lambda value: value

    def __or__(self, other: "Rule") -> "Rule":
        """Returns the rule of values that keep one rule or the other."""

        def rule_of(value: Any) -> Rule:
            return self if self.is_kind(value) and self.holds(value) else other

        return Rule(
            f"{self.expected}, or {other.expected}",
            lambda value: self.is_kind(value) or other.is_kind(value),
            lambda value: rule_of(value).is_kind(value) and rule_of(value).holds(value),
            lambda value: rule_of(value).convert(value),
        )


def number(low: float = 0, high: float = math.inf, *, above: bool = False) -> Rule:
    """Returns the rule of finite numbers from `low` to `high`, without `low` itself if `above`."""
    start = f"above {low:g}" if above else f"of {low:g} or more"
    largest = min(high, float(np.finfo(np.float32).max))
    return Rule(
        f"a number {start}" + (f" and at most {high:g}" if high < math.inf else ""),
        lambda x: isinstance(x, (int, float, np.integer, np.floating)) and not _is_bool(x),
        lambda x: (low < x if above else low <= x) and x <= largest,
        float,
    )


def whole(low: int = 0, high: float = 10**6) -> Rule:
    """Returns the rule of integers from `low` to `high`."""
    return Rule(
        f"a whole number of {low} or more, at most {high}",
        lambda n: isinstance(n, (int, np.integer)) and not _is_bool(n),
        lambda n: low <= n <= high,
        int,
    )


def choice(*values: str | None) -> Rule:
    """Returns the rule of a few strings, and None."""
    return Rule(
        ("one of " if len(values) > 1 else "") + ", ".join(map(repr, values)),
        lambda value: value is None or isinstance(value, str),
        lambda value: value in values,
    )


def instance(*kinds: type) -> Rule:
    """Returns the rule of instances of classes."""
    names = " or ".join(kind.__name__ for kind in kinds)
    return Rule(f"of type {names}", lambda value: isinstance(value, kinds))


def flag() -> Rule:
    """Returns the rule of True and False."""
    return Rule("True or False", lambda value: isinstance(value, bool))


def nothing() -> Rule:
    """Returns the rule of None, as in `number() | nothing()`."""
    return Rule("None", lambda value: value is None)


def check_fields(
    function: str, options: Any, fix: str = "leave it out for the default.", **rules: Rule
) -> None:
    """Checks fields of a dataclass, and sets those to which a rule gives another form.

    Args:
      function: the public name of the function or class, for messages.
      options: the dataclass, which may be frozen.
      fix: what to do if a field does not keep its rule.
      **rules: what each field may hold.
    """
    for name, rule in rules.items():
        value = getattr(options, name)
        is_kind = rule.is_kind(value)
        if not is_kind or not rule.holds(value):
            raise fail(
                function,
                f"`{name}` is out of range." if is_kind else f"`{name}` has the wrong type.",
                given=f"{name} == {shown(value)}",
                expected=rule.expected,
                fix=fix,
                error=ValueError if is_kind else TypeError,
            )
        converted = rule.convert(value)
        if converted is not value:
            object.__setattr__(options, name, converted)


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


# Fields that were added to a class after values of it had been written as JSON.


_ADDED = "jqx added"


def added(default: Any, **options: Any) -> Any:
    """Returns a dataclass field that is not written while it has its default, so that values
    without it are read and written as before it was added. `options` are those of
    `dataclasses.field`.
    """
    return dataclasses.field(default=default, metadata={_ADDED: True}, **options)


def unwritten(cls: type) -> dict[str, Any]:
    """Returns the defaults of the fields of a class that are not written while they have them."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {field.name: field.default for field in fields if _ADDED in field.metadata}
