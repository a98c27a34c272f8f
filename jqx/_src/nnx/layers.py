"""Quantized layers of Flax, also with adapters."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ..errors import fail
from ..modules.layers import (
    add_low_rank,
    check_cache,
    empty_cache,
    with_cache,
)
from ..policy import Policy
from .quantized import Quantized


class _Layer(Quantized):
    """Base of the layers of Flax, whose calls run quantized."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)


class Linear(_Layer, nnx.Linear):
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


class LinearGeneral(_Layer, nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral`, quantized; see `Linear`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> policy = jqx.presets.w8a8_dynamic()
      >>> layer = jqx.nnx.LinearGeneral(4, (2, 3), policy=policy, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 4))).shape
      (1, 2, 3)
    """


class Einsum(_Layer, nnx.Einsum):
    """`flax.nnx.Einsum`, quantized; see `Linear`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.w8a8_dynamic(), "rngs": nnx.Rngs(0)}
      >>> layer = jqx.nnx.Einsum("bd,dhk->bhk", (4, 2, 3), **options)
      >>> layer(jnp.ones((1, 4))).shape
      (1, 2, 3)
    """


class Conv(_Layer, nnx.Conv):
    """`flax.nnx.Conv`, quantized; see `Linear`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> policy = jqx.presets.w8a8_dynamic()
      >>> layer = jqx.nnx.Conv(2, 3, (3, 3), policy=policy, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 5, 5, 2))).shape
      (1, 5, 5, 3)
    """


class ConvTranspose(_Layer, nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose`, quantized; see `Linear`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.w8a8_dynamic(), "rngs": nnx.Rngs(0)}
      >>> layer = jqx.nnx.ConvTranspose(2, 3, (3, 3), strides=(2, 2), **options)
      >>> layer(jnp.ones((1, 5, 5, 2))).shape
      (1, 10, 10, 3)
    """


class Embed(_Layer, nnx.Embed):
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

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        """Multiplies by the transposed table."""
        return self._q_evaluate("attend", *args, **kwargs)


class CachedAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with one more argument: `cache`, the format of a `jqx.KVCache`.

    Attributes:
      cache: the format, or `None`.
      kv_cache: the cache, set by `init_cache` if `cache` is given.
    """

    attention_fn: Any
    cache: str | None
    kv_cache: nnx.Cache[Any] | None

    def __init__(self, *args: Any, cache: str | None = None, **kwargs: Any) -> None:
        check_cache(type(self).__name__, cache)
        super().__init__(*args, **kwargs)
        self.cache, self.kv_cache = cache, nnx.data(None)

    def init_cache(self, input_shape: Any, dtype: DTypeLike = jnp.float32) -> None:
        """Makes an empty cache for inputs [batch, whole length, features]."""
        if self.cache is None:
            super().init_cache(input_shape, dtype)
            return
        shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
        self.kv_cache = nnx.Cache(empty_cache(type(self).__name__, self.cache, shape, dtype))

    def __call__(
        self, *args: Any, decode: bool | None = None, is_causal: bool = False, **kwargs: Any
    ) -> Any:
        decodes = self.decode if decode is None else decode
        if not decodes or self.cache is None:
            return super().__call__(*args, decode=decode, is_causal=is_causal, **kwargs)
        name, cache, attention = type(self).__name__, self.kv_cache, self.attention_fn
        if cache is None:
            problem = f"the cache is not initialized, with decode=True and cache={self.cache!r}."
            fix = "call layer.init_cache((batch, length, features)) first, of the whole length."
            raise fail(name, problem, fix=fix)
        read, write = cache.get_value, cache.set_value
        self.attention_fn = with_cache(name, attention, self.cache, read, write)
        try:  # attention over a cache is causal
            return super().__call__(*args, decode=False, **kwargs)
        finally:
            self.attention_fn = attention


class MultiHeadAttention(_Layer, CachedAttention):
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


class LoRALinear(Quantized, nnx.Linear):
    """`flax.nnx.Linear`, quantized, plus the low-rank product `alpha / rank x a b`.

    The adapters `lora_a` (inputs, rank) and `lora_b` (rank, features) are `nnx.LoRAParam`; their
    product is initially zero. To train only them, differentiate with respect to them:
    `nnx.grad(..., argnums=nnx.DiffState(0, nnx.LoRAParam))`. The base weight may be 4-bit codes in
    training: after `convert` it is a `QParam`. Then set `Mode.SIMULATE`, which dequantizes the
    codes and has all gradients. `init_lora` starts adapters from the products that
    `jqx.algorithms.loftq` or `eora` has found.

    Source: Hu et al., "LoRA", arXiv:2106.09685; Dettmers et al., "QLoRA", arXiv:2305.14314.

    Args:
      in_features: as in `nnx.Linear`.
      out_features: as in `nnx.Linear`.
      rank: rank of the adapters.
      alpha: weight of the adapters, times rank.
      policy: what is quantized in the base layer.
      rngs: for the parameters.
      **kwargs: other arguments of `nnx.Linear`, and `mode`, `backward` and `scales`.

    Example:
      >>> import jqx, jqx.nnx, jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.nf4(block=4), "rngs": nnx.Rngs(0)}
      >>> layer = jqx.nnx.LoRALinear(4, 2, rank=1, **options)
      >>> jqx.nnx.convert(layer, jnp.ones((1, 4)))
      >>> layer.mode = jqx.nnx.Mode.SIMULATE
      >>> adapters = nnx.DiffState(0, nnx.LoRAParam)
      >>> grads = nnx.grad(lambda layer, x: layer(x).sum(), argnums=adapters)(layer, jnp.ones(4))
      >>> {name: grad.shape for name, grad in grads.items()}
      {'lora_a': (4, 1), 'lora_b': (1, 2)}
    """

    rank: int
    alpha: float

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float = 1.0,
        policy: Policy,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, policy=policy, rngs=rngs, **kwargs)
        self.rank, self.alpha = rank, alpha
        start = nnx.initializers.he_uniform()
        dtype = self.param_dtype
        a, b = (
            start(rngs.params(), (in_features, rank), dtype),
            jnp.zeros((rank, out_features), dtype),
        )
        self.lora_a: nnx.LoRAParam[jax.Array] = nnx.LoRAParam(a)
        self.lora_b: nnx.LoRAParam[jax.Array] = nnx.LoRAParam(b)

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        base = self._q_evaluate("__call__", inputs, *args, **kwargs)
        operands = (inputs, self.lora_a[...], self.lora_b[...])
        inputs, a, b = self.promote_dtype(operands, dtype=self.dtype)
        return add_low_rank(base, inputs, a, b, self.alpha)
