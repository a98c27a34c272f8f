"""The quantized products that `bench_lowering.py` compiles: schemes and shapes."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _lowering_kernel import Product

import jqx
from jqx import numerics, presets
from jqx._src.contractions.ragged_dot import tiles_for_kernel

EXPERTS = 8
SEQUENCES, TOKENS, HEADS, KV_HEADS, WIDTH = 8, 4096, 32, 8, 128
"""Of decode attention: each sequence has all of these tokens in its cache."""

Call = tuple[Any, ...]
"""A function and its arguments, which have shapes and dtypes alone."""


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
      shape: its name.
      rows: how many rows are multiplied.
      quantized: returns what is compiled, laid out for the kernels of a platform, or for none.
      bfloat16: what is compiled where nothing is quantized.
      products: those that bfloat16 needs.
      scalars: what the kernel is told before it starts.
    """

    scheme: str
    shape: str
    rows: int
    quantized: Callable[[str | None], Call]
    bfloat16: Call
    products: tuple[Product, ...]
    scalars: tuple[Any, ...] = ()


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
OF_EXPERTS = "experts int4 g128"
OF_CACHES = {"attention int8": jnp.int8, "attention int4": jnp.int4}
NAMES = (*SCHEMES, OF_EXPERTS, *OF_CACHES)


def problems(scheme: str, shapes: Sequence[Shape]) -> list[Problem]:
    """Returns a scheme at all shapes; attention over a cache has a shape of its own."""
    if scheme in OF_CACHES:
        return [_of_cache(scheme)]
    return [_of_experts(at) if scheme == OF_EXPERTS else _of_matrix(scheme, at) for at in shapes]


def _of_matrix(scheme: str, shape: Shape) -> Problem:
    m, k, n = shape
    plain = _dense, _bfloat16(k, n), _bfloat16(m, k)
    quantized = functools.partial(_converted, plain, SCHEMES[scheme])
    products = (Product(m, k, n, "bfloat16"),)
    return Problem(scheme, str(shape), m, quantized, plain, products)


def _of_experts(shape: Shape) -> Problem:
    """Rows in groups as even as they can be, each multiplied by a matrix of its own."""
    m, k, n = shape
    sizes = np.bincount(np.arange(m) % EXPERTS, minlength=EXPERTS).astype(np.int32)
    group = np.asarray(tiles_for_kernel(jnp.asarray(sizes), m).group)
    counts = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    plain = _ragged, _bfloat16(EXPERTS, k, n), _bfloat16(m, k), counts
    quantized = functools.partial(_converted, plain, presets.w4a16(block=128))
    products = tuple(Product(int(rows), k, n, "bfloat16") for rows in sizes if rows)
    return Problem(OF_EXPERTS, str(shape), m, quantized, plain, products, (group,))


def _converted(plain: Call, policy: jqx.Policy, layout: str | None) -> Call:
    f, w, *rest = plain
    plan = jqx.make_plan(f, policy)(w, *rest)
    q = jqx.quantize_params(w, plan, target=layout)
    return jqx.convert(f, plan, "dynamic"), q, *rest


def _of_cache(scheme: str) -> Problem:
    """One query for each sequence over a cache with a scale for each token and head."""
    cache = _bfloat16(SEQUENCES, TOKENS, KV_HEADS, WIDTH)
    query = _bfloat16(SEQUENCES, HEADS, WIDTH)
    lengths = jax.ShapeDtypeStruct((SEQUENCES,), jnp.int32)
    spec = jqx.QSpec(OF_CACHES[scheme], jqx.per_axis(0, 1, 2))

    def quantized(layout: str | None) -> Call:
        codes = jax.eval_shape(
            lambda: jqx.QTensor.zeros(cache.shape, spec, cache.dtype, target=layout)
        )
        return jqx.decode_attention, query, codes, codes, lengths

    rows, each = HEADS // KV_HEADS, SEQUENCES * KV_HEADS
    products = (
        Product(rows, WIDTH, TOKENS, "bfloat16", each),
        Product(rows, TOKENS, WIDTH, "bfloat16", each),
    )
    plain = jqx.decode_attention, query, cache, cache, lengths
    shape = f"{SEQUENCES}x{TOKENS}x{KV_HEADS}x{WIDTH}"
    limits = np.zeros(SEQUENCES, np.int32), np.full(SEQUENCES, TOKENS, np.int32)
    return Problem(scheme, shape, SEQUENCES, quantized, plain, products, limits)


def _dense(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


def _ragged(w: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, sizes)


def _bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
