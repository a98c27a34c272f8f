"""Names of tensors in pictures and pages: order, common parts, groups of layers."""

import re
from collections.abc import Sequence
from typing import NamedTuple

_PARTS = re.compile(r"\d+|\D+")
_COMPONENT = re.compile(r"[/.]?[^/.\[]+|\[[^\]]*\]?|[/.]")


class Group(NamedTuple):
    """Consecutive rows that belong together, such as those of one layer.

    Attributes:
      name: common prefix of their names; empty if there is none.
      start: index of the first row.
      stop: index after the last row.
    """

    name: str
    start: int
    stop: int


def in_model_order(names: Sequence[str]) -> list[int]:
    """Returns the order in which names are shown: the given order, which is that of the model; but
    with numbers in natural order if the names are sorted as text, as JAX sorts the keys of a dict.
    """
    places = list(range(len(names)))
    if list(names) == sorted(names) or _components(names) == sorted(_components(names)):
        return sorted(places, key=lambda i: _natural(names[i]))
    return places


def _components(names: Sequence[str]) -> list[list[str]]:
    return [re.split(r"[/.]", name) for name in names]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a key that sorts numbers by their value."""
    parts = [part for component in _components([name])[0] for part in [*_runs(component), ""]]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _runs(text: str) -> list[str]:
    return _PARTS.findall(text)


def shared_ends(names: Sequence[str]) -> tuple[str, str]:
    """Returns the prefix and suffix of whole components that all names share; empty if a name would
    be left empty, or there is only one name.
    """
    split = [_COMPONENT.findall(name) for name in names]
    if len(split) < 2:
        return "", ""
    most = min(map(len, split)) - 1
    start = 0
    while start < most and len({parts[start] for parts in split}) == 1:
        start += 1
    if start and any(parts[start].strip("/.[]").isdecimal() for parts in split):
        start -= 1  # a number needs the word before it
    end = 0
    while end < most - start and len({parts[-1 - end] for parts in split}) == 1:
        end += 1
    first = split[0]
    return "".join(first[:start]), "".join(first[len(first) - end :])


def shortened(names: Sequence[str]) -> tuple[list[str], str]:
    """Returns names without their shared parts, and these as a pattern, which may be empty."""
    before, after = shared_ends(names)
    short = [name[len(before) : len(name) - len(after)].lstrip("/.") for name in names]
    return short, f"{before}{'/' * bool(before)}…{after}" if before or after else ""


def groups_of(names: Sequence[str]) -> list[Group]:
    """Returns names in groups of consecutive names that begin with the same layer, or with the same
    parent if there are no layer numbers.
    """
    found: list[Group] = []
    for place, name in enumerate(names):
        own = _group(name)
        if found and own and found[-1].name == own:
            found[-1] = found[-1]._replace(stop=place + 1)
        else:
            found.append(Group(own, place, place + 1))
    return found


def _group(name: str) -> str:
    *parts, last = _COMPONENT.findall(name) or [""]
    if last.strip("/.").isdecimal():
        return ""  # a number alone is not a name
    for i, part in enumerate(parts):
        if any(map(str.isdecimal, part)):
            return "".join(parts[: i + 1])
    return "".join(parts)


def within(name: str, group: str) -> str:
    """Returns the rest of a name within its group."""
    return name[len(group) :].lstrip("/.")


def cut(text: str, most: int = 44) -> str:
    """Returns text of at most `most` characters: the start and end of longer text."""
    if len(text) <= most:
        return text
    end = 2 * most // 3
    return f"{text[: most - 1 - end]}…{text[-end:]}"
