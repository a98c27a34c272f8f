"""Modules whose methods run through the transforms."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from ..modules import Mode
from ..modules._shared import QuantizedFunction, Scales, Wanted, holds_codes, optional
from ..policy import Policy
from ._classes import Run
from ._part import COPIED, make_parts, update_parts
from ._pure import PureCall, pure_call
from ._state import State


class Quantized(State):
    """Base of modules whose methods run through the transforms, on the weights of a float module.

    A subclass names the float class as its second base. It takes the arguments of that class, plus
    the keyword arguments `policy`, `mode`, `backward` and `scales`, see `jqx.nnx.quantize`.
    """

    def __init__(
        self,
        *args: Any,
        policy: Policy,
        mode: Mode = Mode.SIMULATE,
        backward: DTypeLike | None = None,
        scales: Scales = "calibrated",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._q_set_up(policy, mode, backward, scales, kwargs.get("rngs"))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in COPIED:
            update_parts(self, **{name: value})
        elif name == "learned_scales":
            update_parts(self, learned=value is not None)

    def _q_set_up(
        self,
        policy: Policy,
        mode: Mode,
        backward: DTypeLike | None,
        scales: Scales,
        rngs: nnx.Rngs | None,
    ) -> None:
        super()._q_set_up(policy, mode, backward, scales, rngs)
        make_parts(self)

    def _q_is_plain(self) -> bool:
        return self.mode is Mode.FLOAT and not holds_codes(nnx.state(self))

    def _q_call(self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call, pure = self._q_function(name, run, args, kwargs)
        return pure.finish(self._q_run(call, pure.params))

    def _q_function(
        self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[QuantizedFunction, PureCall]:
        pure = pure_call(self, name, run, args, kwargs, constant=self._q_wanted() is Wanted.CODES)
        is_whole = name == "__call__" or self._q_wanted() is not None
        call = QuantizedFunction(
            function=pure.function,
            policy=self.policy if is_whole else optional(self.policy),
            args=pure.args,
            kwargs={},
            caller=type(self).__name__,
            converts="jqx.nnx.convert(model, ...)",
            **self._q_known(),
        )
        return call, pure
