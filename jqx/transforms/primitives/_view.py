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


def marked(eqn: Eqn, known: Known, results: Known, *, is_known: bool = True) -> Known:
    """Returns the origins of the results of a view, with the axes of weights that it moves and of
    which it takes parts. A view that is not known moves all of them.
    """
    each = len(results) == len(known) > 1
    found = []
    for i, (result, atom) in enumerate(zip(results, eqn.outvars, strict=True)):
        if result is not None:
            own = [i] if each else range(len(known))
            sources = [(known[j], eqn.invars[j].aval.shape) for j in own if known[j] is not None]
            for source, shape in sources:
                shapes = shape, atom.aval.shape if is_known else None
                result = _marked_by(eqn, source, result, *shapes)
        found.append(result)
    return found


def _marked_by(
    eqn: Eqn, source: Any, result: Origin, old: Sequence[int], new: Sequence[int] | None
) -> Origin:
    """Returns the origin of a result, with what the view did to the weights of one operand."""
    name = eqn.primitive.name
    turned = eqn.params["dimensions"] if name == "rev" else ()
    before = {part.path: part.dims for part in source.parts}

    def mark(part: Origin) -> Origin:
        dims = before.get(part.path)
        if dims is None or (dims == part.dims and not turned and old == new):
            return part
        if new is None:
            every = frozenset().union(*dims)
            return part.with_marks(part.moved | {(axis, name) for axis in every}, part.cut)
        moved: set[int] = set()
        cut: set[int] = set()
        for axis, (held, n) in enumerate(zip(dims, old, strict=True)):
            at = [i for i, other in enumerate(part.dims) if other & held]
            if len(at) == 1 and part.dims[at[0]] == held:
                cut |= held if new[at[0]] != n or axis in turned else set()
            elif n != 1:
                moved |= held
        last = dims[-2:]
        if {*last} != {*part.dims[-2:]}:
            moved |= frozenset().union(*last)
        return part.with_marks(
            part.moved | {(axis, name) for axis in moved}, part.cut | {(axis, name) for axis in cut}
        )

    parts = [mark(part) for part in result.parts]
    return dataclasses.replace(parts[0], others=tuple(parts[1:])) if parts[1:] else parts[0]


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
