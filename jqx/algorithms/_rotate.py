"""Rotations: channels are mixed by an orthogonal matrix, so that no value stands out."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._calls import called
from .._checks import check_integer, require_that
from ..transforms import ChannelMap, Plan
from ..transforms._shared import Chosen, Inapplicable, arguments_of
from ._channels import Met
from ._folds import Folds
from ._hadamard import factors_of, largest_block, orthogonal
from ._labels import Array
from ._pairs import find_pairs

_NAME = "algorithms.rotate"


@dataclasses.dataclass(frozen=True)
class Rotation:
    """How the channels of a site are rotated.

    Attributes:
      site: its name.
      channels: how many there are.
      factors: sizes of the Hadamard matrices whose Kronecker product rotates a block of channels;
        none where the site is left as it is.
      why: it is left as it is.
    """

    site: str
    channels: int
    factors: tuple[int, ...]
    why: str = ""


class RotationReport(tuple[Rotation, ...]):
    """The sites of a plan, and how they are rotated. Prints as a table."""

    def __str__(self) -> str:
        lines = [f"{'channels':>8} {'block':>12}  site"]
        for x in self:
            block = " x ".join(map(str, x.factors)) or "-"
            why = f" (not rotated: {x.why})" if x.why else ""
            lines.append(f"{x.channels or '-':>8} {block:>12}  {x.site}{why}")
        return "\n".join(lines)


@called("algorithms.rotate", "options go by name, such as jqx.algorithms.rotate(block=32).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotate:
    """Multiplies what goes into each contraction by a random Hadamard matrix, and its weight by the
    inverse: an algorithm of `jqx.ptq` that changes weights. The function stays as it is. Each
    channel becomes a mean of all, with signs, so outliers are spread: for plans that quantize
    activations to few bits.

    The inverse is folded into the weights. The rotation itself is computed at run time, as two
    products with small matrices (`jqx.Quantized.maps`): for n channels some 2 sqrt(n)
    multiplications each, where the contraction takes one for each row of its weight. Sites that
    read one value share it.

    Attributes:
      block: how many channels are mixed, a divisor of those of a site: that of the groups of the
        scheme for formats such as MXFP4, which a rotation of all channels harms. `None` mixes all,
        or the largest part of them that there is a Hadamard matrix for.
      seed: of the random signs; channels of one number have the same.

    Raises:
      TypeError: an option is no integer.
      ValueError: `block` is less than 2, or there is no Hadamard matrix of its size; when it runs,
        a site has channels that are not a multiple of it, or no site can be rotated.

    Source: Ashkboos et al., arXiv:2404.00456 (at all sites, online); blocks: Egiazarian et al.,
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

    def __post_init__(self) -> None:
        check_integer(_NAME, "seed", self.seed)
        if self.block is None:
            return
        block = check_integer(_NAME, "block", self.block)
        require_that(
            block > 1 and factors_of(block),
            error=ValueError,
            function=_NAME,
            problem="there is no Hadamard matrix of the size of `block`.",
            given=f"block == {block}",
            expected="2, or a multiple of 4 such as 12, 16, 20, 32, 64 or 128",
            mend="leave it out: then the largest possible is taken.",
        )

    def rewrite(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
    ) -> Chosen:
        """Returns the parameters with their channels rotated, and what is done at sites."""
        first = next(iter(batches))
        folds = find_pairs(f, plan)(*arguments_of(plan, params, first)).folds
        turned = _Turned(folds, params)
        maps: dict[str, ChannelMap] = {}
        found: dict[str, Rotation] = {}
        for met in folds.met:
            if folds.weight(met) is None:
                continue
            name, count = folds.name(met), channels_of_operand(met)
            sizes = self._sizes(name, count)
            why = "" if sizes else f"there is no Hadamard matrix of a divisor of {count}"
            found[name] = Rotation(name, count, sizes, why)
            if sizes:
                signs = signs_of(count, self.seed)
                turned.rotate(met, signs, sizes)
                if folds.key(met) not in maps:  # one for all steps
                    maps[folds.key(met)] = _map(met, signs, sizes)
        why = "its weight has another use, or is no plain matrix"
        report = [found.get(x.name, Rotation(x.name, 0, (), why)) for x in folds.sites]
        require_that(
            maps,
            error=Inapplicable,
            function=_NAME,
            problem="no site can be rotated.",
            given="; ".join(f"{x.site}: {x.why}" for x in report[:4]) or "no site with a weight",
            expected="a contraction with a weight of its own, of an even number of channels",
            mend="leave this algorithm out.",
        )
        return Chosen(turned.params(), RotationReport(report), maps)

    def _sizes(self, name: str, count: int) -> tuple[int, ...]:
        """Returns the sizes of the factors of the rotation of so many channels."""
        if self.block is None:
            block = largest_block(count)
            return factors_of(block) if block > 1 else ()
        require_that(
            count % self.block == 0,
            error=Inapplicable,
            function=_NAME,
            problem="`block` does not divide the channels of a site.",
            given=f"block == {self.block}, and {count} channels at {name!r}",
            expected="a divisor",
            mend="leave `block` out, pass a smaller one, or leave that site in float.",
        )
        return factors_of(self.block)


rotate = Rotate


def channels_of_operand(met: Met) -> int:
    """Returns how many channels an operand has, of all groups of a convolution one's."""
    taps = 1 if met.about.patches is None else math.prod(met.about.patches.kernel)
    return met.inputs.shape[-1] // taps


def signs_of(count: int, seed: int) -> Array:
    """Returns random signs of so many channels."""
    return np.random.default_rng((seed, count)).choice(np.array([-1.0, 1.0]), count)


def _map(met: Met, signs: Array, sizes: Sequence[int]) -> ChannelMap:
    """Returns the rotation of the operand of a site, in each step of the loops around it."""
    steps = tuple(loop.length for loop in met.site.loops)
    groups = 1 if met.about.patches is None else met.about.patches.groups
    stack = met.inputs.shape[:-1] if met.site.op == "dot_general" else ()
    scale = np.broadcast_to(np.tile(signs, groups), (*steps, *stack, groups * len(signs)))
    factors = map(orthogonal, sizes)
    return ChannelMap(
        scale=jnp.asarray(scale, jnp.float32),
        factors=tuple(
            jnp.asarray(np.broadcast_to(x, (*steps, *x.shape)), jnp.float32) for x in factors
        ),
    )


class _Turned:
    """Parameters whose channels are rotated, in float64, rounded once."""

    def __init__(self, folds: Folds, params: Any):
        self._folds, self._params = folds, params
        self._leaves = folds.leaves(params)
        self._found: dict[int, Array] = {}

    def rotate(self, met: Met, signs: Array, sizes: Sequence[int]) -> None:
        """Rotates the channels of the weight of a site in one step."""
        if met.place not in self._found:
            self._found[met.place] = np.array(self._leaves[met.place], np.float64).reshape(-1)
        flat, elements, count = self._found[met.place], met.elements, len(signs)
        w = flat[elements].reshape(*elements.shape[:-1], count, -1)  # taps are the fastest
        w = np.moveaxis(w, -2, -1) * signs
        blocks = w.reshape(*w.shape[:-1], -1, *sizes)
        for i, n in enumerate(sizes):
            axis = i - len(sizes)
            blocks = np.moveaxis(np.moveaxis(blocks, axis, -1) @ orthogonal(n), -1, axis)
        flat[elements] = np.moveaxis(blocks.reshape(w.shape), -1, -2).reshape(elements.shape)

    def params(self) -> Any:
        """Returns the parameters."""
        for place, x in self._found.items():
            own = self._leaves[place]
            self._leaves[place] = jnp.asarray(x.reshape(np.shape(own)), own.dtype)
        return self._folds.with_leaves(self._params, self._leaves)
