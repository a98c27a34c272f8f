"""Flax's layers, quantized: the same arguments, parameters and results, and a policy."""

from typing import Any

from flax import nnx

from ._quantized import Quantized


class Linear(Quantized, nnx.Linear):
    """`flax.nnx.Linear`, quantized.

    Arguments are those of Flax, and by name `policy`, `mode`, `backward` and `scales`, see
    `jqx.nnx.quantize`. The parameters are Flax's too, and stand at the same paths, so that a float
    checkpoint fits.

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
    """`flax.nnx.Embed`, quantized; see `Linear`. `attend` uses the same codes as the lookup, which
    presets leave in float without `tables=`.

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


class MultiHeadAttention(Quantized, nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention`, quantized; see `Linear`.

    The four projections are at `query/kernel`, `key/kernel`, `value/kernel` and `out/kernel`;
    scores and mixing are products of activations, which a rule without `weight=` covers.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.w8a8_dynamic(), "rngs": nnx.Rngs(0)}
      >>> layer = jqx.nnx.MultiHeadAttention(2, 4, decode=False, **options)
      >>> layer(jnp.ones((1, 3, 4))).shape
      (1, 3, 4)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)
