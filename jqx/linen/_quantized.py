"""A linen module whose methods run through the transforms."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax.core import DenyList, meta, unfreeze
from flax.core.scope import intersect_filters

from ..modules import Mode, QuantizedFunction, overlay, split
from ..transforms import Plan
from ._state import OWN, QPARAMS, State

OUTER = ("parent", "name")
"""Fields that say where a module stands."""


class Quantized(State, kw_only=True):
    """Base of modules whose methods run through the transforms, on the parameters of a float one.

    A subclass names the float module as its second base.
    """

    def setup(self) -> None:
        if self._is_plain():
            super().setup()

    def _is_plain(self) -> bool:
        """Whether a call is one of the float module itself."""
        converted = QPARAMS in self.variables
        return self.is_initializing() or (self.mode is Mode.FLOAT and not converted)

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the method `name` of the float module."""
        if self._is_plain():
            return getattr(super(State, self), name)(*args, **kwargs)
        call, params, is_pair = self._function(name, args, kwargs)
        result = self._run(call, params)
        if not is_pair:
            return result
        out, updated = result
        for collection, tree in updated.items():
            self._keep(collection, unfreeze(tree))
        return out

    def _plan(self, name: str, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan of a call of a method."""
        call, params, _ = self._function(name, args, kwargs)
        return call.plan(params)

    def _function(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[QuantizedFunction, dict[str, Any], bool]:
        """Returns a method as a function of weights, the weights, and whether it returns variables
        beside its result.
        """
        scope, module = self.scope, self._float_module()
        assert scope is not None
        variables = {key: unfreeze(meta.unbox(tree)) for key, tree in self.variables.items()}
        params, learned = split(variables.pop("params", {}))
        params = overlay(params, variables.get(QPARAMS, {}))
        others = {key: tree for key, tree in variables.items() if key not in OWN}
        mutable = intersect_filters(scope.mutable, DenyList(("params", *OWN)))

        def function(params: Any, others: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            variables = {**others, "params": params}
            return module.apply(variables, *args, rngs=rngs, mutable=mutable, method=name, **kwargs)

        call = QuantizedFunction(
            function=function,
            policy=self.policy,
            args=(others, dict(scope.rngs), *args),
            kwargs=kwargs,
            caller=type(self).__name__,
            **self._known(learned),
        )
        return call, params, mutable is not False

    def _float_module(self) -> nn.Module:
        """Returns the float module, bound to nothing."""
        free = self.clone(_deep_clone=True, _reset_names=True, parent=None)
        kind = next(base for base in type(self).__mro__ if not issubclass(base, State))
        fields = [f.name for f in dataclasses.fields(kind) if f.init and f.name not in OUTER]
        return kind(**{name: getattr(free, name) for name in fields}, parent=None)
