"""Elements that come from a NaN or an infinity, for `on_nonfinite="ignore"`. Their count is below 0
and stays so in what is computed from them, even if that is finite again.

Negative infinities are in masks of attention too. So in arguments they taint weakly: not what is 0
in the end, as the exponential of a mask is. In other values they taint nothing, unless they are
operands or results of contractions.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._compat import Eqn
from ._counted import Counted, counts_of, is_counted, value_of
from .primitives import CONTRACTIONS

_WEAKLY, _TAINTED = -1.0, -2.0
"""Counts of tainted elements."""

_CHOOSES = ("select_n", "max", "min")
"""Primitives that return one of their operands for each element."""


def tainted(x: Any, negative: float = _WEAKLY) -> Any:
    """Returns a value with counts below 0 for NaN and infinities; `negative` is that of a negative
    infinity.
    """
    if not _has_counts(x):
        return x
    counts = jnp.where(x.value == -jnp.inf, jnp.float32(negative), jnp.float32(_TAINTED))
    counts = jnp.where(jnp.isfinite(x.value), x.counts, jnp.minimum(counts, x.counts))
    return Counted(x.value, jnp.where(x.counts == 0, x.counts, counts))


def tainted_results(eqn: Eqn, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation, with the count -1 where they are tainted."""
    name = eqn.primitive.name
    negative = _TAINTED if name in CONTRACTIONS else jnp.inf
    found = [tainted(x, negative) for x in results]
    if name not in _CHOOSES or not _has_counts(found[0]):
        return found
    (result,) = found
    if name == "select_n":
        which, *cases = operands
        chosen = lax.select_n(value_of(which), *map(counts_of, cases))
        chosen = jnp.minimum(chosen, counts_of(which)) if is_counted(which) else chosen
    else:
        a, b = operands
        first = jnp.broadcast_to(value_of(a) == result.value, result.value.shape)
        chosen = jnp.where(first, _counts(a, first), _counts(b, first))
    counts = jnp.where(result.counts < 0, chosen, result.counts)
    return [tainted(Counted(result.value, counts), jnp.inf)]


def tainted_rows(eqn: Eqn, operands: Sequence[Any], cleans: bool = False) -> list[Any]:
    """Returns the operands of a contraction. All of a row is tainted if some of it is, or is not
    finite; with `cleans` such rows are zeros.
    """
    family = CONTRACTIONS[eqn.primitive.name]
    if family.excuse(eqn) is not None:
        return [*operands]
    found = [*operands]
    for i, own in enumerate(family.axes(eqn)):
        x, axes = operands[i], own.contracted
        if not _has_counts(x):
            continue
        # In a convolution the features come first; along the other axes the kernel slides.
        axes = axes[:1] if eqn.primitive.name == "conv_general_dilated" else axes
        bad = (x.counts < 0) & (x.value != 0)
        bad |= ~jnp.isfinite(x.value) | (x.counts <= _TAINTED)
        bad = jnp.any(bad, axes, keepdims=True)
        counts = jnp.where(bad & (x.counts != 0), jnp.float32(_TAINTED), x.counts)
        value = jnp.where(bad, jnp.zeros_like(x.value), x.value) if cleans else x.value
        found[i] = Counted(value, counts)
    return found


def _has_counts(x: Any) -> bool:
    return is_counted(x) and x.is_known and jnp.issubdtype(x.value.dtype, jnp.inexact)


def _counts(x: Any, like: Any) -> Any:
    """Returns the counts of an operand in the shape of a result."""
    return jnp.broadcast_to(counts_of(x), like.shape)
