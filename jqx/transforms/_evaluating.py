"""Errors that a function raises while it is traced are attributed to it, with its arguments."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from .._errors import message

_OWN = (TypeError, ValueError, LookupError, AttributeError)
"""The exceptions that a function raises for arguments that do not fit."""

_TRACED = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
"""The exceptions that JAX raises if a function needs the value of a traced array."""


@contextlib.contextmanager
def evaluating(
    function: str, f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Raises an error in four parts if `f` fails on its arguments. Errors of jqx pass unchanged,
    and errors of JAX keep their class.
    """
    try:
        yield
    except _OWN as error:
        if str(error).startswith("jqx."):
            raise
        text = _text(function, f, args, kwargs, error)
        if isinstance(error, _TRACED):
            same = type(error).__new__(type(error))  # its constructor would require the tracer
            same.args = (text,)
            raise same from error
        raise (TypeError if isinstance(error, TypeError) else ValueError)(text) from error


def _text(
    function: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: Exception,
) -> str:
    given = ", ".join([*map(kind_of, args), *(f"{k}={kind_of(x)}" for k, x in kwargs.items())])
    misfit = _misfit(f, args, kwargs)
    if misfit is not None:
        problem, expected = misfit
        fix = "pass the arguments of f in its order."
        if "too many positional" in problem:
            fix += " Leave out what f does not take, such as labels."
        if any(isinstance(x, list) for x in args[1:]):
            fix += " A batch that is a list is one argument: several are a tuple."
        return message(function, problem, given=given or "none", expected=expected, fix=fix)
    why = next(iter(str(error).splitlines()), "")
    expected = "arguments that f accepts, in its order"
    fix = "call f itself with them to see where it fails."
    if isinstance(error, _TRACED):
        fix = "write f with jax.numpy, as for jax.jit: it is traced, without values."
    elif any(hasattr(x, "aval") for x in args):
        fix += " Under jax.vmap, f sees one example: map the batch alone, in_axes=(None, 0)."
    return message(
        function,
        f"`f` cannot be evaluated on these arguments. {type(error).__name__}: {why[:300]}",
        given=given,
        expected=expected,
        fix=fix,
    )


def _misfit(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Returns why `f` does not accept these arguments, and what it accepts; otherwise `None`."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # it has no signature
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(map(str, signature.parameters))
        return f"`f` does not take these arguments: {error}.", f"those of f: ({names})"
    return None


def kind_of(x: Any) -> str:
    """Describes an argument by its type: an array by its shape, a tree by its arrays."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    leaves = [leaf for leaf in jax.tree.leaves(x) if hasattr(leaf, "shape")]
    few = ", ".join(map(kind_of, leaves[:3])) + (", ..." if len(leaves) > 3 else "")
    return f"a {type(x).__name__}" + (f" of {few}" if leaves else "")
