"""Classes of quantized modules, each of which wraps a float class."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from ..modules._shared import QuantizedFunction, forwards, read
from ..transforms import Plan

Run = Callable[..., Any]
"""A function of a float module and of arguments."""

CONTAINERS = {*nnx.List.__mro__, *nnx.Dict.__mro__}
"""Bases of modules whose methods compute nothing."""


class Over(nnx.Module):
    """Base of the classes that wrap a float class: whole quantized modules and their parts."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Calls Flax's hook, but not the float class's, which is for its own subclasses."""
        hook: Any = nnx.Module.__init_subclass__
        hook.__func__(cls, **kwargs)

    def _q_is_plain(self) -> bool:
        """Returns whether a call runs the method of the float class unchanged."""
        raise NotImplementedError

    def _q_function(
        self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[QuantizedFunction, Any]:
        """Returns `run`, a function of the float module, as one of weights, and as a pure call."""
        raise NotImplementedError

    def _q_call(self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a function of the float module through the transforms."""
        raise NotImplementedError

    def _q_evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the method `name` of the float class."""
        if self._q_is_plain():
            return getattr(super(), name)(*args, **kwargs)
        return self._q_call(name, method(name), args, kwargs)

    def _q_read(self, name: str) -> Any:
        """Reads the property `name` of the float class, in float if it contracts nothing."""
        run = functools.partial(read, float_class(type(self)), name=name)
        if not self._q_is_plain():
            call, pure = self._q_function(name, run, (), {})
            with contextlib.suppress(jax.errors.ConcretizationTypeError):
                if call.plan(pure.params).sites:
                    return self._q_call(name, run, (), {})
        return run(self)

    def _q_plan(self, name: str, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan of a call of a method."""
        call, pure = self._q_function(name, method(name), args, kwargs)
        return call.plan(pure.params)


def method(name: str) -> Run:
    """Returns a function that calls a method of a module."""
    return lambda module, *args, **kwargs: getattr(module, name)(*args, **kwargs)


@functools.cache
def over(kind: type[nnx.Module], base: type[Over], name: str) -> type[Any]:
    """Returns a class with bases `base` and `kind`, whose every public method and property goes
    through `base`. A float module can become an instance: its memory layout is that of `kind`.
    """
    namespace = {**forwards(kind, CONTAINERS), "__doc__": kind.__doc__}
    namespace |= {"__module__": kind.__module__}
    pytree = getattr(kind, "_pytree__is_pytree", True)
    made = _meta(type(kind))(name, (kind, base), namespace, pytree=pytree)
    made._pytree__nodes = kind._pytree__nodes
    return made


def has_members(kind: type[nnx.Module]) -> bool:
    """Returns whether a class has methods or properties other than those of containers."""
    return bool(forwards(kind, CONTAINERS))


def float_class(kind: type) -> type:
    """Returns the float class that a quantized class is made from."""
    return next(base for base in kind.__mro__ if not issubclass(base, Over))


def become(module: nnx.Module, kind: type) -> None:
    """Makes a module an instance of another class, so that all references to it stay valid."""
    object.__setattr__(module, "__class__", kind)


@contextlib.contextmanager
def as_float(modules: list[nnx.Module]) -> Iterator[None]:
    """Makes modules instances of their float classes inside the context."""
    kinds = [type(module) for module in modules]
    for module, kind in zip(modules, kinds, strict=True):
        become(module, float_class(kind))
    try:
        yield
    finally:
        for module, kind in zip(modules, kinds, strict=True):
            become(module, kind)


@functools.cache
def _meta(kind: type[type]) -> Callable[..., type]:
    """Returns a metaclass that keeps the order of bases in memory, but looks up `Over` first."""

    def mro(cls: type) -> list[type]:
        first, *rest = type.mro(cls)
        return [first, *sorted(rest, key=lambda base: not issubclass(base, Over))]

    return type(f"Over{kind.__name__}", (kind,), {"mro": mro})
