"""Steps of a scan that the path of a rule selects: `layers[0]`, `layers[-2:]/attn/.*`."""

import functools
import re
from typing import NamedTuple

from .._errors import fail

_SELECTOR = re.compile(r"(?<!\\)\[(-?[0-9]+|(?:-?[0-9]+)?(?::(?:-?[0-9]+)?){1,2})\](?=/|\)|\||\Z)")
"""An integer or a slice in brackets at the end of a part of the path."""


class Selector(NamedTuple):
    """The steps that a path selects.

    Attributes:
      path: the path of the rule, for messages.
      base: the path without the steps, a regular expression for weights that a scan steps over.
      texts: the text in each pair of brackets.
    """

    path: str
    base: str
    texts: tuple[str, ...]

    @classmethod
    def of(cls, path: str) -> "Selector | None":
        """Parses a path; `None` if it selects no steps."""
        return _read(path)

    def matches(self, path: str) -> bool:
        """Whether the path of a weight is one from which the steps are selected."""
        return re.fullmatch(self.base, path) is not None

    def resolve(self, function: str, path: str, length: int) -> tuple[int, int]:
        """Returns the first selected step of a scan and the end of the selection.

        Raises:
          ValueError: if the scan does not have these steps, or they are not consecutive.
        """
        given = f"path {self.path!r}, of {length} steps over {path!r}"
        text, *more = self.texts
        if more:
            _refuse(function, "selects steps twice.", given, "one selector in a path")
        parts = [int(part) if part else None for part in text.split(":")]
        if len(parts) == 1:
            start, stop = parts[0], None if parts[0] == -1 else (parts[0] or 0) + 1
        else:
            start, stop = parts[:2]
            if len(parts) == 3 and parts[2] not in (None, 1):
                _refuse(function, "selects every other step.", given, "consecutive steps: [2:5]")
        start = 0 if start is None else start + length * (start < 0)
        stop = length if stop is None else stop + length * (stop < 0)
        if not 0 <= start < stop <= length:
            what = "selects steps that the scan does not have."
            _refuse(function, what, given, f"one step or more, within [0:{length}]")
        return start, stop


def _refuse(function: str, problem: str, given: str, expected: str) -> None:
    fix = "correct the steps, or write several rules, such as layers[0] and layers[-2:]; a rule "
    fix += "with optional=True may match no steps."
    raise fail(function, f"the path of a rule {problem}", given=given, expected=expected, fix=fix)


@functools.lru_cache(256)
def _read(path: str) -> Selector | None:
    texts = tuple(found[1] for found in _SELECTOR.finditer(path))
    if not texts:
        return None
    pieces, at = [], 0
    for found in _SELECTOR.finditer(path):
        pieces.append(path[at : found.start()])
        under = path[found.end() : found.end() + 1] == "/"
        pieces.append("" if under else "(?:/.*)?")
        at = found.end()
    base = "".join([*pieces, path[at:]])
    try:
        re.compile(base)
    except re.error:  # the brackets are part of something else
        return None
    return Selector(path, base, texts)
