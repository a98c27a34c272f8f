"""Blocks: contractions whose weights are learned together, and the equations between them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .._compat import Eqn
from ..transforms._shared import Address, Site

Group = tuple[str, list[Eqn], tuple[Address, ...]]
"""What is run at once: its kind, its equations, the addresses of those that hold sites."""


def labels_of(
    sites: Iterable[Site], bodies: Mapping[Address, Address | None], named: str | None
) -> dict[Address, Any]:
    """Returns for each site the block that it is part of.

    Args:
      sites: of weights that are learned.
      bodies: the innermost body of a scan or of `jax.checkpoint` around each, where there is one.
      named: a pattern: sites in whose paths it finds the same are one block. Else bodies are.
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
    """Returns the equations of a scope with those of a block together.

    A block has what stands between its sites, and what follows them up to where the fewest numbers
    are handed on, such as behind the sum with a residual stream, but nothing that reduces them. A
    body that is one block is whole.

    Args:
      groups: equations that are entered, and before, between and behind them what is jitted.
      label_of: returns the block of what is entered, or `None`.
      address: of the scope.
      is_of_batch: whether a value depends on more than parameters.
      results: of the scope that do.
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
    """Returns how many numbers of a batch are needed before each equation of each group, and after
    its last.
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
    """Returns how many equations behind its last site are part of a block."""
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
