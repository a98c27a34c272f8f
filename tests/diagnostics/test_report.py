"""`report`: planted faults, totals that are sums, and every way to show it."""

import importlib
import io
import json

import jax
import jax.numpy as jnp
import pytest

import jqx

from ..arrays import normal

W8 = jqx.presets.w8a16()


def f(p, x):
    return jnp.tanh(x @ p["a"] + p["bias"][None]) @ p["b"]


def params():
    a, b = normal(0, 2, 16, 16)
    return {"a": a, "b": b, "bias": jnp.zeros(16)}


def plan_of(p, policy=W8):
    return jqx.make_plan(f, policy)(p, jnp.ones((2, 16)))


def test_totals_are_sums_of_what_lies_there():
    p = params()
    plan = plan_of(p)
    found = jqx.report(plan, p)
    assert [w.path for w in found.weights] == ["a", "b"]
    assert found.bytes_before == sum(x.nbytes for x in jax.tree.leaves(p))
    quantized = jqx.quantize_params(p, plan)
    assert found.bytes_after == sum(
        x.nbytes for x in jax.tree.leaves(quantized, is_leaf=lambda x: isinstance(x, jqx.QTensor))
    )
    assert found.kept == p["bias"].nbytes
    assert (found.sites, found.skipped, found.macs) == (2, 0, 1.0)
    assert found.weights[0].bits == 8 + 32 / 16 and found.faults == ()


def test_a_dead_scale_and_a_clipped_weight_are_faults():
    p = params()
    p["a"] = p["a"].at[:, 3].set(0.0)
    narrow = jqx.calibrators.fixed(-0.5, 0.5)
    rules = [jqx.Rule("b", weight=jqx.QSpec(jnp.int8, calibrator=narrow)), *W8.rules]
    found = jqx.report(plan_of(p, jqx.Policy(rules)), p)
    first, second = found.faults
    assert (first.path, first.dead, first.clipped) == ("a", 1, 0.0)
    assert second.path == "b" and second.dead == 0
    outside = float((jnp.abs(p["b"]) > 0.5 * 127.5 / 127).mean())
    assert abs(second.clipped - outside) < 0.01 and second.sqnr < first.sqnr


def test_a_site_left_in_float_is_counted():
    found = jqx.report(plan_of(params(), jqx.Policy([jqx.Rule("b"), *W8.rules])), params())
    assert (found.sites, found.skipped, found.macs) == (1, 1, 0.5)
    assert "1 of 2 contractions quantized, 50.0 %" in str(found)


def test_it_is_shown_as_text_markdown_html_rich_and_json():
    found = jqx.report(plan_of(params()), params())
    assert len(str(found).splitlines()) == 2 + 2 + 1
    assert found.to_markdown().count("\n| ") == 3
    assert "<tr><th" in found._repr_html_() and "int8 per_axis(1)" in found._repr_html_()
    data = json.loads(json.dumps(found.to_dict()))
    assert data["weights"][0]["path"] == "a" and data["bytes_after"] == found.bytes_after
    console = importlib.import_module("rich.console").Console(width=200, file=io.StringIO())
    console.print(found)
    assert "per_axis(1)" in console.file.getvalue()


def test_several_arguments_of_parameters():
    def g(p, x, q):
        return (x @ p) @ q

    p, q, x = params()["a"], params()["b"], jnp.ones((2, 16))
    plan = jqx.make_plan(g, W8, params=(0, 2))(p, x, q)
    assert [w.path for w in jqx.report(plan, (p, q)).weights] == ["0", "2"]


def test_what_is_refused():
    p = params()
    plan = plan_of(p)
    with pytest.raises(ValueError, match="have no values"):
        jqx.report(plan, jax.eval_shape(lambda: p))
    with pytest.raises(ValueError, match="quantized already"):
        jqx.report(plan, jqx.quantize_params(p, plan))
    with pytest.raises(TypeError, match="plan"):
        jqx.report(W8, p)


def test_it_is_of_the_scales_that_are_given():
    w = jnp.linspace(-1, 1, 64).reshape(8, 8)
    plan = jqx.make_plan(lambda w, x: x @ w, jqx.presets.w8a16())(w, w)
    coarse = {plan.weights[0].key: jqx.calibrators.Affine(jnp.full((1, 8), 0.1))}
    found, plain = jqx.report(plan, w, coarse).weights[0], jqx.report(plan, w).weights[0]
    assert found.sqnr < 30 < 40 < plain.sqnr


def test_a_function_without_parameters_has_a_report():
    rule = jqx.Rule(".*", activation="int8:tensor:dynamic", optional=True)
    plan = jqx.make_plan(lambda p, x: x @ x.T, jqx.Policy([rule]))({}, jnp.ones((2, 3)))
    found = jqx.report(plan, {})
    assert (found.bytes_before, found.bytes_after) == (0, 0)
    assert "0 bytes of parameters become 0; 1 of 1 contractions" in str(found)
    assert "0 bytes" in found._repr_html_()
