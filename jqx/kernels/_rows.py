"""Quantization of rows in registers, to the codes of `QTensor.quantize` for symmetric formats."""

import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..numerics import Integer, QType
from ..numerics._shared import RoundMode, divide
from ._pallas import triton


class Arithmetic(NamedTuple):
    """Operations on float32 that a platform rounds as in IEEE 754.

    Attributes:
      divide: `(x, divisor) -> quotient`; the divisor broadcasts to `x`.
      to_nearest: rounds to an integer, ties to even.
    """

    divide: Callable[[jax.Array, jax.Array], jax.Array]
    to_nearest: Callable[[jax.Array], jax.Array]


def arithmetic_on(platform: str, interpret: bool) -> Arithmetic:
    """Returns the operations of a platform; in interpret mode, those of XLA on CPU."""
    if interpret:
        return Arithmetic(divide, _to_nearest)
    if platform == "gpu":
        return Arithmetic(_divide_gpu, _to_nearest_gpu)
    return Arithmetic(operator.truediv, _to_nearest)


def _to_nearest(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _divide_gpu(x: jax.Array, divisor: jax.Array) -> jax.Array:
    return _in_ptx("div.rn.f32 $0, $1, $2;", x, jnp.broadcast_to(divisor, x.shape))


def _to_nearest_gpu(x: jax.Array) -> jax.Array:
    return _in_ptx("cvt.rni.f32.f32 $0, $1;", x)


def _in_ptx(instruction: str, *args: jax.Array) -> jax.Array:
    """Runs a GPU instruction on float32 that Triton lacks, or has with another rounding."""
    shape = jax.ShapeDtypeStruct(args[0].shape, jnp.float32)
    (result,) = triton().elementwise_inline_asm(
        instruction,
        args=args,
        constraints=",".join(["=r", *["r"] * len(args)]),
        pack=1,
        result_shape_dtypes=[shape],
    )
    return result


def multiplied(form: QType) -> jnp.dtype:
    """Returns the dtype in which codes of a format are multiplied."""
    return jnp.dtype(jnp.int8) if isinstance(form, Integer) else form.storage


def codes_of(x: jax.Array, scale: jax.Array, form: QType, by: Arithmetic) -> jax.Array:
    """Returns the codes of float32 values, of the dtype in which they are multiplied.

    `scale` broadcasts to `x`. NaN becomes 0 as an integer, and stays NaN as a float.
    """
    y = by.divide(x, scale)
    if isinstance(form, Integer):
        codes = jnp.clip(by.to_nearest(y), form.low, form.high)
        return jnp.where(jnp.isnan(y), 0.0, codes).astype(jnp.int32).astype(jnp.int8)
    y = jnp.where((x == 0) & ~jnp.isnan(scale), 0.0, y)
    bits = form.encode_bits(y, RoundMode.NEAREST_TOWARD_EVEN)
    return lax.bitcast_convert_type(bits, form.storage)
