"""The policy of an assignment that `search` has found."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from ..policy import Policy, Rule
from ..transforms import Plan
from ..transforms._shared import Part, rule_for


def policy_of(
    units: Sequence[tuple[Sequence[str], str]], candidates: Mapping[str, Policy], base: Plan
) -> Policy:
    """Returns the policy that assigns a candidate, by name, to each unit, given as the paths of its
    weights. A name without a candidate leaves the unit in float.
    """
    return Policy(
        rule
        for parts, name in _joined(units, candidates, base)
        for rule in _rules(parts, candidates.get(name), base)
    )


def _joined(
    units: Sequence[tuple[Sequence[str], str]], candidates: Mapping[str, Policy], base: Plan
) -> list[tuple[list[Part], str]]:
    """Returns the weights of each unit, and its scheme. Consecutive parts with one scheme are
    joined, unless the policy of that scheme selects steps.
    """
    parts = {part.path: part for split in base.splits for part in split.parts}
    uneven = {n for n, way in candidates.items() if any(rule.selector for rule in way.rules)}
    found: dict[tuple[str, ...], list[tuple[list[Part], str]]] = {}
    for paths, name in units:
        own = [parts.get(path, Part(path, path, 0, 0, 0)) for path in paths]
        before = found.setdefault(tuple(part.whole for part in own), [])
        same = before and before[-1][1] == name and name not in uneven
        follows = same and _follow(before[-1][0], own)
        if follows:
            last = zip(before[-1][0], own, strict=True)
            own = [new._replace(start=old.start) for old, new in last]
            before.pop()
        before.append((own, name))
    return [pair for pairs in found.values() for pair in pairs]


def _follow(before: Sequence[Part], own: Sequence[Part]) -> bool:
    """Returns whether parts of the same weights are consecutive."""
    return all(a.stop == b.start and b.length for a, b in zip(before, own, strict=True))


def _rules(parts: Sequence[Part], policy: Policy | None, base: Plan) -> list[Rule]:
    """Returns a rule for each operation on a weight, or on several weights that one site joins."""
    wholes = {split.path: split for split in base.splits}
    paths = {
        x.path
        for part in parts
        for x in (wholes[part.whole].parts if part.length else [part])
        if part.start <= x.start and x.stop <= part.stop
    }
    ops = dict.fromkeys(
        site.op for site in base.sites for operand in site.operands if operand.path in paths
    )
    found = []
    for op in ops:
        choice = rule_for(policy, parts[0], op) if policy is not None else None
        rule = choice[1] if choice else Rule()
        optional = len(ops) > 1
        found += [
            dataclasses.replace(rule, path=path, op=op, optional=optional)
            for path in _patterns(parts)
        ]
    return found


def _patterns(parts: Sequence[Part]) -> list[str]:
    """Returns the paths of rules for weights; weights with one range of steps share one path."""
    ranges: dict[str, list[str]] = {}
    for part in parts:
        steps = f"[{part.start}:{part.stop}]" if part.length else ""
        ranges.setdefault(steps, []).append(re.escape(part.whole))
    return [
        "|".join(paths)
        if not steps
        else f"(?:{'|'.join(paths)}){steps}"
        if len(paths) > 1
        else paths[0] + steps
        for steps, paths in ranges.items()
    ]
