"""What every error of jqx must look like, wherever it is raised."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest


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
