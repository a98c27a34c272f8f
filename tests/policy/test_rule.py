import dataclasses

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jqx

from ..oracles.refusals import assert_refused

law = settings(max_examples=100, deadline=None)

INT8, INT4 = jqx.QSpec(jnp.int8, jqx.per_channel()), jqx.QSpec(jnp.int4)
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
    "pattern, expected",
    [
        (None, OPS),
        (".*", OPS),
        ("dot_general", ["dot_general"]),
        ("dot", []),
        ("conv.*", ["conv_general_dilated"]),
        ("dot_general|ragged_dot", ["dot_general", "ragged_dot"]),
    ],
)
def test_an_operation_is_matched_in_full_and_all_of_them_by_none(pattern, expected):
    rule = jqx.Rule(op=pattern)
    assert [op for op in OPS if rule.matches("w", op, has_weight=True)] == list(expected)


def test_path_and_operation_must_both_match():
    rule = jqx.Rule("a/.*", "gather")
    for path, op, expected in [
        ("a/b", "gather", True),
        ("a/b", "dot_general", False),
        ("b", "gather", False),
        ("b", "dot_general", False),
    ]:
        assert rule.matches(path, op, has_weight=True) is expected


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
        jqx.Rule("blocks/0/.*", weight=INT4),
        jqx.Rule("blocks/.*", weight=INT8),
        jqx.Rule("blocks/.*"),
    ]
    policy = jqx.Policy(rules)
    for path, has_weight, place in [
        ("head/w", True, 0),
        ("blocks/0/w", True, 1),
        ("blocks/1/w", True, 2),
        ("blocks/0/w", False, 3),
        ("tail/w", True, None),
    ]:
        found = policy.first(path, "dot_general", has_weight=has_weight)
        assert found == (None if place is None else (place, rules[place]))


@law
@given(
    st.lists(st.sampled_from(["a", "b", "a|b", ".*", "c"]), max_size=5),
    st.sampled_from(["a", "b", "c", "d"]),
    st.integers(0, 4),
)
def test_rules_after_the_first_match_do_not_matter(patterns, path, cut):
    rules = [jqx.Rule(pattern, weight=INT8) for pattern in patterns]
    found = jqx.Policy(rules).first(path, "gather", has_weight=True)
    if found is None:
        assert not any(matched(rule, [path], "gather") for rule in rules)
    else:
        place, rule = found
        assert rule is rules[place]
        assert not any(matched(earlier, [path], "gather") for earlier in rules[:place])
        shorter = jqx.Policy(rules[: place + 1 + cut])
        assert shorter.first(path, "gather", has_weight=True) == found


def test_an_empty_policy_matches_nothing():
    assert jqx.Policy([]).first("w", "dot_general", has_weight=True) is None


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "a{2,1}", "(?P<a", "\\"])
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
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(field, values):
    for value in values:
        refused = (TypeError, "Rule", f"`{field}`")
        assert_refused(lambda value=value: jqx.Rule(**{field: value}), (), *refused)


@pytest.mark.parametrize("rules", [[jqx.Rule(), INT8], [None], ["w8a8"], [jqx.Policy([])]], ids=str)
def test_a_policy_of_anything_but_rules_is_refused(rules):
    assert_refused(lambda: jqx.Policy(rules), (), TypeError, "Policy", "Rule", ".rules")


@pytest.mark.parametrize("rules", [jqx.Rule(), None, 3, "a rule", jqx.Policy([])], ids=str)
def test_what_holds_no_rules_is_refused(rules):
    """Also one rule alone, or a policy: its rules are what is meant."""
    refused = (TypeError, "Policy", "`rules`", "jqx.Policy([")
    assert_refused(lambda: jqx.Policy(rules), (), *refused)


def test_specs_are_given_by_name():
    with pytest.raises(TypeError):
        jqx.Rule(".*", None, INT8)


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
    assert make().rules[0] != dataclasses.replace(make().rules[0], weight=INT4)
    with pytest.raises(AttributeError):
        make().rules = ()
    with pytest.raises(AttributeError):
        make().rules[0].path = "c"


def test_a_replaced_rule_is_checked_again():
    with pytest.raises(ValueError, match="regular expression"):
        dataclasses.replace(jqx.Rule(), path="(")


def test_a_rule_prints_what_it_changes():
    assert str(jqx.Rule()) == "Rule('.*')"
    rule = jqx.Rule("a", "gather", weight=INT8, output=INT4)
    assert str(rule) == "Rule('a', op='gather', weight=int8 per_channel, output=int4 per_tensor)"


def test_optional_must_be_a_bool_and_a_pattern_must_compile():
    with pytest.raises(TypeError, match="`optional` is not a bool"):
        jqx.Rule(optional="yes")
    with pytest.raises(ValueError, match="not a valid regular expression"):
        jqx.Rule("a{99999999999}")
