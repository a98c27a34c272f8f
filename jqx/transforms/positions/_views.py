"""Views, and what puts values together, along other axes than that of positions."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ... import _compat
from ..._compat import Eqn
from ._elements import each
from ._steps import At, Steps


def joined(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Concatenations along another axis."""
    axis, product, values = steps.alike(eqn, xs)
    if axis == eqn.params["dimension"]:
        raise steps.over(eqn, At(values[0], axis, product))
    return [At(x, axis, product) for x in _compat.bind(eqn, values)]


def stacked(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Operands along a new axis."""
    axis, product, values = steps.alike(eqn, xs)
    axis += eqn.params["axis"] <= axis
    return [At(x, axis, product) for x in _compat.bind(eqn, values)]


def unstacked(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """The parts along another axis, which goes."""
    (x,) = xs
    if x.axis == eqn.params["axis"]:
        raise steps.over(eqn, x)
    axis = x.axis - (eqn.params["axis"] < x.axis)
    return [At(y, axis, x.product) for y in _compat.bind(eqn, [x.value])]


def tiled(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Copies along other axes."""
    if eqn.params["reps"][xs[0].axis] != 1:
        raise steps.over(eqn, xs[0])
    return each(steps, eqn, xs)


def padded(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Padding of other axes."""
    x, filling = xs
    if isinstance(filling, At) or any(eqn.params["padding_config"][x.axis]):
        raise steps.over(eqn, x)
    return [At(y, x.axis, x.product) for y in _compat.bind(eqn, [x.value, filling])]


def reversed_(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Reversals of other axes."""
    if xs[0].axis in eqn.params["dimensions"]:
        raise steps.over(eqn, xs[0])
    return each(steps, eqn, xs)


def split(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Parts along another axis."""
    if xs[0].axis == eqn.params["axis"]:
        raise steps.over(eqn, xs[0])
    return each(steps, eqn, xs)


def broadcast(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Broadcasts."""
    (x,) = xs
    p = eqn.params
    axis, shape = p["broadcast_dimensions"][x.axis], list(p["shape"])
    shape[axis] = 1
    y = lax.broadcast_in_dim(x.value, shape, p["broadcast_dimensions"])
    return [At(y, axis, x.product)]


def reshaped(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Reshapes that keep the axis of positions."""
    (x,) = xs
    before, after = eqn.invars[0].aval.shape, list(eqn.outvars[0].aval.shape)
    first = math.prod(before[: x.axis])
    axes = [i for i in range(len(after)) if math.prod(after[:i]) == first]
    axis = next((i for i in axes if after[i] == steps.length), None)
    if axis is None or eqn.params.get("dimensions") is not None:
        raise steps.unable(eqn, "a reshape merges positions with another axis")
    after[axis] = 1
    return [At(x.value.reshape(after), axis, x.product)]


def squeezed(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Axes of size 1 that go."""
    (x,) = xs
    axes = eqn.params["dimensions"]
    axis = x.axis - sum(i < x.axis for i in axes)
    return [At(lax.squeeze(x.value, axes), axis, x.product)]


def transposed(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Other orders of axes."""
    (x,) = xs
    axis = eqn.params["permutation"].index(x.axis)
    return [At(y, axis, x.product) for y in _compat.bind(eqn, [x.value])]


def sliced(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Slices of other axes."""
    (x,) = xs
    p = eqn.params
    starts, ends = list(p["start_indices"]), list(p["limit_indices"])
    strides = p["strides"] or (1,) * len(starts)
    if (starts[x.axis], ends[x.axis], strides[x.axis]) != (0, steps.length, 1):
        raise steps.over(eqn, x)
    ends[x.axis] = 1
    return [At(lax.slice(x.value, starts, ends, strides), x.axis, x.product)]


def dynamically_sliced(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Slices of other axes that begin at traced places."""
    x, *starts = xs
    sizes = list(eqn.params["slice_sizes"])
    if any(isinstance(i, At) for i in starts) or sizes[x.axis] != steps.length:
        raise steps.over(eqn, x)
    sizes[x.axis], starts[x.axis] = 1, jnp.zeros_like(starts[x.axis])
    return [At(lax.dynamic_slice(x.value, starts, sizes), x.axis, x.product)]


def updated(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Writes to other axes at all positions, as to the keys and values of a layer."""
    axis, product, (x, part, *starts) = steps.alike(eqn, xs)
    shapes = [atom.aval.shape for atom in eqn.invars[:2]]
    if any(isinstance(i, At) for i in xs[2:]) or any(s[axis] != steps.length for s in shapes):
        raise steps.over(eqn, At(x, axis, product))
    starts[axis] = jnp.zeros_like(starts[axis])
    return [At(lax.dynamic_update_slice(x, part, starts), axis, product)]


def unchanged(steps: Steps, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Operations that return their operands."""
    return list(xs)


VIEWS: dict[str, Any] = {
    **dict.fromkeys(("optimization_barrier", "pvary", "reshard", "sharding_constraint"), unchanged),
    "broadcast_in_dim": broadcast,
    "concatenate": joined,
    "dynamic_slice": dynamically_sliced,
    "dynamic_update_slice": updated,
    "pad": padded,
    "reshape": reshaped,
    "rev": reversed_,
    "slice": sliced,
    "split": split,
    "squeeze": squeezed,
    "stack": stacked,
    "tile": tiled,
    "transpose": transposed,
    "unstack": unstacked,
}
