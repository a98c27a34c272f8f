"""Statistics and scales by key, such as `attention/query/kernel:dot_general:lhs`, as nested dicts
in which each entry is next to its weight.
"""

from collections.abc import Mapping
from typing import Any

from ..transforms._shared import nested


def nest(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts, one for each part of the path."""
    return nested((_parts(key), value) for key, value in entries.items())


def flatten(nested: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Inverts `nest`."""
    entries = {}
    for name, value in nested.items():
        if _is_entry(name):
            entries[before + name] = value
        else:
            entries |= flatten(value, f"{before}{name}/")
    return entries


def split(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits nested dicts in two: parameters, and the entries next to them."""
    params, entries = {}, {}
    for name, value in tree.items():
        if _is_entry(name):
            entries[name] = value
        elif isinstance(value, Mapping):
            params[name], inner = split(value)
            if inner:
                entries[name] = inner
        else:
            params[name] = value
    return params, entries


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `below` updated by `above`: a leaf of `above` replaces the leaf of `below`."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            value = overlay(under, value)
        merged[name] = value
    return merged


def without(tree: Mapping[str, Any], gone: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts without the leaves that `gone` has at the same place, and without the
    dicts that become empty.
    """
    kept = {}
    for name, value in tree.items():
        other = gone.get(name, {})
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            value = without(value, other) if other else value
            if not value and other:
                continue
        elif name in gone and not isinstance(other, Mapping):
            continue
        kept[name] = value
    return kept


def unscaled(stats: Mapping[str, Any], scales: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested statistics without those that have become scales."""
    known = flatten(scales)
    return nest({key: stat for key, stat in flatten(stats).items() if key not in known})


def _is_entry(name: str) -> bool:
    return ":" in name


def _parts(key: str) -> list[str]:
    """Splits the path, which precedes the first colon."""
    path, colon, rest = key.partition(":")
    *scopes, last = path.split("/")
    return [*scopes, last + colon + rest]
