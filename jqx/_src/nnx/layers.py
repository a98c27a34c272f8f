"""Quantized layers of Flax, also with adapters."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ..checks import called, check_instance
from ..errors import fail
from ..modules.layers import (
    Adapter,
    add_low_rank,
    check_cache,
    check_same_parameters,
    empty_cache,
    initial_adapters,
    merge_low_rank,
    with_cache,
)
from ..modules.quantized_function import Mode, by_path, nest
from ..policy import Policy
from ..ptq.quantized import Quantized as PtqResult
from .quantized import ATTRIBUTES, Quantized
from .state import STATE, Path, is_random, replace_nodes, values, with_classes, write_values


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


def merge_lora(model: nnx.Module) -> nnx.Module:
    """Returns a model with every adapter added to its weight, in float, and without adapters.

    Args:
      model: has `LoRALinear` layers, float or converted; it is not changed.

    Returns:
      A copy in which those layers are `flax.nnx.Linear`, with float kernels.

    Raises:
      TypeError: if `model` is not a module.
      ValueError: if there are no adapters.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.nf4(block=4), "rngs": nnx.Rngs(0)}
      >>> layer = jqx.nnx.LoRALinear(4, 2, rank=1, **options)
      >>> type(jqx.nnx.merge_lora(layer)).__name__
      'Linear'
    """
    check_instance("nnx.merge_lora", "model", model, nnx.Module, fix="pass an nnx module.")
    merged = nnx.clone(model)
    layers = [layer for _, layer in nnx.iter_modules(merged) if isinstance(layer, LoRALinear)]
    if not layers:
        problem = f"there are no adapters: {type(model).__name__} has no jqx.nnx.LoRALinear layers."
        raise fail("nnx.merge_lora", problem, fix="pass the model that was trained.")
    for layer in layers:
        a, b = layer.lora_a[...], layer.lora_b[...]
        layer.kernel = nnx.Param(merge_low_rank(layer.kernel.get_value(), a, b, layer.alpha))
        for name in ("rank", "alpha", "lora_a", "lora_b", *ATTRIBUTES):
            if name in vars(layer):
                delattr(layer, name)
    return with_classes(merged, {id(layer): nnx.Linear for layer in layers})


@called("nnx.init_lora", "pass jqx.nnx.init_lora(model, quantized).")
def init_lora(model: nnx.Module, quantized: PtqResult) -> None:
    """Gives a model with `LoRALinear` layers the codes of a quantized model, in place. Its adapters
    start from the low-rank products that `jqx.algorithms.loftq` or `eora` has found.

    All parameters become those of `quantized`; its weights are `QParam`s. The mode of every part
    becomes `Mode.SIMULATE`, except that parts in `Mode.FLOAT` stay unchanged. The model then
    computes the same as `quantized`, also in `Mode.CONVERT`, up to rounding in float32: `lora_a`
    and `lora_b` share the factor that cancels `alpha / rank`. Training continues from there.

    Args:
      model: has `LoRALinear` layers where the model that was quantized has `flax.nnx.Linear`, and
        other layers of `jqx.nnx` where it has other quantized weights. Its values are not used.
      quantized: the result of `jqx.nnx.ptq(float_model, policy, loftq(rank=...))`.

    Raises:
      TypeError: if `model` is not a module, or `quantized` is not a `jqx.Quantized`.
      ValueError: if a `LoRALinear` has no such product, or one of another rank; if something else
        is kept at a site; if the parameters of `model` are not those of `quantized`; or if a
        quantized weight is not in a layer of `jqx.nnx`.

    Source: Li et al., arXiv:2310.08659 (LoftQ); Liu et al., arXiv:2410.21271 (EoRA).

    Example:
      >>> import jax, jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> policy, x = jqx.presets.nf4(block=8), jax.random.normal(jax.random.key(0), (4, 16))
      >>> ptq, loftq = jqx.nnx.ptq, jqx.algorithms.loftq(rank=2)
      >>> quantized = ptq(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), policy, loftq, progress=False)([x])
      >>> layer = jqx.nnx.LoRALinear(16, 8, rank=2, policy=policy, rngs=nnx.Rngs(1))
      >>> jqx.nnx.init_lora(layer, quantized)
      >>> bool(jnp.allclose(layer(x), quantized(x), atol=1e-5))
      True
    """
    name = "nnx.init_lora"
    check_instance(name, "model", model, nnx.Module, fix="pass the model to be trained.")
    fix = "pass what jqx.nnx.ptq returns for the float model."
    check_instance(name, "quantized", quantized, PtqResult, fix=fix)
    modules = [("/".join(map(str, path)), part) for path, part in nnx.iter_modules(model)]
    parts = {path: part for path, part in modules if isinstance(part, Quantized)}
    layers = {path: part for path, part in parts.items() if isinstance(part, LoRALinear)}
    shapes = {path: _adapter(layer) for path, layer in layers.items()}
    adapters = initial_adapters(name, quantized.plan, quantized.maps, shapes)
    check_same_parameters(name, _float_values(model), by_path(quantized.params), parts)
    replace_nodes(model, write_values(model, quantized.params))
    for path, (a, b) in adapters.items():
        layers[path].lora_a.set_value(a)
        layers[path].lora_b.set_value(b)
    for path, part in parts.items():
        prefix = path and f"{path}/"
        scales = {key: x for key, x in quantized.affines.items() if key.startswith(prefix)}
        part.quant_scales.set_value(nest({key[len(prefix) :]: x for key, x in scales.items()}))
        part.quant_stats.set_value({})
        part.learned_scales = None
        if part.mode is not Mode.FLOAT:
            part.mode = Mode.SIMULATE


def _adapter(layer: LoRALinear) -> Adapter:
    a, b = layer.lora_a.get_value(), layer.lora_b.get_value()
    return Adapter(layer.rank, layer.alpha, a.shape, b.shape, a.dtype)


def _float_values(model: nnx.Module) -> dict[str, Any]:
    """Returns the values of the variables that the float model also has, by path."""

    def is_state(path: Path, _: Any) -> bool:
        return any(name in STATE for name in path)

    _, _, shared = nnx.split(model, (nnx.LoRAParam, is_random, is_state), ...)
    return by_path(values(shared))
