"""Errors in four parts for calls with unknown or missing arguments. Python's own errors name
neither the existing arguments nor the likely intention.
"""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ._errors import fail

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
