"""Quantized layers of Flax, also with adapters."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..modules.layers import (
    AdapterMatrices,
    add_low_rank,
    check_cache,
    empty_cache,
    with_cache,
)
from ..modules.lora import of_matrices, with_product
from ..modules.quantized_function import by_path
from ..transforms.trace import is_array
from .quantized import Quantized, values

LORA = "lora"
"""Collection of the adapters, which training differentiates."""

_CACHE = "kv_cache"
"""Name of the cache in the collection `cache`."""


class _Layer(Quantized, kw_only=True):
    """Base of the layers of Flax, whose calls run quantized."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate("__call__", *args, **kwargs)


class Dense(_Layer, nn.Dense):
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


class DenseGeneral(_Layer, nn.DenseGeneral):
    """`flax.linen.DenseGeneral`, quantized; see `Dense`."""


class Einsum(_Layer, nn.Einsum):
    """`flax.linen.Einsum`, quantized; see `Dense`."""


class Conv(_Layer, nn.Conv):
    """`flax.linen.Conv`, quantized; see `Dense`."""


class ConvTranspose(_Layer, nn.ConvTranspose):
    """`flax.linen.ConvTranspose`, quantized; see `Dense`."""


class Embed(_Layer, nn.Embed):
    """`flax.linen.Embed`, quantized; see `Dense`. `attend` uses the same codes as the lookup.
    Presets quantize the lookup only with `tables=`; otherwise it stays in float.
    """

    def attend(self, query: Any) -> Any:
        """Multiplies by the transposed table."""
        return self._q_evaluate("attend", query)


class CachedDotProductAttention(nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` with one more field.

    Attributes:
      cache: format of the `jqx.KVCache` that holds keys and values if `decode` is set; `None` keeps
        arrays, as Flax does.
    """

    cache: str | None = None
    _flax_class: ClassVar[type[Any]] = nn.MultiHeadDotProductAttention

    def __post_init__(self) -> None:
        check_cache(type(self).__name__, self.cache)
        super().__post_init__()

    @nn.nowrap  # one scope of names, as in Flax
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.decode or self.cache is None:
            return super().__call__(*args, **kwargs)
        kind = self._flax_class
        names = [x.name for x in dataclasses.fields(kind) if x.init and x.name != "name"]
        fields = {name: getattr(self, name) for name in names}
        fields |= {"decode": False, "attention_fn": self._attention(), "parent": self.scope}
        return kind(**fields)(*args, **kwargs)

    @nn.nowrap
    def _attention(self) -> Any:
        """Returns attention over the cache, or over keys and values as given at its creation."""
        assert self.cache is not None and self.scope is not None
        scope, format, name = self.scope, self.cache, type(self).__name__
        plain: Any = self.attention_fn
        if scope.has_variable("cache", _CACHE) and not self.is_initializing():
            read = functools.partial(scope.get_variable, "cache", _CACHE)
            write = functools.partial(scope.put_variable, "cache", _CACHE)
            return with_cache(name, plain, format, read, write)

        @functools.wraps(plain)
        def attend(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
            scope.put_variable("cache", _CACHE, empty_cache(name, format, key.shape, key.dtype))
            return plain(query, key, value, **kwargs)

        return attend


class CachedAttention(CachedDotProductAttention, nn.MultiHeadAttention):
    """`flax.linen.MultiHeadAttention` with one more field, `cache`."""

    _flax_class: ClassVar[type[Any]] = nn.MultiHeadAttention


# Flax's names, since the name of a class is in the paths of plans.
CachedDotProductAttention.__name__ = nn.MultiHeadDotProductAttention.__name__
CachedAttention.__name__ = nn.MultiHeadAttention.__name__


class MultiHeadDotProductAttention(_Layer, CachedDotProductAttention):
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


class MultiHeadAttention(_Layer, CachedAttention):
    """`flax.linen.MultiHeadAttention`, quantized; see `MultiHeadDotProductAttention`."""


class LoRADense(Quantized, nn.Dense, kw_only=True):
    """`flax.linen.Dense`, quantized, plus the low-rank product `alpha / rank x a b`.

    The adapters `a` (inputs, rank) and `b` (rank, features) are in the collection `lora`; their
    product is initially zero. To train only them, differentiate with respect to that collection.
    The base weight is in `params`, after `convert` in `qparams`. Train adapters over codes in
    `Mode.SIMULATE`, which dequantizes the codes. `init_lora` starts adapters from the products that
    `jqx.algorithms.loftq` or `eora` has found.

    Source: Hu et al., "LoRA", arXiv:2106.09685; Dettmers et al., "QLoRA", arXiv:2305.14314.

    Attributes:
      rank: rank of the adapters.
      alpha: weight of the adapters, times rank.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> layer = jqx.linen.LoRADense(2, rank=1, policy=jqx.presets.nf4(block=4))
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 4)))
      >>> jax.tree.map(jnp.shape, variables["lora"])
      {'a': (4, 1), 'b': (1, 2)}
    """

    rank: int
    alpha: float = 1.0

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        base = self._q_evaluate("__call__", inputs)

        def start() -> jax.Array:
            init = nn.initializers.he_uniform()
            return init(self.make_rng("params"), (inputs.shape[-1], self.rank), self.param_dtype)

        a = self.variable(LORA, "a", start).value
        shape = (self.rank, self.features)
        b = self.variable(LORA, "b", jnp.zeros, shape, self.param_dtype).value
        inputs, a, b = self.promote_dtype(inputs, a, b, dtype=self.dtype)
        return add_low_rank(base, inputs, a, b, self.alpha)


def merge_layers(params: Any, codes: Any, adapters: Any, alpha: float) -> dict[str, Any]:
    """Returns parameters with the adapters of `LoRADense` layers added, in float."""
    merged = dict(params)
    if isinstance(adapters.get("a"), jax.Array):
        kernel = codes["kernel"] if "kernel" in codes else params["kernel"]
        a, b = adapters["a"], adapters["b"]
        adapter = of_matrices(a.shape[-1], alpha, kernel.ndim)
        return {**merged, "kernel": with_product(kernel, adapter, a, b)}
    for name, inner in adapters.items():
        merged[name] = merge_layers(params.get(name, {}), codes.get(name, {}), inner, alpha)
    return merged


def inspect_layers(
    module: nn.Module, args: Any, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, AdapterMatrices], set[str]]:
    """Returns the shapes of the variables of a module, its layers with adapters, and the paths of
    all quantized parts.
    """
    lora_layers: dict[str, tuple[int, float]] = {}
    parts: set[str] = set()

    def record(next_method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        part = context.module
        if isinstance(part, Quantized):
            parts.add("/".join(part.path))
        if isinstance(part, LoRADense):
            lora_layers["/".join(part.path)] = part.rank, part.alpha
        return next_method(*args, **kwargs)

    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    arrays = {i: x for i, x in enumerate(leaves) if is_array(x)}

    def init(key: jax.Array, arrays: Mapping[int, Any]) -> Any:
        args, kwargs = tree.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        with nn.intercept_methods(record):
            return module.init(key, *args, **kwargs)

    shapes = values(jax.eval_shape(init, jax.random.key(0), arrays))
    lora = by_path(shapes.get(LORA, {}))
    layers = {}
    for path, (rank, alpha) in lora_layers.items():
        a, b = (lora[f"{path}/{name}".lstrip("/")] for name in ("a", "b"))
        layers[path] = AdapterMatrices(rank, alpha, a.shape, b.shape, a.dtype)
    return shapes, layers, parts
