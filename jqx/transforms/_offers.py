"""What a plan says of operands that `jqx.hoist` can split off."""

from typing import Any

import jax.numpy as jnp

from ._known_values import KnownValues, Value
from ._trace import Call

OUTSIDE = ": compute it outside of f"
"""The end of a reason that an offer replaces."""


def offers(call: Call) -> dict[int, tuple[str, str]]:
    """Returns what can be done about operands that depend on parameters alone, by the `id` of the
    contraction: the names of the parameters, and the end of the reason.
    """
    known = known_values(call)
    inner = "parameters", ": jqx.hoist computes it outside of f"
    found: dict[int, tuple[str, str]] = dict.fromkeys(known.inner, inner)
    for place, own in known.operands.items():
        paths = [call.paths[parent] for parent in sorted(own.value.parents)]
        names = named([path for path in paths if path is not None])
        found[place] = names, _offer(known, own.value, own.aval)
    return found


def known_values(call: Call) -> KnownValues:
    """Returns what depends on the parameters of a call alone."""
    numbered = zip(call.paths, call.keys, strict=True)
    places = {keys[1].idx for path, keys in numbered if path is not None}
    are_known = [
        path is not None or (keys[0].idx == 0 and keys[1].idx in places and tuple(leaf.shape) == ())
        for path, keys, leaf in zip(call.paths, call.keys, call.leaves, strict=True)
    ]
    return KnownValues(call.jaxpr, are_known, "all")


def _offer(known: KnownValues, value: Value, aval: Any) -> str:
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        return f", and it is {aval.dtype.name}, not a float"
    size, before = known.size_of(value, aval), known.size_before(value)
    if size <= before:
        return ": use jqx.hoist, or ptq(hoist=True)"
    return (
        f": with {size:,} elements it is larger than their {before:,}, so use jqx.hoist, or "
        "ptq(hoist='all')"
    )


def named(paths: list[str]) -> str:
    """Returns paths of parameters as text; of many, the first three."""
    names = " and ".join(map(repr, paths[:3]))
    return names + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
