"""All contractions of a function with weights, quantized or not."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..policy import Policy, Rule
from ..transforms import Plan
from ..transforms._shared import Address, Call, as_plan, plan_call, trace_call
from ._elements import Elements, elements_of_sites
from ._grids import Group
from ._once import sites_once

_EVERY = Policy([Rule(".*", weight="int8", tables=None, optional=True)])


class Every(NamedTuple):
    """A function with the plan of all contractions that may be sites.

    Attributes:
      own: the plan of its call.
      plan: the plan of everything that may be a site.
      elements: which elements of its leaf each site multiplies by, by the key of its operand.
      once: addresses of sites whose matrices no other site multiplies by.
      call: the traced function.
    """

    own: Plan
    plan: Plan
    elements: dict[str, Elements]
    once: set[Address]
    call: Call


def every_site(function: str, f: Callable[..., Any], plan: Plan, args: Sequence[Any]) -> Every:
    """Returns the contractions of a function with weights, traced at its arguments."""
    call = trace_call(function, f, plan.parameters, args, {})
    own = as_plan(function, plan, call, plan.parameters)
    every = plan_call(function, call, _EVERY, plan.parameters)
    named = zip(call.paths, call.leaves, strict=True)
    groups = Group.of_plan(every, {path: x.size for path, x in named if path is not None})
    known = elements_of_sites(every, call, groups) if every.sites else {}
    joined = {
        x.key for site in every.sites for x in site.operands if len(every.weights_in(site)) > 1
    }
    elements = {key: x for key, x in known.items() if key not in joined}
    once = sites_once(every, groups, call.jaxpr, elements)
    return Every(own, every, elements, once, call)
