"""Errors that a function raises while it is traced: said to be its own, with its arguments."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from .._errors import message

_OWN = (TypeError, ValueError, LookupError, AttributeError)
"""What arguments that do not fit make of a function."""

_TRACED = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
"""What JAX raises where a function asks for a value that is traced."""


@contextlib.contextmanager
def evaluating(
    function: str, f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Raises in four parts where `f` fails on its arguments; jqx's own errors pass as they are, and
    those of JAX keep their class.
    """
    try:
        yield
    except _OWN as error:
        if str(error).startswith("jqx."):
            raise
        text = _text(function, f, args, kwargs, error)
        if isinstance(error, _TRACED):
            same = type(error).__new__(type(error))  # it would ask for the tracer
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
    given = ", ".join([*map(_shown, args), *(f"{k}={_shown(x)}" for k, x in kwargs.items())])
    misfit = _misfit(f, args, kwargs)
    if misfit is not None:
        problem, expected = misfit
        mend = "pass the arguments of f, in its order."
        return message(function, problem, given=given or "none", expected=expected, mend=mend)
    why = next(iter(str(error).splitlines()), "")
    expected = "arguments that f itself takes, in its order"
    mend = "call f itself on them to see where it fails."
    if isinstance(error, _TRACED):
        mend = "write f with jax.numpy, as jax.jit needs it: it is traced, without values."
    elif any(hasattr(x, "aval") for x in args):
        mend += " Under jax.vmap, f sees one example: map the batch alone, in_axes=(None, 0)."
    return message(
        function,
        f"`f` cannot be evaluated on these arguments. {type(error).__name__}: {why[:300]}",
        given=given,
        expected=expected,
        mend=mend,
    )


def _misfit(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Returns why `f` does not take as many arguments, or of such names, and what it takes."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # it does not say
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(map(str, signature.parameters))
        return f"`f` does not take these arguments: {error}.", f"those of f: ({names})"
    return None


def _shown(x: Any) -> str:
    """Returns an argument by its type: an array with its shape, a tree by its number of arrays."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    leaves = [leaf for leaf in jax.tree.leaves(x) if hasattr(leaf, "shape")]
    few = ", ".join(map(_shown, leaves[:3])) + (", ..." if len(leaves) > 3 else "")
    return f"a {type(x).__name__}" + (f" of {few}" if leaves else "")
