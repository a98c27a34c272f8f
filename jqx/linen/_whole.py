"""A quantized whole module, and what is reached through it if it is bound."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn

from .._errors import fail
from ..modules._shared import read
from ._quantized import Quantized, call, float_class
from ._state import State

Get = Callable[[nn.Module], Any]
"""A function that gets an attribute of a float module."""


class Whole(Quantized, kw_only=True):
    """Base of modules that `quantize` makes. Everything that is reached through a bound module runs
    quantized.
    """

    def apply(self, variables: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """Applies a method: one of the class, a name, or any function of the module."""
        return super().apply(variables, *args, method=self._q_routed(method), **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._q_is_plain():
            return super().__getattr__(name)
        return _reached(self, lambda module: getattr(module, name))

    @nn.nowrap
    def _register_submodules(self, name: str, val: Any) -> None:
        """Leaves modules among the fields unbound, so that none of them runs in float."""
        if self._q_is_plain():
            super()._register_submodules(name, val)

    @nn.nowrap
    def _q_evaluate(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._q_evaluate(method, *args, **kwargs)
        modules = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, nn.Module)]
        if not modules or self._q_is_plain():
            return result
        if not isinstance(result, nn.Module):
            raise fail(
                type(self).__name__,
                "a method returns modules among other values.",
                given=", ".join(type(module).__name__ for module in modules),
                expected="arrays and values, or a single module",
                fix="return the module from a separate method.",
            )
        return _Part(self, lambda module: call(module, method, *args, **kwargs))

    def _q_read(self, name: str) -> Any:
        """Reads the property `name` of the float class, in float if it contracts nothing."""
        kind = float_class(type(self))
        if self._q_is_plain():
            return read(kind, self, name)

        def get(module: nn.Module) -> Any:
            return read(kind, module, name)

        with contextlib.suppress(jax.errors.ConcretizationTypeError):
            if self._q_plan(get).sites:
                return self._q_evaluate(get)
        return _reached(self, get)

    def _q_routed(self, method: Any) -> Any:
        """Returns a method that Flax can call on this module."""
        if (
            method is None
            or self._q_has(method)
            or not (isinstance(method, str) or callable(method))
        ):
            return method
        unbound = getattr(method, "__func__", method)

        def run(self: Whole, *args: Any, **kwargs: Any) -> Any:
            return self._q_evaluate(unbound, *args, **kwargs)

        return run

    def _q_has(self, method: Any) -> bool:
        """Returns whether a method, or the method of a name, runs quantized."""
        own = [vars(base) for base in type(self).__mro__ if issubclass(base, State)]
        if isinstance(method, str):
            return any(method in members for members in own)
        method = getattr(method, "__func__", method)
        return any(method is member for members in own for member in members.values())


class _Part:
    """A module inside a bound quantized module, whose methods run quantized."""

    def __init__(self, whole: Whole, get: Get):
        self._q_whole, self._q_get = whole, get

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _method(self._q_whole, self._q_get)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return _reached(self._q_whole, lambda module: getattr(self._q_get(module), name))


def _method(whole: Whole, get: Get) -> Callable[..., Any]:
    """Returns a method of the float module, or of a module inside it, that runs quantized."""

    def run(*args: Any, **kwargs: Any) -> Any:
        def on(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return get(module)(*args, **kwargs)

        return whole._q_evaluate(on, *args, **kwargs)

    return run


def _reached(whole: Whole, get: Get) -> Any:
    """Returns an attribute of a bound float module. Values are returned unchanged, modules and
    methods as objects that run quantized.
    """
    value = get(whole._q_bound())
    if isinstance(value, nn.Module):
        return _Part(whole, get)
    if inspect.ismethod(value) and isinstance(value.__self__, nn.Module):
        return _method(whole, get)
    if isinstance(value, (list, tuple)):
        return tuple(_reached(whole, _item(get, i)) for i in range(len(value)))
    if isinstance(value, Mapping):
        return {key: _reached(whole, _item(get, key)) for key in value}
    return value


def _item(get: Get, key: Any) -> Get:
    return lambda module: get(module)[key]
