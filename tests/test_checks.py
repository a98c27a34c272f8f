"""Checks cost next to nothing where they hold: no message is written, nothing else is called."""

import sys

import jax
import jax.numpy as jnp
import pytest

import jqx
from jqx import _checks


def calls_of(f):
    """How many Python functions a call enters."""
    entered = []
    sys.setprofile(lambda frame, event, _: event == "call" and entered.append(frame.f_code.co_name))
    try:
        f()
    finally:
        sys.setprofile(None)
    return entered


PARTS = {"error": ValueError, "function": "f", "problem": "p.", "given": "g", "expected": "e"}


def test_a_condition_that_holds_enters_no_other_function():
    entered = calls_of(lambda: _checks.require_that(True, mend="m.", **PARTS))
    assert entered == ["<lambda>", "require_that"]


def test_a_failed_condition_is_an_error_in_four_parts():
    with pytest.raises(ValueError) as caught:
        _checks.require_that(False, mend="m.", **PARTS)
    expected = "jqx.f: p.\n  given:    g\n  expected: e\n  to mend:  m."
    assert str(caught.value) == expected
    assert caught.value.__cause__ is None


def test_conversions_trace_without_the_text_of_a_tensor(monkeypatch):
    f = lambda w, x: x @ w  # noqa: E731
    w, x = jnp.ones((4, 4)), jnp.ones((1, 4))
    plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(w, x)
    q = jqx.quantize_params(w, plan)
    monkeypatch.setattr(jqx.QTensor, "__repr__", lambda self: 1 / 0)
    jax.make_jaxpr(jqx.convert(f, plan))(q, x)
