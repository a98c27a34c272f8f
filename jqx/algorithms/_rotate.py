"""Rotations: mix channels by an orthogonal matrix, which removes outliers."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from .._checks import check_flags, check_integer, check_pattern, shown
from .._errors import fail
from .._table import Printed
from ..transforms import Plan
from ..transforms._shared import Chosen, Inapplicable, OnNonfinite, arguments_of
from ._every import every_site
from ._hadamard import factors_of
from ._learned_rotations import Loss, learned
from ._named import Named
from ._offline import Offline, found_in, why_at_run_time
from ._options import algorithm
from ._orthogonal import Orthogonal
from ._products import rotated_products
from ._reads import Read
from ._rotated_params import RotatedParams, key_of, maps_of
from ._rotations import Rotations
from ._streams import Streams

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
      lost: if rotations were learned, the loss with the initial ones and with the final ones;
        otherwise `None`.
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
            lines.append(f"gains multiplied into weights: {', '.join(self.gains)}")
        if self.lost is not None:
            before, after = self.lost
            lines.append(f"learned: loss {after:.4g}, {before:.4g} before")
        return "\n".join(lines)


@algorithm("rotate", "pass options by name, such as jqx.algorithms.rotate(block=32).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotate:
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

    With `steps`, the matrices are learned for quantized activations, by gradients of the loss of
    the function with rounded activations. Weights stay in float, because they are rounded later.
    Each step takes one batch, and rotates the matrices by the Cayley transform, so that they stay
    orthogonal. The matrices with the least loss are kept; the initial Hadamard matrices are
    candidates. At run time the small matrices are learned, for each value and each step of a scan.
    With `offline`, one full matrix is learned for each number of channels. The memory is that of a
    gradient of the function: put its layers under `jax.checkpoint`. The loss of deep models is
    rough, because a rounded value changes all later ones. Use large batches, and look at
    `report.lost`; on SmolLM2 learning gained nothing.

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
      steps: number of learning steps; 0 learns nothing.
      learning_rate: angle of the first step, in radians, the root mean square over planes; it
        decays to 0 linearly.
      loss: a function of the results with rounded activations and of the results in float, which
        returns a scalar, such as the divergence of two distributions. `None`: the squared error of
        each float result, relative to its squares, summed.

    Raises:
      TypeError: `block`, `seed` or `steps` is not an integer, `offline` is not a bool, `products`
        is not a string, `learning_rate` is not a number, or `loss` is not a function.
      ValueError: `block` is less than 2, or there is no Hadamard matrix of its size; `products` is
        not a regular expression; `steps` is below 0, or `learning_rate` is not above 0. At run
        time, the channels of a site are not a multiple of `block`, `products` matches no such site
        or another kind of site, no site can be rotated, or `steps` has nothing to learn.

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
    offline: bool | Literal["only"] = False
    products: str | None = None
    steps: int = 0
    learning_rate: float = 0.02
    loss: Loss | None = None

    def __post_init__(self) -> None:
        self._check_learning()
        check_integer(_NAME, "seed", self.seed)
        if self.products is not None:
            fix = "pass for example products='.*scores:dot_general'."
            check_pattern(_NAME, "products", self.products, fix=fix)
        if self.offline != "only":
            check_flags(_NAME, offline=self.offline)
        if self.block is None:
            return
        block = check_integer(_NAME, "block", self.block)
        if not (block > 1 and factors_of(block)):
            raise fail(
                _NAME,
                "there is no Hadamard matrix of size `block`.",
                given=f"block == {block}",
                expected="2, or a multiple of 4 such as 12, 16, 20, 32, 64 or 128",
                fix="leave it out to use the largest possible size.",
            )

    def rewrite(
        self,
        f: Callable[..., Any],
        plan: Plan,
        params: Any,
        batches: Iterable[Any],
        *,
        progress: bool = True,
        on_nonfinite: OnNonfinite = "error",
    ) -> Chosen:
        """Returns the parameters with rotated channels, and the maps that are applied at sites."""
        given = arguments_of(plan, params, next(iter(batches)))
        every = every_site(_NAME, f, plan, given)
        own, streams = every.own, Streams(every)
        named = Named(own, streams.names)
        before, rotations = (
            RotatedParams(named, params),
            Rotations(_NAME, named, self.block, self.seed),
        )
        found = found_in(streams, lambda x: named.weight(x) is not None, self._fits)
        reads = [
            x for x in streams.reads if named.weight(x) and x.places and not found.is_shared(x)
        ]
        at_run_time = {named.name(x) for x in reads if not found.is_whole(x.inputs)}
        lost = None
        if self.steps:
            learnable = rotations.learnable(found, before, reads, at_run_time)
            what = f, plan, params, list(batches), [*learnable.values()]
            options: Any = {"progress": progress, "on_nonfinite": on_nonfinite}
            factors, lost = learned(_NAME, self, *what, **options)
            rotations = rotations.with_learned(learnable, factors)
        maps: dict[str, Any] = maps_of(found, own, rotations.of_size, before.gains)
        edges = {key_of(own, x): why_at_run_time(found, x) for x in found.edges}
        rows: dict[str, Rotation] = {}
        matrices: list[tuple[Read, Orthogonal]] = []
        for read in reads:
            if named.name(read) not in at_run_time:
                row = _offline(named, found, rotations, read)
                rows[row.site] = row
                continue
            if self.offline == "only":
                row = Rotation(named.name(read), read.channels, (), found.reason(read))
                rows.setdefault(row.site, row)
                continue
            matrix = rotations.of_read(read)  # in all steps of a scan
            row, key = _at_run_time(named, matrix, read), named.key(read)
            if matrix is not None:
                matrices.append((read, matrix))
            if row.factors and key not in maps:  # one for all steps
                maps[key] = rotations.map_of(read)
            why = found.reason(read) if self.offline and row.factors else row.why
            rows.setdefault(row.site, dataclasses.replace(row, why=why))
        why = "its weight has another use, or is not a plain matrix"
        every_row = [rows.get(x.name, Rotation(x.name, 0, (), why)) for x in named.sites]
        if self.products is not None:
            products = rotated_products(_NAME, every, self.products, self.seed)
            for name, (count, both) in products.items():
                every_row.append(Rotation(name, count, (count,)))
                maps |= both
        _check_some(every_row)
        rotated = partial(_rotated, named, found, rotations.of_size, matrices)
        report, new = RotationReport(every_row), rotated(params)
        report.edges, report.gains, report.lost = edges, new.folded, lost
        return Chosen(new.params(), report, maps, lambda params: rotated(params).params())

    def _check_learning(self) -> None:
        """Checks the options of learning."""
        steps, rate = check_integer(_NAME, "steps", self.steps), self.learning_rate
        is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        for name, fits, error, expected in (
            ("steps", steps >= 0, ValueError, "0, which learns nothing, or more"),
            ("learning_rate", is_number, TypeError, "a number, an angle in radians"),
            ("learning_rate", is_number and 0 < rate <= 1, ValueError, "above 0, up to 1"),
            ("loss", self.loss is None or callable(self.loss), TypeError, "a function, or None"),
        ):
            if not fits:
                raise fail(
                    _NAME,
                    f"`{name}` is not valid.",
                    given=f"{name} == {shown(getattr(self, name))}",
                    expected=expected,
                    fix="leave it out for the default.",
                    error=error,
                )

    def _fits(self, size: int) -> bool:
        """Whether blocks of so many channels can be rotated in weights."""
        return bool(self.offline) and (self.block is None or size % self.block == 0)


rotate = Rotate


def _offline(named: Named, found: Offline, rotations: Rotations, read: Read) -> Rotation:
    """Returns the entry of a site whose operand is rotated already."""
    sizes = rotations.of_size(int(found.sizes(read.inputs).max())).sizes
    return Rotation(named.name(read), read.channels, sizes, offline=True)


def _at_run_time(named: Named, matrix: Orthogonal | None, read: Read) -> Rotation:
    """Returns the entry of a site whose operand is rotated at run time."""
    name, count = named.name(read), read.channels
    if matrix is None:
        return Rotation(name, count, (), f"there is no Hadamard matrix of a divisor of {count}")
    return Rotation(name, count, matrix.sizes)


def _rotated(
    named: Named,
    found: Offline,
    of_size: Callable[[int], Orthogonal],
    matrices: Sequence[tuple[Read, Orthogonal]],
    params: Any,
) -> RotatedParams:
    """Returns parameters with rotated channels.

    Args:
      named: the function.
      found: what is rotated in weights.
      of_size: the rotations of these.
      matrices: the rotations of operands at run time.
      params: the parameters.
    """
    rotated = RotatedParams(named, params)
    rotated.offline(found, of_size)
    for read, matrix in matrices:
        rotated.read(read, matrix)
    return rotated


def _check_some(report: list[Rotation]) -> None:
    if not any(x.factors for x in report):
        raise fail(
            _NAME,
            "no site can be rotated.",
            given="; ".join(f"{x.site}: {x.why}" for x in report[:4]) or "no site with a weight",
            expected="a contraction with a weight of its own, of an even number of channels",
            fix="leave this algorithm out.",
            error=Inapplicable,
        )
