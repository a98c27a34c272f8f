"""Public methods and properties of a module."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection
from typing import Any

OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        *("call", "getitem", "neg", "pos", "abs", "invert"),
        *(
            prefix + name
            for prefix in ("", "r")
            for name in ("add", "sub", "mul", "matmul", "truediv", "pow", "and", "or", "rshift")
        ),
    )
)
"""Special methods that may compute something."""


def forwards(kind: type, skipped: Collection[type]) -> dict[str, Any]:
    """Returns methods and properties for a class that wraps another. Each public method goes
    through `self._q_evaluate(name, ...)`; each public property is read by `self._q_read(name)`.

    They are those of the class and of all its bases, mixins included, except the skipped ones.
    Fields of a dataclass, static methods and class methods are left unchanged.
    """
    members: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base not in skipped:
            members |= vars(base)
    fields = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else ()
    public = {
        name: unwrapped(member)
        for name, member in members.items()
        if (name[0] != "_" or name in OPERATORS) and name not in fields
    }
    methods = {name: _method(name, member) for name, member in public.items() if _is_method(member)}
    return methods | {
        name: _property(name, member) for name, member in public.items() if _is_property(member)
    }


def read(kind: type, module: Any, name: str) -> Any:
    """Returns a property of a module as an instance of `kind`; a cached property is not stored."""
    member = unwrapped(inspect.getattr_static(kind, name))
    if isinstance(member, functools.cached_property):
        return member.func(module)
    return member.__get__(module, type(module))


def unwrapped(member: Any) -> Any:
    """Returns a descriptor without the wrapper that linen adds."""
    inside = getattr(member, "__dict__", {})
    return inside.get("wrapped", member)


def _method(name: str, method: Any) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate(name, *args, **kwargs)

    run.__name__, run.__doc__ = name, method.__doc__
    return run


def _property(name: str, member: Any) -> property:
    def get(self: Any) -> Any:
        return self._q_read(name)

    setters = (getattr(member, "__set__", None), getattr(member, "__delete__", None))
    return property(get, *setters, member.__doc__)


def _is_method(x: Any) -> bool:
    """Returns whether `x` is a function, or is under `nnx.jit`, `functools.partialmethod` etc."""
    kinds = (type, staticmethod, classmethod)
    return hasattr(x, "__get__") and not isinstance(x, kinds) and not _is_data(x)


def _is_property(x: Any) -> bool:
    slots = (types.MemberDescriptorType, types.GetSetDescriptorType)
    return _is_data(x) and not isinstance(x, slots)


def _is_data(x: Any) -> bool:
    """Returns whether `x` is a data descriptor."""
    is_set = hasattr(x, "__get__") and hasattr(x, "__set__")
    return (is_set or isinstance(x, functools.cached_property)) and not isinstance(x, type)
