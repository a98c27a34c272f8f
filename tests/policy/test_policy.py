"""The ways to write a policy, and to join two: each gives the rules that it says."""

import jax.numpy as jnp
import pytest

import jqx
from jqx import presets

from ..oracles.refusals import assert_refused

INT4 = jqx.QSpec(jnp.int4, jqx.per_group(32, tail=True))


def rules(*given):
    return jqx.Policy(given)


def test_a_sum_has_the_rules_of_both_in_order():
    a, b = jqx.Policy([jqx.Rule("a")]), jqx.Policy([jqx.Rule("b"), jqx.Rule("a", weight=INT4)])
    assert (a + b).rules == (*a.rules, *b.rules)
    assert (a + b) + a == a + (b + a)
    assert a + jqx.Policy([]) == a == sum([a], jqx.Policy([]))
    assert (a + b).first("a", "dot_general", has_weight=True) == (0, jqx.Rule("a"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("float", [jqx.Rule("p")]),
        (None, [jqx.Rule("p")]),
        ("int4:group=32", [jqx.Rule("p", weight=INT4)]),
        (INT4, [jqx.Rule("p", weight=INT4)]),
        (jqx.Rule("q", weight=INT4, optional=True), [jqx.Rule("p", weight=INT4, optional=True)]),
        (presets.w8a8(), presets.w8a8("p").rules),
        (presets.w8a8("q"), presets.w8a8("p").rules),
        (rules(jqx.Rule(op="gather"), jqx.Rule()), [jqx.Rule("p", "gather"), jqx.Rule("p")]),
        (jqx.Policy([]), []),
    ],
    ids=str,
)
def test_a_dict_says_a_rule_for_each_path(value, expected):
    assert jqx.Policy({"p": value}) == jqx.Policy(expected)
    both = jqx.Policy({"first": "int8", "p": value})
    assert both.rules == (jqx.Rule("first", weight="int8"), *expected)


def test_what_a_preset_leaves_in_float_it_leaves_under_a_key_alone():
    policy = jqx.Policy(
        {"a/.*": presets.w8a8(exclude=[".*norm|a/x", "a/y"]), ".*": presets.w4a16(exclude="b/z")}
    )

    def has_codes(path):
        return policy.first(path, "dot_general", has_weight=True)[1].weight is not None

    assert [has_codes(path) for path in ("a/norm", "a/x", "a/y", "b/z")] == [False] * 4
    assert [has_codes(path) for path in ("a/z", "a/xx", "b/norm", "b/x", "b/y")] == [True] * 5


def test_a_key_does_not_replace_several_paths():
    several = presets.w8a8("a") + presets.w4a16("b")
    refused = (ValueError, "Policy", "'a', 'b'", "jqx.Policy({...}) + policy")
    assert_refused(lambda: jqx.Policy({".*": several}), (), *refused)


def test_a_policy_prints_a_line_a_rule():
    policy = jqx.Policy({"head": "float", "a|b": presets.w8a8(), ".*": "int4:group=32"})
    policy += jqx.Policy([jqx.Rule("x", "gather", output="int8", optional=True)])
    assert str(policy).splitlines() == [
        "0  'head'  float",
        "1  'a|b'   int8 per_channel, activation int8 per_tensor, tables float",
        "2  '.*'    int4 per_group(32, tail=True)",
        "3  'x'     output int8 per_tensor, op 'gather', optional",
    ]
    assert str(jqx.Policy([])) == ""


def test_one_flat_rule_says_all():
    rule = jqx.Rule(
        "w",
        weight="int4:group=32",
        activation="int8:token:dynamic",
        output="int8",
        tables="nf4:block=64",
    )
    assert rule == jqx.Rule(
        "w",
        weight=INT4,
        activation=jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True),
        output=jqx.QSpec(jnp.int8),
        tables=jqx.QSpec("nf4", jqx.per_group(64, tail=True)),
    )
    assert jqx.Rule("w", weight="float", tables=None) == jqx.Rule("w", tables=None)


PARAMS = {
    "embed": jnp.ones((6, 64)),
    "blocks": [{"query": jnp.ones((64, 64)), "up": jnp.ones((64, 64))}],
    "head": jnp.ones((64, 6)),
}


def model(params, x):
    for block in params["blocks"]:
        x = (x @ block["query"]) @ block["up"]
    return x @ params["head"]


def test_a_policy_of_three_rules_is_planned_and_stored():
    policy = jqx.Policy({"head": "float", ".*query": presets.w8a8(), ".*": "int4:group=32"})
    plan = jqx.make_plan(model, policy)(PARAMS, jnp.ones((2, 64)))
    assert {weight.path: str(weight.spec) for weight in plan.weights} == {
        "blocks/0/query": "int8 per_axis(1)",
        "blocks/0/up": "int4 per_group(32, tail=True) along (0,)",
    }
    assert jqx.Plan.from_dict(plan.to_dict()) == plan


def test_excluded_paths_stay_in_float_and_must_be_there():
    x = jnp.ones((2, 64))
    plan = jqx.make_plan(model, presets.w8a16(exclude=["head", ".*up"]))(PARAMS, x)
    assert [weight.path for weight in plan.weights] == ["blocks/0/query"]
    assert presets.w8a16(exclude="head") == rules(jqx.Rule("head"), *presets.w8a16().rules)
    for path in ("heads", "head/.*"):
        with pytest.raises(ValueError, match="rule 0 of the policy matches no contraction"):
            jqx.make_plan(model, presets.w8a16(exclude=path))(PARAMS, x)
