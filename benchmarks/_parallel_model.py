"""A model, on paper, of how long collectives take on many chips. Nothing of it was measured.

A network is a torus, or nodes of eight chips with a switch inside and a port for each chip outside.
Time is that of the busiest link, of the hops that follow one another, of the messages that a device
begins, and of rounding in a ring. Bytes of scales are counted: float32, one for 256 elements of a
message, or for a shorter one.
"""

import dataclasses
import math
from collections.abc import Callable

GROUP = 256
ROUNDING = 1e-6
"""Seconds that a hop takes to round, add and begin anew, where codes are added on the way."""

MESSAGE = 1e-7
"""Seconds that a device takes to begin a message of an exchange, of which there is one for each."""


def bytes_of(bits: int, message: float = math.inf) -> float:
    """Returns the bytes of an element in messages of so many, its part of a scale included."""
    return bits / 8 + (4 / min(GROUP, message) if bits < 16 else 0)


@dataclasses.dataclass(frozen=True)
class Torus:
    """Links from each chip to the next along each axis, both ways; each axis closes to a ring.

    `rate` is that of a link one way, in bytes a second; `hop` the seconds until a first byte is at
    the next chip. Times are those of `size` bytes, which the whole array has.
    """

    name: str
    axes: tuple[int, ...]
    rate: float
    hop: float

    @property
    def count(self) -> int:
        return math.prod(self.axes)

    def gathered(self, size: float) -> float:
        """All links are busy, both ways: the compiler's own gather, or half of its sum."""
        part = size * (1 - 1 / self.count)
        return part / (2 * len(self.axes) * self.rate) + self._across

    def exchanged(self, size: float) -> float:
        """Each message takes a quarter of the longest axis on average, and uses all those links."""
        part = size * (1 - 1 / self.count)
        busy = part * max(self.axes) / 8 / self.rate
        return busy + self._across + self.count * MESSAGE

    def sent_on(self, size: float) -> float:
        """One ring through all chips, one way: one link of each is busy."""
        each = size / self.count / self.rate + self.hop + ROUNDING
        return (self.count - 1) * each

    @property
    def _across(self) -> float:
        return sum(axis // 2 for axis in self.axes) * self.hop


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Nodes of `inner` chips at a switch; beyond it each chip has one port. As for `Torus`."""

    name: str
    nodes: int
    inner: int
    rate: float
    hop: float
    outer_rate: float
    outer_hop: float

    @property
    def count(self) -> int:
        return self.nodes * self.inner

    def gathered(self, size: float) -> float:
        """What comes in at one chip of a node goes on to the others by the switch; as a tree."""
        return self.within(size) + self.between(size / self.inner)

    def within(self, size: float) -> float:
        """Gathered or exchanged in a node."""
        return size * (1 - 1 / self.inner) / self.rate + self.hop

    def between(self, size: float) -> float:
        """The same of a chip with those of its rank in the other nodes."""
        part = size * (1 - 1 / self.nodes)
        return part / self.outer_rate + math.log2(self.nodes) * self.outer_hop

    def exchanged(self, size: float) -> float:
        """Nearly all messages of a chip leave its node, by its own port."""
        part = size * (1 - 1 / self.nodes)
        return part / self.outer_rate + self.outer_hop + self.count * MESSAGE

    def sent_on(self, size: float) -> float:
        """One ring: of eight hops one leaves a node, and all wait for it."""
        each = size / self.count / self.outer_rate + self.outer_hop + ROUNDING
        return (self.count - 1) * each


H200 = {"inner": 8, "rate": 450e9, "hop": 2e-6, "outer_rate": 50e9, "outer_hop": 5e-6}
NETWORKS: tuple[Torus | Nodes, ...] = (
    Torus("TPU v5e, 2x4", (2, 4), 50e9, 1e-6),
    Torus("TPU v5e, 16x16", (16, 16), 50e9, 1e-6),
    Torus("TPU v5p, 16x16x16", (16, 16, 16), 100e9, 1e-6),
    Nodes("H200, 32 nodes", 32, **H200),
    Nodes("H200, 512 nodes", 512, **H200),
)
ASSUMED = (
    "TPU v5e and v5p: 50 and 100 GB/s a link one way (in Google's tables 400 and 1,200 GB/s a chip",
    "both ways, of 4 and 6 links), 1 us a hop; all axes are rings, those of 2x4 too.",
    "H200: 450 GB/s a chip one way in its node, 2 us; 50 GB/s a chip beyond (400 Gb/s), 5 us.",
    f"Codes in groups of {GROUP}, scales of float32. A ring takes {1e6 * ROUNDING:.0f} us a hop to "
    f"round, an exchange {1e6 * MESSAGE:.1f} us a message.",
    "Latencies are guesses. No other traffic; nothing is overlapped; protocols take no bandwidth.",
)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to add up or gather: bytes that a device sends for an element, and seconds.

    `seconds` is of a network and of the bytes of the whole array; `None` where it does not apply.
    """

    name: str
    bits: int
    passes: int
    seconds: Callable[[Torus | Nodes, float], float | None]

    def sent(self, network: Torus | Nodes) -> float:
        """Returns the bytes that a device sends for an element of the whole array."""
        return self.passes * bytes_of(self.bits) * (1 - 1 / network.count)

    def time(self, network: Torus | Nodes, elements: float) -> float | None:
        """Returns the seconds for an array of so many elements."""
        size = bytes_of(self.bits, max(1, elements / network.count)) * elements
        return self.seconds(network, size)


def _native(network: Torus | Nodes, size: float) -> float:
    return 2 * network.gathered(size)


def _two_phases(network: Torus | Nodes, size: float) -> float:
    return network.exchanged(size) + network.gathered(size)


def _ring(network: Torus | Nodes, size: float) -> float:
    return network.sent_on(size) + network.gathered(size)


def _by_nodes(network: Torus | Nodes, size: float) -> float | None:
    """Scattered in a node, added between nodes, gathered in the node: two axes of the mesh."""
    if isinstance(network, Torus):
        return None
    part = size / network.inner
    between = network.between(part) + part * (1 - 1 / network.nodes) / network.outer_rate
    return 2 * network.within(size) + between + network.outer_hop + network.nodes * MESSAGE


def _rings(network: Torus | Nodes, size: float) -> float | None:
    """As the compiler adds floats: along all axes, both ways; jqx has no such form."""
    if isinstance(network, Nodes):
        return None
    return 2 * network.gathered(size) + sum(axis // 2 for axis in network.axes) * ROUNDING


def _gathered(network: Torus | Nodes, size: float) -> float:
    return network.gathered(size)


SUMS = (
    Way("psum, float32", 32, 2, _native),
    Way("psum, bfloat16", 16, 2, _native),
    Way("int8, two phases", 8, 2, _two_phases),
    Way("int4, two phases", 4, 2, _two_phases),
    Way("int8, two phases, by nodes", 8, 2, _by_nodes),
    Way("int4, two phases, by nodes", 4, 2, _by_nodes),
    Way("int8, ring", 8, 2, _ring),
    Way("int4, ring", 4, 2, _ring),
    Way("int8, rings of all links (not in jqx)", 8, 2, _rings),
)
GATHERS = (
    Way("gather, float32", 32, 1, _gathered),
    Way("gather, bfloat16", 16, 1, _gathered),
    Way("gather, int8", 8, 1, _gathered),
    Way("gather, int4", 4, 1, _gathered),
)
