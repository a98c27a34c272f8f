"""What treescope shows of dataclasses with many fields: those that differ from their defaults."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any


def constructor(
    value: Any, attributes: Mapping[str, Any], path: str | None, subtree_renderer: Any
) -> Any:
    """Returns an object with some attributes. treescope calls it, so treescope is loaded."""
    return sys.modules["treescope"].repr_lib.render_object_constructor(
        object_type=type(value),
        attributes=attributes,
        path=path,
        subtree_renderer=subtree_renderer,
    )


def changed_fields(value: Any, path: str | None, subtree_renderer: Any) -> Any:
    """Shows an object with the fields that differ from their defaults; for `__treescope_repr__`."""
    given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    changed = {name: x for name, x in given.items() if not _same(x, defaults[name])}
    return constructor(value, changed, path, subtree_renderer)


def _same(x: Any, default: Any) -> bool:
    return x is default or (type(x) is type(default) and x == default)
