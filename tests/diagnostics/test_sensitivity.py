"""What quantization of each part costs, against the function evaluated with that part by hand; what
`search` assigns by these costs, against all assignments and uniform bits.
"""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.diagnostics import Bits, Bytes, Error, relative_error, search, sensitivity

from ..arrays import normal
from ..models.forms import FORMS, POLICIES, function, reference, rows, weights
from ..oracles.contractions import near

NAMES, ABC = "abcd", "abc"
W4 = jqx.presets.w8a16(weight={"qtype": jnp.int4})
W8A8 = jqx.presets.w8a8()


def chain(p, x):
    for name in sorted(p):
        x = jnp.tanh(x @ p[name])
    return x


PARAMS = {name: normal(i, 8, 8) for i, name in enumerate(NAMES)}
BATCHES = [normal(7, 5, 8), normal(8, 5, 8)]


def alone(policy, name, x, others=False):
    """The metric with one weight quantized, or with all but it."""
    path, rules = (".*", [jqx.Rule(name)]) if others else (name, [])
    rules += [jqx.Rule(path, weight=r.weight, activation=r.activation) for r in policy.rules]
    plan = jqx.make_plan(chain, jqx.Policy(rules))(PARAMS, x)
    affines = None
    if plan.static_specs():
        stats = jqx.calibrate_batches(chain, plan, PARAMS, BATCHES, progress=False)
        affines = jqx.affines(plan, stats)
    return relative_error(jqx.simulate(chain, plan, affines)(PARAMS, x), chain(PARAMS, x))


@pytest.mark.parametrize("policy", [W4, W8A8], ids=["weights", "static activations"])
def test_one_at_a_time_is_each_alone(policy):
    costs = sensitivity(chain, policy)(PARAMS, *BATCHES)
    for name in NAMES:
        expected = np.mean([alone(policy, name, x) for x in BATCHES])
        np.testing.assert_allclose(costs[name], expected, rtol=near(expected, 4, 8))
    plan = jqx.make_plan(chain, policy)(PARAMS, BATCHES[0])
    stats = jqx.calibrate_batches(chain, plan, PARAMS, BATCHES, progress=False)
    whole = jqx.simulate(chain, plan, jqx.affines(plan, stats) if stats else None)
    errors = [relative_error(whole(PARAMS, x), chain(PARAMS, x)) for x in BATCHES]
    mean = np.mean(errors)
    np.testing.assert_allclose(costs.everything, mean, rtol=near(mean, 4, 8))


def test_all_but_one_is_what_the_metric_falls_by():
    costs = sensitivity(chain, W4, estimate="all_but_one")(PARAMS, *BATCHES)
    for name in NAMES:
        rest = np.mean([alone(W4, name, x, others=True) for x in BATCHES])
        off = sum(near(e, 4, 8) * e for e in (costs.everything, rest))
        np.testing.assert_allclose(costs[name], costs.everything - rest, rtol=0, atol=off)


@pytest.mark.many
@pytest.mark.parametrize("name", FORMS)
def test_everything_in_every_form_is_quantization_by_hand(name):
    policy = "weights and activations"
    costs = sensitivity(function(name), POLICIES[policy])(weights(), rows())
    functions = function(name), reference(name, policy)
    plain, quantized = jax.jit(lambda w, x: [f(w, x) for f in functions])(weights(), rows())
    error = relative_error(quantized, plain)  # every product is exact: the sum of it is not
    np.testing.assert_allclose(costs.everything, error, rtol=100 * 2.0**-24)


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
    costs = sensitivity(f, policy, estimate=estimate)(params, *BATCHES)
    assert costs.ranked[0].path == "c"
    assert costs.ranked[0].cost > 5 * costs.ranked[1].cost


@pytest.mark.parametrize("spoilt", ["output", "input", "weight"])
def test_every_tool_names_the_weight_that_an_outlier_spoils(spoilt):
    """A large channel of `b` holds nearly all energy of the result, so that it is no measure."""

    def f(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    a, b, x = (normal(i, 64, 64) for i in range(3))
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
    local_sqnr = {row.name: row.local_sqnr for row in jqx.compare(f, plan)(params, x).sites}
    assert local_sqnr["b"] < local_sqnr["a"] - 0.5


def test_the_relative_error_is_that_of_a_channel_on_average():
    """Sizes of channels are no matter, where many rows show them. A mean of 4096 squares of normal
    numbers has a standard deviation of 2 %, of 8 channels .8 %, and so has the energy below it; the
    row that is added takes up to 4 %. The formula itself is held to roundings of float32.
    """

    def formula(z, y):
        signal, noise = (np.square(np.asarray(x, np.float64)).mean(0) for x in (y, z - y))
        n, added = len(y), np.sqrt(signal).mean() ** 2
        return (noise / ((n * signal + added) / (n + 1))).mean()

    y, noise = normal(0, 4096, 8), normal(1, 4096, 8) / 8
    sizes = jnp.float32(2.0 ** np.arange(8))[None]
    for size in (jnp.ones((1, 8)), sizes):
        result = relative_error({"y": (y + noise) * size}, {"y": y * size})
        np.testing.assert_allclose(result, 1 / 64, rtol=0.06)
        expected = formula((y + noise) * size, y * size)
        np.testing.assert_allclose(result, expected, rtol=2.0**-16)
    lost = relative_error((y * sizes).at[:, :4].set(0.0), y * sizes)  # 1 % of the energy
    np.testing.assert_allclose(lost, 1 / 2, rtol=0.08)
    single = y.at[:, 1:].set(0.0)  # the others are zero, and exact
    np.testing.assert_allclose(relative_error(1.5 * single, single), 0.25 / 8, rtol=1e-3)
    loss = relative_error(jnp.asarray(3.0), jnp.asarray(2.0))
    assert loss == 0.25


def test_the_weight_error_is_the_inverse_of_its_sqnr():
    costs = sensitivity(chain, W4, estimate="weight_error")(PARAMS, BATCHES[0])
    plan = jqx.make_plan(chain, W4)(PARAMS, BATCHES[0])
    q = jqx.quantize_params(PARAMS, plan)
    for name in NAMES:
        error = np.asarray(q[name].dequantize(), np.float64) - np.asarray(PARAMS[name])
        expected = (error**2).sum() / (np.asarray(PARAMS[name], np.float64) ** 2).sum()
        np.testing.assert_allclose(costs[name], expected, rtol=2 * 64 * 2.0**-24)  # sums of 64
    assert costs.everything is None


def test_the_hessian_of_a_quadratic_is_found_exactly():
    """Of a mean of squares of `x w` the Hessian is known; its diagonal is what signs show, up to
    the products of different inputs, which average out.
    """

    def f(p, x):
        return (x @ p["w"]) * p["s"]

    x = jnp.diag(jnp.arange(1.0, 9.0))  # orthogonal inputs: a diagonal Hessian
    params = {"w": PARAMS["a"], "s": jnp.ones(8)[None]}
    metric = lambda y, plain: jnp.sum((y - plain) ** 2)  # noqa: E731
    costs = sensitivity(f, W4, metric, estimate="hessian", samples=2)(params, x)
    plan = jqx.make_plan(f, W4)(params, x)
    error = jqx.quantize_params(params, plan)["w"].dequantize() - params["w"]
    mean = 2 * (jnp.arange(1.0, 9.0) ** 2).sum() * 8 / 64
    terms = 2 * 64 * 2.0**-24  # sums of 64 squares on either side
    np.testing.assert_allclose(costs["w"], mean * (error**2).sum(), rtol=terms)


def test_fisher_is_squared_gradient_times_squared_error():
    def loss(p, x, y):
        return jnp.mean((chain(p, x) - y) ** 2)

    batch = (BATCHES[0], BATCHES[1])
    costs = sensitivity(loss, W4, lambda loss, _: loss, estimate="fisher")(PARAMS, batch)
    gradient = jax.grad(loss)(PARAMS, *batch)
    rounding = 2 * 2 * 4 * 8 * 2.0**-24  # a square, forward and backward through 4 sums of 8
    plan = jqx.make_plan(loss, W4)(PARAMS, *batch)
    q = jqx.quantize_params(PARAMS, plan)
    for name in NAMES:
        error = q[name].dequantize() - PARAMS[name]
        expected = ((gradient[name] * error) ** 2).sum()
        np.testing.assert_allclose(costs[name], expected, rtol=rounding)


def test_a_stack_is_one_row_and_a_site_without_weight_has_its_own():
    def f(p, x):
        x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["stack"])[0]
        with jax.named_scope("scores"):
            scores = jnp.einsum("ik,jk->ij", x, x)
        return scores @ (x @ p["w"])

    params = {"stack": normal(0, 3, 8, 8), "w": normal(1, 8, 8)}
    int8 = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)
    rules = [jqx.Rule("scores/.*", activation=int8), *jqx.presets.w8a8_dynamic().rules]
    costs = sensitivity(f, jqx.Policy(rules))(params, BATCHES[0])
    assert {row.path for row in costs.ranked} == {"stack", "scores/ik,jk->ij", "w"}
    assert all(row.cost > 0 for row in costs.ranked)


def test_it_prints_and_serializes():
    sensitivities = sensitivity(chain, W4)(PARAMS, BATCHES[0])
    lines = str(sensitivities).splitlines()
    assert len(lines) == 2 + 4 + 1 and "all quantized" in lines[-1]
    costs = [row.cost for row in sensitivities.ranked]
    assert costs == sorted(costs, reverse=True)
    assert json.loads(json.dumps(sensitivities.to_dict()))["estimate"] == "one_at_a_time"


@pytest.mark.parametrize(
    ("options", "batches", "text"),
    [
        ({"estimate": "guess"}, BATCHES[:1], "`estimate` is unknown"),
        ({}, (), "there is no batch|argument"),
        ({"estimate": "fisher"}, BATCHES[:1], "has no gradient"),
    ],
)
def test_estimates_without_a_meaning_are_refused(options, batches, text):
    plan = jqx.make_plan(chain, W4)(PARAMS, BATCHES[0])
    with pytest.raises(ValueError, match=text):
        sensitivity(chain, plan, **options)(PARAMS, *batches)


def test_quantized_parameters_are_refused():
    plan = jqx.make_plan(chain, W4)(PARAMS, BATCHES[0])
    with pytest.raises(ValueError, match="a parameter is quantized already"):
        sensitivity(chain, plan)(jqx.quantize_params(PARAMS, plan), BATCHES[0])


def test_a_result_of_zeros_costs_what_it_is_off_by():
    w, x = jnp.ones((4, 4)) / 3, jnp.ones((2, 4))
    zero = sensitivity(lambda w, x: (x @ w) * 0.0, jqx.presets.w8a16(), progress=False)(w, x)
    assert (zero.everything, [row.cost for row in zero.ranked]) == (0.0, [0.0])
    cheap = sensitivity(
        lambda w, x: x @ w, jqx.presets.w8a16(), estimate="weight_error", progress=False
    )(w * 0, x)
    assert [row.cost for row in cheap.ranked] == [0.0]


WAYS = {f"int{n}": jqx.presets.w8a16(weight={"qtype": f"int{n}"}) for n in (2, 4, 8)}


THREE = {"a": normal(0, 16, 16), "b": normal(1, 16, 16) / 16, "c": normal(2, 16, 16)}
ROWS = normal(7, 8, 16)


def slightly_above(error):
    """What another program may measure instead of an error."""
    return error * (1 + near(error, 3, 16)) if error else 0


def assert_measured(measured, error, layers=3, terms=16):
    np.testing.assert_allclose(measured, error, rtol=near(error, layers, terms))


def size_of(schemes):
    bits = {"int2": 2, "int4": 4, "int8": 8}
    return sum(16 * 16 * 4 if s == "float" else 16 * 16 * bits[s] / 8 + 16 * 4 for s in schemes)


def policy_of(schemes):
    rules = []
    for name, scheme in zip(ABC, schemes, strict=True):
        weight = WAYS[scheme].rules[0].weight if scheme != "float" else None
        rules.append(jqx.Rule(name, weight=weight))
    return jqx.Policy(rules)


def error_of(schemes):
    return _error_of(tuple(schemes))


@functools.cache
def _error_of(schemes):
    simulated = jqx.simulate(chain, policy_of(schemes))(THREE, ROWS)
    return float(relative_error(simulated, chain(THREE, ROWS)))


@functools.cache
def searched(budget, **options):
    return search(chain, WAYS["int8"], WAYS, budget, **options)(THREE, ROWS)


def every():
    return list(itertools.product(["float", *WAYS], repeat=3))


def cost_alone(index, scheme):
    return error_of(["float"] * index + [scheme] + ["float"] * (2 - index))


@functools.cache
def sums():
    """The sum of the costs of each alone, of every assignment."""
    cost = {(i, s): cost_alone(i, s) for i in range(3) for s in WAYS}
    cost |= {(i, "float"): 0.0 for i in range(3)}
    return {schemes: sum(cost[i, s] for i, s in enumerate(schemes)) for schemes in every()}


def test_the_front_is_that_of_all_assignments():
    """No assignment has fewer bytes and less predicted error than one of the front, which has less
    error for more bytes.
    """
    front = searched(Bytes(10_000)).front
    for schemes, cost in sums().items():
        size = size_of(schemes)
        assert min(p.error for p in front if p.bytes <= size) <= slightly_above(cost)
    assert all(point.bytes == size_of(point.schemes) for point in front) and len(front) > 4
    assert all(a.bytes < b.bytes and a.error > b.error for a, b in itertools.pairwise(front))
    assert front[-1].schemes == ("float",) * 3 and front[-1].error == 0


@pytest.mark.parametrize("limit", [400, 500, 700, 1000, 2000])
def test_the_assignment_is_as_good_as_the_best_of_all(limit):
    """Measured, within the bytes: at least as good as the best predicted one and as any uniform."""
    assignment = searched(Bytes(limit))
    assert assignment.bytes == size_of(assignment.schemes.values()) <= limit
    assert_measured(assignment.measured, error_of(assignment.schemes.values()))
    cheap_enough = {s: cost for s, cost in sums().items() if size_of(s) <= limit}
    best = [min(cheap_enough, key=cheap_enough.__getitem__), *((name,) * 3 for name in WAYS)]
    for schemes in best:
        if size_of(schemes) <= limit:
            assert assignment.measured <= slightly_above(error_of(schemes))


def test_the_policy_gives_what_was_measured_and_bits_are_bytes():
    """Of 3 x 256 weights."""
    one = searched(Bytes(500))
    simulated = jqx.simulate(chain, one.policy)(THREE, ROWS)
    assert_measured(one.measured, relative_error(simulated, chain(THREE, ROWS)))
    plan = jqx.make_plan(chain, one.policy)(THREE, ROWS)
    assert {w.path: str(w.spec.qtype) for w in plan.weights} == {
        path: scheme for path, scheme in one.schemes.items() if scheme != "float"
    }
    assert one.bits == one.bytes * 8 / 768
    assert len(str(one).splitlines()) == 2 + len(ABC) + 1 + len(WAYS) + 1
    assert f"this mixture: {one.bits:.2f} bits a weight ({one.bytes:,.0f} bytes)" in str(one)
    assert "budget: at most 500 bytes" in str(one)
    data = json.loads(json.dumps(one.to_dict()))
    assert data["bytes"] == one.bytes and data["budget"] == {"bytes": 500}
    other = searched(Bits(500 * 8 / 768))
    assert other == dataclasses.replace(one, budget=Bits(500 * 8 / 768))
    assert "budget: at most 5.208 bits a weight" in str(other)


def test_an_error_budget_takes_the_fewest_bytes_that_measure_well():
    limit = 0.02
    assignment = searched(Error(limit))
    assert assignment.measured <= limit
    met = [size_of(s) for s, cost in sums().items() if cost <= limit and error_of(s) <= limit]
    assert assignment.bytes <= min(met)


def test_it_beats_uniform_bits_at_equal_bytes():
    """`b` is small and tanh nearly linear: it bears fewer bits than the others."""
    four = size_of(["int4"] * 3)
    assignment = searched(Bytes(four))
    assert assignment.uniform["int4"][0] == four
    assert assignment.bytes <= four and assignment.measured <= assignment.uniform["int4"][1]


@pytest.mark.parametrize("budget", [Bytes(600), Error(0.02)])
def test_a_greedy_search_measures_the_whole(budget):
    assignment = searched(budget, additive=False)
    assert_measured(assignment.predicted, assignment.measured)
    assert (assignment.bytes if isinstance(budget, Bytes) else assignment.measured) <= budget.limit
    assert assignment.front[0].schemes == ("int2",) * 3
    assert all(a.bytes < b.bytes for a, b in itertools.pairwise(assignment.front))
    assert len(assignment.front) > 2 and assignment.front[-1].error < assignment.front[0].error
    errors = [error_of(s) for s in every() if size_of(s) <= assignment.bytes]
    assert assignment.measured <= 3 * slightly_above(min(errors))


def test_static_activations_are_calibrated_for_each_candidate():
    ways = {"w8a8": jqx.presets.w8a8(), "w4a8": jqx.presets.w8a8(weight={"qtype": jnp.int4})}
    assignment = search(chain, ways["w8a8"], ways, Bytes(size_of(["int8"] * 3)))(THREE, ROWS)
    assert set(assignment.schemes.values()) == {"w8a8"}
    plan = jqx.make_plan(chain, ways["w8a8"])(THREE, ROWS)
    affines = jqx.affines(plan, jqx.calibrate(chain, plan)(THREE, ROWS)[1])
    whole = relative_error(jqx.simulate(chain, plan, affines)(THREE, ROWS), chain(THREE, ROWS))
    assert_measured(assignment.measured, whole)


def test_joined_weights_get_one_scheme():
    def f(p, x):
        return jnp.tanh(x @ jnp.concatenate([p["q"], p["k"]], axis=1)) @ p["o"]

    params = {"q": normal(0, 8, 8), "k": normal(1, 8, 8), "o": normal(2, 16, 4)}
    assignment = search(f, WAYS["int8"], WAYS, Bytes(300))(params, ROWS[:, :8])
    assert list(assignment.schemes) == ["q+k", "o"]
    plan = jqx.make_plan(f, assignment.policy)(params, ROWS[:, :8])
    named = {weight.path: str(weight.spec.qtype) for weight in plan.weights}
    assert named.get("q") == named.get("k")
    simulated = jqx.simulate(f, assignment.policy)(params, ROWS[:, :8])
    assert_measured(assignment.measured, relative_error(simulated, f(params, ROWS[:, :8])))


def test_budgets_and_candidates_that_have_no_meaning_are_refused():
    for budget, *words in (
        (Bytes(10), "at least 384 bytes, scales included"),
        (
            Bits(0.5),
            "Bits(0.5): at most 0.5 bits a weight, 48 bytes for 768 weights",
            "at least 4.00 bits a weight, scales included (384 bytes)",
        ),
        (
            Error(-1),
            "given:    Error(-1): a metric of at most -1",
            "a metric of at least 0",
        ),
    ):
        with pytest.raises(ValueError, match="no assignment meets the budget") as error:
            searched(budget)
        assert all(word in str(error.value) for word in words)
    with pytest.raises(TypeError, match="budget"):
        searched(1000)
    with pytest.raises(ValueError, match="always included"):
        search(chain, WAYS["int8"], {"float": WAYS["int8"]}, Bytes(1))
    with pytest.raises(TypeError, match="candidate"):
        search(chain, WAYS["int8"], {"int8": "int8"}, Bytes(1))
    with pytest.raises(ValueError, match="no weight to search for"):
        lone = jqx.Policy([jqx.Rule(activation=jqx.QSpec(jnp.int8, dynamic=True))])
        search(lambda p, x: x @ x.T, lone, {"a": lone}, Bytes(1))(THREE, ROWS)


def of_a_stack(p, x):
    layer = lambda h, w: (jnp.tanh(h @ w["a"]) @ w["b"], None)  # noqa: E731
    return jax.lax.scan(layer, x, p)[0]


def test_each_step_of_a_scan_gets_a_scheme_of_its_own():
    rng = np.random.default_rng(0)
    stack = rng.normal(size=(2, 4, 8, 8)) / 2
    stack[:, 1, :, 0] *= 30.0  # the layer that needs more bits
    p = {name: jnp.asarray(w, jnp.float32) for name, w in zip("ab", stack, strict=True)}
    x = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    ways = {f"int{n}": jqx.Policy({".*": f"int{n}"}) for n in (8, 4, 2)}
    assignment = search(of_a_stack, ways["int8"], ways, Bits(9.0), steps=True)(p, x)
    assert set(assignment.schemes) == {f"{w}[{i}:{i + 1}]" for w in "ab" for i in range(4)}
    assert len(set(assignment.schemes.values())) > 1
    assert assignment.measured < assignment.uniform["int4"][1]
    plan = jqx.make_plan(of_a_stack, assignment.policy)(p, x)
    assert {site.path.partition("[")[0] for site in plan.sites} <= set("ab")
    whole = jqx.quantize_params(p, plan)
    for name in "ab":
        for part, (a, b) in zip(
            whole[name].parts, itertools.pairwise(whole[name].bounds), strict=True
        ):
            kinds = {assignment.schemes[f"{name}[{i}:{i + 1}]"] for i in range(a, b)}
            kind = part.qtype.name if isinstance(part, jqx.QTensor) else "float"
            assert kinds == {kind}
    plain = of_a_stack(p, x)
    measured = relative_error(jqx.simulate(of_a_stack, plan)(p, x), plain)
    assert_measured(measured, assignment.measured, layers=2 * 4, terms=8)
    base = jqx.Policy({"[0]": "int4", "a[0]": "int8", "b[0]": "int8", ".*": "int8"})
    base = jqx.Policy(base.rules[1:])
    by_parts = search(of_a_stack, base, ways, Bits(9.0))(p, x)
    assert list(by_parts.schemes) == ["a[0:1]", "b[0:1]", "a[1:4]", "b[1:4]"]
    with pytest.raises(ValueError, match="finished plan cannot be split"):
        search(of_a_stack, plan, ways, Bits(4.5), steps=True)
