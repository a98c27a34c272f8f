"""Blocks: contractions whose weights are learned together, and the equations between them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .._compat import Eqn
from ..transforms import Site
from ..transforms._shared import Address

Group = tuple[str, list[Eqn], tuple[Address, ...]]
"""Equations that run together: their kind, the equations, the addresses of those with sites."""


def labels_of(
    sites: Iterable[Site], bodies: Mapping[Address, Address | None], named: str | None
) -> dict[Address, Any]:
    """Returns for each site the block that it belongs to.

    Args:
      sites: sites of weights that are learned.
      bodies: the innermost body of a scan or of `jax.checkpoint` around each site, if there is one.
      named: a pattern; sites whose paths give the same match are one block. `None` uses bodies.
    """
    found: dict[Address, Any] = {}
    for site in sites:
        match = None if named is None else re.search(named, site.path)
        body = bodies[site.address] if named is None else None
        found[site.address] = body or site.address
        if match is not None:
            found[site.address] = tuple(loop.address for loop in site.loops), match.group()
    return found


def grouped(
    groups: Sequence[Group],
    label_of: Callable[[str, Address], Any],
    address: Address,
    is_of_batch: Callable[[Any], bool],
    results: Iterable[Any],
) -> list[Group]:
    """Groups the equations of a scope, so that those of a block are together.

    A block has the equations between its sites. It also has those after the last site, up to the
    point where the fewest numbers are passed on, for example after the sum with a residual stream,
    but no equation that reduces them. A body that is one block stays whole.

    Args:
      groups: equations that are entered, and before, between and after them those that are jitted.
      label_of: returns the block of an entered equation, or `None`.
      address: address of the scope.
      is_of_batch: whether a value depends on more than parameters.
      results: results of the scope that depend on more than parameters.
    """
    entered = groups[1::2]
    labels = [label_of(kind, inside[0]) for kind, _, inside in entered]
    if labels and all(label == address for label in labels):
        return [("run", [], ()), _joined(groups), ("run", [], ())]
    crossing = _crossing(groups, is_of_batch, results)
    found, i = [groups[0]], 0
    while i < len(entered):
        label, first = labels[i], i
        if label is None:
            found += groups[2 * i + 1 : 2 * i + 3]
            i += 1
            continue
        while i + 1 < len(entered) and labels[i + 1] == label:
            i += 1
        own, (_, behind, _) = groups[2 * first + 1 : 2 * i + 2], groups[2 * i + 2]
        cut = _cut(behind, crossing[2 * i + 2], is_of_batch)
        found += [_joined([*own, ("run", behind[:cut], ())]), ("run", behind[cut:], ())]
        i += 1
    return found


def _joined(groups: Sequence[Group]) -> Group:
    eqns = [eqn for _, own, _ in groups for eqn in own]
    return "block", eqns, tuple(here for _, _, inside in groups for here in inside)


def _crossing(
    groups: Sequence[Group], is_of_batch: Callable[[Any], bool], results: Iterable[Any]
) -> list[list[int]]:
    """Returns how many numbers of a batch are still needed before each equation of each group, and
    after its last one.
    """
    needed = set(results)
    found: list[list[int]] = []
    for _, eqns, _ in reversed(groups):
        own = [_count(needed)]
        for eqn in reversed(eqns):
            needed = (needed - {*eqn.outvars}) | set(filter(is_of_batch, eqn.invars))
            own.append(_count(needed))
        found.append(own[::-1])
    return found[::-1]


def _cut(eqns: Sequence[Eqn], crossing: Sequence[int], is_of_batch: Callable[[Any], bool]) -> int:
    """Returns how many equations after its last site belong to a block."""
    stop = 0
    for eqn in eqns:
        given = [x.aval for x in eqn.invars if is_of_batch(x)]
        largest = max((x.size for x in given), default=0)
        real = any(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.outvars)
        if not real or min(x.aval.size for x in eqn.outvars) < largest:
            break
        stop += 1
    return min(range(stop + 1), key=lambda i: (crossing[i], -i))


def _count(atoms: Iterable[Any]) -> int:
    return sum(x.aval.size for x in atoms)
