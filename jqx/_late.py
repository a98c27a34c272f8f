"""Modules that are imported when one of their names is first used, which keeps `import jqx` fast.

Their imports are below `if TYPE_CHECKING:`, where editors and type checkers read them.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Late:
    """A stand-in for a module, with the attributes of the module, which it imports on first use.

    Args:
      module: the full name of the module.
    """

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


def late(
    module: str, names: Mapping[str, Sequence[str]], otherwise: Callable[[str], Any]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package.

    Args:
      module: the name of the package.
      names: for each of its modules that is imported late, the names that the package takes from
        it.
      otherwise: finds all other names, or raises AttributeError.
    """
    sources = {name: source for source, found in names.items() for name in found}

    def getattr_of_late(name: str) -> Any:
        if name == "__all__":  # for `import *`
            return [public for public in dir_of_all() if not public.startswith("_")]
        if name in names:  # the import sets the attribute too
            return importlib.import_module(f"{module}.{name}")
        if name in sources:
            value = getattr(importlib.import_module(f"{module}.{sources[name]}"), name)
            setattr(sys.modules[module], name, value)
            return value
        return otherwise(name)

    def dir_of_all() -> list[str]:
        return sorted({*vars(sys.modules[module]), *names, *sources})

    return getattr_of_late, dir_of_all
