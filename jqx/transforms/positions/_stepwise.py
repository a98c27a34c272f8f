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
from .._trace import is_array
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
      start: returns what is kept before the first position: `start(*args)`.
      step: `step(kept, place, tokens, *args) -> (result, kept)`, with tokens at one position.
    """

    start: Callable[..., list[Array]]
    step: Callable[..., tuple[Array, list[Array]]]


def stepwise(f: Callable[..., Any], tokens: jax.ShapeDtypeStruct, *args: Any) -> Stepwise:
    """Returns `f(*args, tokens)` one position at a time. Its result, and `tokens`, have the axis of
    positions last but one, and last.

    Raises:
      Unable: something in `f` is not known to be computed position by position.
    """
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, x in enumerate(leaves) if is_array(x)]

    def flat(*given: Any) -> Any:
        filled = list(leaves)
        for i, x in zip(places, given, strict=False):
            filled[i] = x
        return f(*jax.tree.unflatten(tree, filled), given[-1])

    jaxpr, consts = _compat.trace(flat, *(leaves[i] for i in places), tokens)
    jaxpr = _compat.without_dead(jaxpr)
    length, axis = tokens.shape[-1], len(tokens.shape) - 1
    results = len(jaxpr.outvars)
    shape = getattr(jaxpr.outvars[0].aval, "shape", ()) if results == 1 else ()
    if results != 1 or shape[:-1] != tokens.shape:
        kinds = ", ".join(str(v.aval) for v in jaxpr.outvars)
        raise Unable(f"the results are {kinds}, and not logits {[*tokens.shape, 'vocabulary']}")
    turned: set[int] = set()

    def evaluated(kept: list[Array] | None, place: Any, own: Any, arrays: Sequence[Any]) -> Any:
        steps = Steps(_RULES, place, length, frozenset(turned), kept)
        (found,) = steps.run(jaxpr, consts, [*arrays, At(own, axis)])
        if not isinstance(found, At) or found.axis != axis:
            raise Unable("the result does not have one entry for each token")
        return found.value, steps.new

    def arrays_of(given: Sequence[Any]) -> list[Any]:
        return [x for x in jax.tree.leaves(given) if is_array(x)]

    own = jax.ShapeDtypeStruct((*tokens.shape[:-1], 1), tokens.dtype)
    place = jax.ShapeDtypeStruct((), jnp.int32)
    while True:
        try:
            jax.eval_shape(lambda *x: evaluated(None, *x), place, own, arrays_of(args))
            break
        except Turn as turn:
            if turn.product in turned:
                raise Unable("a product of positions with positions is summed over both") from None
            turned.add(turn.product)

    def start(*given: Any) -> list[Array]:
        none = jnp.zeros(own.shape, own.dtype)
        return evaluated(None, jnp.int32(0), none, arrays_of(given))[1]

    def step(kept: list[Array], place: Any, tokens: Any, *given: Any) -> Any:
        return evaluated(list(kept), place, tokens, arrays_of(given))

    return Stepwise(start, step)
