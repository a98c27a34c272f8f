"""The rotation of each value: one for each size in weights, one for each value at run time."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._errors import fail
from ..transforms import ChannelMap
from ..transforms._shared import Inapplicable
from ._hadamard import factors_of, largest_block
from ._labels import Array
from ._learned_rotations import Factors, LearnedRotation, Operand
from ._named import Named
from ._offline import Offline
from ._orthogonal import Orthogonal
from ._reads import Read
from ._rotated_params import RotatedParams


@dataclasses.dataclass(frozen=True)
class Rotations:
    """Which matrix rotates which value.

    Attributes:
      function: name of the function, for errors.
      named: names of sites.
      block: number of channels that are mixed; `None` for as many as possible.
      seed: seed of the random signs.
      learned: factors that replace Hadamard matrices: [*loops, n, n] by the key of an operand,
        [n, n] by the size of a block that weights take.
    """

    function: str
    named: Named
    block: int | None
    seed: int
    learned: Mapping[str | int, tuple[Array, ...]] = dataclasses.field(default_factory=dict)

    def of_size(self, size: int) -> Orthogonal:
        """Returns the rotation that weights take for blocks of a number of channels."""
        if self.block is None:
            found = Orthogonal.any(size, self.seed)
        else:
            found = Orthogonal.hadamard(size, factors_of(self.block), self.seed)
        return dataclasses.replace(found, factors=self.learned.get(size, found.factors))

    def of_read(self, read: Read) -> Orthogonal | None:
        """Returns the rotation of an operand at run time, in its step; `None` if there is no
        Hadamard matrix.
        """
        found, key = self._start(read), self.named.key(read)
        if found is None or key not in self.learned:
            return found
        factors = tuple(x[read.steps_of_places] for x in self.learned[key])
        return dataclasses.replace(found, factors=factors)

    def map_of(self, read: Read) -> ChannelMap:
        """Returns the rotation of an operand at run time, in all steps of the loops around it."""
        start = self._start(read)
        assert start is not None
        found = start.map(_shape(read), _loops(read))
        own = self.learned.get(self.named.key(read))
        if own is None:
            return found
        return dataclasses.replace(found, factors=tuple(jnp.asarray(x, jnp.float32) for x in own))

    def learnable(
        self, found: Offline, rotated: RotatedParams, reads: Iterable[Read], at_run_time: set[str]
    ) -> dict[tuple[str | int, ...], LearnedRotation]:
        """Returns the rotations that can be learned, by their key in `learned`.

        Args:
          found: what weights take.
          rotated: the parameters, for their gains.
          reads: the contractions.
          at_run_time: names of sites whose operand is rotated at run time.
        """
        values: dict[Any, dict[str, Read]] = {}
        sizes: dict[int, dict[str, list[Read]]] = {}
        for read in reads:
            key = self.named.key(read)
            if self._spec(read) is None:
                continue
            if self.named.name(read) in at_run_time:
                values.setdefault((id(read.value), _loops(read)), {}).setdefault(key, read)
            elif read.order is None and len(own := np.unique(found.sizes(read.inputs))) == 1:
                sizes.setdefault(int(own[0]), {}).setdefault(key, []).append(read)
        learnable: dict[tuple[str | int, ...], LearnedRotation] = {}
        for own in values.values():
            learnable.setdefault(tuple(sorted(own)), self._rotation_of_value(own))
        for size, every in sizes.items():
            learnable[size,] = self._rotation_of_size(size, found, rotated, every)
        return {name: rotation for name, rotation in learnable.items() if rotation.operands}

    def _rotation_of_value(self, reads: Mapping[str, Read]) -> LearnedRotation:
        """Returns the run-time rotation of a value that some sites read."""
        one = next(iter(reads.values()))
        first, loops = self._start(one), _loops(one)
        if first is None:
            return LearnedRotation((), {})
        operands = {}
        for key, read in reads.items():
            signs = np.tile(first.signs, _shape(read)[-1] // len(first.signs))
            scale = np.broadcast_to(signs, (*loops, *_shape(read)))
            operands[key] = Operand(self._spec(read), scale, loops)
        start = tuple(np.broadcast_to(x, (*loops, *x.shape)) for x in first.factors)
        return LearnedRotation(start, operands)

    def _rotation_of_size(
        self, size: int, found: Offline, rotated: RotatedParams, reads: Mapping[str, list[Read]]
    ) -> LearnedRotation:
        """Returns the rotation of all blocks of a size that weights take, as one full matrix, which
        costs nothing there. Gains are in the weights after it.
        """
        start, operands = self.of_size(size), {}
        for key, every in reads.items():
            loops, shape = _loops(every[0]), every[0].inputs.shape
            scale = np.ones((*loops, *shape)) * np.tile(start.signs, shape[-1] // size)
            for read in every:
                if read.gains is not None:
                    by = rotated.gains(found, read.gains)
                    scale[read.steps_of_places] *= np.where(by == 0, 0, 1 / np.where(by, by, 1))
            operands[key] = Operand(self._spec(every[0]), scale, loops)
        return LearnedRotation((functools.reduce(np.kron, start.factors),), operands)

    def with_learned(self, names: Iterable[tuple[str | int, ...]], factors: Factors) -> "Rotations":
        """Returns a copy with learned factors."""
        known = {key: x for name, x in zip(names, factors, strict=True) for key in name}
        return dataclasses.replace(self, learned=known)

    def _spec(self, read: Read) -> Any:
        """Returns how the operand of a site is rounded; `None` if it is not rounded."""
        return next(x.spec for x in self.named.site(read).operands if x.path is None)

    def _start(self, read: Read) -> Orthogonal | None:
        """Returns the initial rotation of an operand at run time, of Hadamard matrices."""
        sizes = self._sizes(self.named.name(read), read.channels)
        return Orthogonal.hadamard(read.channels, sizes, self.seed) if sizes else None

    def _sizes(self, name: str, count: int) -> tuple[int, ...]:
        """Returns the sizes of the factors of a rotation of a number of channels."""
        if self.block is None:
            block = largest_block(count)
            return factors_of(block) if block > 1 else ()
        if count % self.block != 0:
            raise fail(
                self.function,
                "`block` does not divide the channels of a site.",
                given=f"block == {self.block}, and {count} channels at {name!r}",
                expected="a divisor of the number of channels",
                fix="leave `block` out, pass a smaller one, or leave that site in float.",
                error=Inapplicable,
            )
        return factors_of(self.block)


def _loops(read: Read) -> tuple[int, ...]:
    """Returns the lengths of the loops that step over the weight of a site."""
    return tuple(loop.length for loop in read.site.loops)


def _shape(read: Read) -> tuple[int, ...]:
    """Returns the shape of the channels of an operand, [*batch, channels]; for a convolution, of
    all groups.
    """
    groups = 1 if read.about.patches is None else read.about.patches.groups
    stack = read.inputs.shape[:-1] if read.site.op == "dot_general" else ()
    return (*stack, groups * read.channels)
