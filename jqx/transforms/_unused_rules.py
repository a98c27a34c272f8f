"""The error of a rule of a policy that matches no contraction."""

import difflib
import fnmatch
import re
from collections.abc import Sequence
from itertools import accumulate

from .._errors import fail
from ..policy import Policy, Rule
from ._find import Found
from ._select_steps import selects
from ._site import Skipped
from ._trace import Call

_MOST = 8
"""How many paths the error lists."""


def check_used(
    function: str,
    policy: Policy,
    used: set[int],
    found: Sequence[Found],
    skipped: Sequence[Skipped],
    call: Call,
) -> None:
    """Checks that every rule that is not optional was used."""
    for place, rule in enumerate(policy.rules):
        if place not in used and not rule.optional:
            _refuse(function, place, rule, found, skipped, call)


def _refuse(
    function: str,
    place: int,
    rule: Rule,
    found: Sequence[Found],
    skipped: Sequence[Skipped],
    call: Call,
) -> None:
    parts = call.parts

    def covers(path: str, item: Found) -> bool:
        whole = parts[path].whole if path in parts else path
        matches = rule.matches(whole, item.op, has_weight=any(item.origins))
        return matches or (path in parts and selects(rule, parts[path], item.op))

    known = sorted({path for item in found for path in item.paths})
    weights = {item.path for item in found if any(item.origins)}
    shadowed = any(covers(path, item) for item in found for path in item.paths)
    given = [str(rule)]
    if rule.selector is not None and not shadowed:
        given.append(f"no scan steps over a weight at {rule.selector.base!r}")
    named = [path for path in call.paths if path is not None]
    if any(re.fullmatch(rule.path, path) for path in (*named, *(x.path for x in skipped))):
        apart = [x for x in skipped if x.path not in weights]
        given += [f"at {x.path!r} {x.reason}" for x in apart][:2]
    raise fail(
        function,
        f"rule {place} of the policy matches no contraction"
        + (" that an earlier rule has not taken." if shadowed else "."),
        given="; ".join(dict.fromkeys(given)),
        expected=f"a match; paths are: {shown_paths(rule.path, known)}",
        fix=_op(rule, known) or _fix(rule.path, known, shadowed)
        if weights
        else "compute them first: g, computed = jqx.hoist(f)(params, x), and plan g."
        if any("jqx.hoist" in text for text in given)
        else "pass the weights in an argument of f, and its position as params=.",
    )


def shown_paths(pattern: str, known: Sequence[str]) -> str:
    """Returns paths as text: of many, those that are most similar to a pattern."""
    near = known
    if len(known) > _MOST:
        near = difflib.get_close_matches(pattern, known, n=_MOST, cutoff=0)
    more = f" and {len(known) - len(near)} more" if len(known) > len(near) else ""
    return (", ".join(map(repr, near)) or "(none)") + more


def _fix(pattern: str, known: Sequence[str], shadowed: bool) -> str:
    near = None if shadowed else near_path(pattern, known)
    if near is None:
        return "correct its path or op, move it up, or pass optional=True."
    return f"{near} Or pass optional=True." if near.endswith("?") else near


_OPS = {
    **dict.fromkeys(("matmul", "dot", "linear", "dense", "einsum", "bmm", "mm"), "dot_general"),
    **dict.fromkeys(("conv", "conv1d", "conv2d", "conv3d", "convolution"), "conv_general_dilated"),
    **dict.fromkeys(("embedding", "embed", "take", "lookup"), "gather"),
}
"""Operations by the names that others give them."""


def _op(rule: Rule, known: Sequence[str]) -> str | None:
    """Returns what to write if the operation alone is wrong; `None` if it is not."""
    own = _OPS.get((rule.op or "").lower())
    if own is None or not any(re.fullmatch(rule.path, path) for path in known):
        return None
    return f"the operation is called {own!r}: write op={own!r}, or leave it out for all."


_ALL = ("", "*", "all", "default", "any", "everything")


def near_path(pattern: str, known: Sequence[str]) -> str | None:
    """Returns the path that a pattern without a match is likely to mean, as a hint; `None` if there
    is none.
    """
    for path in known:
        for parent in accumulate(path.split("/")[:-1], "{}/{}".format):
            if re.fullmatch(pattern, parent):
                return f"a path must match in full, such as {path!r}: write '{parent}/.*'."
    if pattern.lower() in _ALL:
        return "write '.*', which matches every path."
    if pattern in known:
        return f"it is a regular expression: write {re.escape(pattern)!r}."
    globbed = [path for path in known if "*" in pattern and fnmatch.fnmatchcase(path, pattern)]
    if globbed:
        text = re.sub(r"(?<!\.)\*+", ".*", pattern)
        return f"it is a regular expression, in which any text is '.*': write {text!r}."
    plain = "/".join(re.findall(r"[^\[\]'\"./]+", pattern))  # PyTorch's dots, JAX's brackets
    for text in (plain, plain.partition("/")[2], plain.rpartition("/")[0]):
        if text and text in known:
            return f"did you mean {text!r}?"
    close = difflib.get_close_matches(pattern, known, n=1, cutoff=0.75)
    return f"did you mean {close[0]!r}?" if close else None
