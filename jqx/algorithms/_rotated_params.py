"""Parameters and maps of a function with rotated channels."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..transforms import ChannelMap, Plan
from ._labels import FIXED, Array
from ._named import Named
from ._offline import Edge, Offline
from ._orthogonal import Orthogonal
from ._reads import Read

_SIDES = "lhs", "rhs"


class RotatedParams:
    """Parameters with rotated channels, computed in float64 and rounded once."""

    def __init__(self, named: Named, params: Any):
        self._named, self._params = named, params
        self._leaves = named.leaves(params)
        self._found: dict[int, Array] = {}
        self._folded: dict[str, None] = {}

    @property
    def folded(self) -> tuple[str, ...]:
        """The gains that are multiplied into weights."""
        return tuple(self._folded)

    def read(self, read: Read, matrix: Orthogonal) -> None:
        """Rotates the channels of the weight of a contraction in one step."""
        self._change(read.place, read.summed, -1, matrix.times, read.channels)

    def offline(self, found: Offline, matrix: Callable[[int], Orthogonal]) -> None:
        """Rotates everything that is rotated in weights. Gains that weights take become 1."""
        streams = found.streams

        def turned(place: int, elements: Array, labels: Array, axis: int) -> None:
            for here in np.ndindex(labels.shape[:-1]):
                sizes = found.sizes(labels[here])
                if sizes.any():
                    part = functools.partial(_rotated, sizes=sizes, matrix=matrix)
                    self._change(place, elements[here], axis, part, len(sizes))

        for read in found.folded:
            if read.gains is not None:
                by = np.where(found.sizes(read.inputs) > 0, self.gains(found, read.gains), 1)
                taps = read.elements.shape[-1] // by.shape[-1]
                self._flat(read.place)[read.elements] *= np.repeat(by, taps, -1)[..., None, :]
        for read in found.folded:
            if read.place not in found.tied:
                turned(read.place, read.elements, read.inputs, -1)
            turned(read.place, read.elements, read.outputs, -2)
        for table in found.tables:
            turned(table.place, table.elements[()], table.labels, -1)
        for place, start in streams.starts.items():
            count = streams.sizes[place]
            turned(place, np.arange(count), np.arange(start, start + count), -1)
        for gains, labels in streams.gains:
            place, elements = streams.elements_of(gains)
            own = elements[found.sizes(labels) > 0]
            if own.size:
                self._flat(place)[own] = 1 - streams.offsets[place]
                self._folded[self._named.names[place]] = None

    def gains(self, found: Offline, labels: Array) -> Array:
        """Returns the factors of gains, before they become 1."""
        by = np.ones(labels.shape)
        if np.any(labels > FIXED):
            own = labels > FIXED
            place, elements = found.streams.elements_of(labels[own])
            leaf = np.asarray(self._leaves[place], np.float64).reshape(-1)
            by[own] = leaf[elements] + found.streams.offsets[place]
        return by

    def _flat(self, place: int) -> Array:
        if place not in self._found:
            self._found[place] = np.array(self._leaves[place], np.float64).reshape(-1)
        return self._found[place]

    def _change(
        self, place: int, elements: Array, axis: int, to: Callable[[Array], Array], count: int
    ) -> None:
        """Changes vectors of a number of channels along an axis; taps vary fastest."""
        flat = self._flat(place)
        moved = np.moveaxis(elements, axis, -1)
        w = flat[moved].reshape(*moved.shape[:-1], count, -1)
        w = np.moveaxis(to(np.moveaxis(w, -2, -1)), -1, -2)
        flat[moved] = w.reshape(moved.shape)

    def params(self) -> Any:
        """Returns the parameters."""
        leaves = dict(self._leaves)
        for place, x in self._found.items():
            own = leaves[place]
            leaves[place] = jnp.asarray(x.reshape(np.shape(own)), own.dtype)
        return self._named.with_leaves(self._params, leaves)


def _rotated(w: Array, sizes: Array, matrix: Callable[[int], Orthogonal]) -> Array:
    """Returns vectors whose blocks of channels are rotated, by block size."""
    w = np.array(w)
    for size in set(np.unique(sizes).tolist()) - {0}:
        own = np.flatnonzero(sizes == size)
        w[..., own] = matrix(size).times(w[..., own])
    return w


def maps_of(
    found: Offline,
    plan: Plan,
    matrix: Callable[[int], Orthogonal],
    gains: Callable[[Offline, Array], Array],
) -> dict[str, tuple[ChannelMap, ...]]:
    """Returns the maps at run time, by key: lookups are rotated, and operands of weights that
    cannot take a rotation are rotated back.
    """
    by_address: dict[Any, list[Edge]] = {}
    for edge in found.edges:
        by_address.setdefault(edge.address, []).append(edge)
    maps = {}
    for address, edges in by_address.items():
        loops = [loop.length for loop in found.streams.items[address].loops]
        first, labels = edges[0], edges[0].labels
        turn = matrix(int(found.sizes(labels).flat[0]))
        if not isinstance(first, Read):
            maps[key_of(plan, first)] = (turn.map(labels.shape, loops),)
            continue
        by = np.ones((*loops, *labels.shape))
        for edge in edges:
            if isinstance(edge, Read) and edge.gains is not None:
                by[edge.steps] = gains(found, edge.gains)
        maps[key_of(plan, first)] = turn.inverse(by, loops)
    return maps


def key_of(plan: Plan, edge: Edge) -> str:
    """Returns the name of the operand of a contraction, or of the result of a lookup."""
    address = edge.address
    own = plan.site_at(address)
    place = -1
    if isinstance(edge, Read):
        (place,) = (i for i, x in enumerate(edge.site.operands) if x.path is None)
    if own is not None:
        return own.operands[place].key if place >= 0 else own.output_key
    index = next(i for i, x in enumerate(plan.skipped) if x.address == address)
    return f"{plan.name_of_skipped(index)}:{_SIDES[place] if place >= 0 else 'out'}"
