"""Rotations: channels are mixed by an orthogonal matrix, so that no value stands out."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from .._calls import called
from .._checks import check_flags, check_integer, check_pattern, require_that, shown
from .._table import Printed
from ..transforms import Plan
from ..transforms._shared import Chosen, Inapplicable, arguments_of
from ._every import every_site
from ._hadamard import factors_of
from ._learned_turns import Loss, learned
from ._named import Named
from ._offline import Offline, found_in, why_at_run_time
from ._products import rotated_products
from ._reads import Read
from ._rotations import Rotations
from ._streams import Streams
from ._turned import TurnedParams, key_of, maps_of

_NAME = "algorithms.rotate"


@dataclasses.dataclass(frozen=True)
class Rotation:
    """How the channels of a site are rotated.

    Attributes:
      site: its name.
      channels: how many there are.
      factors: sizes of the Hadamard matrices whose Kronecker product rotates a block of channels;
        none where the site is left as it is.
      why: it is left as it is, or is rotated at run time.
      offline: whether what makes its operand is rotated: then nothing is computed at run time.
    """

    site: str
    channels: int
    factors: tuple[int, ...]
    why: str = ""
    offline: bool = False


class RotationReport(Printed, tuple[Rotation, ...]):
    """The sites of a plan, and how they are rotated. Prints as a table.

    Attributes:
      edges: operands that are turned back at run time, and lookups that are rotated, by key, with
        the reason: the ends of what is rotated offline where a weight cannot take it.
      gains: parameters that became 1, because the weights behind them are multiplied by them.
      lost: where rotations were learned, what is lost with those that it began with, and with the
        ones that were kept; `None` where they were not.
    """

    edges: Mapping[str, str] = MappingProxyType({})
    gains: tuple[str, ...] = ()
    lost: tuple[float, float] | None = None

    def __str__(self) -> str:
        lines = [f"{'channels':>8} {'block':>12} {'where':>9}  site"]
        for x in self:
            block = " x ".join(map(str, x.factors)) or "-"
            where = "weights" if x.offline else "run time" if x.factors else "-"
            why = f" ({'' if x.factors else 'not rotated: '}{x.why})" if x.why else ""
            lines.append(f"{x.channels or '-':>8} {block:>12} {where:>9}  {x.site}{why}")
        for key, why in self.edges.items():
            lines.append(f"{'-':>8} {'-':>12} {'run time':>9}  {key} ({why})")
        if self.gains:
            lines.append(f"gains that weights take: {', '.join(self.gains)}")
        if self.lost is not None:
            before, after = self.lost
            lines.append(f"learned: a loss of {after:.4g}, {before:.4g} before")
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

    With `offline` what makes an operand is rotated instead, where that is possible: the output axes
    of weights, biases, tables. That is found in the function, not in a registry of architectures:
    what is added to one residual stream is rotated alike, the gains of RMS norms become 1 and go
    into the weights behind them, and values of attention are rotated head by head. A table that is
    the head, too, stays as it is where a gain stands before the head: the stream is rotated behind
    the lookup, and turned back before the head, where the gain is kept. All other sites are rotated
    at run time. The report says of each site which it is, and why.

    Fewer products remain, but gains no longer hold back what stands out in the stream before it is
    mixed: weights that are rounded to nearest may lose more. Let GPTQ follow, and measure both. (In
    SmolLM2 two channels stand out: in 4 bits the error is larger with `offline`, after GPTQ, too.)

    With `steps` the matrices are learned, where activations are quantized behind them: by gradients
    of what the function loses when these are rounded, weights in float, since what rounds them
    follows. Each step takes one batch, and turns the matrices by the Cayley transform, so that they
    stay orthogonal; what has lost least is kept, the matrices of Hadamard among it. At run time the
    small matrices are learned, of each value and each step of a scan; with `offline` one full
    matrix for each number of channels. Memory is that of a gradient of the function: let its
    layers be under `jax.checkpoint`. Of deep models the loss is rough: a rounded value changes all
    that follow. Take large batches, and look at `report.lost`; on SmolLM2 it has gained nothing.

    Attributes:
      block: how many channels are mixed, a divisor of those of a site: that of the groups of the
        scheme for formats such as MXFP4, which a rotation of all channels harms. `None` mixes all,
        or the largest part of them that there is a Hadamard matrix for.
      seed: of the random signs; channels of one number have the same.
      offline: whether weights take rotations on both sides, where they can; numbers of channels
        without a Hadamard matrix are mixed by a random orthogonal one there.
      products: regular expression of the names of sites that multiply two activations, matched in
        full, such as queries and keys (R3 of SpinQuant): both operands are rotated at run time, by
        one matrix, which leaves the product as it is. For plans that quantize them. A product with
        values sums over tokens: leave it out.
      steps: how many there are to learn; 0 learns nothing.
      learning_rate: by how much the first step turns, in radians, the root mean square over planes;
        it falls to 0 evenly.
      loss: a function of what the function returns with rounded activations, and of what it returns
        in float, to a scalar, such as the divergence of two distributions. `None`: the squared
        error of each result of floats, relative to its squares, summed.

    Raises:
      TypeError: `block`, `seed` or `steps` is no integer, `offline` no truth value, `products` no
        text, `learning_rate` no number, or `loss` no function.
      ValueError: `block` is less than 2, or there is no Hadamard matrix of its size; `products` is
        no regular expression; `steps` is below 0, or `learning_rate` not above 0; when it runs, a
        site has channels that are not a multiple of `block`, `products` names no such site or
        another one, no site can be rotated, or `steps` has nothing to learn.

    Source: Ashkboos et al., arXiv:2404.00456; Liu et al., arXiv:2405.16406 (the stream and the
    values: its R1 and R2; learned rotations); blocks: Egiazarian et al., arXiv:2509.23202.

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
    offline: bool = False
    products: str | None = None
    steps: int = 0
    learning_rate: float = 0.02
    loss: Loss | None = None

    def __post_init__(self) -> None:
        self._check_learning()
        check_integer(_NAME, "seed", self.seed)
        if self.products is not None:
            mend = "pass for example products='.*scores:dot_general'."
            check_pattern(_NAME, "products", self.products, mend=mend)
        check_flags(_NAME, offline=self.offline)
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
        given = arguments_of(plan, params, next(iter(batches)))
        every = every_site(_NAME, f, plan, given)
        own, streams = every.own, Streams(every)
        named = Named(own, streams.names)
        turned, rotations = (
            TurnedParams(named, params),
            Rotations(_NAME, named, self.block, self.seed),
        )
        found = found_in(streams, lambda x: named.weight(x) is not None, self._fits)
        reads = [
            x for x in streams.reads if named.weight(x) and x.places and not found.is_shared(x)
        ]
        at_run_time = {named.name(x) for x in reads if not found.is_whole(x.inputs)}
        lost = None
        if self.steps:
            turns = rotations.turns(found, turned, reads, at_run_time)
            what = f, plan, params, list(batches), [*turns.values()]
            factors, lost = learned(_NAME, self, *what, progress=progress)
            rotations = rotations.with_learned(turns, factors)
        turned.offline(found, rotations.of_size)
        maps: dict[str, Any] = maps_of(found, own, rotations.of_size, turned.gains)
        edges = {key_of(own, x): why_at_run_time(found, x) for x in found.edges}
        rows: dict[str, Rotation] = {}
        for read in reads:
            if named.name(read) not in at_run_time:
                row = _offline(named, found, rotations, read)
                rows[row.site] = row
                continue
            row = _at_run_time(named, turned, rotations, read)  # in all steps of a scan
            key = named.key(read)
            if row.factors and key not in maps:  # one for all steps
                maps[key] = rotations.map_of(read)
            why = found.reason(read) if self.offline and row.factors else row.why
            rows.setdefault(row.site, dataclasses.replace(row, why=why))
        why = "its weight has another use, or is no plain matrix"
        every_row = [rows.get(x.name, Rotation(x.name, 0, (), why)) for x in named.sites]
        if self.products is not None:
            products = rotated_products(_NAME, every, self.products, self.seed)
            for name, (count, both) in products.items():
                every_row.append(Rotation(name, count, (count,)))
                maps |= both
        _check_some(every_row)
        report = RotationReport(every_row)
        report.edges, report.gains, report.lost = edges, turned.folded, lost
        return Chosen(turned.params(), report, maps)

    def _check_learning(self) -> None:
        """Checks how rotations are learned."""
        steps, rate = check_integer(_NAME, "steps", self.steps), self.learning_rate
        is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        for name, fits, error, expected in (
            ("steps", steps >= 0, ValueError, "0, which learns nothing, or more"),
            ("learning_rate", is_number, TypeError, "a number, an angle in radians"),
            ("learning_rate", is_number and 0 < rate <= 1, ValueError, "above 0, up to 1"),
            ("loss", self.loss is None or callable(self.loss), TypeError, "a function, or None"),
        ):
            require_that(
                fits,
                error=error,
                function=_NAME,
                problem=f"`{name}` does not fit.",
                given=f"{name} == {shown(getattr(self, name))}",
                expected=expected,
                mend="leave it out for the default.",
            )

    def _fits(self, size: int) -> bool:
        """Whether blocks of so many channels can be rotated in weights."""
        return self.offline and (self.block is None or size % self.block == 0)


rotate = Rotate


def _offline(named: Named, found: Offline, rotations: Rotations, read: Read) -> Rotation:
    """Returns how the operand of a site is rotated already."""
    sizes = rotations.of_size(int(found.sizes(read.inputs).max())).sizes
    return Rotation(named.name(read), read.channels, sizes, offline=True)


def _at_run_time(named: Named, turned: TurnedParams, rotations: Rotations, read: Read) -> Rotation:
    """Rotates the weight of a site, whose operand is rotated at run time."""
    name, count, matrix = named.name(read), read.channels, rotations.of_read(read)
    if matrix is None:
        return Rotation(name, count, (), f"there is no Hadamard matrix of a divisor of {count}")
    turned.read(read, matrix)
    return Rotation(name, count, matrix.sizes)


def _check_some(report: list[Rotation]) -> None:
    require_that(
        any(x.factors for x in report),
        error=Inapplicable,
        function=_NAME,
        problem="no site can be rotated.",
        given="; ".join(f"{x.site}: {x.why}" for x in report[:4]) or "no site with a weight",
        expected="a contraction with a weight of its own, of an even number of channels",
        mend="leave this algorithm out.",
    )
