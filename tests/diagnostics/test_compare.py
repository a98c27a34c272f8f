"""`compare` against both functions evaluated apart, through every control-flow form; parts of scans
in all diagnostics.
"""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx

from ..arrays import normal
from ..models.forms import FORMS, POLICIES, UNTAKEN, function, reference, rows, weights
from ..oracles.contractions import near

POLICY = POLICIES["weights and activations"]
W8A8 = jqx.presets.w8a8_dynamic()


ROUNDING = 160 * 2.0**-24
"""Of sums of at most 160 float32 squares."""


def leaves(tree):
    return [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]


def expected(y, z):
    """SQNR in dB, cosine and largest difference of two results, in float64."""
    y, z = np.concatenate(leaves(y)), np.concatenate(leaves(z))
    noise = ((z - y) ** 2).sum()
    sqnr = math.inf if noise == 0 else 10 * math.log10((y * y).sum() / noise)
    return sqnr, (y @ z) / math.sqrt((y @ y) * (z @ z)), abs(z - y).max()


def assert_close(row, numbers, atol=0.0):
    result = (row.sqnr, row.cosine, row.max_error)
    np.testing.assert_allclose(result, numbers, rtol=ROUNDING, atol=atol)


@pytest.mark.many
@pytest.mark.parametrize("name", FORMS)
def test_the_error_of_the_result_in_every_form(name):
    w, x = weights(), rows()
    comparison = jqx.compare(function(name), POLICY, "dynamic")(w, x)
    assert_close(
        comparison.result,
        expected(function(name)(w, x), reference(name, "weights and activations")(w, x)),
    )
    plan = jqx.make_plan(function(name), POLICY)(w, x)
    rows_of = sum(math.prod(loop.length for loop in site.loops) for site in plan.sites)
    assert len(comparison.sites) == rows_of
    untaken = [row for row in comparison.sites if math.isnan(row.sqnr)]
    assert bool(untaken) == (name in UNTAKEN)
    assert all(row.local_sqnr > 0 for row in comparison.sites if row not in untaken)


def layers(params, x):
    """Two layers, one after the other."""
    return jnp.tanh(x @ params["a"]) @ params["b"]


PARAMS = {"a": normal(0, 8, 8), "b": normal(1, 8, 3)}
X = normal(2, 5, 8)


def test_own_and_gathered_errors_of_two_layers():
    comparison = jqx.compare(layers, W8A8, "dynamic")(PARAMS, X)
    one = jqx.simulate(lambda p, x: x @ p["a"], W8A8, "dynamic")
    two = jqx.simulate(lambda p, x: x @ p["b"], W8A8, "dynamic")
    middle, rounded = X @ PARAMS["a"], one({"a": PARAMS["a"]}, X)
    first, second = comparison.sites
    assert (first.path, second.path) == ("a", "b")
    assert_close(first, expected(middle, rounded))
    assert (first.sqnr, first.max_error) == (first.local_sqnr, first.local_max_error)
    hidden = jnp.tanh(middle)
    end, alone = hidden @ PARAMS["b"], two({"b": PARAMS["b"]}, hidden)
    gathered = two({"b": PARAMS["b"]}, jnp.tanh(rounded))
    # Another program may add the eight products up in another order, on both sides.
    atol = 2 * 8 * 2.0**-24 * float((jnp.abs(hidden) @ jnp.abs(PARAMS["b"])).max())
    assert_close(second, expected(end, gathered), atol)
    sqnr, _, largest = expected(end, alone)
    np.testing.assert_allclose(
        (second.local_sqnr, second.local_max_error), (sqnr, largest), rtol=ROUNDING, atol=atol
    )
    assert_close(comparison.result, expected(end, gathered), atol)


def through_layers(w, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def test_one_row_for_each_layer_of_a_scan():
    """The layer with the planted outlier is the worst."""
    w = normal(0, 4, 8, 8).at[2, 0, 0].set(500.0)
    policy = jqx.presets.w8a8_dynamic(weight={"granularity": jqx.per_axis(0)})

    comparison = jqx.compare(through_layers, policy, "dynamic")(w, X)
    assert [row.layer for row in comparison.sites] == [(0,), (1,), (2,), (3,)]
    assert comparison.worst(1)[0].layer == (2,)
    tensor = jqx.presets.w8a8_dynamic(weight={"granularity": jqx.per_tensor()})
    each, x = jqx.simulate(lambda w, x: x @ w, tensor, "dynamic"), X
    for i, row in enumerate(comparison.sites):
        sqnr, _, _ = expected(x @ w[i], each(w[i], x))
        decibels = 10 / math.log(10) * near(10 ** (-sqnr / 10), 1, 8)
        np.testing.assert_allclose(row.local_sqnr, sqnr, rtol=0, atol=decibels)
        x = jnp.tanh(x @ w[i])


def test_a_planted_outlier_channel_is_the_worst_site():
    params = {name: normal(i, 8, 8) for i, name in enumerate("abcd")}
    params["c"] = params["c"].at[:, 3].mul(200.0)
    policy = jqx.presets.w8a16(weight={"granularity": jqx.per_tensor()})

    def f(p, x):
        for name in "abcd":
            x = jnp.tanh(x @ p[name])
        return x

    comparison = jqx.compare(f, policy, "dynamic")(params, X)
    assert comparison.worst()[0].path == "c"
    healthy = [row.local_sqnr for row in comparison.sites if row.path != "c"]
    assert comparison.worst()[0].local_sqnr < min(healthy) - 1


def test_static_scales_and_outputs_are_those_given():
    int8 = jqx.QSpec(jnp.int8)
    policy = jqx.Policy([jqx.Rule(weight=int8, activation=int8, output=int8)])
    plan = jqx.make_plan(layers, policy)(PARAMS, X)
    affines = jqx.affines(plan, jqx.calibrate(layers, plan)(PARAMS, X / 8)[1])  # too small
    comparison = jqx.compare(layers, plan, affines)(PARAMS, X)
    simulated = jqx.simulate(layers, plan, affines)(PARAMS, X)
    assert_close(comparison.result, expected(layers(PARAMS, X), simulated))
    assert (
        comparison.result.sqnr < jqx.compare(layers, policy, "dynamic")(PARAMS, X).result.sqnr - 10
    )


def test_exact_sites_are_exact():
    w = jnp.round(normal(0, 8, 8) * 20).at[0].set(127.0)
    comparison = jqx.compare(lambda w, x: x @ w, jqx.presets.w8a16(), "dynamic")(
        w, jnp.ones((2, 8))
    )
    assert comparison.result.sqnr == math.inf and comparison.result.max_error == 0
    assert "exact" in str(comparison)


def test_a_float_weight_elsewhere_and_a_lookup():
    def f(p, i):
        return (p["t"][i] @ p["w"]) * p["w"].sum()

    params = {"t": normal(0, 7, 8), "w": normal(1, 8, 4)}
    ids = jnp.array([1, 5, 2])
    policy = jqx.presets.w8a16(tables="int8")
    comparison = jqx.compare(f, policy, "dynamic")(params, ids)
    assert [row.op for row in comparison.sites] == ["gather", "dot_general"]
    assert_close(
        comparison.result, expected(f(params, ids), jqx.simulate(f, policy, "dynamic")(params, ids))
    )


def test_under_jit_inside_and_with_static_arguments():
    def f(p, x, *, depth):
        for _ in range(depth):
            x = jax.jit(lambda w, x: jnp.tanh(x @ w))(p, x)
        return {"x": x, "n": depth, "i": jnp.arange(3)}

    comparison = jqx.compare(f, W8A8, "dynamic")(PARAMS["a"], X, depth=3)
    assert (
        len(comparison.sites) == 3
        and comparison.sites[0].sqnr > comparison.sites[2].local_sqnr - 60
    )
    assert comparison.result.path == "(result)"


def test_it_prints_and_serializes():
    comparison = jqx.compare(layers, W8A8, "dynamic")(PARAMS, X)
    lines = str(comparison).splitlines()
    assert lines[0].split()[:2] == ["path", "op"] and len(lines) == 2 + 3 + 1
    data = json.loads(json.dumps(comparison.to_dict()))
    assert [row["path"] for row in data["sites"]] == ["a", "b"]
    assert data["result"]["sqnr"] == comparison.result.sqnr
    assert comparison.to_markdown().startswith("| path | op |")
    assert comparison._repr_html_().count("<tr>") == 4


def test_codes_that_were_rounded_before_compare_as_parameters_do():
    plan = jqx.make_plan(layers, W8A8)(PARAMS, X)
    codes = jqx.quantize_params(PARAMS, plan)
    one = jqx.compare(layers, plan, "dynamic")(PARAMS, X)
    for rounded_before in (codes, jqx.pack_for(codes, "cpu")):
        assert jqx.compare(layers, plan, "dynamic", weights=rounded_before)(PARAMS, X) == one


def test_codes_that_an_algorithm_chose_are_compared_with_its_report():
    w, x = normal(0, 3, 8, 8), normal(3, 64, 8)
    policy = jqx.Policy({".*": "int3"})
    quantize = jqx.ptq(through_layers, policy, jqx.algorithms.gptq(), target=False, progress=False)
    done = quantize(w, [x])
    comparison = jqx.compare(through_layers, done)(w, x)
    alone = jqx.compare(through_layers, done.plan, weights=done.params)(w, x)
    sites = [dataclasses.replace(row, objective=None) for row in comparison.sites]
    assert list(alone.sites) == sites
    lost = np.asarray(done.params.dequantize(), np.float64) - np.asarray(w, np.float64)
    for i, (row, entry) in enumerate(zip(comparison.sites, done.details, strict=True)):
        real = np.asarray(x, np.float64)
        ratio = np.sum((real @ np.asarray(w[i])) ** 2) / np.sum((real @ lost[i]) ** 2)
        squares = 2 * x.size * 2.0**-24  # both are float32 sums of as many squares
        rtol = near(1 / ratio, 1, 8) + squares
        np.testing.assert_allclose(10 ** (row.local_sqnr / 10), ratio, rtol=rtol)
        assert row.objective == entry.after / entry.before < 1
        x = jnp.tanh(x @ w[i])
    plain = jqx.compare(through_layers, done.plan)(w, normal(3, 64, 8))
    assert plain.sites[0].local_sqnr < comparison.sites[0].local_sqnr
    assert [row.objective for row in plain.sites] == [None] * 3
    assert "objective" in str(comparison) and "objective" not in str(plain)
    assert comparison.to_dict()["sites"][0]["objective"] == comparison.sites[0].objective


def test_weights_that_do_not_fit_are_refused():
    plan = jqx.make_plan(layers, W8A8)(PARAMS, X)
    quantized = lambda params, spec: jax.tree.map(  # noqa: E731
        lambda w: jqx.QTensor.quantize(w, spec), params
    )
    longer = quantized({**PARAMS, "a": normal(0, 9, 8)}, plan.weights[0].spec)
    for codes, *words in (
        (PARAMS, "floats: 'a'", "a QTensor of int8"),
        ({"a": normal(0, 4, 4), "b": normal(0, 8, 3)}, "floats: 'a'"),
        (quantized(PARAMS, jqx.QSpec("int4")), "int4[8, 8]", "a QTensor of int8"),
        (longer, "shape (9, 8) for 'a', which has shape (8, 8)"),
    ):
        with pytest.raises(ValueError, match="compare") as error:
            jqx.compare(layers, plan, "dynamic", weights=codes)(PARAMS, X)
        assert all(word in str(error.value) for word in words)
    with pytest.raises(ValueError, match="quantized already") as error:
        jqx.compare(layers, plan, "dynamic")(jqx.quantize_params(PARAMS, plan), X)
    assert "jqx.quantize_params" in str(error.value)


def test_a_nan_is_told():
    params = {**PARAMS, "b": PARAMS["b"].at[0, 0].set(jnp.nan)}
    comparison = jqx.compare(layers, W8A8, "dynamic")(params, X)
    assert math.isnan(comparison.result.sqnr) and comparison.sites[0].sqnr > 0


L, K = 3, 8
BY_STEP = jqx.Policy(
    [
        jqx.Rule("layers[0]", weight="int8", activation="int8:dynamic"),
        jqx.Rule("layers/.*", weight="int4", activation="int8:dynamic"),
        jqx.Rule(activation="int8:dynamic"),
    ]
)


def with_scores(p, x):
    def layer(h, w):
        with jax.named_scope("scores"):
            scores = h @ h.T
        return jnp.tanh(jax.nn.softmax(scores) @ h @ w["a"]), None

    return jax.lax.scan(layer, x, p["layers"])[0] @ p["head"]


def test_every_part_has_a_row():
    rng = np.random.default_rng(0)
    p = {"layers": {"a": rng.normal(size=(L, K, K))}, "head": rng.normal(size=(K, 2))}
    p = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), p)
    x = jnp.asarray(rng.normal(size=(4, K)), jnp.float32)
    plan = jqx.make_plan(with_scores, BY_STEP)(p, x)
    parts = ["layers/a[0:1]", "layers/a[1:3]"]
    assert {"[0:1]/scores", "[1:3]/scores", *parts} <= {site.path for site in plan.sites}
    assert len({site.name for site in plan.sites}) == len(plan.sites)
    names = [site.path for site in plan.sites]
    assert [row.path for row in jqx.report(plan, p).weights] == parts
    quantized = jqx.quantize_params(p, plan)
    explanation = jqx.explain(with_scores, quantized, x, plan=plan)
    assert [site.path for site in explanation.sites][: len(names)] == names
    assert "gone" not in {site.executed_as for site in explanation.sites}
    assert {row.path for row in jqx.compare(with_scores, plan)(p, x).sites} == set(names)
    assert jqx.diagnostics.ranges(with_scores, plan)(quantized, x) is not None
    made = jqx.ptq(with_scores, BY_STEP, progress=False)(p, [x])
    wanted = jax.jit(jqx.convert(with_scores, plan))(quantized, x)
    np.testing.assert_array_equal(jax.jit(made.function)(made.params, x), wanted)
