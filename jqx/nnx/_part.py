"""Modules inside of a quantized one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from .._checks import require_that
from ..modules import Mode, QuantizedFunction, optional
from ..policy import Policy
from ._classes import Over, Run, become, has_members, over
from ._pure import PureCall, pure_call
from ._variables import QParam


@dataclasses.dataclass(frozen=True, repr=False)
class Whole:
    """What a part knows of the quantized module that it is inside of.

    Attributes:
      path: of the part.
      policy: of the whole, whose rules may match nothing here.
      mode: of the whole.
      backward: of the whole.
      learned: whether it learns scales.
    """

    path: tuple[str, ...]
    policy: Policy
    mode: Mode
    backward: DTypeLike | None
    learned: bool

    def __repr__(self) -> str:
        return f"<{'/'.join(self.path)}, {self.mode}>"


class Part(Over):
    """A module inside of a quantized one, which runs it in float. Called from outside, it runs by
    the policy and in the mode of the whole; but statistics and scales are the whole's alone.
    """

    quant_part: Whole

    def _q_is_plain(self) -> bool:
        return self.quant_part.mode is Mode.FLOAT and not nnx.state(self, QParam)

    def _q_call(self, name: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        whole = self.quant_part
        require_that(
            whole.mode is not Mode.CALIBRATE and not whole.learned,
            error=ValueError,
            function=type(self).__name__,
            problem=f"`{name}` of a part of a quantized module is called from outside.",
            given=f"{'/'.join(whole.path)}, in {whole.mode}"
            + (", with learned scales" if whole.learned else ""),
            expected="a method of the whole, which has the statistics and scales",
            mend="call a method of the whole, or quantize the parts one by one.",
        )
        call, pure = self._q_function(name, run, args, kwargs)
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
            caller=type(self).__name__,
        )
        return call, pure


def make_parts(module: nnx.Module, policy: Policy, mode: Mode, backward: DTypeLike | None) -> None:
    """Makes the modules inside of one its parts."""
    for path, part in nnx.iter_modules(module):
        if part is not module and not isinstance(part, Over) and has_members(type(part)):
            become(part, over(type(part), Part, type(part).__name__))
            place = tuple(map(str, path))
            part.quant_part = Whole(place, policy, mode, backward, learned=False)


def tell_parts(module: nnx.Module, **known: Any) -> None:
    """Tells the parts of a module what has changed."""
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Part):
            part.quant_part = dataclasses.replace(part.quant_part, **known)
