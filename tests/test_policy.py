"""Rules and policies: what they match, how two are joined, how they are written and printed."""

import dataclasses

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jqx
from jqx import presets

from .oracles.refusals import assert_refused

law = settings(max_examples=100, deadline=None)

INT8, ONE_SCALE = jqx.QSpec(jnp.int8, jqx.per_channel()), jqx.QSpec(jnp.int4)
OPS = ("dot_general", "conv_general_dilated", "ragged_dot", "gather")
PATHS = ["", "w", "blocks/0/w", "blocks/10/w", "blocks/0/w/b", "head/blocks/0/w", "Blocks/0/w"]


def matched(rule, paths=PATHS, op="dot_general"):
    return [path for path in paths if rule.matches(path, op, has_weight=True)]


@pytest.mark.parametrize(
    "pattern, expected",
    [
        (".*", PATHS),
        ("", [""]),
        ("w", ["w"]),
        ("blocks", []),
        ("blocks/0/w", ["blocks/0/w"]),
        ("blocks/[0-9]/w", ["blocks/0/w"]),
        ("blocks/[0-9]+/w", ["blocks/0/w", "blocks/10/w"]),
        ("blocks/.*", ["blocks/0/w", "blocks/10/w", "blocks/0/w/b"]),
        (".*/w", ["blocks/0/w", "blocks/10/w", "head/blocks/0/w", "Blocks/0/w"]),
        ("w|blocks/0/w/b", ["w", "blocks/0/w/b"]),
        ("(?i)blocks/0/w", ["blocks/0/w", "Blocks/0/w"]),
        ("(?!head).*blocks/0/w", ["blocks/0/w"]),
    ],
)
def test_a_path_is_matched_in_full(pattern, expected):
    """A part of a path, at either end, is no match: alternatives included."""
    assert matched(jqx.Rule(pattern)) == expected


@pytest.mark.parametrize(
    "path, op, expected",
    [
        (".*", None, OPS),
        (".*", ".*", OPS),
        (".*", "dot_general", ["dot_general"]),
        (".*", "dot", []),
        (".*", "conv.*", ["conv_general_dilated"]),
        (".*", "dot_general|ragged_dot", ["dot_general", "ragged_dot"]),
        ("a/.*", "gather", []),
        ("w", "gather", ["gather"]),
    ],
)
def test_an_operation_is_matched_in_full_and_only_beside_the_path(path, op, expected):
    rule = jqx.Rule(path, op)
    assert [op for op in OPS if rule.matches("w", op, has_weight=True)] == list(expected)


@pytest.mark.parametrize("activation", [None, INT8])
def test_a_rule_for_weights_matches_only_where_there_is_one(activation):
    """Attention scores have none: only a rule without weights covers them."""
    with_weight = jqx.Rule(weight=INT8, activation=activation)
    without = jqx.Rule(activation=activation)
    for rule, has_weight, expected in [
        (with_weight, True, True),
        (with_weight, False, False),
        (without, True, True),
        (without, False, True),
    ]:
        assert rule.matches("any", "dot_general", has_weight=has_weight) is expected


def test_the_first_rule_that_matches_wins():
    rules = [
        jqx.Rule("head/.*"),
        jqx.Rule("blocks/0/.*", weight=ONE_SCALE),
        jqx.Rule("blocks/.*", weight=INT8),
        jqx.Rule("blocks/.*"),
    ]
    policy = jqx.Policy(rules)
    assert jqx.Policy([]).first("w", "dot_general", has_weight=True) is None
    for path, has_weight, index in [
        ("head/w", True, 0),
        ("blocks/0/w", True, 1),
        ("blocks/1/w", True, 2),
        ("blocks/0/w", False, 3),
        ("tail/w", True, None),
    ]:
        first = policy.first(path, "dot_general", has_weight=has_weight)
        assert first == (None if index is None else (index, rules[index]))


@law
@given(
    st.lists(st.sampled_from(["a", "b", "a|b", ".*", "c"]), max_size=5),
    st.sampled_from(["a", "b", "c", "d"]),
    st.integers(0, 4),
)
def test_rules_after_the_first_match_do_not_matter(patterns, path, cut):
    rules = [jqx.Rule(pattern, weight=INT8) for pattern in patterns]
    first = jqx.Policy(rules).first(path, "gather", has_weight=True)
    if first is None:
        assert not any(matched(rule, [path], "gather") for rule in rules)
    else:
        index, rule = first
        assert rule is rules[index]
        assert not any(matched(earlier, [path], "gather") for earlier in rules[:index])
        shorter = jqx.Policy(rules[: index + 1 + cut])
        assert shorter.first(path, "gather", has_weight=True) == first


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "a{2,1}", "(?P<a", "\\", "a{99999999999}"])
@pytest.mark.parametrize("field", ["path", "op"])
def test_an_invalid_regular_expression_is_refused(field, pattern):
    refused = (ValueError, "Rule", f"`{field}`", "regular expression", repr(pattern))
    assert_refused(lambda: jqx.Rule(**{field: pattern}), (), *refused)


@pytest.mark.parametrize(
    "field, values",
    [
        ("path", [None, 0, b"w", ["w"]]),
        ("op", [0, b"gather", ("gather",)]),
        ("weight", [jnp.int8, 8, {"qtype": "int8"}, jqx.QSpec]),
        ("activation", [jnp.int8, True]),
        ("output", [jqx.per_tensor()]),
        ("optional", ["yes"]),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(field, values):
    for value in values:
        refused = (TypeError, "Rule", f"`{field}`")
        assert_refused(lambda value=value: jqx.Rule(**{field: value}), (), *refused)


ELEMENTS, WHOLE = ("Rule", ".rules"), ("`rules`", "jqx.Policy([")


@pytest.mark.parametrize(
    ("rules", "facts"),
    [
        *(([jqx.Rule(), rule], ELEMENTS) for rule in (INT8, None, "w8a8", jqx.Policy([]))),
        *((rules, WHOLE) for rules in (jqx.Rule(), None, 3, "a rule", jqx.Policy([]))),
    ],
    ids=str,
)
def test_a_policy_of_anything_but_rules_is_refused(rules, facts):
    """Also of one rule alone, or of a policy: its rules are what is meant."""
    assert_refused(lambda: jqx.Policy(rules), (), TypeError, "Policy", *facts)


def test_a_rule_leaves_everything_in_float_by_default():
    rule = jqx.Rule()
    assert (rule.path, rule.op, rule.optional) == (".*", None, False)
    assert rule.weight is rule.activation is rule.output is None


def test_rules_and_policies_are_values():
    def make():
        return jqx.Policy(iter([jqx.Rule("a", weight=INT8), jqx.Rule("b", optional=True)]))

    assert make() == make() and hash(make()) == hash(make())
    assert isinstance(make().rules, tuple)
    assert make() != jqx.Policy(make().rules[::-1])
    assert make().rules[0] != dataclasses.replace(make().rules[0], weight=ONE_SCALE)
    with pytest.raises(AttributeError):
        make().rules = ()
    with pytest.raises(AttributeError):
        make().rules[0].path = "c"


def test_a_replaced_rule_is_checked_again():
    with pytest.raises(ValueError, match="regular expression"):
        dataclasses.replace(jqx.Rule(), path="(")


def test_a_rule_prints_what_it_changes():
    assert str(jqx.Rule()) == "Rule('.*')"
    rule = jqx.Rule("a", "gather", weight=INT8, output=ONE_SCALE)
    assert str(rule) == "Rule('a', op='gather', weight=int8 per_channel, output=int4 per_tensor)"


INT4 = jqx.QSpec(jnp.int4, jqx.per_group(32, tail=True))


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
        (jqx.Policy([jqx.Rule(op="gather"), jqx.Rule()]), [jqx.Rule("p", "gather"), jqx.Rule("p")]),
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
    assert presets.w8a16(exclude="head") == jqx.Policy([jqx.Rule("head"), *presets.w8a16().rules])
    for path in ("heads", "head/.*"):
        with pytest.raises(ValueError, match="rule 0 of the policy matches no contraction"):
            jqx.make_plan(model, presets.w8a16(exclude=path))(PARAMS, x)
