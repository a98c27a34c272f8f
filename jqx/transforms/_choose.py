"""The rule of each contraction, and the format of a weight with several uses.

The uses of one weight are decided together, by the first rule of the policy that matches any of
them. If one rule matches several uses, its entry for lookups decides. If the decision is float, the
weight stays in float for all uses. If it is quantized, all uses take the same codes, including a
use that no rule covers or that a later rule leaves in float.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._checks import is_real
from ..policy import Policy, Rule
from ..tensor import QSpec
from ._find import Found
from ._origin import Origin
from ._paths import Part
from ._reasons import NO_WEIGHT
from ._select_steps import rule_for, selecting

Choice = tuple[int, Rule] | None
"""A rule and its index in the policy."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The decision for a contraction.

    Attributes:
      rule: its rule and the index of the rule; `None` if none matches.
      reason: why it stays in float; `None` if it is quantized.
      codes: the operation of the other use from which its weight takes its codes.
      specs: the spec of the weight in each operand; `None` for activations and weights in float.
      may_take: whether it may take codes that its weight has from another use, because no rule
        forbids it.
    """

    rule: Choice
    reason: str | None
    codes: str | None = None
    specs: tuple[QSpec | None, ...] = ()
    may_take: bool = False


def choose(
    found: Sequence[Found],
    policy: Policy,
    dtypes: Mapping[str, Any],
    parts: Mapping[str, Part],
    lost: Mapping[str, str],
) -> tuple[list[Chosen], set[int]]:
    """Returns the decision for each contraction, and the indices of the rules that match one.

    `dtypes` are the dtypes of the parameters, `parts` those parameters that are parts of another,
    and `lost` those that cannot be quantized as planned, each with the reason.
    """
    rules = selecting(found, policy, parts)
    choices = [_choices(item, policy, rules, parts) for item in found]
    used = {choice[0] for each in choices for choice in each.values() if choice}
    uses = _uses(found, choices)
    first = {path: _first(each) for path, each in uses.items()}
    floats = {path: use for path, use in first.items() if use and use.spec is None}
    floats |= {path: first[path]._replace(spec=None, why=why) for path, why in lost.items()}
    own = [_own(item, each, dtypes) for item, each in zip(found, choices, strict=True)]
    _spread(found, own, floats)
    chosen = [_together(item, mine, first, floats) for item, mine in zip(found, own, strict=True)]
    return chosen, used


def weights_of(item: Found) -> list[Origin]:
    """Returns the weights among the operands of a contraction; joined weights are separate."""
    return [part for origin in item.origins if origin for part in origin.parts]


class Use(NamedTuple):
    """What a rule specifies for a use of a weight; `why` is the reason if it cannot be done."""

    place: int
    path: str
    op: str
    spec: QSpec | None
    why: str = ""


def _choices(
    item: Found, policy: Policy, selecting: Mapping[int, Rule], parts: Mapping[str, Part]
) -> dict[str, Choice]:
    """Returns the rule for each path of a contraction."""
    has_weight = any(origin is not None for origin in item.origins)

    def of(path: str) -> Choice:
        if path in parts:
            return rule_for(policy, parts[path], item.op, selecting)
        return policy.first(path, item.op, has_weight=has_weight)

    return {path: of(path) for path in item.paths}


def _uses(found: Sequence[Found], choices: Sequence[Mapping[str, Choice]]) -> dict[str, list[Use]]:
    uses = defaultdict(list)
    for item, each in zip(found, choices, strict=True):
        general = next(iter(each.values()))
        for path in {part.path for part in weights_of(item)}:
            choice = each.get(path, general)
            if choice is not None:
                place, rule = choice
                uses[path].append(Use(place, path, item.op, rule.weight_for(item.op)))
    return uses


def _first(uses: Sequence[Use]) -> Use:
    return min(uses, key=lambda use: (use.place, use.op != "gather"))


def _own(item: Found, choices: Mapping[str, Choice], dtypes: Mapping[str, Any]) -> Chosen:
    """Returns the decision for a contraction by the rule that covers it, without regard to other
    uses of its weights.
    """
    choice = next(iter(choices.values()))
    if len({choice and choice[0] for choice in choices.values()}) > 1:
        names = " and ".join(map(repr, choices))
        several = sum(origin is not None for origin in item.origins) > 1
        how = "multiplied by each other" if several else "joined"
        why = f"the weights {names} are {how}, but fall under different rules"
        return Chosen(None, why)
    if item.reason is not None:
        return Chosen(choice, item.reason)
    operands = [v.aval.dtype for v in item.eqn.invars[: len(item.origins)]]
    integers = [part.path for part in weights_of(item) if not is_real(dtypes[part.path])]
    cast = next((part for part in weights_of(item) if part.cast), None)
    real = all(map(is_real, operands)) and not integers and cast is None
    if choice is None:
        reason = "no rule matches" if any(item.origins) else NO_WEIGHT
        return Chosen(None, reason, may_take=real)
    place, rule = choice
    weight, lookup = rule.weight_for(item.op), item.op == "gather"
    if weight is None and rule.output is None and (lookup or rule.activation is None):
        it = "lookups" if lookup and rule.weight else "it"
        return Chosen(choice, f"rule {place} leaves {it} in float", may_take=real)
    if cast is not None:
        return Chosen(choice, f"f rounds {cast.path!r} to {cast.cast}")
    if not all(map(is_real, operands)):
        names = " and ".join(dtype.name for dtype in operands)
        return Chosen(choice, f"operands are {names}, not floats{_OF_BITS * ('float' in names)}")
    if integers:
        name = dtypes[integers[0]].name
        return Chosen(choice, f"the parameter {integers[0]!r} is {_unreal(name)}")
    specs = tuple(weight if origin else None for origin in item.origins)
    return Chosen(choice, None, specs=specs, may_take=True)


_OF_BITS = " of 16 bits or more"


def _unreal(name: str) -> str:
    return f"{name}, not a float{_OF_BITS * name.startswith('float')}"


def _spread(found: Sequence[Found], own: Sequence[Chosen], floats: dict[str, Use]) -> None:
    """Adds the weights that are multiplied together with a weight that stays in float."""
    before = -1
    while before != len(floats):
        before = len(floats)
        for item, mine in zip(found, own, strict=True):
            paths = [part.path for part in weights_of(item)]
            use = next((floats[path] for path in paths if path in floats), None)
            if use and any(mine.specs):
                floats.update({path: use for path in paths if path not in floats})


def _together(
    item: Found, own: Chosen, first: Mapping[str, Use], floats: Mapping[str, Use]
) -> Chosen:
    """Returns the decision for a contraction, given the other uses of its weights."""
    paths = [part.path for part in weights_of(item)]
    tied = next((path for path in paths if path in floats), None)
    if tied is not None and any(own.specs):
        return Chosen(own.rule, _left(tied, floats[tied]))
    if tied is not None or not own.may_take:
        return own
    specs = own.specs or (None,) * len(item.origins)
    pairs = list(zip(item.origins, specs, strict=True))
    taken = [_taken(origin, spec, first) if origin else None for origin, spec in pairs]
    whole = all(use or not origin for use, origin in zip(taken, item.origins, strict=True))
    if not any(taken) or (own.reason is not None and not whole):
        return own
    other = next(use for use in taken if use)
    specs = tuple(use.spec if use else spec for use, spec in zip(taken, specs, strict=True))
    return Chosen(own.rule or (other.place, Rule()), None, other.op, specs)


def _taken(origin: Origin, spec: QSpec | None, first: Mapping[str, Use]) -> Use | None:
    """Returns the use from which a weight takes its codes, if it is another one: its own rule
    leaves it in float, or a rule for lookups in it decides otherwise.
    """
    uses = [first[part.path] for part in origin.parts if part.path in first]
    if len(uses) < len(origin.parts) or len({use.spec for use in uses}) > 1:
        return None
    use = uses[0]
    return use if spec is None or (use.op == "gather" and use.spec != spec) else None


def _left(path: str, use: Use) -> str:
    if use.why:
        also = f", and {path!r} is multiplied together with it"
        return use.why + (also if path != use.path else "")
    what, more = f"{use.path!r}", ""
    if use.op == "gather":
        what, more = f"the lookup of {use.path!r}", 'pass tables="int8", or '
    why = "and a weight is quantized for all its uses or for none"
    if path != use.path:
        why = f"and {path!r} is multiplied together with it"
    return f"rule {use.place} leaves {what} in float, {why}: {more}put a rule for it first"
