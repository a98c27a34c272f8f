"""The Hessian of the squared error of a product, with respect to its weight: sums of `x x^T`."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._errors import message
from ._observer import ObservedSite, Observer, added, serializable


@serializable
class HessianStats(NamedTuple):
    """Sums of products of channels, and how many rows they are of.

    Float sums round: merging in another order may change the last bits.

    Attributes:
      products: sum over the rows of `x[i] * x[j]`, float32 [*batch, channels, channels].
      rows: how many rows were seen, an int32 scalar, of a `ragged_dot` for each matrix; it stops at
        the largest int32.
    """

    products: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True)
class Hessian(Observer):
    """Sums `x x^T` over the rows of an activation that a weight is multiplied by.

    Channels are the contracted axes as one, in the order of the contraction, the last the fastest;
    a stack of weights has one matrix for each. So has each group of a convolution, whose rows are
    the patches of the image, and each matrix of a `ragged_dot`, of the rows that reach it. Sums are
    in float32 whatever the dtype of the operand. A NaN makes the row and column of its channel NaN.

    Raises:
      NotImplementedError: the site is a lookup, or a convolution of batch groups: its rows are not
        those of the operand.
    """

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> HessianStats:
        """Returns sums of 0."""
        _check_rows(site)
        *stack, _, size = jax.eval_shape(site.rows, operand).shape
        counts = [] if site.experts is None else [site.experts]
        products = jnp.zeros((*stack, *counts, size, size), jnp.float32)
        return HessianStats(products, jnp.zeros(counts, jnp.int32))

    def observe(self, x: jax.Array, site: ObservedSite) -> HessianStats:
        """Returns the sum over the rows of one operand."""
        _check_rows(site)
        count = jax.eval_shape(site.rows, x).shape[-2]
        rows = jnp.asarray(count, jnp.int32) if site.sizes is None else site.sizes
        return HessianStats(gram(x, x, site), rows.astype(jnp.int32))

    def merge(self, a: HessianStats, b: HessianStats) -> HessianStats:
        """Returns the sums, each rounded to float32 once."""
        return HessianStats(a.products + b.products, added(a.rows, b.rows))


def gram(x: jax.Array, y: jax.Array, site: ObservedSite) -> jax.Array:
    """Returns the sum of `x[i] y[j]` over the rows of two values of an operand, float32
    `[*batch, channels, channels]`; of a `ragged_dot` one for each of its matrices.
    """
    x, y = (site.rows(z).astype(jnp.float32) for z in (x, y))
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    if site.sizes is None:
        return product(x.mT, y)
    ends = jnp.cumsum(site.sizes)
    place = lax.iota(ends.dtype, x.shape[0])[:, None]

    def of_expert(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        start, end = bounds
        own = (place >= start) & (place < end)
        return product(jnp.where(own, x, 0).T, jnp.where(own, y, 0))

    return lax.map(of_expert, (ends - site.sizes, ends))


def _check_rows(site: ObservedSite) -> None:
    if site.op in ("dot_general", "ragged_dot") or site.patches is not None:
        return
    raise NotImplementedError(
        message(
            "observers.hessian",
            f"{site.op} multiplies no rows of its operand by one matrix.",
            given=f"the site {site.path!r}",
            expected="matrix products, as of jnp.matmul, einsum and ragged_dot, and convolutions",
            mend="leave it out of the regular expression in observers=, or write an Observer.",
        )
    )


hessian = Hessian()
