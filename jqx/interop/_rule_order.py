"""Rules that never apply, because earlier rules match all that they match."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from .._errors import fail
from ._names import Name

Match = Callable[[Name, str], Any]
"""Returns the parts of a name or of a path; `None` if the rule does not match it."""


def check_order(
    function: str, rules: Sequence[Name], names: Collection[str], match: Match, *, strict: bool
) -> None:
    """Checks that each rule that matches a name applies to one.

    An optional rule may lose all its names to several earlier rules, as a general last rule does.

    Args:
      function: the public function that reads the rules.
      rules: the rules in order; the first that matches a name applies.
      names: names of tensors, or paths of leaves.
      match: matches a rule with one of `names`.
      strict: whether an optional rule is refused whose names one earlier rule matches.
    """
    matched = [[name for name in names if match(rule, name) is not None] for rule in rules]
    for place, (rule, found) in enumerate(zip(rules, matched, strict=True)):
        before = [i for i in range(place) if rules[i].source != rule.source]
        taken = {name: i for i in reversed(before) for name in matched[i]}
        if any(name not in taken for name in found):
            continue
        hidden = any(set(found) <= set(matched[i]) for i in before)
        given = [f"{rule!r}, but {name!r} goes to {rules[taken[name]]!r}" for name in found]
        if found and not (rule.optional and not (strict and hidden)):
            raise fail(
                function,
                "a rule never applies, because earlier rules match all that it matches.",
                given="".join(given[:1]),
                expected="rules that can be told apart: the first that matches applies",
                fix="distinguish them by a pattern in the earlier rule, such as "
                "{name:[qkvo]_proj}, "
                "or put the narrower rule first.",
            )
