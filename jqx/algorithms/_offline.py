"""Chooses which blocks of channels are rotated in the weights, and what is done at run time if a
weight cannot take a rotation.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ._labels import FIXED, Array
from ._reads import Lookup, Read, Table, different
from ._rotatable import Blocks
from ._streams import Streams

Edge = Read | Lookup


@dataclasses.dataclass(frozen=True)
class Offline:
    """What is rotated in the weights of a function.

    Attributes:
      streams: the function.
      blocks: all blocks of channels.
      rotated: for each kind of blocks, whether it is rotated.
      edges: contractions and lookups whose weight cannot take a rotation, so that their operand or
        result is rotated at run time.
      tied: leaves that are both tables and weights, rotated once for both.
      why: why kinds of blocks are not rotated.
    """

    streams: Streams
    blocks: Blocks
    rotated: Array
    edges: tuple[Edge, ...]
    tied: frozenset[int]
    why: Mapping[int, str]

    @property
    def folded(self) -> list[Read]:
        """The contractions whose weight takes rotations."""
        edges = set(map(id, self.edges))
        return [x for x in self.streams.reads if id(x) not in edges and x.places is not None]

    @property
    def tables(self) -> list[Table]:
        """The tables that take rotations."""
        edges = set(map(id, self.edges))
        return different(x.table for x in self.streams.lookups if id(x) not in edges)

    def sizes(self, labels: Array) -> Array:
        """Returns for each channel the size of its block, 0 if it is not rotated."""
        kinds = self.kinds(labels)
        return np.where(self.rotated[kinds], self.blocks.sizes[kinds], 0)

    def kinds(self, labels: Array) -> Array:
        """Returns the kind of the block of each channel."""
        return _kinds(self.blocks, labels)

    def is_whole(self, labels: Array) -> bool:
        """Whether all channels are rotated."""
        return bool(labels.size) and bool(np.all(self.sizes(labels) > 0))

    def is_shared(self, read: Read) -> bool:
        """Whether the weight of a contraction has another use, so that it cannot be rotated, or
        only together with that use.
        """
        looked_up = {x.table.place for x in self.streams.lookups}
        if read.place in self.tied and self.is_whole(read.inputs):
            return False
        return read.place in self.streams.elsewhere or read.place in looked_up

    def reason(self, read: Read) -> str:
        """Returns why some channels of a contraction are not rotated in weights."""
        labels = read.inputs
        for label in np.unique(labels[self.sizes(labels) == 0]).tolist():
            reason = self.why.get(int(self.blocks.kinds[label])) if label > FIXED else None
            reason = reason or self.blocks.why.get(label)
            if reason:
                return reason
        return read.why or "it is an argument, or made of one"


def found_in(
    streams: Streams, is_planned: Callable[[Read], bool], fits: Callable[[int], bool]
) -> Offline:
    """Finds what can be rotated in weights and saves products at run time.

    Args:
      streams: the function.
      is_planned: whether a contraction would otherwise be rotated at run time.
      fits: whether blocks of a number of channels can be rotated.
    """
    edges, tied = _edges(streams)
    blocks = streams.constraints.solved()
    rotated, why = np.ones(len(blocks.sizes), bool), dict[int, str]()
    rotated[0] = False
    gains = [(gain, _kinds(blocks, labels)) for gain, labels in streams.gains]
    at_edges = set(map(id, edges))
    folded = [read for read in streams.reads if id(read) not in at_edges]

    def drop(kinds: Array, reason: str) -> None:
        for kind in np.unique(kinds).tolist():
            if rotated[kind]:
                rotated[kind] = False
                why.setdefault(kind, reason)

    fit = np.array([size > 1 and fits(int(size)) for size in blocks.sizes])
    drop(
        np.flatnonzero(~fit),
        "its number of channels that rotate alike is not a multiple of `block`",
    )
    while True:
        before = rotated.sum()
        for kinds in _uneven(edges, blocks, rotated):
            drop(kinds, "only a part of it could be rotated at run time")
        _same_gains(gains, rotated, drop)
        saved, spent = _products(folded, edges, blocks, rotated, is_planned)
        if rotated.sum() == before:
            few = np.flatnonzero(rotated & (saved <= spent))
            drop(few, "that would save no product at run time")
        if rotated.sum() == before:
            break
    kept = tuple(x for x in edges if np.any(rotated[_kinds(blocks, x.labels)]))
    return Offline(streams, blocks, rotated, kept, tied, why)


def why_at_run_time(found: Offline, edge: Edge) -> str:
    """Returns why an edge is rotated at run time."""
    streams = found.streams
    if isinstance(edge, Read) and edge.places is None:
        return "its weight has another use, or is not a plain matrix"
    uses = streams.unseen | streams.elsewhere
    if edge.place in uses:
        return f"its weight has another use: {uses[edge.place]}"
    if isinstance(edge, Read):
        return "its weight is a table that is looked up"
    return "its table is also a weight, after a gain"


def _kinds(blocks: Blocks, labels: Array) -> Array:
    return np.where(labels > FIXED, blocks.kinds[labels], 0)


def _edges(streams: Streams) -> tuple[list[Edge], frozenset[int]]:
    """Returns the contractions and lookups whose weight cannot take a rotation, and the tables that
    take one rotation for all their uses.
    """
    constraints, elsewhere = streams.constraints, streams.unseen | streams.elsewhere
    tables = {x.table.place: x for x in streams.lookups}
    tied = set[int]()
    for place, lookup in tables.items():
        reads = [x for x in streams.reads if x.place == place]
        if reads and all(_is_alike(x, lookup) for x in reads):
            tied.add(place)
    edges: list[Edge] = []
    for read in streams.reads:
        loops = streams.items[read.site.address].loops
        if read.gains is not None and len(loops) != len(read.steps):
            constraints.stop(read.inputs, "a gain before a weight that a scan does not step over")
        fails = read.places is None or read.place in elsewhere
        fails = fails or not (read.is_site or read.place in tables)
        if read.place in tables and read.place in tied and not fails:
            constraints.join(tables[read.place].made, read.inputs, "a table with another use")
        elif fails or read.place in tables:
            edges.append(read)
            if read.order is not None:
                constraints.stop(
                    read.inputs, "a weight that cannot be rotated, summed in another order"
                )
            constraints.stop(read.outputs, "its weight has another use, or is not a plain matrix")
    for lookup in streams.lookups:
        place = lookup.table.place
        shared = any(x.place == place for x in streams.reads) and place not in tied
        first = tables[place].made
        if place in elsewhere or shared:
            edges.append(lookup)
        elif lookup.made is not first:
            constraints.join(first, lookup.made, "a table with another use")
    return edges, frozenset(tied - set(elsewhere))


def _is_alike(read: Read, lookup: Lookup) -> bool:
    """Whether a contraction sums over the axis that a lookup returns: the rows of one table."""
    if read.places is None or read.gains is not None or read.inputs.ndim > 1:
        return False
    own = read.elements
    return own.ndim == 2 and np.array_equal(own, lookup.table.elements[()])


def _uneven(edges: Sequence[Edge], blocks: Blocks, rotated: Array) -> Iterator[Array]:
    """Yields kinds of blocks that cannot be rotated where they meet at one edge."""
    by_address: dict[object, list[Edge]] = {}
    for edge in edges:
        by_address.setdefault(edge.address, []).append(edge)
    for each in by_address.values():
        kinds = np.concatenate([_kinds(blocks, edge.labels).ravel() for edge in each])
        sizes = np.where(rotated[kinds], blocks.sizes[kinds], 0)
        if np.unique(sizes).size > 1:
            yield kinds


def _same_gains(
    gains: Sequence[tuple[Array, Array]], rotated: Array, drop: Callable[[Array, str], None]
) -> None:
    """Drops kinds of blocks whose gains belong to channels that are not rotated."""
    if not gains:
        return
    gain, kinds = (np.concatenate(x) for x in zip(*gains, strict=True))
    kept = np.zeros(int(gain.max()) + 1, bool)
    kept[gain[~rotated[kinds]]] = True
    drop(kinds[kept[gain]], "its gain belongs to a value that cannot be rotated")


def _products(
    folded: Sequence[Read],
    edges: Sequence[Edge],
    blocks: Blocks,
    rotated: Array,
    is_planned: Callable[[Read], bool],
) -> tuple[Array, Array]:
    """Returns for each kind of blocks how many values no longer need a rotation at run time, and
    how many need one because of it.
    """
    saved, spent = np.zeros(len(rotated), int), np.zeros(len(rotated), int)
    seen: set[object] = set()
    for count, each in ((saved, folded), (spent, edges)):
        for x in each:
            kinds = np.unique(_kinds(blocks, x.labels))
            value = (id(x.value) if isinstance(x, Read) else x.address, x.steps, count is saved)
            is_read = count is spent or (np.all(rotated[kinds]) and is_planned(x))  # type: ignore
            if is_read and value not in seen:
                seen.add(value)
                count[kinds] += 1
    return saved, spent
