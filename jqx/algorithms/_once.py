"""Finds sites that run once for each part of their weight: these are quantized in place."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .. import _compat
from ..transforms import Plan, Site
from ..transforms._shared import FORMS, REMAT, Address, addressed
from ._decisions import body_of
from ._elements import Elements
from ._grids import Group


def sites_once(
    plan: Plan, groups: Sequence[Group], jaxpr: Any, elements: Mapping[str, Elements]
) -> set[Address]:
    """Returns the addresses of the sites that run once for each part of their weight: all scans
    around them step over it, and no other site multiplies by the same elements.
    """
    alone = {site.address: site.address for site in plan.sites}
    return apart(plan, groups, elements, alone) & {*bodies_of(plan, jaxpr)}


def bodies_of(plan: Plan, jaxpr: Any) -> dict[Address, Address | None]:
    """Returns the sites with a weight over which all scans around them step, each with the
    innermost body of a scan or of `jax.checkpoint` around it, or `None`.
    """
    found: dict[Address, Address | None] = {}
    for site, scans, around in _reached(plan, jaxpr):
        weights = sum(x.path is not None for x in site.operands)
        if weights == 1 and tuple(loop.address for loop in site.loops) == scans:
            found[site.address] = around
    return found


def scans_around(plan: Plan, jaxpr: Any) -> dict[Address, tuple[Address, ...]]:
    """Returns the sites that a walk over stages reaches, each with the scans around it."""
    return {site.address: scans for site, scans, _ in _reached(plan, jaxpr)}


def _reached(
    plan: Plan,
    jaxpr: Any,
    address: Address = (),
    scans: tuple[Address, ...] = (),
    around: Address | None = None,
) -> Iterator[tuple[Site, tuple[Address, ...], Address | None]]:
    """Yields sites, each with the scans around it, and with the innermost body of a scan or of
    `jax.checkpoint`.
    """
    body, _ = _compat.open_jaxpr(jaxpr)
    for here, eqn, marked in addressed(body, address):
        site, name = plan.site_at(here), eqn.primitive.name
        if site is not None:
            yield site, scans, around
        elif not marked or name in ("while", "shard_map"):
            continue
        elif name == "cond":
            for i, branch in enumerate(eqn.params["branches"]):
                yield from _reached(plan, branch, (*here, i), scans, around)
        elif name == "scan":
            yield from _reached(plan, eqn.params["jaxpr"], here, (*scans, here), here)
        elif name in FORMS:
            inside = here if name in REMAT else around
            yield from _reached(plan, body_of(eqn), here, scans, inside)


def apart(
    plan: Plan,
    groups: Sequence[Group],
    elements: Mapping[str, Elements],
    labels: Mapping[Address, Any],
) -> set[Address]:
    """Returns the addresses of the sites whose weight shares no element with that of a site of
    another label.
    """
    found: set[Address] = set()
    for group in groups:
        mine = [
            (site.address, elements.get(operand.key))
            for site in plan.sites
            for operand in site.operands
            if operand.path in group.sizes
        ]
        known = [(here, own) for here, own in mine if own is not None]
        if not known or len(known) < len(mine):
            continue
        if len({labels.get(here) for here, _ in known}) == 1:
            found |= {here for here, _ in known}
            continue
        known = [(here, own[()]) for here, own in known]
        uses = np.zeros(1 + max(int(own.max(initial=0)) for _, own in known), np.int32)
        for label in dict.fromkeys(labels.get(here) for here, _ in known):
            is_used = np.zeros(len(uses), bool)
            for here, own in known:
                if labels.get(here) == label:
                    is_used[own.ravel()] = True
            uses += is_used
        found |= {here for here, own in known if np.all(uses[own] == 1)}
    return found
