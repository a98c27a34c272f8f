"""Rotations: mix channels by an orthogonal matrix, which removes outliers."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from ..checks import check_fields, check_integer, check_pattern, choice, flag
from ..errors import fail, some
from ..table import Printed
from ..transforms.algorithm import AlgorithmResult, Inapplicable
from ..transforms.calibrate import arguments_of
from ..transforms.channel_map import ChannelMap
from ..transforms.plan import Plan, Site
from ..transforms.stats import OnNonfinite, observed_parts
from .channels import Named, Rewritten
from .grids import Every, every_site
from .hadamard import Orthogonal, factors_of, largest_block
from .interface import algorithm
from .labels import FIXED, Array
from .rotatable import Blocks, Lookup, Read, RotationDomain, different

# Chooses which blocks of channels are rotated in the weights, and what is done at run time if a
# weight cannot take a rotation.


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
      reasons: why kinds of blocks are not rotated.
    """

    streams: RotationDomain
    blocks: Blocks
    rotated: Array
    edges: tuple[Edge, ...]
    tied: frozenset[int]
    reasons: Mapping[int, str]

    @property
    def folded(self) -> list[Read]:
        """The contractions whose weight takes rotations."""
        edges = set(map(id, self.edges))
        return [x for x in self.streams.reads if id(x) not in edges and x.element_ids is not None]

    @property
    def tables(self) -> list[Lookup]:
        """The tables that take rotations, each by one of its lookups."""
        edges = set(map(id, self.edges))
        return different(x for x in self.streams.lookups if id(x) not in edges)

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
        looked_up = {x.leaf_index for x in self.streams.lookups}
        if read.leaf_index in self.tied and self.is_whole(read.inputs):
            return False
        return read.leaf_index in self.streams.elsewhere or read.leaf_index in looked_up

    def reason(self, read: Read) -> str:
        """Returns why some channels of a contraction are not rotated in weights."""
        labels = read.inputs
        for label in np.unique(labels[self.sizes(labels) == 0]).tolist():
            reason = self.reasons.get(int(self.blocks.kinds[label])) if label > FIXED else None
            reason = reason or self.blocks.reasons.get(label)
            if reason:
                return reason
        return read.reason or "it is an argument, or made of one"


def found_in(
    streams: RotationDomain, is_planned: Callable[[Read], bool], fits: Callable[[int], bool]
) -> Offline:
    """Finds what can be rotated in weights and saves products at run time.

    Args:
      streams: the function.
      is_planned: whether a contraction would otherwise be rotated at run time.
      fits: whether blocks of a number of channels can be rotated.
    """
    edges, tied = _edges(streams)
    blocks = streams.labels.solved()
    rotated, reasons = np.ones(len(blocks.sizes), bool), dict[int, str]()
    rotated[0] = False
    gains = [(gain, _kinds(blocks, labels)) for gain, labels in streams.gains]
    at_edges = set(map(id, edges))
    folded = [read for read in streams.reads if id(read) not in at_edges]

    def drop(kinds: Array, reason: str) -> None:
        for kind in np.unique(kinds).tolist():
            if rotated[kind]:
                rotated[kind] = False
                reasons.setdefault(kind, reason)

    fit = np.array([size > 1 and fits(int(size)) for size in blocks.sizes])
    drop(
        np.flatnonzero(~fit),
        "its number of channels that rotate alike is not a multiple of `block`",
    )
    while True:
        count = rotated.sum()
        for kinds in _uneven(edges, blocks, rotated):
            drop(kinds, "only a part of it could be rotated at run time")
        _same_gains(gains, rotated, drop)
        saved, spent = _products(folded, edges, blocks, rotated, is_planned)
        if rotated.sum() == count:
            useless = np.flatnonzero(rotated & (saved <= spent))
            drop(useless, "that would save no product at run time")
        if rotated.sum() == count:
            break
    rotated_edges = tuple(x for x in edges if np.any(rotated[_kinds(blocks, x.labels)]))
    return Offline(streams, blocks, rotated, rotated_edges, tied, reasons)


def why_at_run_time(offline: Offline, edge: Edge) -> str:
    """Returns why an edge is rotated at run time."""
    streams = offline.streams
    if isinstance(edge, Read) and edge.element_ids is None:
        return "its weight has another use, or is not a plain matrix"
    uses = streams.unseen | streams.elsewhere
    if edge.leaf_index in uses:
        return f"its weight has another use: {uses[edge.leaf_index]}"
    if isinstance(edge, Read):
        return "its weight is a table that is looked up"
    return "its table is also a weight, after a gain"


def _kinds(blocks: Blocks, labels: Array) -> Array:
    return np.where(labels > FIXED, blocks.kinds[labels], 0)


def _edges(streams: RotationDomain) -> tuple[list[Edge], frozenset[int]]:
    """Returns the contractions and lookups whose weight cannot take a rotation, and the tables that
    take one rotation for all their uses.
    """
    rotations, elsewhere = streams.labels, streams.unseen | streams.elsewhere
    tables = {x.leaf_index: x for x in streams.lookups}
    tied = set[int]()
    for leaf_index, lookup in tables.items():
        reads = [x for x in streams.reads if x.leaf_index == leaf_index]
        if reads and all(_is_alike(x, lookup) for x in reads):
            tied.add(leaf_index)
    edges: list[Edge] = []
    for read in streams.reads:
        loops = streams.items[read.site.address].loops
        if read.gains is not None and len(loops) != len(read.steps):
            rotations.stop(read.inputs, "a gain before a weight that a scan does not step over")
        fails = read.element_ids is None or read.leaf_index in elsewhere
        fails = fails or not (read.is_site or read.leaf_index in tables)
        if read.leaf_index in tables and read.leaf_index in tied and not fails:
            rotations.join(tables[read.leaf_index].labels, read.inputs, "a table with another use")
        elif fails or read.leaf_index in tables:
            edges.append(read)
            if read.order is not None:
                rotations.stop(
                    read.inputs, "a weight that cannot be rotated, summed in another order"
                )
            rotations.stop(read.outputs, "its weight has another use, or is not a plain matrix")
    for lookup in streams.lookups:
        leaf_index = lookup.leaf_index
        shared = any(x.leaf_index == leaf_index for x in streams.reads) and leaf_index not in tied
        first_labels = tables[leaf_index].labels
        if leaf_index in elsewhere or shared:
            edges.append(lookup)
        elif lookup.labels is not first_labels:
            rotations.join(first_labels, lookup.labels, "a table with another use")
    return edges, frozenset(tied - set(elsewhere))


def _is_alike(read: Read, lookup: Lookup) -> bool:
    """Whether a contraction sums over the axis that a lookup returns: the rows of one table."""
    if read.element_ids is None or read.gains is not None or read.inputs.ndim > 1:
        return False
    elements = read.elements
    return elements.ndim == 2 and np.array_equal(elements, lookup.elements[()])


def _uneven(edges: Sequence[Edge], blocks: Blocks, rotated: Array) -> Iterator[Array]:
    """Yields kinds of blocks that cannot be rotated where they meet at one edge."""
    by_address: dict[object, list[Edge]] = {}
    for edge in edges:
        by_address.setdefault(edge.address, []).append(edge)
    for group in by_address.values():
        kinds = np.concatenate([_kinds(blocks, edge.labels).ravel() for edge in group])
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
    is_kept = np.zeros(int(gain.max()) + 1, bool)
    is_kept[gain[~rotated[kinds]]] = True
    drop(kinds[is_kept[gain]], "its gain belongs to a value that cannot be rotated")


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
    counted: set[object] = set()
    for count, uses in ((saved, folded), (spent, edges)):
        for x in uses:
            kinds = np.unique(_kinds(blocks, x.labels))
            value = (id(x.value) if isinstance(x, Read) else x.address, x.steps, count is saved)
            is_read = count is spent or (np.all(rotated[kinds]) and is_planned(x))  # type: ignore
            if is_read and value not in counted:
                counted.add(value)
                count[kinds] += 1
    return saved, spent


# Parameters and maps of a function with rotated channels.


_SIDES = "lhs", "rhs"


class RotatedParams(Rewritten):
    """Parameters with rotated channels."""

    def __init__(self, named: Named, params: Any):
        super().__init__(named, params)
        self._folded: dict[str, None] = {}

    @property
    def folded(self) -> tuple[str, ...]:
        """The gains that are multiplied into weights."""
        return tuple(self._folded)

    def read(self, read: Read, matrix: Orthogonal) -> None:
        """Rotates the channels of the weight of a contraction in one step."""
        self._change(read.leaf_index, read.summed, -1, matrix.times, read.channels)

    def offline(self, offline: Offline, matrix: Callable[[int], Orthogonal]) -> None:
        """Rotates everything that is rotated in weights. Gains that weights take become 1."""
        streams = offline.streams

        def turned(leaf_index: int, elements: Array, labels: Array, axis: int) -> None:
            for index in np.ndindex(labels.shape[:-1]):
                sizes = offline.sizes(labels[index])

                def part(w: Array, sizes: Array = sizes) -> Array:
                    w = np.array(w)
                    for size in set(np.unique(sizes).tolist()) - {0}:
                        channels = np.flatnonzero(sizes == size)
                        w[..., channels] = matrix(size).times(w[..., channels])
                    return w

                if sizes.any():
                    self._change(leaf_index, elements[index], axis, part, len(sizes))

        for read in offline.folded:
            if read.gains is not None:
                is_rotated = offline.sizes(read.inputs) > 0
                factors = np.where(is_rotated, self.gains(offline, read.gains), 1)
                factors = np.repeat(factors, read.elements.shape[-1] // factors.shape[-1], -1)
                self.flat(read.leaf_index)[read.elements] *= factors[..., None, :]
        for read in offline.folded:
            if read.leaf_index not in offline.tied:
                turned(read.leaf_index, read.elements, read.inputs, -1)
            turned(read.leaf_index, read.elements, read.outputs, -2)
        for table in offline.tables:
            turned(table.leaf_index, table.elements[()], table.labels, -1)
        for leaf_index, start in streams.starts.items():
            count = streams.sizes[leaf_index]
            turned(leaf_index, np.arange(count), np.arange(start, start + count), -1)
        for gains, labels in streams.gains:
            leaf_index, elements = streams.elements_of(gains)
            rotated_gains = elements[offline.sizes(labels) > 0]
            if rotated_gains.size:
                self.flat(leaf_index)[rotated_gains] = 1 - streams.offsets[leaf_index]
                self._folded[self._named.names[leaf_index]] = None

    def gains(self, offline: Offline, labels: Array) -> Array:
        """Returns the factors of gains, before they become 1."""
        factors = np.ones(labels.shape)
        if np.any(labels > FIXED):
            is_gain = labels > FIXED
            leaf_index, elements = offline.streams.elements_of(labels[is_gain])
            leaf = np.asarray(self._leaves[leaf_index], np.float64).reshape(-1)
            factors[is_gain] = leaf[elements] + offline.streams.offsets[leaf_index]
        return factors

    def _change(
        self, leaf_index: int, elements: Array, axis: int, to: Callable[[Array], Array], count: int
    ) -> None:
        """Changes vectors of a number of channels along an axis; taps vary fastest."""
        flat = self.flat(leaf_index)
        moved = np.moveaxis(elements, axis, -1)
        w = flat[moved].reshape(*moved.shape[:-1], count, -1)
        w = np.moveaxis(to(np.moveaxis(w, -2, -1)), -1, -2)
        flat[moved] = w.reshape(moved.shape)


def maps_of(
    offline: Offline,
    plan: Plan,
    matrix: Callable[[int], Orthogonal],
    gains: Callable[[Offline, Array], Array],
) -> dict[str, tuple[ChannelMap, ...]]:
    """Returns the maps at run time, by key: lookups are rotated, and operands of weights that
    cannot take a rotation are rotated back.
    """
    by_address: dict[Any, list[Edge]] = {}
    for edge in offline.edges:
        by_address.setdefault(edge.address, []).append(edge)
    maps = {}
    for address, edges in by_address.items():
        loops = [loop.length for loop in offline.streams.items[address].loops]
        first_edge, labels = edges[0], edges[0].labels
        turn = matrix(int(offline.sizes(labels).flat[0]))
        if not isinstance(first_edge, Read):
            maps[key_of(plan, first_edge)] = (turn.map(labels.shape, loops),)
            continue
        gain_factors = np.ones((*loops, *labels.shape))
        for edge in edges:
            if isinstance(edge, Read) and edge.gains is not None:
                gain_factors[edge.steps] = gains(offline, edge.gains)
        maps[key_of(plan, first_edge)] = turn.inverse(gain_factors, loops)
    return maps


def key_of(plan: Plan, edge: Edge) -> str:
    """Returns the name of the operand of a contraction, or of the result of a lookup."""
    address = edge.address
    site = plan.site_at(address)
    argnum = -1
    if isinstance(edge, Read):
        (argnum,) = (i for i, x in enumerate(edge.site.operands) if x.path is None)
    if site is not None:
        return site.operands[argnum].key if argnum >= 0 else site.output_key
    index = next(i for i, x in enumerate(plan.skipped) if x.address == address)
    return f"{plan.name_of_skipped(index)}:{_SIDES[argnum] if argnum >= 0 else 'out'}"


_NAME = "algorithms.rotate"


@dataclasses.dataclass(frozen=True)
class Rotation:
    """How the channels of a site are rotated.

    Attributes:
      site: its name.
      channels: number of channels.
      factors: sizes of the Hadamard matrices whose Kronecker product rotates a block of channels;
        empty if the site is not rotated.
      why: why it is not rotated, or is rotated at run time.
      offline: whether the parameters that produce its operand are rotated. Then nothing is computed
        at run time.
    """

    site: str
    channels: int
    factors: tuple[int, ...]
    why: str = ""
    offline: bool = False


class RotationReport(Printed, tuple[Rotation, ...]):
    """The sites of a plan, and how they are rotated. Prints as a table.

    Attributes:
      edges: operands that are rotated back at run time, and lookups that are rotated, by key, with
        the reason. At these ends of what is rotated offline, a weight cannot take the rotation.
      gains: parameters that became 1, because they were multiplied into the weights after them.
    """

    edges: Mapping[str, str] = MappingProxyType({})
    gains: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{'channels':>8} {'block':>12} {'where':>9}  site"]
        for x in self:
            block = " x ".join(map(str, x.factors)) or "-"
            where = "weights" if x.offline else "run time" if x.factors else "-"
            reason = f" ({'' if x.factors else 'not rotated: '}{x.why})" if x.why else ""
            lines.append(f"{x.channels or '-':>8} {block:>12} {where:>9}  {x.site}{reason}")
        for key, reason in self.edges.items():
            lines.append(f"{'-':>8} {'-':>12} {'run time':>9}  {key} ({reason})")
        if self.gains:
            lines.append(f"gains multiplied into weights: {', '.join(self.gains)}")
        return "\n".join(lines)


@algorithm("rotate", "pass options by name, such as jqx.algorithms.rotate(block=32).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class rotate:
    """Multiplies the input of each contraction by a random Hadamard matrix, and its weight by the
    inverse: an algorithm of `jqx.ptq` that changes weights, but not the function.

    Each rotated channel is a signed mean of all channels, which spreads outliers. Use it for plans
    that quantize activations to few bits.

    The inverse is folded into the weights. The rotation itself is computed at run time, as two
    products with small matrices (`jqx.Quantized.maps`). For n channels these need about 2 sqrt(n)
    multiplications each; the contraction needs one for each row of its weight. Sites that read the
    same value share the rotation.

    With `offline`, the parameters that produce an operand are rotated instead, if possible: the
    output axes of weights, biases, tables. They are found in the function, not in a registry of
    architectures. All values that are added to one residual stream get the same rotation. The gains
    of RMS norms are multiplied into the weights after them and become 1. Values of attention are
    rotated head by head. A table that is also the head is not rotated if there is a gain before the
    head: the stream is rotated after the lookup, and rotated back before the head, where the gain
    stays. All other sites are rotated at run time. The report says which is done at each site, and
    why.

    This saves products at run time, but gains no longer damp the outliers of the stream before it
    is mixed, so weights that are rounded to nearest may lose more. Run GPTQ after it. (SmolLM2,
    GPTQ on text of its own, divergence from the float model in nats a token: int4 per channel with
    int8 activations .32 without rotation and .21 with `offline="only"`. In blocks of 32, float
    activations, `gptq(sweeps=2)`: int4 .078 and .066, int3 .297 and .269.)

    Attributes:
      block: number of channels that are mixed, a divisor of the channels of a site. Use the group
        size of the scheme for formats such as MXFP4, which a rotation of all channels harms. `None`
        mixes all channels, or the largest part for which there is a Hadamard matrix.
      seed: seed of the random signs; equal numbers of channels have the same signs.
      offline: whether weights on both sides take rotations, if they can. Numbers of channels
        without a Hadamard matrix are then mixed by a random orthogonal matrix. `"only"` rotates no
        operand of another site at run time.
      products: regular expression of the names of sites that multiply two activations, matched in
        full, such as queries and keys (R3 of SpinQuant). Both operands are rotated at run time by
        one matrix, which does not change the product. For plans that quantize them. A product with
        values sums over tokens: leave it out.

    Raises:
      TypeError: `block` or `seed` is not an integer, `offline` is not a bool, or `products` is no
        string.
      ValueError: `block` is less than 2, or there is no Hadamard matrix of its size; `products` is
        not a regular expression. At run time, the channels of a site are not a multiple of `block`,
        `products` matches no such site or another kind of site, or no site can be rotated.

    Source: Ashkboos et al., arXiv:2404.00456; Liu et al., arXiv:2405.16406 (the stream and the
    values: its R1 and R2; learning them gained nothing); blocks: Egiazarian et al.,
    arXiv:2509.23202.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f, w = lambda w, x: x @ w, jnp.array([[1.0], [1.0], [0.0], [1.0]])
      >>> x = jnp.array([[0.4, 0.4, 7.0, 0.4]])
      >>> for algorithm in (jqx.algorithms.nearest(), jqx.algorithms.rotate()):
      ...     quantize = jqx.ptq(f, jqx.presets.w4a4(), algorithm, progress=False)
      ...     print(quantize(w, [x])(x).round(1))
      [[0.]]
      [[1.6]]
    """

    block: int | None = None
    seed: int = 0
    offline: bool | Literal["only"] = False
    products: str | None = None

    def __post_init__(self) -> None:
        check_integer(_NAME, "seed", self.seed)
        check_fields(_NAME, self, offline=flag() | choice("only"))
        if self.products is not None:
            fix = "pass for example products='.*scores:dot_general'."
            check_pattern(_NAME, "products", self.products, fix=fix)
        if self.block is None:
            return
        block = check_integer(_NAME, "block", self.block)
        if block < 2 or not factors_of(block):
            problem = f"there is no Hadamard matrix of size `block`, {block}."
            fix = "leave it out for the largest possible size, or pass 2 or a multiple of 4."
            raise fail(_NAME, problem, fix=fix)

    def rewrite(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> AlgorithmResult:
        """Returns the parameters with rotated channels, and the maps that are applied at sites."""
        traced = every_site(_NAME, f, plan, arguments_of(plan, params, next(iter(batches))))
        streams = RotationDomain(traced)
        named = Named(traced.call_plan, streams.names)
        offline = found_in(streams, lambda x: named.weight(x) is not None, self._fits)
        reads = [
            x
            for x in streams.reads
            if named.weight(x) and x.element_ids and not offline.is_shared(x)
        ]
        at_run_time = {named.name(x) for x in reads if not offline.is_whole(x.inputs)}
        gains = RotatedParams(named, params).gains
        maps: dict[str, Any] = maps_of(offline, traced.call_plan, self._of_size, gains)
        rows: dict[str, Rotation] = {}
        matrices: list[tuple[Read, Orthogonal]] = []
        for read in reads:
            name, count = named.name(read), read.channels
            if name not in at_run_time:
                sizes = self._of_size(int(offline.sizes(read.inputs).max())).sizes
                rows[name] = Rotation(name, count, sizes, offline=True)
                continue
            if self.offline == "only":
                rows.setdefault(name, Rotation(name, count, (), offline.reason(read)))
                continue
            matrix = self._of_channels(name, count)
            if matrix is None:
                reason = f"there is no Hadamard matrix of a divisor of {count}"
                rows.setdefault(name, Rotation(name, count, (), reason))
                continue
            matrices.append((read, matrix))
            loops = tuple(loop.length for loop in read.site.loops)
            maps.setdefault(named.key(read), matrix.map(_shape(read), loops))  # for all steps
            reason = offline.reason(read) if self.offline else ""
            rows.setdefault(name, Rotation(name, count, matrix.sizes, reason))
        reason = "its weight has another use, or is not a plain matrix"
        entries = [rows.get(x.name, Rotation(x.name, 0, (), reason)) for x in named.sites]
        if self.products is not None:
            products = _rotated_products(traced, self.products, self.seed)
            for name, (count, both) in products.items():
                entries.append(Rotation(name, count, (count,)))
                maps |= both
        _check_some(entries)

        def rotated(params: Any) -> RotatedParams:
            new = RotatedParams(named, params)
            new.offline(offline, self._of_size)
            for read, matrix in matrices:
                new.read(read, matrix)
            return new

        report, new = RotationReport(entries), rotated(params)
        report.edges = {
            key_of(traced.call_plan, x): why_at_run_time(offline, x) for x in offline.edges
        }
        report.gains = new.folded
        return AlgorithmResult(new.params(), report, maps, lambda params: rotated(params).params())

    def _fits(self, size: int) -> bool:
        """Whether blocks of so many channels can be rotated in weights."""
        return bool(self.offline) and (self.block is None or size % self.block == 0)

    def _of_size(self, size: int) -> Orthogonal:
        """Returns the rotation that weights take for blocks of a number of channels."""
        if self.block is None:
            return Orthogonal.any(size, self.seed)
        return Orthogonal.hadamard(size, factors_of(self.block), self.seed)

    def _of_channels(self, name: str, count: int) -> Orthogonal | None:
        """Returns the rotation of the operand of a site at run time; `None` if there is no Hadamard
        matrix.
        """
        block = largest_block(count) if self.block is None else self.block
        if count % block:
            problem = "`block` does not divide the channels of a site."
            detail = f"block == {block}, and {count} channels at {name!r}"
            fix = "leave `block` out, pass a divisor, or leave that site in float."
            raise fail(_NAME, problem, given=detail, fix=fix, error=Inapplicable)
        return Orthogonal.hadamard(count, factors_of(block), self.seed) if block > 1 else None


def _shape(read: Read) -> tuple[int, ...]:
    """Returns the shape of the channels of an operand, [*batch, channels]; for a convolution, of
    all groups.
    """
    groups = 1 if read.observed_site.patches is None else read.observed_site.patches.groups
    stack = read.inputs.shape[:-1] if read.site.op == "dot_general" else ()
    return (*stack, groups * read.channels)


def _check_some(report: list[Rotation]) -> None:
    if not any(x.factors for x in report):
        problem = "no site can be rotated: none has a weight of its own, and an even number of "
        problem += "channels."
        detail = "; ".join(f"{x.site}: {x.why}" for x in report[:4]) or "no site with a weight"
        fix = "leave this algorithm out."
        raise fail(_NAME, problem, given=detail, fix=fix, error=Inapplicable)


def _rotated_products(
    traced: Every, pattern: str, seed: int
) -> dict[str, tuple[int, dict[str, ChannelMap]]]:
    """Returns for the name of each product of two activations the number of channels that it sums
    over, and the rotation of both operands, by key: `(x Q) (y Q)' = x y'`.

    Args:
      traced: the function, and a plan of all its sites.
      pattern: a regular expression for names of sites, matched in full.
      seed: seed of the rotations.
    """
    plan = traced.call_plan
    matched = [site for site in plan.sites if re.fullmatch(pattern, site.name)]
    products = [site for site in matched if _is_product(site)]
    if not products or len(products) < len(matched):
        others = [site.name for site in matched if not _is_product(site)]
        names = [site.name for site in plan.sites if _is_product(site)]
        problem = "`products` matches no product of two activations."
        if products:
            problem = "`products` also matches other sites."
        detail = f"products == {pattern!r}, which matches {some(others)}"
        expected = f"names of such sites of the plan: {some(map(repr, names))}"
        fix = "add a rule for them to the policy, without weight=, or match other names."
        raise fail(_NAME, problem, given=detail, expected=expected, fix=fix)
    rotations = {}
    for site in products:
        lhs, rhs, *_ = observed_parts(site, traced.items[site.address])
        count = math.prod(int(site.shapes[0][axis]) for axis in lhs.observed.contracted)
        matrix = Orthogonal.any(count, seed).times(np.eye(count))
        both = ChannelMap(factors=(jnp.asarray(matrix, jnp.float32),))
        rotations[site.name] = count, {lhs.key: both, rhs.key: both}
    return rotations


def _is_product(site: Site) -> bool:
    """Whether a site multiplies two activations."""
    return site.op == "dot_general" and all(x.path is None for x in site.operands)
