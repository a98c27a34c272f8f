"""The assignment that `search` finds, against all assignments, and against uniform bits."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.diagnostics import Bits, Bytes, Error, relative_error, search

from ..arrays import normal
from .errors import near

WAYS = {f"int{n}": jqx.presets.w8a16(weight={"qtype": f"int{n}"}) for n in (2, 4, 8)}
NAMES = "abc"


def chain(p, x):
    for name in NAMES:
        x = jnp.tanh(x @ p[name])
    return x


def random(*shape, seed=0):
    return normal(seed, *shape)


PARAMS = {"a": random(16, 16), "b": random(16, 16, seed=1) / 16, "c": random(16, 16, seed=2)}
X = random(8, 16, seed=7)


def slightly_above(error):
    """What another program may measure instead of an error."""
    return error * (1 + near(error, 3, 16)) if error else 0


def assert_measured(found, error, layers=3, terms=16):
    np.testing.assert_allclose(found, error, rtol=near(error, layers, terms))


def size_of(schemes):
    bits = {"int2": 2, "int4": 4, "int8": 8}
    return sum(16 * 16 * 4 if s == "float" else 16 * 16 * bits[s] / 8 + 16 * 4 for s in schemes)


def policy_of(schemes):
    rules = []
    for name, scheme in zip(NAMES, schemes, strict=True):
        weight = WAYS[scheme].rules[0].weight if scheme != "float" else None
        rules.append(jqx.Rule(name, weight=weight))
    return jqx.Policy(rules)


def error_of(schemes):
    return _error_of(tuple(schemes))


@functools.cache
def _error_of(schemes):
    return float(
        relative_error(jqx.simulate(chain, policy_of(schemes))(PARAMS, X), chain(PARAMS, X))
    )


def every():
    return list(itertools.product(["float", *WAYS], repeat=3))


def alone(place, scheme):
    return error_of(["float"] * place + [scheme] + ["float"] * (2 - place))


def sums():
    """The sum of the costs of each alone, of every assignment."""
    cost = {
        (i, s): alone(i, s) if s != "float" else 0.0 for i in range(3) for s in ["float", *WAYS]
    }
    return {schemes: sum(cost[i, s] for i, s in enumerate(schemes)) for schemes in every()}


def test_the_front_is_that_of_all_assignments():
    """No assignment has fewer bytes and less predicted error than one of the front."""
    front = search(chain, WAYS["int8"], WAYS, Bytes(10_000))(PARAMS, X).front
    for schemes, cost in sums().items():
        size = size_of(schemes)
        assert min(p.error for p in front if p.bytes <= size) <= slightly_above(cost)
    for point in front:
        assert point.bytes == size_of(point.schemes)


@pytest.mark.parametrize("limit", [400, 500, 700, 1000, 2000])
def test_the_assignment_is_as_good_as_the_best_of_all(limit):
    """Measured, within the bytes: at least as good as the best predicted one and as any uniform."""
    found = search(chain, WAYS["int8"], WAYS, Bytes(limit))(PARAMS, X)
    assert found.bytes == size_of(found.schemes.values()) <= limit
    assert_measured(found.measured, error_of(found.schemes.values()))
    known = {s: cost for s, cost in sums().items() if size_of(s) <= limit}
    best = [min(known, key=known.__getitem__), *((name,) * 3 for name in WAYS)]
    for schemes in best:
        if size_of(schemes) <= limit:
            assert found.measured <= slightly_above(error_of(schemes))


def test_bits_are_bytes():
    """Of 3 x 256 weights."""
    one = search(chain, WAYS["int8"], WAYS, Bytes(500))(PARAMS, X)
    assert one.bits == one.bytes * 8 / 768
    assert f"this mixture: {one.bits:.2f} bits a weight ({one.bytes:,.0f} bytes)" in str(one)
    assert "budget: at most 500 bytes" in str(one)
    other = search(chain, WAYS["int8"], WAYS, Bits(500 * 8 / 768))(PARAMS, X)
    assert other == dataclasses.replace(one, budget=Bits(500 * 8 / 768))
    assert "budget: at most 5.208 bits a weight" in str(other)


def test_an_error_budget_takes_the_fewest_bytes_that_measure_well():
    limit = 0.02
    found = search(chain, WAYS["int8"], WAYS, Error(limit))(PARAMS, X)
    assert found.measured <= limit
    met = [size_of(s) for s, cost in sums().items() if cost <= limit and error_of(s) <= limit]
    assert found.bytes <= min(met)


def test_the_policy_gives_what_was_measured():
    found = search(chain, WAYS["int8"], WAYS, Bytes(500))(PARAMS, X)
    simulated = jqx.simulate(chain, found.policy)(PARAMS, X)
    assert_measured(found.measured, relative_error(simulated, chain(PARAMS, X)))
    plan = jqx.make_plan(chain, found.policy)(PARAMS, X)
    assert {w.path: str(w.spec.qtype) for w in plan.weights} == {
        path: scheme for path, scheme in found.schemes.items() if scheme != "float"
    }


def test_it_beats_uniform_bits_at_equal_bytes():
    """`b` is small and tanh nearly linear: it bears fewer bits than the others."""
    four = size_of(["int4"] * 3)
    found = search(chain, WAYS["int8"], WAYS, Bytes(four))(PARAMS, X)
    assert found.uniform["int4"][0] == four
    assert found.bytes <= four and found.measured <= found.uniform["int4"][1]


def test_the_front_has_less_error_for_more_bytes():
    front = search(chain, WAYS["int8"], WAYS, Bytes(10_000))(PARAMS, X).front
    assert len(front) > 4
    assert all(a.bytes < b.bytes and a.error > b.error for a, b in itertools.pairwise(front))
    assert front[-1].schemes == ("float",) * 3 and front[-1].error == 0


@pytest.mark.parametrize("budget", [Bytes(600), Error(0.02)])
def test_a_greedy_search_measures_the_whole(budget):
    found = search(chain, WAYS["int8"], WAYS, budget, additive=False)(PARAMS, X)
    assert_measured(found.predicted, found.measured)
    assert (found.bytes if isinstance(budget, Bytes) else found.measured) <= budget.limit
    assert found.front[0].schemes == ("int2",) * 3
    assert all(a.bytes < b.bytes for a, b in itertools.pairwise(found.front))
    assert len(found.front) > 2 and found.front[-1].error < found.front[0].error
    errors = [error_of(s) for s in every() if size_of(s) <= found.bytes]
    assert found.measured <= 3 * slightly_above(min(errors))


def test_static_activations_are_calibrated_for_each_candidate():
    ways = {"w8a8": jqx.presets.w8a8(), "w4a8": jqx.presets.w8a8(weight={"qtype": jnp.int4})}
    found = search(chain, ways["w8a8"], ways, Bytes(size_of(["int8"] * 3)))(PARAMS, X)
    assert set(found.schemes.values()) == {"w8a8"}
    plan = jqx.make_plan(chain, ways["w8a8"])(PARAMS, X)
    affines = jqx.affines(plan, jqx.calibrate(chain, plan)(PARAMS, X)[1])
    whole = relative_error(jqx.simulate(chain, plan, affines)(PARAMS, X), chain(PARAMS, X))
    assert_measured(found.measured, whole)


def test_joined_weights_get_one_scheme():
    def f(p, x):
        return jnp.tanh(x @ jnp.concatenate([p["q"], p["k"]], axis=1)) @ p["o"]

    params = {"q": random(8, 8), "k": random(8, 8, seed=1), "o": random(16, 4, seed=2)}
    found = search(f, WAYS["int8"], WAYS, Bytes(300))(params, X[:, :8])
    assert list(found.schemes) == ["q+k", "o"]
    plan = jqx.make_plan(f, found.policy)(params, X[:, :8])
    named = {weight.path: str(weight.spec.qtype) for weight in plan.weights}
    assert named.get("q") == named.get("k")
    simulated = jqx.simulate(f, found.policy)(params, X[:, :8])
    assert_measured(found.measured, relative_error(simulated, f(params, X[:, :8])))


def test_it_prints_and_serializes():
    found = search(chain, WAYS["int8"], WAYS, Bytes(600))(PARAMS, X)
    assert len(str(found).splitlines()) == 2 + len(NAMES) + 1 + len(WAYS) + 1
    data = json.loads(json.dumps(found.to_dict()))
    assert data["bytes"] == found.bytes and data["budget"] == {"bytes": 600}


def test_what_is_refused():
    with pytest.raises(ValueError, match="no assignment meets the budget") as error:
        search(chain, WAYS["int8"], WAYS, Bytes(10))(PARAMS, X)
    assert "at least 384 bytes, scales included" in str(error.value)
    with pytest.raises(ValueError, match="no assignment meets the budget") as error:
        search(chain, WAYS["int8"], WAYS, Bits(0.5))(PARAMS, X)
    assert "Bits(0.5): at most 0.5 bits a weight, 48 bytes for 768 weights" in str(error.value)
    assert "at least 4.00 bits a weight, scales included (384 bytes)" in str(error.value)
    with pytest.raises(ValueError, match="no assignment meets the budget") as error:
        search(chain, WAYS["int8"], WAYS, Error(-1))(PARAMS, X)
    assert "given:    Error(-1): a metric of at most -1" in str(error.value)
    assert "a metric of at least 0" in str(error.value)
    with pytest.raises(TypeError, match="budget"):
        search(chain, WAYS["int8"], WAYS, 1000)
    with pytest.raises(ValueError, match="always included"):
        search(chain, WAYS["int8"], {"float": WAYS["int8"]}, Bytes(1))
    with pytest.raises(TypeError, match="candidate"):
        search(chain, WAYS["int8"], {"int8": "int8"}, Bytes(1))
    with pytest.raises(ValueError, match="no weight to search for"):
        lone = jqx.Policy([jqx.Rule(activation=jqx.QSpec(jnp.int8, dynamic=True))])
        search(lambda p, x: x @ x.T, lone, {"a": lone}, Bytes(1))(PARAMS, X)


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
    found = search(of_a_stack, ways["int8"], ways, Bits(9.0), steps=True)(p, x)
    assert set(found.schemes) == {f"{w}[{i}:{i + 1}]" for w in "ab" for i in range(4)}
    assert len(set(found.schemes.values())) > 1
    assert found.measured < found.uniform["int4"][1]
    plan = jqx.make_plan(of_a_stack, found.policy)(p, x)
    assert {site.path.partition("[")[0] for site in plan.sites} <= set("ab")
    whole = jqx.quantize_params(p, plan)
    for name in "ab":
        for part, (a, b) in zip(
            whole[name].parts, itertools.pairwise(whole[name].bounds), strict=True
        ):
            kinds = {found.schemes[f"{name}[{i}:{i + 1}]"] for i in range(a, b)}
            kind = part.qtype.name if isinstance(part, jqx.QTensor) else "float"
            assert kinds == {kind}
    plain = of_a_stack(p, x)
    measured = relative_error(jqx.simulate(of_a_stack, plan)(p, x), plain)
    assert_measured(measured, found.measured, layers=2 * 4, terms=8)
    base = jqx.Policy({"[0]": "int4", "a[0]": "int8", "b[0]": "int8", ".*": "int8"})
    base = jqx.Policy(base.rules[1:])
    by_parts = search(of_a_stack, base, ways, Bits(9.0))(p, x)
    assert list(by_parts.schemes) == ["a[0:1]", "b[0:1]", "a[1:4]", "b[1:4]"]
    with pytest.raises(ValueError, match="finished plan cannot be split"):
        search(of_a_stack, plan, ways, Bits(4.5), steps=True)
