"""The Hessian of the squared error of a product, with respect to its weight: sums of `x x^T`."""

import dataclasses
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
      rows: how many rows were seen, an int32 scalar; it stops at the largest int32.
    """

    products: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True)
class Hessian(Observer):
    """Sums `x x^T` over the rows of an activation that a weight is multiplied by.

    Channels are the contracted axes as one, in the order of the contraction, the last the fastest;
    a stack of weights has one matrix for each, and so has each group of a convolution, whose rows
    are the patches of the image. Sums are in float32 whatever the dtype of the operand. A NaN makes
    the row and column of its channel NaN.

    Raises:
      NotImplementedError: the site is a `ragged_dot`, or a convolution of batch groups: its rows
        are not those of the operand.
    """

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> HessianStats:
        """Returns sums of 0."""
        _check_rows(site)
        rows = jax.eval_shape(site.rows, operand)
        *stack, _, size = rows.shape
        return HessianStats(jnp.zeros((*stack, size, size), jnp.float32), jnp.zeros((), jnp.int32))

    def observe(self, x: jax.Array, site: ObservedSite) -> HessianStats:
        """Returns the sum over the rows of one operand."""
        _check_rows(site)
        rows = site.rows(x).astype(jnp.float32)
        stack = tuple(range(rows.ndim - 2))
        along = (rows.ndim - 2,)
        products = lax.dot_general(
            rows,
            rows,
            ((along, along), (stack, stack)),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        count = jnp.asarray(rows.shape[-2], jnp.int32)
        return HessianStats(products, count)

    def merge(self, a: HessianStats, b: HessianStats) -> HessianStats:
        """Returns the sums, each rounded to float32 once."""
        return HessianStats(a.products + b.products, added(a.rows, b.rows))


def _check_rows(site: ObservedSite) -> None:
    if site.op == "dot_general" or site.patches is not None:
        return
    raise NotImplementedError(
        message(
            "observers.hessian",
            f"{site.op} multiplies no rows of its operand by one matrix.",
            given=f"the site {site.path!r}",
            expected="matrix products, as of jnp.matmul, einsum and tensordot, and convolutions",
            mend="leave it out of the regular expression in observers=, or write an Observer.",
        )
    )


hessian = Hessian()
