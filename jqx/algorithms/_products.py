"""Products of two activations, such as queries and keys, with both operands rotated."""

import math
import re

import jax.numpy as jnp
import numpy as np

from .._errors import fail
from ..transforms import ChannelMap, Plan, Site
from ..transforms._shared import contractions, observed_parts
from ._every import Every
from ._orthogonal import Orthogonal


def rotated_products(
    function: str, every: Every, pattern: str, seed: int
) -> dict[str, tuple[int, dict[str, ChannelMap]]]:
    """Returns for the name of each product the number of channels that it sums over, and the
    rotation of both operands, by key: `(x Q) (y Q)' = x y'`.

    Args:
      function: name of the function, for errors.
      every: the function.
      pattern: a regular expression for names of sites, matched in full.
      seed: seed of the rotations.
    """
    sites = [x for x in every.own.sites if re.fullmatch(pattern, x.name)]
    fits = [x for x in sites if _is_product(x)]
    wrong = [x.name for x in sites if x not in fits]
    if not (fits and not wrong):
        raise fail(
            function,
            "`products` matches no product of two activations."
            if not fits
            else "`products` also matches other sites.",
            given=f"products == {pattern!r}, which matches {', '.join(wrong[:4]) or 'no site'}",
            expected=f"names of such sites of the plan: {_some(every.own)}",
            fix="add a rule for them to the policy, without weight=, or match other names.",
        )
    items, found = {item.address: item for item in contractions(every.call)}, {}
    for site in fits:
        lhs, rhs, *_ = observed_parts(site, items[site.address])
        count = math.prod(int(site.shapes[0][axis]) for axis in lhs.about.contracted)
        matrix = Orthogonal.any(count, seed).times(np.eye(count))
        own = ChannelMap(factors=(jnp.asarray(matrix, jnp.float32),))
        found[site.name] = count, {lhs.key: own, rhs.key: own}
    return found


def _is_product(site: Site) -> bool:
    """Whether a site multiplies two activations."""
    return site.op == "dot_general" and all(x.path is None for x in site.operands)


def _some(plan: Plan) -> str:
    names = [x.name for x in plan.sites if _is_product(x)]
    return ", ".join(map(repr, names[:4])) or "there is none"
