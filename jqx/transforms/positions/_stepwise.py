"""A causal function of tokens, one position at a time.

A function of all positions becomes one of a single position and of what it needs of earlier ones:
keys, values and states of recurrences, as a decoder keeps them. Its jaxpr is evaluated with values
of one position, of size 1 along their axis of positions; what a product or a sum over positions
reads is kept, with zeros at later positions. Those have no effect on a causal function.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ... import _compat
from .._calibrate_batches import arrays_of
from ._elements import ELEMENTS
from ._products import PRODUCTS
from ._scans import SCANS
from ._steps import Array, At, Steps, Turn, Unable
from ._views import VIEWS

_RULES = ELEMENTS | VIEWS | PRODUCTS | SCANS


@dataclasses.dataclass(frozen=True)
class Stepwise:
    """A function of one position.

    Attributes:
      start: `start(*args) -> (kept, parts)`, what is kept before the first position, and parts of
        stacked arguments.
      step: `step(kept, place, tokens, parts, *args) -> (result, kept)`, with tokens at one
        position.
    """

    start: Callable[..., tuple[list[Any], list[Array]]]
    step: Callable[..., tuple[Array, list[Any]]]


def stepwise(f: Callable[..., Any], tokens: jax.ShapeDtypeStruct, *args: Any) -> Stepwise:
    """Returns `f(*args, tokens)` one position at a time. Its result, and `tokens`, have the axis of
    positions last but one, and last. All leaves of `args` are arrays.

    Raises:
      Unable: something in `f` is not known to be computed position by position.
    """
    arrays, filled = arrays_of(args)
    jaxpr, consts = _compat.trace(lambda *x: f(*filled(x[:-1]), x[-1]), *arrays, tokens)
    jaxpr = _compat.without_dead(jaxpr)
    length, axis = tokens.shape[-1], len(tokens.shape) - 1
    results = len(jaxpr.outvars)
    shape = getattr(jaxpr.outvars[0].aval, "shape", ()) if results == 1 else ()
    if results != 1 or shape[:-1] != tokens.shape:
        kinds = ", ".join(str(v.aval) for v in jaxpr.outvars)
        raise Unable(f"the results are {kinds}, and not logits {[*tokens.shape, 'vocabulary']}")
    turned: set[int] = set()

    def evaluated(place: Any, own: Any, arrays: Sequence[Any], *known: Any) -> Any:
        steps = Steps(_RULES, place, length, frozenset(turned), arrays, *known)
        (found,) = steps.run(jaxpr, consts, [*arrays, At(own, axis)])
        if not isinstance(found, At) or found.axis != axis:
            raise Unable("the result does not have one entry for each token")
        return found.value, steps.new, steps.parts

    @jax.jit  # traced once
    def start(*given: Any) -> Any:
        none = jnp.zeros((*tokens.shape[:-1], 1), tokens.dtype)
        return evaluated(jnp.int32(0), none, arrays_of(given)[0])[1:]

    def step(kept: Any, place: Any, tokens: Any, parts: Any, *given: Any) -> Any:
        return evaluated(place, tokens, arrays_of(given)[0], list(kept), list(parts))[:2]

    while True:
        try:
            jax.eval_shape(start, *args)
            return Stepwise(start, step)
        except Turn as turn:
            if turn.product in turned:
                raise Unable("a product of positions with positions is summed over both") from None
            turned.add(turn.product)
