"""Parses rules of the command line, `regex=scheme`; see `jqx/tensor/_scheme.py`."""

import re
from typing import NamedTuple

from .._errors import message
from ..tensor._shared import Scheme, parse_scheme

_RULE = re.compile(r"(.+?)=([a-z][a-z0-9_]*(?::[a-z]+(?:=[^:=]+)?)*)", re.DOTALL)


class FileRule(NamedTuple):
    """A scheme for the tensors whose names match a regular expression in full."""

    pattern: re.Pattern[str]
    scheme: Scheme
    text: str


def parse_rule(text: str) -> FileRule:
    """Returns the rule for a text `regex=scheme`.

    Raises:
      ValueError: if the text does not have this form.

    Example:
      >>> rule = parse_rule("layers.[0-9]+.*=int4:group=32")
      >>> rule.pattern.pattern, str(rule.scheme.spec)
      ('layers.[0-9]+.*', 'int4 per_group(32, tail=True)')
    """
    found = _RULE.fullmatch(text)
    if found is None:
        raise _wrong("the rule is not regex=scheme.", text, "such as '.*mlp.*=int4:group=32'")
    try:
        pattern = re.compile(found[1])
    except (re.error, OverflowError) as error:
        raise _wrong(
            f"the rule has no valid regular expression: {error}.", text, "a pattern of Python's re"
        ) from None
    return FileRule(pattern, parse_scheme(found[2]), text)


def _wrong(problem: str, given: str, expected: str) -> ValueError:
    fix = "see the table of schemes in the documentation, docs/guides/policies.md."
    return ValueError(message("scheme", problem, given=given, expected=expected, fix=fix))
