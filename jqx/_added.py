"""Fields that were added to a class after values of it had been written as JSON."""

import dataclasses
from typing import Any

_ADDED = "jqx added"


def added(default: Any, **options: Any) -> Any:
    """Returns a dataclass field that is not written while it has its default, so that values
    without it are read and written as before it was added. `options` are those of
    `dataclasses.field`.
    """
    return dataclasses.field(default=default, metadata={_ADDED: True}, **options)


def unwritten(cls: type) -> dict[str, Any]:
    """Returns the defaults of the fields of a class that are not written while they have them."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {field.name: field.default for field in fields if _ADDED in field.metadata}
