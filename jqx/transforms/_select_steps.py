"""Finds where the rules of a policy split the weights of scans."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from .._errors import fail
from ..policy import Policy, Rule
from ._find import Found
from ._origin import Address
from ._paths import Part, Split


def selecting(found: Sequence[Found], policy: Policy, parts: Mapping[str, Part]) -> dict[int, Rule]:
    """Returns the rules that select steps, by index. A rule whose path, brackets included, matches
    a contraction as a regular expression is not one. `parts` are the weights that are parts of one.
    """

    def matches(rule: Rule, item: Found) -> bool:
        has_weight = any(origin is not None for origin in item.origins)
        paths = [parts[path].whole if path in parts else path for path in item.paths]
        return any(rule.matches(path, item.op, has_weight=has_weight) for path in paths)

    return {
        place: rule
        for place, rule in enumerate(policy.rules)
        if rule.selector is not None and not any(matches(rule, item) for item in found)
    }


def selects(rule: Rule, part: Part, op: str) -> bool:
    """Whether a rule selects all steps of a part."""
    if rule.selector is None or not rule.selects(part.whole, op):
        return False
    try:
        start, stop = rule.selector.resolve("make_plan", part.whole, part.length)
    except ValueError:  # raised where the scan is split, unless the rule is optional
        return False
    return start <= part.start and part.stop <= stop


def rule_for(
    policy: Policy, part: Part, op: str, selecting: Collection[int] | None = None
) -> tuple[int, Rule] | None:
    """Returns the first rule for a part and its index; `None` if there is none. `selecting` has the
    indices of rules that select steps, `None` for all that may.
    """
    for place, rule in enumerate(policy.rules):
        selects_steps = selecting is None or place in selecting
        if rule.matches(part.whole, op, has_weight=True) or (
            selects_steps and selects(rule, part, op)
        ):
            return place, rule
    return None


class _Use(NamedTuple):
    """The use of a weight that a scan steps over in a contraction."""

    scan: Address
    length: int
    path: str
    axes: frozenset[int]
    op: str


def splits_of(
    function: str, found: Sequence[Found], policy: Policy | None, shapes: dict[str, tuple[int, ...]]
) -> tuple[Split, ...]:
    """Returns the splits of the scans of a function. All weights that a scan steps over are split
    with it, and all scans that step over a weight are split with it. `shapes` are those of the
    parameters. Without a policy all are split at each step.
    """
    rules = {} if policy is None else selecting(found, policy, {})
    if policy is not None and not rules:
        return ()
    uses = [
        _Use(part.loops[0].address, part.loops[0].length, part.path, part.stepped[0], item.op)
        for item in found
        for origin in item.origins
        for part in (origin.parts if origin else ())
        if part.loops
    ]
    together = _together(uses)
    cuts: dict[Any, set[int]] = defaultdict(set)
    for use in uses if policy is None else ():
        cuts[together[use.path]] |= {*range(use.length)}
    for rule in rules.values():
        for use in uses:
            if not rule.selects(use.path, use.op):
                continue
            assert rule.selector is not None
            try:
                cuts[together[use.path]] |= {*rule.selector.resolve(function, use.path, use.length)}
            except ValueError:
                if rule.optional:
                    continue
                raise
            if not _is_whole(use, shapes):
                _refuse(function, rule, use, shapes[use.path])
    splits = {}
    for use in uses:
        if (places := cuts.get(together[use.path])) and _is_whole(use, shapes):
            (axis,) = use.axes
            splits[use.path] = Split(use.path, axis, tuple(sorted({0, use.length, *places})))
    return tuple(splits[path] for path in shapes if path in splits)


def _together(uses: Sequence[_Use]) -> dict[str, Any]:
    """Returns one name for all weights that any scans step over together."""
    name: dict[Any, Any] = {}
    for use in uses:
        a, b = (name.setdefault(x, x) for x in (use.scan, use.path))
        name = {x: a if of == b else of for x, of in name.items()}
    return {use.path: name[use.path] for use in uses}


def _is_whole(use: _Use, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether the steps of a scan are the indices of one axis of the weight."""
    return len(use.axes) == 1 and shapes[use.path][min(use.axes)] == use.length


def _refuse(function: str, rule: Rule, use: _Use, shape: tuple[int, ...]) -> None:
    raise fail(
        function,
        f"the path of a rule selects steps of {use.path!r}, which are not steps of one axis.",
        given=f"path {rule.path!r}; a weight of the shape {list(shape)}, and a scan of "
        f"{use.length} steps over axes {sorted(use.axes)}",
        expected="a scan over all indices of one axis of the weight",
        fix="let the rule match the whole weight, or keep the layers of f in one stack.",
    )


def check_split(function: str, found: Sequence[Found], splits: Sequence[Split]) -> None:
    """Raises if a weight was split but no scan reads its parts."""
    whole = {part.path: part.whole for split in splits for part in split.parts}
    apart: set[str] = set()
    for item in found:
        for origin in filter(None, item.origins):
            paths = [part.path for part in origin.parts]
            if len({whole.get(path, path) for path in paths}) == len(set(paths)):
                apart |= {whole[path] for path in paths if path in whole}
    for split in splits:
        if split.path not in apart:
            raise fail(
                function,
                f"the weight {split.path!r}, whose steps a rule selects, reaches its scan "
                "through an operation that mixes them.",
                given=f"bounds {list(split.bounds)} along axis {split.axis}",
                expected="views that keep the steps apart and in order, such as astype, "
                "transpose and reshape of other axes",
                fix="prepare the weight outside of f, or let rules match the whole weight.",
                error=NotImplementedError,
            )
