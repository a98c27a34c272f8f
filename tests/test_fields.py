"""Fields of option types: what each rule accepts, converts and refuses."""

import dataclasses

import numpy as np
import pytest

from jqx._src.checks import check_fields, choice, flag, instance, nothing, number, whole

RULES = {
    "rate": (number(0, 1, above=True), [1, 0.5, np.float32(0.5)], [0, 1.5, np.nan], ["1", True]),
    "size": (number(), [0, 2.5], [-1, np.inf], [None]),
    "steps": (whole(1), [1, np.int64(3)], [0, 10**7], [1.0, True, "2"]),
    "order": (choice(None, "first"), [None, "first"], ["last"], [1, ["first"]]),
    "keep": (flag(), [True, False], [], [1, None]),
    "kind": (instance(int), [1], [], ["1"]),
    "limit": (number(1) | choice("mean") | nothing(), [1, "mean", None], [0, "most"], [[1]]),
}


@dataclasses.dataclass(frozen=True)
class Options:
    field: object


@pytest.mark.parametrize("name", RULES)
def test_a_rule_accepts_what_it_says_and_names_what_it_refuses(name):
    rule, good, out_of_range, of_another_kind = RULES[name]
    for value in good:
        options = Options(value)
        check_fields("f", options, field=rule)
        assert options.field == value and not isinstance(options.field, np.generic)
    for values, error in ((out_of_range, ValueError), (of_another_kind, TypeError)):
        for value in values:
            with pytest.raises(error, match=r"^jqx\.f: `field`(?s:.)+given(?s:.)+fix: ") as info:
                check_fields("f", Options(value), field=rule)
            assert rule.expected in str(info.value)
