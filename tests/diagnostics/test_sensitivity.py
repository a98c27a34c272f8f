"""What quantization of each part costs, against the function evaluated with that part by hand."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.diagnostics import Bits, relative_error, search, sensitivity

from ..arrays import normal
from ..models.forms import FORMS, POLICIES, function, reference, rows, weights
from .errors import near

NAMES = "abcd"
W4 = jqx.presets.w8a16(weight={"qtype": jnp.int4})
W8A8 = jqx.presets.w8a8()


def chain(p, x):
    for name in NAMES:
        x = jnp.tanh(x @ p[name])
    return x


def random(*shape, seed=0):
    return normal(seed, *shape)


PARAMS = {name: random(8, 8, seed=i) for i, name in enumerate(NAMES)}
BATCHES = [random(5, 8, seed=7), random(5, 8, seed=8)]


def alone(policy, name, x, others=False):
    """The metric with one weight quantized, or with all but it."""
    rules = [jqx.Rule(name)] if others else []
    rules += [
        jqx.Rule(name if not others else ".*", weight=r.weight, activation=r.activation)
        for r in policy.rules
    ]
    plan = jqx.make_plan(chain, jqx.Policy(rules))(PARAMS, x)
    affines = None
    if plan.static_specs():
        stats = jqx.calibrate_batches(chain, plan, PARAMS, BATCHES, progress=False)
        affines = jqx.affines(plan, stats)
    return relative_error(jqx.simulate(chain, plan, affines)(PARAMS, x), chain(PARAMS, x))


@pytest.mark.parametrize("policy", [W4, W8A8], ids=["weights", "static activations"])
def test_one_at_a_time_is_each_alone(policy):
    found = sensitivity(chain, policy)(PARAMS, *BATCHES)
    for name in NAMES:
        expected = np.mean([alone(policy, name, x) for x in BATCHES])
        np.testing.assert_allclose(found[name], expected, rtol=near(expected, 4, 8))
    plan = jqx.make_plan(chain, policy)(PARAMS, BATCHES[0])
    stats = jqx.calibrate_batches(chain, plan, PARAMS, BATCHES, progress=False)
    whole = jqx.simulate(chain, plan, jqx.affines(plan, stats) if stats else None)
    errors = [relative_error(whole(PARAMS, x), chain(PARAMS, x)) for x in BATCHES]
    mean = np.mean(errors)
    np.testing.assert_allclose(found.everything, mean, rtol=near(mean, 4, 8))


def test_all_but_one_is_what_the_metric_falls_by():
    found = sensitivity(chain, W4, estimate="all_but_one")(PARAMS, *BATCHES)
    for name in NAMES:
        rest = np.mean([alone(W4, name, x, others=True) for x in BATCHES])
        off = sum(near(e, 4, 8) * e for e in (found.everything, rest))
        np.testing.assert_allclose(found[name], found.everything - rest, rtol=0, atol=off)


@pytest.mark.many
@pytest.mark.parametrize("name", FORMS)
def test_everything_in_every_form_is_quantization_by_hand(name):
    policy = "weights and activations"
    found = sensitivity(function(name), POLICIES[policy])(weights(), rows())
    functions = function(name), reference(name, policy)
    plain, quantized = jax.jit(lambda w, x: [f(w, x) for f in functions])(weights(), rows())
    error = relative_error(quantized, plain)  # every product is exact: the sum of it is not
    np.testing.assert_allclose(found.everything, error, rtol=100 * 2.0**-24)


@pytest.mark.parametrize("estimate", ["one_at_a_time", "all_but_one", "hessian"])
def test_a_planted_outlier_comes_first(estimate):
    """In weight `c` one large value takes the resolution of all others; its layer does not
    saturate, as the outlier meets an input that is zero.
    """
    params = {**PARAMS, "c": PARAMS["c"].at[0, 0].set(60.0)}

    def f(p, x):
        x = jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]).at[:, 0].set(0.0)
        return jnp.tanh(x @ p["c"]) @ p["d"]

    policy = jqx.presets.w8a16(weight={"granularity": jqx.per_tensor()})
    found = sensitivity(f, policy, estimate=estimate)(params, *BATCHES)
    assert found.ranked[0].path == "c"
    assert found.ranked[0].cost > 5 * found.ranked[1].cost


@pytest.mark.parametrize("spoilt", ["output", "input", "weight"])
def test_every_tool_names_the_weight_that_an_outlier_spoils(spoilt):
    """A large channel of `b` holds nearly all energy of the result, so that it is no measure."""

    def f(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    a, b, x = (random(64, 64, seed=i) for i in range(3))
    wide = {
        "output": b.at[:, 5].mul(50.0),
        "input": b.at[5].mul(50.0),
        "weight": b.at[5, 5].set(30.0),
    }
    params = {"a": a, "b": wide[spoilt]}
    ways = {f"int{n}": jqx.Policy({".*": f"int{n}:tensor"}) for n in (4, 8)}
    plan = jqx.make_plan(f, ways["int4"])(params, x)
    costs = sensitivity(f, plan)(params, x)
    assert costs["b"] > 1.5 * costs["a"]
    assert search(f, plan, ways, Bits(6.5))(params, x).schemes == {"a": "int4", "b": "int8"}
    sqnr = {row.path: row.sqnr for row in jqx.report(plan, params).weights}
    assert sqnr["b"] < sqnr["a"] - 0.5
    own = {row.name: row.local_sqnr for row in jqx.compare(f, plan)(params, x).sites}
    assert own["b"] < own["a"] - 0.5


def test_the_relative_error_is_that_of_a_channel_on_average():
    """Sizes of channels are no matter, where many rows show them. A mean of 4096 squares of normal
    numbers has a standard deviation of 2 %, of 8 channels .8 %, and so has the energy below it; the
    row that is added takes up to 4 %. The formula itself is held to roundings of float32.
    """

    def formula(z, y):
        signal, noise = (np.square(np.asarray(x, np.float64)).mean(0) for x in (y, z - y))
        n, added = len(y), np.sqrt(signal).mean() ** 2
        return (noise / ((n * signal + added) / (n + 1))).mean()

    y, noise = random(4096, 8), random(4096, 8, seed=1) / 8
    sizes = jnp.float32(2.0 ** np.arange(8))[None]
    for size in (jnp.ones((1, 8)), sizes):
        found = relative_error({"y": (y + noise) * size}, {"y": y * size})
        np.testing.assert_allclose(found, 1 / 64, rtol=0.06)
        expected = formula((y + noise) * size, y * size)
        np.testing.assert_allclose(found, expected, rtol=2.0**-16)
    lost = relative_error((y * sizes).at[:, :4].set(0.0), y * sizes)  # 1 % of the energy
    np.testing.assert_allclose(lost, 1 / 2, rtol=0.08)
    single = y.at[:, 1:].set(0.0)  # the others are zero, and exact
    np.testing.assert_allclose(relative_error(1.5 * single, single), 0.25 / 8, rtol=1e-3)
    loss = relative_error(jnp.asarray(3.0), jnp.asarray(2.0))
    assert loss == 0.25


def test_the_weight_error_is_the_inverse_of_its_sqnr():
    found = sensitivity(chain, W4, estimate="weight_error")(PARAMS, BATCHES[0])
    plan = jqx.make_plan(chain, W4)(PARAMS, BATCHES[0])
    q = jqx.quantize_params(PARAMS, plan)
    for name in NAMES:
        error = np.asarray(q[name].dequantize(), np.float64) - np.asarray(PARAMS[name])
        expected = (error**2).sum() / (np.asarray(PARAMS[name], np.float64) ** 2).sum()
        np.testing.assert_allclose(found[name], expected, rtol=2 * 64 * 2.0**-24)  # sums of 64
    assert found.everything is None


def test_the_hessian_of_a_quadratic_is_found_exactly():
    """Of a mean of squares of `x w` the Hessian is known; its diagonal is what signs show, up to
    the products of different inputs, which average out.
    """

    def f(p, x):
        return (x @ p["w"]) * p["s"]

    x = jnp.diag(jnp.arange(1.0, 9.0))  # orthogonal inputs: a diagonal Hessian
    params = {"w": PARAMS["a"], "s": jnp.ones(8)[None]}
    metric = lambda y, plain: jnp.sum((y - plain) ** 2)  # noqa: E731
    found = sensitivity(f, W4, metric, estimate="hessian", samples=2)(params, x)
    plan = jqx.make_plan(f, W4)(params, x)
    error = jqx.quantize_params(params, plan)["w"].dequantize() - params["w"]
    mean = 2 * (jnp.arange(1.0, 9.0) ** 2).sum() * 8 / 64
    terms = 2 * 64 * 2.0**-24  # sums of 64 squares on either side
    np.testing.assert_allclose(found["w"], mean * (error**2).sum(), rtol=terms)


def test_fisher_is_squared_gradient_times_squared_error():
    def loss(p, x, y):
        return jnp.mean((chain(p, x) - y) ** 2)

    batch = (BATCHES[0], BATCHES[1])
    found = sensitivity(loss, W4, lambda loss, _: loss, estimate="fisher")(PARAMS, batch)
    gradient = jax.grad(loss)(PARAMS, *batch)
    rounding = 2 * 2 * 4 * 8 * 2.0**-24  # a square, forward and backward through 4 sums of 8
    plan = jqx.make_plan(loss, W4)(PARAMS, *batch)
    q = jqx.quantize_params(PARAMS, plan)
    for name in NAMES:
        error = q[name].dequantize() - PARAMS[name]
        expected = ((gradient[name] * error) ** 2).sum()
        np.testing.assert_allclose(found[name], expected, rtol=rounding)


def test_a_stack_is_one_row_and_a_site_without_weight_has_its_own():
    def f(p, x):
        x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["stack"])[0]
        with jax.named_scope("scores"):
            scores = jnp.einsum("ik,jk->ij", x, x)
        return scores @ (x @ p["w"])

    params = {"stack": random(3, 8, 8), "w": random(8, 8, seed=1)}
    int8 = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)
    rules = [jqx.Rule("scores/.*", activation=int8), *jqx.presets.w8a8_dynamic().rules]
    found = sensitivity(f, jqx.Policy(rules))(params, BATCHES[0])
    assert {row.path for row in found.ranked} == {"stack", "scores/ik,jk->ij", "w"}
    assert all(row.cost > 0 for row in found.ranked)


def test_it_prints_and_serializes():
    found = sensitivity(chain, W4)(PARAMS, BATCHES[0])
    lines = str(found).splitlines()
    assert len(lines) == 2 + 4 + 1 and "all quantized" in lines[-1]
    costs = [row.cost for row in found.ranked]
    assert costs == sorted(costs, reverse=True)
    assert json.loads(json.dumps(found.to_dict()))["estimate"] == "one_at_a_time"


@pytest.mark.parametrize(
    ("change", "call", "error", "text"),
    [
        ({"estimate": "guess"}, (PARAMS, BATCHES[0]), ValueError, "`estimate` is unknown"),
        ({}, (PARAMS,), ValueError, "there is no batch|argument"),
        ({"estimate": "fisher"}, (PARAMS, BATCHES[0]), ValueError, "has no gradient"),
    ],
)
def test_what_is_refused(change, call, error, text):
    plan = jqx.make_plan(chain, W4)(PARAMS, BATCHES[0])
    with pytest.raises(error, match=text):
        sensitivity(chain, plan, **change)(*call)


def test_quantized_parameters_are_refused():
    plan = jqx.make_plan(chain, W4)(PARAMS, BATCHES[0])
    with pytest.raises(ValueError, match=re.escape("a parameter is quantized already")):
        sensitivity(chain, plan)(jqx.quantize_params(PARAMS, plan), BATCHES[0])


def test_a_result_of_zeros_costs_what_it_is_off_by():
    w, x = jnp.ones((4, 4)) / 3, jnp.ones((2, 4))
    zero = sensitivity(lambda w, x: (x @ w) * 0.0, jqx.presets.w8a16(), progress=False)(w, x)
    assert (zero.everything, [row.cost for row in zero.ranked]) == (0.0, [0.0])
    cheap = sensitivity(
        lambda w, x: x @ w, jqx.presets.w8a16(), estimate="weight_error", progress=False
    )(w * 0, x)
    assert [row.cost for row in cheap.ranked] == [0.0]
