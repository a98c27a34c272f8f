"""Quantized layers of Flax, also with adapters."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze

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
from ..modules.quantized_function import by_path, nest, without
from ..ptq.quantized import Quantized as PtqResult
from ..transforms.paths import is_whole
from ..transforms.trace import is_array
from .quantized import QPARAMS, SCALES, Quantized, values

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


def merge_lora(variables: Mapping[str, Any], *, alpha: float = 1.0) -> dict[str, Any]:
    """Returns variables with every adapter added to its weight, in float, and without adapters.

    Args:
      variables: variables of a module with `LoRADense` layers, float or converted.
      alpha: the `alpha` of its layers.

    Returns:
      Variables for the same module with `flax.linen.Dense` layers: float kernels in `params`.

    Raises:
      ValueError: if there are no adapters.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> layer, x = jqx.linen.LoRADense(2, rank=1, policy=jqx.presets.w8a16()), jnp.ones((1, 4))
      >>> merged = jqx.linen.merge_lora(layer.init(jax.random.key(0), x))
      >>> jax.tree.map(jnp.shape, merged)
      {'params': {'bias': (2,), 'kernel': (4, 2)}}
    """
    if not variables.get(LORA):
        problem = f"there are no adapters: the collections are {', '.join(variables)}."
        fix = "pass all variables of a module with LoRADense layers."
        raise fail("linen.merge_lora", problem, fix=fix)
    merged = {name: unfreeze(tree) for name, tree in variables.items() if name != LORA}
    params, codes = merged.get("params", {}), merged.get(QPARAMS, {})
    merged["params"] = _merge(params, codes, unfreeze(variables[LORA]), alpha)
    merged[QPARAMS] = without(codes, merged["params"])
    return {name: tree for name, tree in merged.items() if tree}


@called("linen.init_lora", "pass jqx.linen.init_lora(module, quantized, x).")
def init_lora(module: nn.Module, quantized: PtqResult, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns variables of a module with `LoRADense` layers: the codes of a quantized module, and
    adapters that start from the low-rank products that `jqx.algorithms.loftq` or `eora` has found.
    `module.init` has adapters that add nothing.

    The module then computes the same as `quantized`, in `Mode.SIMULATE` and `Mode.CONVERT`, up to
    rounding in float32: `a` and `b` share the factor that cancels `alpha / rank`. Training
    continues from there.

    Args:
      module: has `LoRADense` layers where the module that was quantized has `flax.linen.Dense`, and
        other layers of `jqx.linen` where it has other quantized weights; in any mode.
      quantized: the result of `jqx.linen.ptq(float_module, policy, loftq(rank=...))`.
      *args: positional arguments of a call, as for `module.init`; arrays or `jax.ShapeDtypeStruct`.
      **kwargs: keyword arguments of the call, as for `module.init`.

    Returns:
      The collections `qparams` and `lora`; `params` and other collections as in `quantized`; and
      `quant_scales` if activations have static scales. They have no boxes such as `nn.Partitioned`.

    Raises:
      TypeError: if `module` is not a linen module, or `quantized` is not a `jqx.Quantized`.
      ValueError: if a `LoRADense` has no such product, or one of another rank; if something else is
        kept at a site; if the parameters of `module` are not those of `quantized`; or if a
        quantized weight is not in a layer of `jqx.linen`.

    Source: Li et al., arXiv:2310.08659 (LoftQ); Liu et al., arXiv:2410.21271 (EoRA).

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> policy, x = jqx.presets.nf4(block=8), jax.random.normal(jax.random.key(0), (4, 16))
      >>> variables = nn.Dense(8).init(jax.random.key(1), x)
      >>> ptq = jqx.linen.ptq(nn.Dense(8), policy, jqx.algorithms.loftq(rank=2), progress=False)
      >>> quantized = ptq(variables, [x])
      >>> layer = jqx.linen.LoRADense(8, rank=2, policy=policy)
      >>> known = jqx.linen.init_lora(layer, quantized, x)
      >>> sorted(known), jax.tree.map(jnp.shape, known["lora"])
      (['lora', 'params', 'qparams'], {'a': (16, 2), 'b': (2, 8)})
      >>> bool(jnp.allclose(layer.apply(known, x), quantized(x), atol=1e-5))
      True
    """
    name = "linen.init_lora"
    check_instance(name, "module", module, nn.Module, fix="pass the module to be trained.")
    fix = "pass the result of jqx.linen.ptq for the float module and its variables."
    check_instance(name, "quantized", quantized, PtqResult, fix=fix)
    shapes, layers, parts = _inspect(module, args, kwargs)
    collections = values(quantized.params)
    params = collections.pop("params")
    products = initial_adapters(name, quantized.plan, quantized.maps, layers)
    leaves = by_path(params)
    check_same_parameters(name, by_path(shapes.get("params", {})), leaves, parts)
    codes = nest({path: x for path, x in leaves.items() if is_whole(x)})
    adapters: dict[str, Any] = {}
    for path, (a, b) in products.items():
        prefix = path and f"{path}/"
        adapters |= {f"{prefix}a": a, f"{prefix}b": b}
    collections |= {"params": without(params, codes), QPARAMS: codes, LORA: nest(adapters)}
    collections[SCALES] = nest(quantized.affines)
    return {name: tree for name, tree in collections.items() if tree}


def _merge(params: Any, codes: Any, adapters: Any, alpha: float) -> dict[str, Any]:
    merged = dict(params)
    if isinstance(adapters.get("a"), jax.Array):
        kernel = codes["kernel"] if "kernel" in codes else params["kernel"]
        kernel = merge_low_rank(kernel, adapters["a"], adapters["b"], alpha)
        return {**merged, "kernel": kernel}
    for name, inner in adapters.items():
        merged[name] = _merge(params.get(name, {}), codes.get(name, {}), inner, alpha)
    return merged


def _inspect(
    module: nn.Module, args: Any, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Adapter], set[str]]:
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
        layers[path] = Adapter(rank, alpha, a.shape, b.shape, a.dtype)
    return shapes, layers, parts
