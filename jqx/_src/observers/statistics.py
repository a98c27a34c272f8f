"""The observers of jqx: statistics of the channels and rows of an operand."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..checks import as_count
from ..compat import whole_of
from ..errors import fail
from .observer import (
    ObservedSite,
    Observer,
    Weighted,
    added,
    count_rows,
    no_rows,
    over_rows,
    serializable,
    shape_of,
)


@serializable
class AbsMaxStats(NamedTuple):
    """The largest magnitude of each channel, and the number of rows.

    Attributes:
      largest: float32, with the rank of the operand and size 1 along the axes that are neither
        contracted nor stacked; for a `ragged_dot` `[experts, channels]`.
      rows: number of rows seen, as in `MeanStats`.
    """

    largest: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsMax(Weighted):
    """The largest magnitude of each channel of an activation that is multiplied by a weight, over
    the rows whose weight is above 0.

    A NaN makes the result of its channel NaN. The rows of a convolution are pixels, and a group has
    some of the channels. A row of a `ragged_dot` counts for the expert that it reaches.
    """

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> AbsMaxStats:
        """Returns magnitudes of 0."""
        largest = jnp.zeros(shape_of(operand, site), jnp.float32)
        return AbsMaxStats(largest, no_rows(operand, site, self.weight is not None))

    def observe(self, x: jax.Array, site: ObservedSite) -> AbsMaxStats:
        """Returns the largest magnitudes of the rows of one operand."""
        return AbsMaxStats(over_rows(jnp.abs(x), site, "max"), count_rows(x, site))

    def merge(self, a: AbsMaxStats, b: AbsMaxStats) -> AbsMaxStats:
        """Returns the larger magnitudes."""
        return AbsMaxStats(jnp.maximum(a.largest, b.largest), added(a.rows, b.rows))


absmax: AbsMax = AbsMax()


# The mean of each channel.


@serializable
class MeanStats(NamedTuple):
    """Sums of channels, and the number of rows they are taken over: the mean is `total / rows`.

    Float sums round: merging in another order may change the last bits.

    Attributes:
      total: sum of each channel, float32, with the rank of the operand and size 1 along the axes
        that are neither contracted nor stacked; for a `ragged_dot` `[experts, channels]`.
      rows: number of rows seen, int32, one number, or `[experts, 1]` for a `ragged_dot`. It
        saturates at the largest int32. With a `weight`, the sum of the weights of the rows,
        float32, in the shape of `total` with size 1 along the channels.
    """

    total: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean(Weighted):
    """Sums the channels of an activation that is multiplied by a weight: the mean is
    `total / rows`.

    Sums are in float32 whatever the dtype of the operand. A NaN makes the sum of its channel NaN.
    The rows of a convolution are pixels, and a group has some of the channels. A row of a
    `ragged_dot` counts for the expert that it reaches.
    """

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> MeanStats:
        """Returns sums of 0."""
        total = jnp.zeros(shape_of(operand, site), jnp.float32)
        return MeanStats(total, no_rows(operand, site, self.weight is not None))

    def observe(self, x: jax.Array, site: ObservedSite) -> MeanStats:
        """Returns the sum over the rows of one operand."""
        return MeanStats(over_rows(self.of(x), site, "sum"), count_rows(x, site))

    def merge(self, a: MeanStats, b: MeanStats) -> MeanStats:
        """Returns the sums, each rounded to float32 once."""
        return MeanStats(a.total + b.total, added(a.rows, b.rows))

    def of(self, x: jax.Array) -> jax.Array:
        """Returns the values that are summed."""
        return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanAbs(Mean):
    """Sums the magnitudes of the channels of an activation, as `mean` does their values."""

    def of(self, x: jax.Array) -> jax.Array:
        """Returns the values that are summed."""
        return jnp.abs(x)

    def __str__(self) -> str:
        return "mean_abs"


mean: Mean = Mean()
mean_abs: MeanAbs = MeanAbs()


# The Hessian of the squared error of a product, with respect to its weight: sums of `x x^T`.


@serializable
class HessianStats(NamedTuple):
    """Sums of products of channels, and the number of rows they are taken over.

    Float sums round: merging in another order may change the last bits.

    Attributes:
      products: sum over the rows of `x[i] * x[j]`, float32 [*batch, channels, channels].
      rows: number of rows seen, an int32 scalar, or one entry for each matrix of a `ragged_dot`. It
        saturates at the largest int32. With a `weight`, the sum of the weights of the rows,
        float32, for each matrix.
      fourth: sum over the rows of `|x|^4`, the squares of their squared lengths, float32 [*batch].
        `trace(products)^2 / fourth` is the effective number of rows: all of them if their lengths
        are equal, 1 if one is far longer than the others. It is beyond the range of float32 for
        rows longer than 4e9, or all shorter than 1e-10.
    """

    products: jax.Array
    rows: jax.Array
    fourth: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hessian(Weighted):
    """Sums `x x^T` over the rows of an activation that is multiplied by a weight.

    Channels are the contracted axes flattened into one, in the order of the contraction, with the
    last axis fastest. A stack of weights has one matrix for each weight. A convolution has one
    matrix for each group, and its rows are the patches of the image. A `ragged_dot` has one for
    each of its matrices, over the rows that reach it. Sums are in float32 whatever the dtype of the
    operand. A NaN makes the row and column of its channel NaN.
    `hessian(weight=lambda tokens: tokens != 0)` leaves padding out.

    Raises:
      NotImplementedError: if the site is a lookup, or a convolution with batch groups: its rows are
        not rows of the operand.
    """

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> HessianStats:
        """Returns sums of 0."""
        check_rows("observers.hessian", site)
        *stack, _, size = jax.eval_shape(site.rows, operand).shape
        stack += [] if site.experts is None else [site.experts]
        products, none = jnp.zeros((*stack, size, size), jnp.float32), jnp.zeros(stack, jnp.float32)
        if self.weight is not None:
            return HessianStats(products, none, none)
        counts = [] if site.experts is None else stack
        return HessianStats(products, jnp.zeros(counts, jnp.int32), none)

    def observe(self, x: jax.Array, site: ObservedSite) -> HessianStats:
        """Returns the sum over the rows of one operand."""
        check_rows("observers.hessian", site)
        counts, fourth = (_of_values(statistic, site, x) for statistic in (_count, _fourth))
        return HessianStats(gram(x, x, site), counts, fourth)

    def merge(self, a: HessianStats, b: HessianStats) -> HessianStats:
        """Returns the sums, each rounded to float32 once."""
        rows, fourth = added(a.rows, b.rows), a.fourth + b.fourth
        return HessianStats(a.products + b.products, rows, fourth)


def gram(x: jax.Array, y: jax.Array, site: ObservedSite) -> jax.Array:
    """Returns the weighted sum of `x[i] y[j]` over the rows of two values of an operand, float32
    `[*batch, channels, channels]`; for a `ragged_dot` one for each of its matrices.
    """
    return _of_values(_gram, site, x, y)


def _of_values(f: Callable[..., jax.Array], site: ObservedSite, *values: jax.Array) -> jax.Array:
    """Returns a sum over rows, replicated on every device if value types carry shardings."""

    def of(sizes: Any, weights: Any, *values: jax.Array) -> jax.Array:
        return f(*values, dataclasses.replace(site, sizes=sizes, weights=weights))

    return whole_of(of, site.sizes, site.weights, *values)


def _gram(x: jax.Array, y: jax.Array, site: ObservedSite) -> jax.Array:
    weights = site.row_weights(x)
    x, y = (site.rows(z).astype(jnp.float32) for z in (x, y))
    if weights is not None:
        weights = weights[..., None]
        x, y = jnp.where(weights > 0, x * weights, 0), jnp.where(weights > 0, y, 0)
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    if site.sizes is None:
        return product(x.mT, y)
    expert = site.expert_of_rows(len(x))[:, None]

    def of_expert(is_own_row: jax.Array) -> jax.Array:
        return product(
            jnp.where(expert == is_own_row, x, 0).T, jnp.where(expert == is_own_row, y, 0)
        )

    return lax.map(of_expert, jnp.arange(len(site.sizes), dtype=jnp.int32))


def _count(x: jax.Array, site: ObservedSite) -> jax.Array:
    """Returns the number of rows of an operand, or the sum of their weights."""
    weights = site.row_weights(x)
    if weights is None:
        count = jax.eval_shape(site.rows, x).shape[-2]
        if site.sizes is None:
            return jnp.asarray(count).astype(jnp.int32)
        return as_count(site.sizes, jnp.iinfo(jnp.int32).max)
    if site.sizes is None:
        return weights.sum(-1)
    return jax.ops.segment_sum(weights, site.expert_of_rows(len(x)), site.experts)


def _fourth(x: jax.Array, site: ObservedSite) -> jax.Array:
    """Returns the sum over rows of the squares of their weighted squared lengths."""
    lengths = jnp.sum(jnp.square(site.rows(x).astype(jnp.float32)), -1)
    weights = site.row_weights(x)
    if weights is not None:
        lengths = jnp.where(weights > 0, lengths * weights, 0)
    squares = lengths * lengths
    if site.sizes is None:
        return squares.sum(-1)
    return jax.ops.segment_sum(squares, site.expert_of_rows(len(x)), site.experts)


def has_rows(site: ObservedSite) -> bool:
    """Whether the rows of a site are rows of its operand."""
    return site.op in ("dot_general", "ragged_dot") or site.patches is not None


def check_rows(function: str, site: ObservedSite) -> None:
    """Raises if the rows of a site are not rows of its operand."""
    if not has_rows(site):
        problem = f"{site.op} does not multiply rows of its operand by one matrix."
        details = f"the site {site.path!r}"
        raise fail(function, problem, given=details, fix=_FIX, error=NotImplementedError)


_FIX = "leave it out of the regular expression in observers=, or write an Observer."


hessian: Hessian = Hessian()


# The positions of a weight's elements in the matrices that its sites multiply by.


@dataclasses.dataclass(frozen=True)
class Places(Observer):
    """Maps each element of the matrix that a site multiplies by to an element of its weight: int32
    `[*loops, *batch, rows, channels]`. Elements are numbered in the order of the weight, with the
    last axis fastest. Rows are the axes that the product keeps, channels are those of `hessian`. If
    several weights are joined, they are numbered consecutively, in the order of `plan.weights`.
    Weights have no entry if they are not in a product of matrices, are inside a `shard_map`, or are
    read at a computed position.

    The result depends on the function, not on values. An algorithm that works on the matrices of
    sites uses it to write to the weight through any views.
    """

    def looks_at(self, site: ObservedSite) -> bool:
        """Whether the operand is a weight."""
        return site.role == "weight"

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> Any:
        """Not called: `calibrate` follows the views of the function."""
        raise NotImplementedError

    def observe(self, x: jax.Array, site: ObservedSite) -> Any:
        """Not called: `calibrate` follows the views of the function."""
        raise NotImplementedError

    def merge(self, a: Any, b: Any) -> Any:
        """Returns the first: both are the same."""
        return a


places: Places = Places()
