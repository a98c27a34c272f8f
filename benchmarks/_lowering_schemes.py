"""The quantized products that `bench_lowering.py` compiles: schemes and shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _lowering_kernel import Product

import jqx
from jqx import numerics, presets
from jqx.contractions._ragged_kernels import tiles_for_kernel

EXPERTS = 8

PLAIN: None = None
"""The layout of weights that no kernel reads."""


class Shape(NamedTuple):
    """A product [m, k] x [k, n]."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


@dataclass(frozen=True)
class Problem:
    """A scheme at a shape.

    Attributes:
      scheme: its name.
      shape: of the product; of rows in groups, of all rows.
      f: a function of the weight and what follows, in bfloat16.
      args: what it is given.
      policy: how it is quantized.
      scalars: what its kernel is told before it starts.
      bfloat16: the products of the same shape that bfloat16 needs.
    """

    scheme: str
    shape: Shape
    f: Callable[..., jax.Array]
    args: tuple[Any, ...]
    policy: jqx.Policy
    scalars: tuple[Any, ...]
    bfloat16: tuple[Product, ...]

    def converted(self, layout: str | None) -> tuple[Any, ...]:
        """Returns the quantized function and its arguments, the weight laid out for a platform."""
        plan = jqx.make_plan(self.f, self.policy)(*self.args)
        q = jqx.quantize_params(self.args[0], plan, target=layout)
        return jqx.convert(self.f, plan, "dynamic"), q, *self.args[1:]


_BY_128 = {"granularity": jqx.per_group(128)}
SCHEMES: dict[str, jqx.Policy] = {
    "w4a16 g128": presets.w4a16(block=128),
    "w4a16 g32": presets.w4a16(block=32),
    "nf4 g64": presets.nf4(),
    "mxfp8": presets.mxfp8(),
    "mxfp4 weights": presets.w4a16(weight=jqx.QSpec(numerics.mxfp4, jqx.per_group(32))),
    "w8a8 dynamic": presets.w8a8_dynamic(),
    "w4a8 g128": presets.w4a8(weight=_BY_128),
    "fp8 128x128": presets.fp8(
        weight={"granularity": jqx.per_block({0: 128, 1: 128})},
        activation=_BY_128 | {"dynamic": True},
    ),
}
EXPERTS_SCHEME = "experts int4 g128"
NAMES = (*SCHEMES, EXPERTS_SCHEME)


def problem(scheme: str, shape: Shape) -> Problem:
    """Returns a scheme at a shape."""
    m, k, n = shape
    if scheme == EXPERTS_SCHEME:
        return _of_experts(shape)
    args = _bfloat16(k, n), _bfloat16(m, k)
    own = (Product(m, k, n, "bfloat16"),)
    return Problem(scheme, shape, _dense, args, SCHEMES[scheme], (), own)


def _of_experts(shape: Shape) -> Problem:
    """Rows in groups as even as they can be, each multiplied by a matrix of its own."""
    m, k, n = shape
    sizes = np.bincount(np.arange(m) % EXPERTS, minlength=EXPERTS).astype(np.int32)
    group = np.asarray(tiles_for_kernel(jnp.asarray(sizes), m).group)
    args = _bfloat16(EXPERTS, k, n), _bfloat16(m, k), jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    own = tuple(Product(int(rows), k, n, "bfloat16") for rows in sizes if rows)
    policy = presets.w4a16(block=128)
    return Problem(EXPERTS_SCHEME, shape, _ragged, args, policy, (group,), own)


def shapes(rows: Sequence[int], matrices: Sequence[tuple[int, int]]) -> list[Shape]:
    """Returns all products of numbers of rows and of matrices."""
    return [Shape(m, k, n) for k, n in matrices for m in rows]


def _dense(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


def _ragged(w: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, sizes)


def _bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
