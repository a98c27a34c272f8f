"""Modules whose methods run through the transforms."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from ..modules import Mode, QuantizedFunction
from ..policy import Policy
from ..transforms import Plan
from ._pure import PureCall, pure_call
from ._state import State, Wanted
from ._variables import QParam


class Quantized(State):
    """Base of modules whose methods run through the transforms, on the weights of a float one.

    A subclass names the float class as its second base. It takes that one's arguments, and by name
    `policy`, `mode` and `backward`, which are attributes, see `jqx.nnx.quantize`.
    """

    def __init__(
        self,
        *args: Any,
        policy: Policy,
        mode: Mode = Mode.SIMULATE,
        backward: DTypeLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._set_up(policy, mode, backward, kwargs.get("rngs"))

    def _is_plain(self) -> bool:
        """Whether a call is one of the float class itself."""
        return self.mode is Mode.FLOAT and not nnx.state(self, QParam)

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the method `name` of the float class."""
        if self._is_plain():
            return getattr(super(State, self), name)(*args, **kwargs)
        call, pure = self._function(name, args, kwargs)
        out, written = self._run(call, pure.params)
        pure.write(written)
        return out

    def _plan(self, name: str, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan of a call of a method."""
        call, pure = self._function(name, args, kwargs)
        return call.plan(pure.params)

    def _function(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[QuantizedFunction, PureCall]:
        """Returns a method as a function of weights."""
        constant = self.wanted is Wanted.CODES
        pure = pure_call(self, float_class(type(self)), name, args, kwargs, constant=constant)
        is_whole = name == "__call__" or self.found is not None
        call = QuantizedFunction(
            function=pure.function,
            policy=self.policy if is_whole else _optional(self.policy),
            args=pure.args,
            kwargs={},
            caller=type(self).__name__,
            **self._known(),
        )
        return call, pure


def _optional(policy: Policy) -> Policy:
    """Returns a policy for a method that may reach but some of the weights."""
    return Policy(dataclasses.replace(rule, optional=True) for rule in policy.rules)


def float_class(kind: type) -> type:
    """Returns the class that a quantized one is made of."""
    return next(base for base in kind.__mro__ if not issubclass(base, State))
