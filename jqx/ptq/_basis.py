"""`Basis`: the float parameters that codes stand for, after algorithms have rewritten weights."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from ..transforms import Plan, dequantize_params
from ..transforms._shared import Chosen, Maps, Unstacked, with_maps


@dataclasses.dataclass(frozen=True)
class Basis:
    """Rewrites float parameters again, as algorithms did. It holds no copy of parameters.

    Attributes:
      steps: what algorithms do to parameters, in order.
      maps: the maps with which the function of the result is the float function.
    """

    steps: tuple[Callable[[Any], Any], ...] = ()
    maps: Maps = dataclasses.field(default_factory=dict)

    def __call__(self, params: Any) -> tuple[Any, Maps]:
        """Returns float parameters and maps of channels that give the float function."""
        found = dequantize_params(params) if self.steps else params
        for step in self.steps:
            found = step(found)
        return found, self.maps

    def then(self, chosen: Chosen) -> "Basis":
        """Returns the same with the basis and the maps of a result after its own."""
        assert chosen.basis is not None
        maps = with_maps("ptq", self.maps, chosen.maps)
        return Basis((*self.steps, chosen.basis), maps)

    def of_whole(self, plan: Plan) -> "Basis":
        """Returns the basis of whole weights for one of their parts; the plan splits them."""
        return Basis(tuple(partial(_in_parts, plan, step) for step in self.steps), self.maps)


def _in_parts(plan: Plan, step: Callable[[Any], Any], params: Any) -> Any:
    """Returns parameters whose parts are rewritten."""
    own = Unstacked(plan, params)
    return own.together(step(own.params))
