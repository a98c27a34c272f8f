"""The difference between the inputs of a product in the float and in the quantized function."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._errors import fail
from ._channels import added
from ._hessian import gram, hessian
from ._observer import ObservedSite, serializable
from ._weighted import Weighted

BOTH = "jqx.observers.cross"
"""The axis along which the float function and the quantized function are mapped."""


@serializable
class CrossStats(NamedTuple):
    """Sums of products of channels. `x` is an input of the quantized function, and `d` is the input
    of the float function minus `x`. Shapes are those of `HessianStats`.

    Attributes:
      products: sum over the rows of `d[i] * x[j]`, float32.
      quantized: sum over the rows of `x[i] * x[j]`, float32.
      rows: number of rows seen.
    """

    products: jax.Array
    quantized: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cross(Weighted):
    """Sums `(x_float - x) x^T` and `x x^T` over the rows of an activation that is multiplied by a
    weight. `x` is the activation with all weights quantized. GPTAQ and QEP correct for the
    difference.

    For `calibrate_batches(..., quantized=...)`, which runs both functions side by side. Rows and
    channels are those of `hessian`.

    Raises:
      ValueError: if there is no quantized function to compare with.
      NotImplementedError: if the site is a lookup, a convolution with batch groups, or a
        `ragged_dot`, in which the two functions may send a row to different experts.
    """

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> CrossStats:
        """Returns sums of 0."""
        products, rows, _ = hessian(weight=self.weight).empty(operand, _checked(site))
        return CrossStats(products, products, rows)

    def observe(self, x: jax.Array, site: ObservedSite) -> CrossStats:
        """Returns the sums over the rows of one operand."""
        exact, own = _both(x.astype(jnp.float32), site)
        if site.weights is not None:
            weights = jnp.minimum(*_both(site.weights, site))
            site = dataclasses.replace(site, weights=weights)
        products, rows, _ = hessian.observe(own, _checked(site))
        return CrossStats(gram(exact - own, own, site), products, rows)

    def merge(self, a: CrossStats, b: CrossStats) -> CrossStats:
        """Returns the sums, each rounded to float32 once."""
        products, quantized = a.products + b.products, a.quantized + b.quantized
        return CrossStats(products, quantized, added(a.rows, b.rows))


cross: Cross = Cross()


def _both(x: jax.Array, site: ObservedSite) -> Any:
    """Returns a value of the float function and of the quantized function."""
    try:
        return lax.all_gather(x, BOTH)
    except NameError:
        raise fail(
            "observers.cross",
            "there is no quantized function to compare with.",
            given=f"the site {site.path!r}, of one function",
            expected="calibrate_batches(..., quantized=...)",
            fix="pass quantized=jqx.quantize_params(params, plan), or what an algorithm chose.",
        ) from None


def _checked(site: ObservedSite) -> ObservedSite:
    if site.experts is None:
        return site
    raise fail(
        "observers.cross",
        "rows of a ragged_dot cannot be compared.",
        given=f"the site {site.path!r}",
        expected="products whose rows are in the same order in both functions",
        fix="leave it out of the regular expression in observers=.",
        error=NotImplementedError,
    )
