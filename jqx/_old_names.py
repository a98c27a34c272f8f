"""Names of the previous release: they work for one release, with a DeprecationWarning."""

import difflib
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

_FEW = 12
"""How many names a module has at most whose error for an unknown name lists all."""


def renamed(module: str, names: Mapping[str, str], stacklevel: int = 2) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module that finds old names, with a DeprecationWarning. Its
    error for an unknown name has the names that are near.

    Args:
      module: the name of the module, `jqx` or `jqx.<folder>`.
      names: the renamed names: `{"old": "jqx.place.new"}`. The names in the `_shared.py` of a
        folder also count as old: they were public, and are internal now.
      stacklevel: the level of the warning, if the result is called by another function.
    """
    return functools.partial(_find, module, names, stacklevel)


def _find(module: str, names: Mapping[str, str], stacklevel: int, name: str) -> Any:
    if name in names:
        parts = names[name].split(".")[1:]
        value = functools.reduce(getattr, parts, sys.modules["jqx"])
        mend = f"use {names[name]}"
    else:
        value = None if name.startswith("__") else _internal(module, name)
        mend = "it is internal to jqx"
    if value is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}{_near(module, name)}")
    text = f"{module}.{name} will be removed in the next release: {mend}."
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
    return value


def _internal(module: str, name: str) -> Any:
    if importlib.util.find_spec(f"{module}._shared") is None:
        return None
    return vars(importlib.import_module(f"{module}._shared")).get(name)


def _near(module: str, name: str) -> str:
    public = [known for known in dir(sys.modules[module]) if not known.startswith("_")]
    close = [] if name.startswith("_") else difflib.get_close_matches(name, public)
    if name.startswith("_") or (not close and len(public) > _FEW):
        return ""
    return f": did you mean {' or '.join(close)}?" if close else f": it has {', '.join(public)}"
