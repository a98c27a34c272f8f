"""Messages of errors, and that none is written where nothing is wrong."""

import jax
import jax.numpy as jnp

import jqx
from jqx._src import errors


def test_a_message_has_only_the_parts_that_it_is_given():
    parts = {"given": "g", "expected": "e", "fix": "m."}
    whole = str(errors.fail("f", "p.", **parts))
    assert whole == "jqx.f: p.\n  given:    g\n  expected: e\n  fix:      m."
    assert str(errors.fail("f", "p.", fix="m.")) == "jqx.f: p.\n  fix:      m."


def test_an_error_is_a_value_error_unless_another_class_is_named():
    assert type(errors.fail("f", "p.")) is ValueError
    assert type(errors.fail("f", "p.", error=TypeError)) is TypeError


def test_conversions_trace_without_the_text_of_a_tensor(monkeypatch):
    f = lambda w, x: x @ w  # noqa: E731
    w, x = jnp.ones((4, 4)), jnp.ones((1, 4))
    plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(w, x)
    q = jqx.quantize_params(w, plan)
    monkeypatch.setattr(jqx.QTensor, "__repr__", lambda self: 1 / 0)
    jax.make_jaxpr(jqx.convert(f, plan))(q, x)
