"""Modules inside a quantized module."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from flax import nnx
from jax.typing import DTypeLike

from .._errors import fail
from ..modules import Mode
from ..modules._shared import QuantizedFunction, holds_codes, needs_calibration, optional
from ..policy import Policy
from ._classes import Over, Run, become, has_members, over
from ._pure import PureCall, pure_call


@dataclasses.dataclass(frozen=True, repr=False)
class Whole:
    """What a part knows about the quantized module that contains it.

    Attributes:
      path: path of the part.
      policy: policy of the whole; its rules may match nothing in this part.
      mode: mode of the whole.
      backward: backward dtype of the whole.
      quant_dynamic: as in the whole.
      learned: whether the whole learns scales.
    """

    path: tuple[str, ...]
    policy: Policy
    mode: Mode
    backward: DTypeLike | None
    quant_dynamic: bool
    learned: bool

    def __repr__(self) -> str:
        return f"<{'/'.join(self.path)}, {self.mode}>"


COPIED = ("policy", "mode", "backward", "quant_dynamic")
"""Attributes of a whole that are copied to its parts."""


class Part(Over):
    """A module inside a quantized module, which runs it in float. A call from outside follows the
    policy and the mode of the whole, but only the whole has statistics and scales.
    """

    quant_part: Whole

    def _q_is_plain(self) -> bool:
        return self.quant_part.mode is Mode.FLOAT and not holds_codes(nnx.state(self))

    def _q_call(self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        whole = self.quant_part
        call, pure = self._q_function(name, run, args, kwargs)
        static = needs_calibration(whole.policy) and not whole.quant_dynamic
        needs = static and whole.mode is not Mode.FLOAT and call.plan(pure.params).static_specs()
        if needs or whole.learned or whole.mode is Mode.CALIBRATE:
            raise fail(
                type(self).__name__,
                f"`{name}` of a part of a quantized module is called from outside.",
                given=f"{'/'.join(whole.path)}, in {whole.mode}"
                + (", with learned scales" if whole.learned else "")
                + (f", without scales for {', '.join(list(needs)[:4])}" if needs else ""),
                expected="a method of the whole, which alone has statistics and scales",
                fix="call a method of the whole, or quantize the parts one by one.",
            )
        return pure.finish(call(pure.params, whole.mode, whole.backward))

    def _q_function(
        self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[QuantizedFunction, PureCall]:
        whole = self.quant_part
        pure = pure_call(self, name, run, args, kwargs, constant=False).inside(whole.path)
        call = QuantizedFunction(
            function=pure.function,
            policy=optional(whole.policy),
            args=pure.args,
            kwargs={},
            stats={},
            scales={},
            dynamic=whole.quant_dynamic,
            caller=type(self).__name__,
            converts="jqx.nnx.convert(model, ...)",
        )
        return call, pure


def make_parts(module: Any) -> None:
    """Makes the modules inside a quantized module its parts."""
    for path, part in nnx.iter_modules(module):
        if part is not module and not isinstance(part, Over) and has_members(type(part)):
            become(part, over(type(part), Part, type(part).__name__))
            names = tuple(map(str, path))
            known = {name: getattr(module, name) for name in COPIED}
            cast(Part, part).quant_part = Whole(names, **known, learned=False)


def update_parts(module: nnx.Module, **known: Any) -> None:
    """Updates the parts of a module after a change."""
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Part):
            part.quant_part = dataclasses.replace(part.quant_part, **known)
