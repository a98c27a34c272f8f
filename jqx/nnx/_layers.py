"""Flax's layers, quantized: the same arguments, parameters and results, plus a policy."""

from typing import Any

from flax import nnx

from ._attention import CachedAttention
from ._quantized import Quantized


class Linear(Quantized, nnx.Linear):
    """`flax.nnx.Linear`, quantized.

    The arguments are those of Flax, plus the keyword arguments `policy`, `mode`, `backward` and
    `scales`, see `jqx.nnx.quantize`. The parameters are those of Flax at the same paths, so that a
    float checkpoint fits.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = jqx.nnx.Linear(4, 2, policy=jqx.presets.w8a8_dynamic(), rngs=nnx.Rngs(0))
      >>> jqx.nnx.convert(layer, jnp.ones((1, 4)))
      >>> layer.kernel.get_value()
      QTensor(int8[4, 2] per_axis(1), scale float32[1, 2], dtype=float32, 16 bytes)
      >>> layer(jnp.ones((1, 4))).shape
      (1, 2)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)


class LinearGeneral(Quantized, nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral`, quantized; see `Linear`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> policy = jqx.presets.w8a8_dynamic()
      >>> layer = jqx.nnx.LinearGeneral(4, (2, 3), policy=policy, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 4))).shape
      (1, 2, 3)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)


class Einsum(Quantized, nnx.Einsum):
    """`flax.nnx.Einsum`, quantized; see `Linear`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.w8a8_dynamic(), "rngs": nnx.Rngs(0)}
      >>> layer = jqx.nnx.Einsum("bd,dhk->bhk", (4, 2, 3), **options)
      >>> layer(jnp.ones((1, 4))).shape
      (1, 2, 3)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)


class Conv(Quantized, nnx.Conv):
    """`flax.nnx.Conv`, quantized; see `Linear`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> policy = jqx.presets.w8a8_dynamic()
      >>> layer = jqx.nnx.Conv(2, 3, (3, 3), policy=policy, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 5, 5, 2))).shape
      (1, 5, 5, 3)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)


class ConvTranspose(Quantized, nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose`, quantized; see `Linear`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.w8a8_dynamic(), "rngs": nnx.Rngs(0)}
      >>> layer = jqx.nnx.ConvTranspose(2, 3, (3, 3), strides=(2, 2), **options)
      >>> layer(jnp.ones((1, 5, 5, 2))).shape
      (1, 10, 10, 3)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)


class Embed(Quantized, nnx.Embed):
    """`flax.nnx.Embed`, quantized; see `Linear`. `attend` uses the same codes as the lookup.
    Presets quantize the lookup only with `tables=`; otherwise it stays in float.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = jqx.nnx.Embed(5, 4, policy=jqx.presets.w8a16(tables="int8"), rngs=nnx.Rngs(0))
      >>> jqx.nnx.convert(layer, jnp.array([1, 2]))
      >>> layer.attend(layer(jnp.array([1, 2]))).shape
      (2, 5)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        """Multiplies by the transposed table."""
        return self._q_evaluate("attend", *args, **kwargs)


class MultiHeadAttention(Quantized, CachedAttention):
    """`flax.nnx.MultiHeadAttention`, quantized; see `Linear`.

    The four projections are at `query/kernel`, `key/kernel`, `value/kernel` and `out/kernel`;
    scores and mixing are products of activations, which a rule without `weight=` matches.

    `cache="int4"`, `"int2"` or `"fp8"` makes the cache of calls with `decode=True` a `jqx.KVCache`,
    the value of the `nnx.Cache` that `init_cache((batch, length, features))` sets as `kv_cache`.
    Flax has three arrays instead. Such a call appends one or more tokens. Each token attends to the
    tokens up to itself that the mask `[batch, heads, tokens, length]` allows. Tokens beyond the
    length give NaN. Without `decode`, for example in training, there is no cache.

    Raises:
      ValueError: if `cache` is unknown; if a call decodes before `init_cache`; if inputs have
        several sequence axes; if the format has no groups for the width of the heads; or if the
        cache was replaced by one of another format.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.w8a8_dynamic(), "rngs": nnx.Rngs(0)}
      >>> layer = jqx.nnx.MultiHeadAttention(2, 4, decode=False, **options)
      >>> layer(jnp.ones((1, 3, 4))).shape
      (1, 3, 4)
      >>> layer = jqx.nnx.MultiHeadAttention(2, 32, decode=True, cache="int4", **options)
      >>> layer.init_cache((1, 64, 32))
      >>> y = layer(jnp.ones((1, 1, 32)))
      >>> layer.kv_cache.get_value()
      KVCache(int4, 1 of 64 tokens, 12,292 bytes)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)
