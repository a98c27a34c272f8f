"""A function with maps of channels, and the check that it is one of its weights."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .._errors import message
from ..calibrators import Affine
from ..transforms import Plan, convert, map_channels
from ..transforms._shared import Maps, check_function, with_maps


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A function with what algorithms do at its sites."""

    f: Callable[..., Any]
    plan: Plan
    maps: Maps = dataclasses.field(default_factory=dict)

    @property
    def function(self) -> Callable[..., Any]:
        """The function with its maps."""
        return map_channels(self.f, self.plan, self.maps) if self.maps else self.f

    def then(self, maps: Maps) -> "Mapped":
        """Returns the same with maps after those that it has."""
        return Mapped(self.f, self.plan, with_maps("ptq", self.maps, maps))

    def converted(self, scales: Mapping[str, Affine]) -> Callable[..., Any]:
        """Returns the function on integers."""
        return convert(self.function, self.plan, scales)


def check_whole(function: str, f: Any) -> None:
    """Checks that `f` is a function of its weights, and no model that holds them."""
    nnx = sys.modules.get("flax.nnx")
    is_model = nnx is not None and isinstance(f, nnx.Module)
    if callable(f) and not is_model:
        check_function(function, f)
        return
    kind = f"an object of type {type(f).__name__}"
    raise TypeError(
        message(
            function,
            "`f` is not a function of its weights.",
            given=f"{kind}, a model of nnx" if is_model else kind,
            expected="a function of arrays and pytrees of arrays",
            mend=f"use jqx.nnx.{function}."
            if is_model
            else "pass the function first, and the function itself, not what it returns.",
        )
    )
