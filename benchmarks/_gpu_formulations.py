"""Ways to write one quantized contraction, in plain `jax.lax` and in jqx: one function each.

Every function takes (x, w, k). `x` is [M, K]: bfloat16, or a QTensor with a scale per row. `w` is
[N, K] where `k`, its contracted axis, is 1, and [K, N] where `k` is 0: bfloat16, or a QTensor with
a scale per output channel, or per block of K and channel. It returns [M, N] in bfloat16 unless it
says otherwise.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jqx

STATIC_SCALE = 4 / 127  # calibrated, for normal activations
FAST_ACCUM = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM


def numbers(k: int) -> lax.DotDimensionNumbers:
    return ((1,), (k,)), ((), ())


# Plain: no QTensor, or one that is only read.


def dot(x: jax.Array, w: jax.Array, k: int) -> jax.Array:
    return lax.dot_general(x, w, numbers(k))


def integer_product(x: Any, w: Any, k: int) -> jax.Array:
    """Returns the int32 accumulator; codes of 4 bits are widened first."""
    values = w.values.astype(jnp.int8)
    return lax.dot_general(x.values, values, numbers(k), preferred_element_type=jnp.int32)


def integer(x: Any, w: Any, k: int) -> jax.Array:
    """Scales after: the exact int32 accumulator, times the scales of row and column."""
    return _scaled(integer_product(x, w, k), x.scale, w.scale)


def integer_requantized(x: Any, w: Any, k: int) -> jax.Array:
    """Returns int8: what the next integer contraction reads, after a relu."""
    y = jax.nn.relu(integer_product(x, w, k).astype(jnp.float32) * x.scale * w.scale.reshape(1, -1))
    return jnp.clip(jnp.round(y / STATIC_SCALE), -128, 127).astype(jnp.int8)


def float8(x: Any, w: Any, k: int, precision: Any = None) -> jax.Array:
    y = lax.dot_general(
        x.values, w.values, numbers(k), precision=precision, preferred_element_type=jnp.float32
    )
    return _scaled(y, x.scale, w.scale)


def float8_fast(x: Any, w: Any, k: int) -> jax.Array:
    """Accumulates in the tensor core's own narrower sums."""
    return float8(x, w, k, FAST_ACCUM)


def static(x: jax.Array, w: Any, k: int) -> jax.Array:
    """Quantizes activations with one scale that is known."""
    q = jnp.clip(jnp.round(x.astype(jnp.float32) / STATIC_SCALE), -128, 127).astype(jnp.int8)
    y = lax.dot_general(q, w.values, numbers(k), preferred_element_type=jnp.int32)
    return _scaled(y, jnp.float32(STATIC_SCALE), w.scale)


def dynamic(x: jax.Array, w: Any, k: int) -> jax.Array:
    """Quantizes activations with scales found in each row."""
    q, scale = quantize_rows(x)
    y = lax.dot_general(q, w.values, numbers(k), preferred_element_type=jnp.int32)
    return _scaled(y, scale, w.scale)


def quantize_rows(x: jax.Array, *_: Any) -> tuple[jax.Array, jax.Array]:
    """Returns int8 codes and a scale per row: the pass that dynamic quantization adds."""
    real = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(real), axis=1, keepdims=True) / 127
    return jnp.round(real / scale).astype(jnp.int8), scale


def weight_only(x: jax.Array, w: Any, k: int) -> jax.Array:
    """Converts codes to bfloat16 in the contraction, and scales after."""
    values = w.values.astype(x.dtype)
    y = lax.dot_general(x, values, numbers(k), preferred_element_type=jnp.float32)
    return (y * w.scale.reshape(1, -1)).astype(x.dtype)


def dequantize_first(x: jax.Array, w: Any, k: int) -> jax.Array:
    """Scales the weights before the contraction."""
    return dot(x, (w.values.astype(jnp.float32) * w.scale).astype(x.dtype), k)


def blocks_batched(x: jax.Array, w: Any, k: int) -> jax.Array:
    """Contracts each block by itself, scales the products, sums them."""
    values, scale = _in_blocks(w)
    x = x.reshape(len(x), *values.shape[:2])
    y = lax.dot_general(
        x, values.astype(x.dtype), (((2,), (1,)), ((1,), (0,))), preferred_element_type=jnp.float32
    )
    return jnp.sum(y * scale, axis=0).astype(x.dtype)


def blocks_3d(x: jax.Array, w: Any, k: int) -> jax.Array:
    """Scales weights [G, g, N] in float32, and contracts over both first axes."""
    values, scale = _in_blocks(w)
    real = (values.astype(jnp.float32) * scale).astype(x.dtype)
    x = x.reshape(len(x), *values.shape[:2])
    return lax.dot_general(x, real, (((1, 2), (0, 1)), ((), ())))


def blocks_2d(x: jax.Array, w: Any, k: int) -> jax.Array:
    """As `blocks_3d`, but contracts weights that are [K, N] again."""
    values, scale = _in_blocks(w)
    real = (values.astype(jnp.float32) * scale).astype(x.dtype)
    return dot(x, real.reshape(w.shape), 0)


def mixed(x: Any, w: Any, k: int) -> jax.Array:
    """Contracts unlike types as they are: what no library should emit."""
    lhs = x.values if isinstance(x, jqx.QTensor) else x
    dtype = jnp.int32 if isinstance(x, jqx.QTensor) else jnp.float32
    return lax.dot_general(lhs, w.values, numbers(k), preferred_element_type=dtype)


def negate(x: jax.Array, *_: Any) -> jax.Array:
    """Reads and writes memory once: the bandwidth there is."""
    return -x


# jqx: formulation and layout are its own choice.


def jqx_dot(x: Any, w: Any, k: int) -> jax.Array:
    return jqx.dot_general(x, w, numbers(k))


def jqx_dot_fast(x: Any, w: Any, k: int) -> jax.Array:
    return jqx.dot_general(x, w, numbers(k), precision=FAST_ACCUM)


def jqx_dynamic(x: jax.Array, w: Any, k: int) -> jax.Array:
    return jqx.dot_general(jqx_quantize(x), w, numbers(k))


def jqx_quantize(x: jax.Array, *_: Any) -> jqx.QTensor:
    return jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0)))


# Convolutions: x is NHWC, w is OHWI, both a scale per tensor; returns NHWC.


def convolution(x: jax.Array, w: jax.Array, k: int) -> jax.Array:
    return _convolve(x, w, x.dtype)


def convolution_float32(x: Any, w: Any, k: int) -> jax.Array:
    """Convolves 8-bit codes to float32, scales after."""
    return _scaled(_convolve(x.values, w.values, jnp.float32), x.scale, w.scale)


def convolution_int32(x: Any, w: Any, k: int) -> jax.Array:
    """Convolves 8-bit codes to int32, scales after."""
    return _scaled(_convolve(x.values, w.values, jnp.int32), x.scale, w.scale)


def jqx_convolution(x: Any, w: Any, k: int) -> jax.Array:
    return jqx.conv_general_dilated(  # type: ignore[attr-defined]
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC")
    )


def _convolve(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return lax.conv_general_dilated(
        *(x, w, (1, 1), "SAME"),
        dimension_numbers=("NHWC", "OHWI", "NHWC"),
        preferred_element_type=dtype,
    )


def _scaled(y: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    return (y.astype(jnp.float32) * rows * columns.reshape((1,) * (y.ndim - 1) + (-1,))).astype(
        jnp.bfloat16
    )


def _in_blocks(w: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the codes as [G, g, N] and the scale as [G, 1, N]."""
    groups, n = w.scale.shape
    return w.values.reshape(groups, -1, n), w.scale.reshape(groups, 1, n)
