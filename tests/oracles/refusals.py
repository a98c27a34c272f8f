"""What every error of jqx must look like, wherever it is raised."""

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest

import jqx


def assert_refused(
    f: Callable[..., Any],
    operands: Sequence[Any],
    error: type[Exception],
    function: str,
    *facts: str,
) -> None:
    """Asserts that `f(*operands)` raises a four-part error with these facts, traced or not."""
    parts = rf"jqx\.{function}: .+(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+"
    forms = {
        "eagerly": lambda: f(*operands),
        "under jit": lambda: jax.jit(f)(*operands),
        "under eval_shape": lambda: jax.eval_shape(f, *operands),
    }
    for form, evaluate in forms.items():
        with pytest.raises(error, match=rf"^jqx\.{function}: ") as refusal:
            evaluate()
        text = str(refusal.value)
        assert refusal.type is error, form
        assert re.fullmatch(parts, text), (form, text)
        for fact in facts:
            assert fact in text, (form, fact, text)
        assert not re.search(r"Traced|Tracer|Array\(", text), (form, text)


def assert_error(
    call: Callable[[], Any], *words: str, error: type[Exception] = ValueError
) -> Exception:
    """Asserts that a call raises an error with these words, of bounded length, and returns it."""
    with pytest.raises(error) as info:
        call()
    text = str(info.value)
    assert text.startswith("jqx.") and "\n  fix:      " in text, text
    assert all(word in text for word in words), text
    assert len(text) < 2000
    return info.value


def refusal(facts: str | tuple[str, ...], *operands: Any, **options: Any) -> tuple[Any, ...]:
    """A case of `assert_refusals`: what the error says, and the arguments that it is raised for."""
    return operands, options, (facts,) if isinstance(facts, str) else facts


def assert_refusals(
    function: str,
    error: type[Exception],
    cases: Sequence[tuple[Any, ...]],
    *operands: Any,
    **defaults: Any,
) -> None:
    """Asserts that a function, which is named as in `jqx.`, refuses each case as `assert_refused`
    says. Operands and options that a case does not have are those that are given.
    """
    f = operator.attrgetter(function)(jqx)
    for own, options, facts in cases:
        f_of_operands = functools.partial(f, **(defaults | options))
        assert_refused(f_of_operands, own or operands, error, function, *facts)
