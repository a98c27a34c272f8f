"""`decode_attention`: one query for each sequence over a cache of keys and values."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike, DTypeLike

from .. import compat
from ..checks import as_count, as_integers, as_real, called, check_integer, shown
from ..errors import fail
from ..kernels.decode_attention_gpu import decode_attention_gpu, fits_gpu
from ..kernels.decode_attention_tpu import decode_attention_tpu, fits_tpu
from ..kernels.products_cpu import one_by_one
from ..numerics.blocks import Block
from ..numerics.lookup import format_of
from ..numerics.qtype import Integer
from ..tensor.layout import check_dtypes
from ..tensor.qtensor import QTensor
from ..tensor.targets import kernel_of
from ..tensor.views import refine

# Keys or values of attention as codes and factors that can be taken out of the products.
#
# sum_w q[w] (c[l, w] - z[w]) s[w]  =  sum_w (q[w] s[w]) c[l, w]  -  sum_w (q[w] s[w]) z[w]
# sum_w q[w] (c[l, w] - z[l]) s[l]  =  (sum_w q[w] c[l, w]  -  z[l] sum_w q[w]) s[l]


BATCH, LENGTH, HEADS, WIDTH = 0, 1, 2, 3


class Cached(NamedTuple):
    """Numbers `(codes - zero) * scale` on the axes batch, length, heads, width.

    Attributes:
      codes: [B, L, H, W], of a dtype whose elements are the numbers themselves.
      of_token: scale of each token, [B, L, H, 1] or [B, L, 1, 1]; `None` is 1.
      of_channel: scale of each channel, [B, 1, H or 1, W or 1]; `None` is 1.
      zero: one for each token or each channel, like the scale, or a single one; `None` is 0.
    """

    codes: jax.Array
    of_token: jax.Array | None = None
    of_channel: jax.Array | None = None
    zero: jax.Array | None = None

    @property
    def zero_of_token(self) -> jax.Array | None:
        """Zero points that go with scales for each token, [B, L, H or 1, 1]."""
        return None if self.of_token is None else self.zero

    @property
    def zero_of_channel(self) -> jax.Array | None:
        """Zero points that go with scales for each channel, [B, 1, H or 1, W or 1]."""
        return self.zero if self.of_token is None else None


def cached(function: str, argument: str, x: Any, dtype: DTypeLike) -> Cached:
    """Returns keys or values, given as a float array or a QTensor, as codes and float factors.

    Dequantizes them if scales are neither for each token nor for each channel, or if codes are not
    numbers.
    """
    if not isinstance(x, QTensor):
        return Cached(as_real(function, argument, x))
    check_dtypes(function, x, f" of `{argument}`")
    if x.offset is not None or x.order is not None:
        problem = f"`{argument}` have a float offset or a permuted axis: {x!r}."
        raise fail(function, problem, fix=f"pass {argument}.dequantize().")
    form = format_of(x.qtype)
    is_number = isinstance(form, Integer) or jnp.issubdtype(x.values.dtype, jnp.floating)
    is_number = is_number and not isinstance(form, Block)
    if x.ndim != 4 or not is_number or 1 not in (x.scale.shape[LENGTH], x.scale.shape[WIDTH]):
        return Cached(x.dequantize())
    of_channel = x.scale.shape[LENGTH] == 1
    for axis in (BATCH, HEADS, WIDTH if of_channel else LENGTH):
        if x.scale.shape[axis] not in (1, x.shape[axis]):
            x = refine(x, axis)

    def each(parameter: jax.Array) -> jax.Array:
        shape = x.shape[0], *parameter.shape[1:]
        return jnp.broadcast_to(parameter.astype(dtype), shape)

    scale = each(x.real_scale())
    zero = None if x.zero_point is None else each(x.zero_point)
    if of_channel:
        return Cached(x.codes, None, scale, zero)
    if zero is not None and zero.shape[LENGTH] == 1:
        zero = jnp.broadcast_to(zero, (*zero.shape[:1], scale.shape[LENGTH], *zero.shape[2:]))
    return Cached(x.codes, scale, None, zero)


# Attention of one query over a cache, on any platform: on CPU in tiles of tokens.
#
# XLA on CPU converts codes to floats in memory before it multiplies, so it gets one tile at a
# time. Elsewhere XLA converts codes as it reads them, but would copy the cache for a loop. The
# softmax uses a running maximum: sums are scaled down when a later tile has a larger product.
# Neither the result nor its derivative depends on that maximum.


TOKENS = 1024
"""Number of tokens of a tile."""


class _Sums(NamedTuple):
    """Partial results over some tokens, for each query: [B, H, G, 1], `mixed` [B, H, G, V].

    Attributes:
      largest: the largest product.
      total: the sum of all weights, which are exponentials of products minus the largest.
      mixed: the weighted sum of values.
    """

    largest: jax.Array
    total: jax.Array
    mixed: jax.Array


def plain_attention(
    q: jax.Array,
    keys: Cached,
    values: Cached,
    starts: jax.Array,
    stops: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Returns attention over tokens `starts[b]` to `stops[b] - 1`, in float32 or float64."""
    run = functools.partial(_attention, scale=scale)
    args, length = (q, keys, values, starts, stops), keys.codes.shape[1]
    if length <= TOKENS:
        return run(*args, size=length)
    tiled, untiled = (functools.partial(run, size=size) for size in (TOKENS, length))
    return lax.platform_dependent(*args, cpu=tiled, default=untiled)


def _attention(
    q: jax.Array,
    keys: Cached,
    values: Cached,
    starts: jax.Array,
    stops: jax.Array,
    *,
    scale: float,
    size: int,
) -> jax.Array:
    """Processes a cache in tiles of tokens."""
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    batch, length, heads, _ = keys.codes.shape
    rows = q.astype(wide).reshape(batch, heads, -1, q.shape[2]) * scale
    if keys.of_channel is not None:
        rows = rows * _for_queries(keys.of_channel, wide)
    tiles = -(-length // size)

    def add(sums: _Sums, tile_start: Any) -> tuple[_Sums, None]:
        """Adds a tile. The last tile is shifted back so that it is whole; tokens that were added
        before are masked.
        """
        begin = jnp.minimum(tile_start, length - size)
        tokens = (begin + jnp.arange(size, dtype=jnp.int32))[None]
        counts = (jnp.maximum(starts, tile_start)[:, None] <= tokens) & (tokens < stops[:, None])
        tile = functools.partial(_tile, begin=begin, size=size)
        has_begun = (starts < jnp.minimum(tile_start + size, stops))[:, None, None, None]

        def added(sums: _Sums) -> _Sums:
            return _added(tile(keys), tile(values), rows, counts, has_begun, sums)

        return lax.cond(jnp.any(counts), added, lambda sums: sums, sums), None

    shape = (*rows.shape[:3], values.codes.shape[3])
    none = jnp.zeros((*shape[:3], 1), wide)
    sums = _Sums(jnp.full_like(none, -jnp.inf), none, jnp.zeros(shape, wide))
    along = map(compat.varies_along, jax.tree.leaves((q, keys, values, starts, stops)))
    sums = compat.vary(sums, frozenset().union(*along))
    if tiles == 1:
        sums, _ = add(sums, jnp.int32(0))
    else:
        firsts = jnp.arange(tiles, dtype=jnp.int32) * size
        sums, _ = lax.scan(jax.checkpoint(add), sums, firsts)
    mixed = sums.mixed / jnp.where(sums.total == 0, 1, sums.total)
    if values.zero_of_channel is not None:
        zero = _for_queries(values.zero_of_channel, wide)
        mixed = jnp.where((starts < stops)[:, None, None, None], mixed - zero, 0)
    if values.of_channel is not None:
        mixed = mixed * _for_queries(values.of_channel, wide)
    return mixed.reshape(*q.shape[:2], -1).astype(q.dtype)


def _added(
    keys: Cached,
    values: Cached,
    rows: jax.Array,
    counts: jax.Array,
    has_begun: jax.Array,
    sums: _Sums,
) -> _Sums:
    """Adds a tile; only tokens of a mask [B, T] count."""
    wide = rows.dtype
    einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

    def real(codes: jax.Array) -> jax.Array:
        if not jnp.issubdtype(codes.dtype, jnp.integer):
            codes = jnp.where(counts[:, :, None, None], codes, jnp.zeros((), codes.dtype))
        return codes.astype(wide)

    def of_tokens(parameter: jax.Array) -> jax.Array:  # [B, H or 1, 1, T]
        masked = jnp.where(counts[:, :, None], parameter[..., 0].astype(wide), 0)
        return masked.transpose(0, 2, 1)[:, :, None]

    products = einsum("bhgw,blhw->bhgl", rows, real(keys.codes))
    if keys.zero_of_token is not None:
        products = products - rows.sum(3, keepdims=True) * of_tokens(keys.zero_of_token)
    if keys.zero_of_channel is not None:
        zero = _for_queries(keys.zero_of_channel, wide)
        products = products - (rows * zero).sum(3, keepdims=True)
    if keys.of_token is not None:
        products = products * of_tokens(keys.of_token)
    products = jnp.where(counts[:, None, None], products, -jnp.inf)
    largest = jnp.maximum(sums.largest, lax.stop_gradient(products.max(3, keepdims=True)))
    reference = jnp.where(has_begun, largest, 0)
    decay, weights = jnp.exp(sums.largest - reference), jnp.exp(products - reference)
    total = sums.total * decay + weights.sum(3, keepdims=True)
    if values.of_token is not None:
        weights = weights * of_tokens(values.of_token)
    mixed = sums.mixed * decay + einsum("bhgl,blhw->bhgw", weights, real(values.codes))
    if values.zero_of_token is not None:
        mixed = mixed - (weights * of_tokens(values.zero_of_token)).sum(3, keepdims=True)
    return _Sums(largest, total, mixed)


def _tile(x: Cached, begin: Any, size: int) -> Cached:
    """Returns some tokens of a cache."""

    def of(leaf: jax.Array) -> jax.Array:
        if leaf.shape[LENGTH] == 1 or leaf.shape[LENGTH] == size:
            return leaf
        return lax.dynamic_slice_in_dim(leaf, begin, size, axis=LENGTH)

    return jax.tree.map(of, x)


def _for_queries(parameter: jax.Array, dtype: Any) -> jax.Array:
    """Returns parameters of channels, [B, 1, H, W], as [B, H, 1, W]."""
    return parameter[:, 0, :, None].astype(dtype)


# The ways to compute attention of one query: plain JAX, or a kernel with the plain derivative.


KERNELS = {"tpu": decode_attention_tpu, "gpu": decode_attention_gpu}
_PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
_FITS = {"tpu": fits_tpu, "gpu": fits_gpu}
_DTYPES = (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4, jnp.float8_e4m3fn, jnp.float8_e5m2)
"""The dtypes that kernels read."""


def is_taken(kernel: str, keys: Cached, values: Cached) -> bool:
    """Whether a kernel supports such a cache."""
    return (
        kernel in KERNELS
        and all(x.codes.dtype in _DTYPES for x in (keys, values))
        and _FITS[kernel](keys.codes, values.codes)
    )


@functools.cache
def attention(kernel: str, scale: float, window: int | None) -> Callable[..., jax.Array]:
    """Returns attention of queries over the keys and values from starts to stops."""
    plain = functools.partial(plain_attention, scale=scale)
    if not kernel:
        return plain
    special = functools.partial(kernel_attention, KERNELS[kernel], scale=scale, window=window)

    def chosen(*args: Any) -> jax.Array:
        return lax.platform_dependent(*args, **{_PLATFORMS[kernel]: special}, default=plain)

    function = jax.custom_jvp(_over_batches(chosen))

    @function.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        return function(*primals), jax.jvp(jax.checkpoint(plain), primals, tangents)[1]

    return function


def _over_batches(attention: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Adds a rule for `vmap`: it adds sequences to the batch, or loops over queries if the cache is
    shared.
    """
    function = custom_vmap(attention)

    @function.def_vmap
    def _(size: int, batched: Any, *args: Any) -> tuple[jax.Array, bool]:
        leaves, structure = jax.tree.flatten(args)
        are_mapped = jax.tree.leaves(batched)
        if batched[1].codes and batched[2].codes:
            pairs = zip(leaves, are_mapped, strict=True)
            full = [x if m else jnp.broadcast_to(x, (size, *x.shape)) for x, m in pairs]
            result = function(*structure.unflatten([x.reshape(-1, *x.shape[2:]) for x in full]))
            return result.reshape(size, -1, *result.shape[1:]), True

        def of_leaves(*leaves: jax.Array) -> jax.Array:
            return function(*structure.unflatten(leaves))

        return one_by_one(of_leaves, are_mapped, leaves), True

    return function


def kernel_attention(
    kernel: Callable[..., jax.Array],
    q: jax.Array,
    keys: Cached,
    values: Cached,
    starts: jax.Array,
    stops: jax.Array,
    *,
    scale: float,
    window: int | None,
    interpret: bool = False,
) -> jax.Array:
    """Runs a kernel. Applies scales for each channel before and after it.

    Zero points of channels of keys are ignored: they add the same number to the products with all
    keys, which does not change the softmax.
    """
    rows = q if q.dtype == jnp.bfloat16 else q.astype(jnp.float32)
    if keys.of_channel is not None:
        channel_scale = _of_queries(keys.of_channel, keys.codes, q.shape[1])
        rows = rows.astype(jnp.float32) * channel_scale.astype(jnp.float32)
    mixed = kernel(
        rows,
        keys.codes,
        keys.of_token,
        values.codes,
        values.of_token,
        starts,
        stops,
        scale=scale,
        key_zero=keys.zero_of_token,
        value_zero=values.zero_of_token,
        window=window,
        precise=q.dtype != jnp.bfloat16,
        interpret=interpret,
    )
    if values.zero_of_channel is not None:
        zero = _of_queries(values.zero_of_channel, values.codes, q.shape[1])
        mixed = jnp.where((starts < stops)[:, None, None], mixed - zero, 0)
    if values.of_channel is not None:
        mixed = mixed * _of_queries(values.of_channel, values.codes, q.shape[1])
    return mixed.astype(q.dtype)


def _of_queries(parameter: jax.Array, codes: jax.Array, queries: int) -> jax.Array:
    """Returns parameters of the channels of a cache for each query, [B, queries, W or 1]."""
    heads = codes.shape[2]
    per_head = jnp.broadcast_to(parameter[:, 0], (codes.shape[0], heads, parameter.shape[3]))
    return jnp.repeat(per_head, queries // heads, axis=1)


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
      values: floats or a QTensor [batch, length, kv_heads, value_width].
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
    kernel = kernel_of(keys) if kernel_of(keys) == kernel_of(values) else ""
    k, v = cached(name, "keys", keys, wide), cached(name, "values", values, wide)
    lengths = as_integers(name, "lengths", lengths)
    _check_shapes(q, k.codes, v.codes, lengths)
    scale = _scale_of(scale, q.shape[2])
    if window is not None:
        window = int(check_integer(name, "window", window))
        if window < 1:
            fix = "pass how many of the last tokens are attended to."
            raise fail(name, f"`window` == {window} is not positive.", fix=fix)
    if 0 in k.codes.shape or 0 in v.codes.shape:
        return jnp.zeros((*q.shape[:2], v.codes.shape[3]), q.dtype)
    kernel = kernel if is_taken(kernel, k, v) else ""
    return _named(kernel, scale, window)(q, k, v, lengths)


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


def _check_shapes(q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array) -> None:
    fits = q.ndim == 3 and keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3]
    fits = fits and (q.shape[0], q.shape[2]) == (keys.shape[0], keys.shape[3])
    if not fits or keys.shape[2] == 0 or q.shape[1] % keys.shape[2]:
        raise fail(
            "decode_attention",
            "`q`, `keys` and `values` do not fit each other.",
            given=f"shapes {q.shape}, {keys.shape} and {values.shape}",
            fix="pass [batch, heads, width], [batch, length, kv_heads, width] and [batch, length, "
            "kv_heads, value_width], heads a multiple of kv_heads.",
        )
    if lengths.shape != q.shape[:1]:
        problem = f"`lengths` of shape {lengths.shape} do not fit the batch of {q.shape[0]}."
        fix = "pass one length for each sequence: jnp.full(batch, length)."
        raise fail("decode_attention", problem, fix=fix)


def _scale_of(scale: Any, width: int) -> float:
    kinds = (int, float, np.integer, np.floating, type(None))
    if not isinstance(scale, kinds) or isinstance(scale, bool):
        problem = f"`scale` is not a number: {shown(scale)}."
        fix = "multiply q by the array, and pass scale=1."
        raise fail("decode_attention", problem, fix=fix, error=TypeError)
    return max(width, 1) ** -0.5 if scale is None else float(scale)
