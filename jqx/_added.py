"""Fields that a class got after values of it had been written as JSON."""

import dataclasses
from typing import Any

_ADDED = "jqx added"


def added(default: Any, **options: Any) -> Any:
    """A field of a dataclass that is not written while it has its default, so that values without
    it read and write as they did before it was added. `options` are those of `dataclasses.field`.
    """
    return dataclasses.field(default=default, metadata={_ADDED: True}, **options)


def unwritten(cls: type) -> dict[str, Any]:
    """Returns the defaults of the fields of a class that are not written while they have them."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {field.name: field.default for field in fields if _ADDED in field.metadata}
