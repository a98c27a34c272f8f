"""Flax's layers, quantized: the same fields, parameters and results, plus a policy."""

from typing import Any

from flax import linen as nn

from . import _attention
from ._quantized import Quantized


class Dense(Quantized, nn.Dense):
    """`flax.linen.Dense`, quantized.

    The fields are those of Flax, plus the keyword arguments `policy`, `mode`, `backward` and
    `scales`, see `Quantized`. The parameters are those of Flax at the same paths, so that a float
    checkpoint fits.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> layer = jqx.linen.Dense(2, policy=jqx.presets.w8a8_dynamic())
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 4)))
      >>> jax.tree.map(jnp.shape, variables["params"])
      {'bias': (2,), 'kernel': (4, 2)}
      >>> integers = layer.clone(mode=jqx.linen.Mode.CONVERT)
      >>> jqx.linen.convert(integers, variables, jnp.ones((1, 4)))["qparams"]["kernel"]
      QTensor(int8[4, 2] per_axis(1), scale float32[1, 2], dtype=float32, 16 bytes)
    """

    def __call__(self, inputs: Any) -> Any:
        return self._q_evaluate("__call__", inputs)


class DenseGeneral(Quantized, nn.DenseGeneral):
    """`flax.linen.DenseGeneral`, quantized; see `Dense`."""

    def __call__(self, inputs: Any) -> Any:
        return self._q_evaluate("__call__", inputs)


class Einsum(Quantized, nn.Einsum):
    """`flax.linen.Einsum`, quantized; see `Dense`."""

    def __call__(self, inputs: Any, einsum_str: str | None = None) -> Any:
        return self._q_evaluate("__call__", inputs, einsum_str)


class Conv(Quantized, nn.Conv):
    """`flax.linen.Conv`, quantized; see `Dense`."""

    def __call__(self, inputs: Any) -> Any:
        return self._q_evaluate("__call__", inputs)


class ConvTranspose(Quantized, nn.ConvTranspose):
    """`flax.linen.ConvTranspose`, quantized; see `Dense`."""

    def __call__(self, inputs: Any) -> Any:
        return self._q_evaluate("__call__", inputs)


class Embed(Quantized, nn.Embed):
    """`flax.linen.Embed`, quantized; see `Dense`. `attend` uses the same codes as the lookup.
    Presets quantize the lookup only with `tables=`; otherwise it stays in float.
    """

    def __call__(self, inputs: Any) -> Any:
        return self._q_evaluate("__call__", inputs)

    def attend(self, query: Any) -> Any:
        """Multiplies by the transposed table."""
        return self._q_evaluate("attend", query)


class MultiHeadDotProductAttention(Quantized, _attention.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention`, quantized; see `Dense`.

    The four projections are at `query/kernel`, `key/kernel`, `value/kernel` and `out/kernel`;
    scores and mixing are products of activations, which a rule without `weight=` matches.

    With `decode=True`, `cache="int4"`, `"int2"` or `"fp8"` keeps keys and values in a
    `jqx.KVCache`, at `kv_cache` in the collection `cache`. Flax has three arrays instead. `init` on
    inputs of the whole length creates the cache. A call appends one or more tokens. Each token
    attends to the tokens up to itself that the mask `[batch, heads, tokens, whole length]` allows.
    Tokens beyond the length give NaN. Without `decode`, for example in training, there is no cache.

    Attributes:
      cache: format of the cache; `None` selects Flax's cache of arrays.

    Raises:
      ValueError: if `cache` is unknown; if inputs have several sequence axes; if the format has no
        groups for the width of the heads; or if the collection holds a cache of another format.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> layer = jqx.linen.MultiHeadDotProductAttention(
      ...     2, decode=True, cache="int4", policy=jqx.presets.w8a16(), mode=jqx.linen.Mode.FLOAT
      ... )
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 64, 32)))
      >>> variables["cache"]["kv_cache"]
      KVCache(int4, 0 of 64 tokens, 12,292 bytes)
      >>> y, new = layer.apply(variables, jnp.ones((1, 1, 32)), mutable=["cache"])
      >>> new["cache"]["kv_cache"].length
      Array(1, dtype=int32)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)


class MultiHeadAttention(Quantized, _attention.MultiHeadAttention):
    """`flax.linen.MultiHeadAttention`, quantized; see `MultiHeadDotProductAttention`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)
