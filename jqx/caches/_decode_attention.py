"""`decode_attention`: one query for each sequence over a cache of keys and values."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._calls import called
from .._checks import as_count, as_integers, as_real, check_integer, shown
from .._errors import fail
from ..tensor import QTensor
from ..tensor._shared import kernel_of
from ._cached import Cached, cached
from ._decode_forms import attention, is_taken


@called("decode_attention", "pass jqx.decode_attention(q, keys, values, lengths).")
def decode_attention(
    q: ArrayLike,
    keys: ArrayLike | QTensor,
    values: ArrayLike | QTensor,
    lengths: ArrayLike,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Returns attention of one new token of each sequence over all cached tokens of the sequence.

    Scales are applied to small arrays. Those for each token multiply the products of queries and
    keys, and the weights of the values. Those for each channel multiply the query and the result.
    With such scales the cache is read as codes, without dequantizing it.

    Args:
      q: queries, floats [batch, heads, width].
      keys: floats or a QTensor [batch, length, kv_heads, width], with scales for each token, for
        each channel, or a single one. With other scales, such as those of blocks along both axes,
        keys are dequantized first. `heads` is a multiple of `kv_heads`; each of these serves
        `heads / kv_heads` consecutive heads of `q`. The keys include the token of `q`.
      values: floats or a QTensor [batch, length, kv_heads, value_width], likewise.
      lengths: number of tokens of each sequence, integers [batch]; later tokens are ignored.
      window: how many of the last tokens are attended to; `None` means all.
      scale: factor of the products of queries and keys; `None` means `1 / sqrt(width)`.

    Returns:
      [batch, heads, value_width], of the dtype of `q`; zeros for sequences without tokens. Sums and
      the softmax are float32 (float64 for float64 queries).

    Raises:
      TypeError: `q`, `keys` or `values` are not floats, `lengths` are not integers, `window` is not
        an integer, or `scale` is not a number.
      ValueError: shapes do not fit, `window` is not positive, or a QTensor has an offset or a
        permuted axis.

    Gradient: by JAX, for `q`, for floats and for scales; none for codes. It uses the form without
      kernels.
    NaN and infinities: tokens that are ignored do not change the result, even if they are NaN. A
      NaN in other tokens makes the result of its sequence NaN, for the heads that it serves. On a
      TPU, a NaN among codes of values may do so for all heads.
    Source: the softmax of parts of a sequence: Dao et al., arXiv:2205.14135.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 2, 16, 4, 64))
      >>> q = jax.random.normal(jax.random.key(1), (2, 8, 64))
      >>> spec = jqx.QSpec(jnp.int8, jqx.per_axis(0, 1, 2))
      >>> cache = [jqx.QTensor.quantize(x, spec) for x in (k, v)]
      >>> y = jqx.decode_attention(q, *cache, jnp.array([16, 5]))
      >>> mask = jnp.arange(16) < jnp.array([[[[16]]], [[[5]]]])
      >>> exact = jax.nn.dot_product_attention(q[:, None], k, v, mask=mask)[:, 0]
      >>> y.shape, bool(jnp.abs(y - exact).max() < 0.03)
      ((2, 8, 64), True)
    """
    name = "decode_attention"
    q = as_real(name, "q", q)
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    kernel = _kernel_of(keys, values)
    own, other = cached(name, "keys", keys, wide), cached(name, "values", values, wide)
    lengths = _checked(q, own.codes, other.codes, as_integers(name, "lengths", lengths))
    scale = _scale_of(scale, q.shape[2])
    if window is not None:
        if not check_integer(name, "window", window) > 0:
            raise fail(
                name,
                "`window` is not positive.",
                given=f"window == {window}",
                expected="1 or more",
                fix="pass how many of the last tokens are attended to.",
            )
        window = int(window)
    if 0 in own.codes.shape or 0 in other.codes.shape:
        return jnp.zeros((*q.shape[:2], other.codes.shape[3]), q.dtype)
    kernel = kernel if is_taken(kernel, own, other) else ""
    return _named(kernel, scale, window)(q, own, other, lengths)


_CALLS: dict[str, Callable[..., jax.Array]] = {}
"""Maps the name of the jitted function that computes attention to its scale and window."""


@functools.cache
def _named(kernel: str, scale: float, window: int | None) -> Callable[..., jax.Array]:
    """Returns attention as a jitted function that can be recognized by its name in a jaxpr."""

    def run(q: jax.Array, keys: Cached, values: Cached, lengths: jax.Array) -> jax.Array:
        stops = as_count(lengths, keys.codes.shape[1])
        starts = jnp.zeros_like(stops) if window is None else jnp.maximum(stops - window, 0)
        return attention(kernel, scale, window)(q, keys, values, starts, stops)

    run.__name__ = "_".join(map(str, ("jqx_decode_attention", scale, window, kernel)))
    _CALLS[run.__name__] = functools.partial(decode_attention, scale=scale, window=window)
    return jax.jit(run)


def attention_named(name: str) -> Callable[..., jax.Array] | None:
    """Returns the attention that a jitted function of this name computes: a function of queries,
    keys, values and lengths. `None` if the name is not one of `decode_attention`.
    """
    return _CALLS.get(name)


def _checked(q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array) -> jax.Array:
    """Checks that all shapes fit, and returns the lengths."""
    name = "decode_attention"
    fits = q.ndim == 3 and keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3]
    fits = fits and (q.shape[0], q.shape[2]) == (keys.shape[0], keys.shape[3])
    if not (fits and keys.shape[2] > 0 and q.shape[1] % keys.shape[2] == 0):
        raise fail(
            name,
            "`q`, `keys` and `values` do not fit each other.",
            given=f"shapes {q.shape}, {keys.shape} and {values.shape}",
            expected="[batch, heads, width], [batch, length, kv_heads, width] and [batch, length, "
            "kv_heads, value_width], heads a multiple of kv_heads",
            fix="pass one query for each sequence, and the axes of the cache in this order.",
        )
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise fail(
            name,
            "`lengths` are not integers.",
            given=f"lengths.dtype == {lengths.dtype.name}",
            expected="integers, such as int32",
            fix="pass the number of tokens of each sequence.",
            error=TypeError,
        )
    if lengths.shape != q.shape[:1]:
        raise fail(
            name,
            "`lengths` do not fit the batch.",
            given=f"shape {lengths.shape} for a batch of {q.shape[0]}",
            expected=f"shape {q.shape[:1]}",
            fix="pass one length for each sequence: jnp.full(batch, length).",
        )
    return lengths


def _scale_of(scale: Any, width: int) -> float:
    number = isinstance(scale, (int, float, np.integer, np.floating))
    if scale is not None and not (number and not isinstance(scale, bool)):
        raise fail(
            "decode_attention",
            "`scale` is not a number.",
            given=f"scale == {shown(scale)}",
            expected="a Python number, or None",
            fix="multiply q by the array, and pass scale=1.",
            error=TypeError,
        )
    return max(width, 1) ** -0.5 if scale is None else float(scale)


def _kernel_of(keys: Any, values: Any) -> str:
    """Returns the kernel that both are laid out for: `"tpu"`, `"gpu"`, or an empty string."""
    kernel = kernel_of(keys)
    return kernel if kernel == kernel_of(values) else ""
