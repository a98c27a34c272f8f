"""How the transforms handle a primitive through which weights pass quantized."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._compat import Eqn
from ...tensor import QTensor
from .._origin import Origin

Known = Sequence[Origin | None]


@dataclasses.dataclass(frozen=True)
class View:
    """How a view primitive treats weights among its operands.

    Attributes:
      track: maps the origins of the operands to those of the results; `None` for a result that is
        no longer a weight.
      apply: maps operands, of which those that are tracked may be QTensors, to the results.
    """

    track: Callable[[Eqn, Known], Known]
    apply: Callable[[Eqn, Sequence[Any]], list[Any]]


def of_one(
    track: Callable[[Eqn, int, Origin], Origin | None],
    apply: Callable[[Eqn, int, Sequence[Any]], Any],
) -> View:
    """Returns a view of the one operand that is a weight; both rules get its position. All results
    show the same axes.
    """

    def track_one(eqn: Eqn, known: Known) -> Known:
        count, found = len(eqn.outvars), _positions(known)
        if len(found) != 1:
            return [None] * count
        (at,) = found
        origin = known[at]
        assert origin is not None
        return [origin.through(lambda part: track(eqn, at, part))] * count

    def apply_one(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        (at,) = _positions([x if isinstance(x, QTensor) else None for x in operands])
        results = apply(eqn, at, operands)
        return results if isinstance(results, list) else [results]

    return View(track_one, apply_one)


def _positions(known: Sequence[Any]) -> list[int]:
    return [i for i, origin in enumerate(known) if origin is not None]


def starts_of(starts: Sequence[Any]) -> list[Any]:
    """Returns the starts of a dynamic slice for jqx: the primitive clamps a negative start to 0,
    but in `jqx.dynamic_slice` it counts from the end.
    """
    return [max(int(x), 0) if _is_known(x) else jnp.maximum(x, 0) for x in starts]


def _is_known(x: Any) -> bool:
    return isinstance(x, (int, np.integer, np.ndarray))


def same(eqn: Eqn, position: int, origin: Origin) -> Origin:
    """Returns the origin unchanged, because the axes of the weight stay in place."""
    return origin
