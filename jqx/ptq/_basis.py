"""`Basis`: the float parameters that codes stand for, after algorithms have rewritten weights."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from ..transforms import ChannelMap, LowRank, Plan, dequantize_params
from ..transforms._shared import Chosen, Map, Maps, Unstacked, as_maps, with_maps


@dataclasses.dataclass(frozen=True)
class Basis:
    """Rewrites float parameters again, as algorithms did. It holds no copy of parameters.

    Attributes:
      steps: what algorithms do to parameters, in order.
      maps: the maps of the quantized function, with those that correct codes replaced by maps that
        change nothing.
    """

    steps: tuple[Callable[[Any], Any], ...] = ()
    maps: Maps = dataclasses.field(default_factory=dict)

    def __call__(self, params: Any) -> tuple[Any, Maps]:
        """Returns float parameters and maps of channels that give the float function."""
        found = dequantize_params(params) if self.steps else params
        for step in self.steps:
            found = step(found)
        return found, self.maps

    @classmethod
    def of_given(cls, maps: Maps) -> "Basis":
        """Returns the basis if nothing has rewritten parameters, and all maps correct codes."""
        each = as_maps("ptq", maps).items()
        return cls(maps={key: tuple(map(_without_effect, own)) for key, own in each})

    def then(self, chosen: Chosen, *, rewrites: bool) -> "Basis | None":
        """Returns the basis after what an algorithm has chosen, or rewritten."""
        if chosen.basis is not None:
            maps = with_maps("ptq", self.maps, chosen.maps)
            return Basis((*self.steps, chosen.basis), maps)
        if rewrites:
            return None
        maps = with_maps("ptq", self.maps, Basis.of_given(chosen.maps).maps)
        return Basis(self.steps, maps)

    def of_whole(self, plan: Plan) -> "Basis":
        """Returns the basis of whole weights for one of their parts; the plan splits them."""
        return Basis(tuple(partial(_in_parts, plan, step) for step in self.steps), self.maps)


def _in_parts(plan: Plan, step: Callable[[Any], Any], params: Any) -> Any:
    """Returns parameters whose parts are rewritten."""
    own = Unstacked(plan, params)
    return own.together(step(own.params))


def _without_effect(x: Map) -> Map:
    """Returns a map with the same arrays in which they change nothing."""
    if isinstance(x, LowRank):
        return LowRank(jnp.zeros_like(x.a), jnp.zeros_like(x.b))
    factors = (jnp.broadcast_to(jnp.eye(y.shape[-1], dtype=y.dtype), y.shape) for y in x.factors)
    return ChannelMap(
        scale=None if x.scale is None else jnp.ones_like(x.scale),
        factors=tuple(factors),
        shift=None if x.shift is None else jnp.zeros_like(x.shift),
        clip=None if x.clip is None else jnp.full_like(x.clip, jnp.inf),
    )
