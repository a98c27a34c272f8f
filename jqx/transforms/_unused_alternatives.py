"""The warning about an alternative in the path of a rule, `(embed|head)/kernel`, that matches no
path. The rest of the rule is used, so it is no error: one policy may serve several models.
"""

import functools
import itertools
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from .._errors import message, warn
from ..policy import Policy
from ..policy._shared import Selector
from ._find import Found
from ._trace import Call
from ._unused_rules import near_path, shown_paths

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""An escape, a set of characters, or one character of a regular expression."""

_LEFT_ALONE = re.compile(r"\(\?(?!:)|\\[0-9]|\{")
"""Flags, names, lookaheads, references to groups, and counts: such a path is not taken apart."""


class Alternative(NamedTuple):
    """One of the alternatives in a path.

    Attributes:
      start: where its text starts in the path.
      stop: where its text ends.
      path: the path without the other alternatives, of its group and of those around it.
    """

    start: int
    stop: int
    path: str


def warn_of_unused_alternatives(
    function: str, policy: Policy, found: Sequence[Found], call: Call
) -> None:
    """Warns of each rule that is not optional and has an alternative that matches no path.

    The paths are those of all parameters and of all contractions, whichever rule takes them.
    """
    if not any("|" in rule.path and not rule.optional for rule in policy.rules):
        return
    known = sorted({path for item in found for path in item.paths})
    whole = [part.whole for part in call.parts.values()]
    paths = {*known, *whole, *filter(None, call.paths)}
    for place, rule in enumerate(policy.rules):
        if rule.optional or not (unused := _unused(rule.path, paths)):
            continue
        texts = ", ".join(repr(rule.path[each.start : each.stop]) for each in unused)
        others = [path for path in known if not re.fullmatch(rule.path, path)]
        near = next(filter(None, (near_path(each.path, others) for each in unused)), None)
        some = "an alternative" if len(unused) == 1 else f"{len(unused)} alternatives"
        warn(
            message(
                function,
                f"rule {place} of the policy has {some} without a match.",
                given=f"{texts} in {rule}",
                expected=f"a match of each; paths are: {shown_paths(unused[0].path, known)}",
                fix=f"{near or 'correct the path.'} Or drop what has no match, or pass "
                "optional=True for a policy of several models.",
            )
        )


def _unused(pattern: str, paths: Collection[str]) -> list[Alternative]:
    """Returns the alternatives that match no path, without those inside of another one."""
    unused: list[Alternative] = []
    for each in alternatives(pattern):
        if unused and each.start < unused[-1].stop:
            continue
        selector = Selector.of(each.path)
        matches = re.compile(each.path).fullmatch
        if not any(matches(path) or (selector and selector.matches(path)) for path in paths):
            unused.append(each)
    return unused


@functools.lru_cache(256)
def alternatives(pattern: str) -> tuple[Alternative, ...]:
    """Returns the alternatives of a regular expression in order, outer ones before inner ones.

    Alternatives that may be absent, or may follow one another, are left out: those inside of a
    group that is repeated, is followed by `?`, or has an empty alternative.
    """
    if "|" not in pattern or _LEFT_ALONE.search(pattern):
        return ()
    opened, groups = [(0, [-1])], []
    for token in _TOKEN.finditer(pattern):
        at = token.start()
        if token[0] == "(":
            opened.append((at, [at + 2 if pattern.startswith("(?:", at) else at]))
        elif token[0] == "|":
            opened[-1][1].append(at)
        elif token[0] == ")":
            start, bars = opened.pop()
            groups.append((start, at + 1, [*bars, at]))
    groups.append((0, len(pattern), [*opened[0][1], len(pattern)]))
    absent, chosen = [], []
    for start, stop, bars in groups:
        spans = [(before + 1, after) for before, after in itertools.pairwise(bars)]
        if pattern[stop : stop + 1] in ("?", "*", "+") or any(a == b for a, b in spans):
            absent.append((start, stop))
        elif len(spans) > 1:
            chosen += [(start, a, b, stop) for a, b in spans]

    def alone(a: int, b: int) -> str:
        """Returns the pattern with one alternative, and those that it is a part of, alone."""
        holding = [each for each in chosen if each[1] <= a and b <= each[2]]
        left = [cut for start, c, d, stop in holding for cut in ((start, c), (d, stop))]
        kept = (i for i in range(len(pattern)) if not any(c <= i < d for c, d in left))
        return "".join(pattern[i] for i in kept)

    return tuple(
        Alternative(a, b, alone(a, b))
        for _, a, b, _ in sorted(chosen, key=lambda each: (each[1], -each[2]))
        if not any(start <= a and b <= stop for start, stop in absent)
    )
