"""A linen module whose methods run through the transforms."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from flax import linen as nn
from flax.core import DenyList, meta, unfreeze
from flax.core.scope import intersect_filters

from ..modules import Mode
from ..modules._shared import QuantizedFunction, holds_codes, optional, overlay, split
from ..transforms import Plan, dequantize_params
from ._state import OWN, QPARAMS, State, wanted

Method = str | Callable[..., Any]
"""What runs on a module: the name of a method, or a function of the module."""

_FIELDS = "__dataclass_fields__"

OUTER = ("parent", "name")
"""Fields that identify the place of a module in its parent."""


class Quantized(State, kw_only=True):
    """Base of modules whose methods run through the transforms, on the weights of a float module.

    A subclass names the float module as its second base.
    """

    def setup(self) -> None:
        if self._q_is_plain():
            super().setup()

    @nn.nowrap  # else Flax runs `setup` first, also where it defers that into a transform
    def _q_is_plain(self) -> bool:
        """Returns whether a call runs the method of the float module unchanged."""
        if self.scope is None or self.is_initializing():
            return True
        return self.mode is Mode.FLOAT and not holds_codes(dict(self.variables))

    @nn.nowrap
    def _q_evaluate(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of the float module, or a function of the module."""
        if self._q_is_plain():
            float_self = super(State, self) if isinstance(method, str) else self
            with self._q_as_float():
                return call(float_self, method, *args, **kwargs)
        function, params, is_pair = self._q_function(method, args, kwargs)
        result = self._q_run(function, params)
        if not is_pair:
            return result
        out, updated = result
        for collection, tree in updated.items():
            self._q_keep(collection, unfreeze(tree))
        return out

    @contextlib.contextmanager
    def _q_as_float(self) -> Iterator[None]:
        """A context in which this module shows Flax the fields of its float class alone. A class
        that `nn.jit` or a similar function returns passes them all to the class that it lifts.
        """
        if _FIELDS in vars(self):  # one method calls another
            yield
            return
        object.__setattr__(self, _FIELDS, vars(float_class(type(self)))[_FIELDS])
        try:
            yield
        finally:
            object.__delattr__(self, _FIELDS)

    @nn.nowrap
    def clone(self, **updates: Any) -> Self:
        """Returns a copy with some fields changed, as `flax.linen.Module.clone` does."""
        own = [f.name for f in dataclasses.fields(State) if f.name not in OUTER]
        new = super().clone(**{name: getattr(self, name) for name in own} | updates)
        if _FIELDS in vars(self):
            object.__setattr__(new, _FIELDS, vars(self)[_FIELDS])
        return new

    def _q_plan(self, method: Method, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan of a call."""
        function, params, _ = self._q_function(method, args, kwargs)
        return function.plan(params)

    def _q_function(
        self, method: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[QuantizedFunction, dict[str, Any], bool]:
        """Returns a method as a function of weights, the weights, and whether the function also
        returns variables.
        """
        module, params, learned, others = self._q_float()
        assert self.scope is not None
        mutable = intersect_filters(self.scope.mutable, DenyList(("params", *OWN)))
        is_whole = method == "__call__" or wanted() is not None

        def function(params: Any, others: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            def run(bound: nn.Module, *args: Any) -> Any:
                return call(bound, method, *args, **kwargs)

            variables = {**others, "params": params}
            return module.apply(variables, *args, rngs=rngs, mutable=mutable, method=run)

        quantized = QuantizedFunction(
            function=function,
            policy=self.policy if is_whole else optional(self.policy),
            args=(others, dict(self.scope.rngs), *args),
            kwargs=kwargs,
            caller=type(self).__name__,
            converts="jqx.linen.convert(module, variables, ...)",
            **self._q_known(learned),
        )
        return quantized, params, mutable is not False

    def _q_float(self) -> tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Returns the float module, its weights, learned scales, and other collections."""
        variables = {key: unfreeze(meta.unbox(tree)) for key, tree in self.variables.items()}
        params, learned = split(variables.pop("params", {}))
        params = overlay(params, variables.get(QPARAMS, {}))
        others = {key: tree for key, tree in variables.items() if key not in OWN}
        return self._q_float_module(), params, learned, others

    def _q_bound(self) -> nn.Module:
        """Returns the float module, bound to its variables in float."""
        module, params, _, others = self._q_float()
        assert self.scope is not None
        variables = {**others, "params": dequantize_params(params)}
        rngs: Any = dict(self.scope.rngs)
        return module.bind(variables, rngs=rngs)

    def _q_float_module(self) -> nn.Module:
        """Returns the float module, unbound."""
        free = self.clone(_deep_clone=True, _reset_names=True, parent=None)
        kind = float_class(type(self))
        fields = [f.name for f in dataclasses.fields(kind) if f.init and f.name not in OUTER]
        return kind(**{name: getattr(free, name) for name in fields}, parent=None)


def call(module: Any, method: Method, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a module, or a function of the module."""
    if isinstance(method, str):
        return getattr(module, method)(*args, **kwargs)
    return method(module, *args, **kwargs)


def float_class(kind: type) -> type[Any]:
    """Returns the float class that a quantized class is made from."""
    return next(base for base in kind.__mro__ if not issubclass(base, State))
