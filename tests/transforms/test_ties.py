"""Tables, and other weights with several uses: quantized for all of them with one QTensor, or for
none.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..models.transforms import normal
from .sources import POLICY, WEIGHT, assert_same, rounded

IDS = jnp.array([3, 1, 4])
PARAMS = {"wte": normal(0, 11, 8), "a": normal(1, 8, 8), "wpe": normal(2, 5, 8)}
LOOKUP, PRODUCT = jqx.Rule(op="gather"), jqx.Rule("wte", "dot_general", weight=WEIGHT)


def f(p, ids):
    h = p["wte"][ids] + p["wpe"][jnp.arange(3)]
    return jnp.tanh(h @ p["a"]) @ p["wte"].T


def of(rules, **kwargs):
    return jqx.make_plan(f, jqx.Policy(rules), **kwargs)(PARAMS, IDS)


def operations(items):
    return {(item.path, item.op) for item in items}


TABLE, HEAD, BODY = ("wte", "gather"), ("wte", "dot_general"), ("a", "dot_general")
PLACES = ("wpe", "gather")


@pytest.mark.parametrize(
    ("rules", "sites"),
    [
        ([jqx.Rule(weight=WEIGHT, tables=None)], {BODY}),
        ([LOOKUP, *POLICY.rules], {BODY}),
        ([jqx.Rule("wte"), *POLICY.rules], {BODY, PLACES}),
        ([jqx.Rule(weight=WEIGHT, tables=WEIGHT)], {TABLE, HEAD, BODY, PLACES}),
        (POLICY.rules, {TABLE, HEAD, BODY, PLACES}),
        ([PRODUCT], {TABLE, HEAD}),
        ([PRODUCT, jqx.Rule(weight=WEIGHT, tables=None)], {TABLE, HEAD, BODY}),
        ([PRODUCT, LOOKUP], {TABLE, HEAD}),
        ([jqx.Rule("wte", "gather", weight=WEIGHT)], {TABLE, HEAD}),
        ([jqx.Rule("a", weight=WEIGHT), LOOKUP], {BODY}),
    ],
    ids=[
        "tables in float, as presets have it",
        "a lookup left in float first",
        "a table left in float first",
        "tables",
        "one rule for all",
        "a product alone",
        "a product before a preset",
        "a product before a lookup in float",
        "a lookup alone",
        "not covered",
    ],
)
def test_a_table_is_quantized_for_all_its_uses_or_for_none(rules, sites):
    plan = of(rules)
    assert operations(plan.sites) == sites
    assert operations(plan.skipped) == {TABLE, HEAD, BODY, PLACES} - sites
    on_grid = {
        k: rounded(w) if any(k == path for path, _ in sites) else w for k, w in PARAMS.items()
    }
    q = jqx.quantize_params(PARAMS, plan)
    assert {weight.path for weight in plan.weights} == {path for path, _ in sites}
    expected = f(on_grid, IDS)
    assert_same(jqx.convert(f, plan)(q, IDS), expected)
    assert_same(jqx.simulate(f, plan)(PARAMS, IDS), expected)
    assert_same(jqx.calibrate(f, plan)(PARAMS, IDS)[0], f(PARAMS, IDS))
    assert jqx.Plan.from_dict(plan.to_dict()) == plan


def test_a_plan_says_why_a_table_stays_in_float_and_what_takes_the_codes_of_another_use():
    plan = of(jqx.presets.w8a16().rules)
    (head,) = (skip for skip in plan["wte"] if skip.op == "dot_general")
    assert "rule 0 leaves the lookup of 'wte' in float" in head.reason
    assert 'pass tables="int8", or put a rule for it first' in head.reason
    assert "rule 0 leaves lookups in float" in str(plan)
    plan = of([PRODUCT])
    assert [site.codes for site in plan["wte"]] == ["dot_general", None]
    assert "0; takes the codes of its dot_general" in str(plan)
    assert "one tensor for wte (2 sites)" in str(plan)


@pytest.mark.parametrize("preset", [jqx.presets.w8a8_dynamic, jqx.presets.w4a16])
def test_tables_of_a_preset_are_the_codes_of_its_products_too(preset):
    policy = preset(tables="int8")
    plan = jqx.make_plan(f, policy)(PARAMS, IDS)
    assert str(plan.weight_at("wte").spec) == "int8 per_axis(0)"
    (head,) = (site for site in plan["wte"] if site.op == "dot_general")
    assert (head.operands[0].spec is None) == (policy.rules[0].activation is None)
    assert head.codes == (None if preset is jqx.presets.w8a8_dynamic else "gather")
    q = jqx.quantize_params(PARAMS, plan)
    near = jqx.convert(f, plan)(q, IDS), jqx.simulate(f, plan)(PARAMS, IDS)
    np.testing.assert_allclose(*near, atol=1e-4)
    assert jqx.compare(f, plan, affines=None)(PARAMS, IDS).sites


def test_a_weight_multiplied_with_one_that_stays_in_float_stays_so_too():
    """Both are joined in one product, and the table is left in float at its lookup."""

    def joined(p, ids):
        both = jnp.concatenate([p["wte"][:8], p["a"]], axis=1)
        return p["wte"][ids] @ both, p["wte"][ids] @ p["a"], p["wte"][ids] @ p["b"]

    params = {**PARAMS, "b": normal(3, 8, 8)}
    plan = jqx.make_plan(joined, jqx.presets.w8a16())(params, IDS)
    assert [site.path for site in plan.sites] == ["b"]
    assert ["'wte' in float, and" in skip.reason for skip in plan["wte+a"]] == [True]
    assert "and 'a' is multiplied together with it" in plan["a"][0].reason


def test_a_scale_of_a_table_that_is_multiplied_by_as_it_stands_fits_both_uses():
    square = lambda p, ids: p[ids] @ p  # noqa: E731
    plan = jqx.make_plan(square, jqx.Policy([jqx.Rule(op="dot_general", weight=WEIGHT)]))
    w = normal(0, 8, 8)
    assert plan(w, IDS).weights[0].spec.granularity.scale_shape((8, 8)) == (1, 1)
    assert_same(jqx.convert(square, plan(w, IDS))(w, IDS), square(rounded(w), IDS))


def test_products_under_rules_of_different_specs_are_an_error_and_a_lookup_decides():
    int4 = jqx.QSpec(jnp.int4, jqx.per_channel())
    wrong = [PRODUCT, jqx.Rule(op="gather", weight=int4)]
    with pytest.raises(ValueError, match="two rules give the weight 'wte' different specs"):
        of(wrong)
    plan = of(wrong[::-1])
    assert plan.weight_at("wte").spec.qtype == jnp.int4 and plan.weight_at("wte").sites == 2


@pytest.mark.parametrize("other", ["w", None], ids=["beside a weight", "alone"])
def test_integers_cast_inside_are_no_weights(other):
    """Multiplied by a weight they are activations; alone they are listed with the reason."""
    params = {"codes": jnp.arange(16, dtype=jnp.int8).reshape(4, 4), "w": normal(0, 4, 4)}

    def g(p, x):
        real = p["codes"].astype(jnp.float32) * 0.25
        return x @ p["w"] + (real @ p[other] if other else x @ real)

    x = normal(1, 4, 4)
    plan = jqx.make_plan(g, POLICY)(params, x)
    assert [weight.path for weight in plan.weights] == ["w"]
    reasons = ["the parameter 'codes' is int8, not a float"]
    assert [skip.reason for skip in plan.skipped] == ([] if other else reasons)
    q = jqx.quantize_params(params, plan)
    assert q["codes"] is params["codes"]
    assert_same(
        jax.jit(jqx.convert(g, plan))(q, x), jax.jit(g)({**params, "w": rounded(params["w"])}, x)
    )
