"""What layers of linen and nnx share: attention over a `jqx.KVCache`, and low-rank adapters."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..caches.kv_cache import KVCache, check_format
from ..checks import check_instance
from ..errors import fail, some
from ..transforms.channel_map import LowRank, Maps
from ..transforms.map_channels import as_maps
from ..transforms.paths import is_whole
from ..transforms.plan import Plan

Attention = Callable[..., Any]
"""`attention(query, key, value, mask=mask, ...)`, as in Flax."""


def check_cache(function: str, cache: Any) -> None:
    """Checks a field `cache`: a format, or `None`."""
    if cache is not None:
        check_format(function, "cache", cache)


def empty_cache(function: str, format: str, shape: tuple[int, ...], dtype: DTypeLike) -> KVCache:
    """Returns an empty cache for keys and values of a shape."""
    if len(shape) != 4:
        problem = f"a KVCache has one sequence axis, and keys have the shape {tuple(shape)}."
        fix = "merge the leading axes of the inputs, or jax.vmap the layer."
        raise fail(function, problem, fix=fix)
    batch, length, heads, width = shape
    return KVCache.empty(
        batch=batch, length=length, heads=heads, width=width, format=format, dtype=dtype
    )


def with_cache(
    function: str,
    attention: Attention,
    format: str,
    read: Callable[[], Any],
    write: Callable[[KVCache], None],
) -> Attention:
    """Returns attention that appends keys and values to a cache, and then uses those of the cache.
    Each query attends to the tokens up to its own that a mask allows.
    """

    @functools.wraps(attention)
    def attend(query: Any, key: Any, value: Any, *, mask: Any = None, **kwargs: Any) -> Any:
        cache = read()
        fix = "make it with KVCache.empty, or leave it to the layer."
        check_instance(function, "the cache", cache, KVCache, fix=fix)
        if cache.format != format:
            problem = f"the cache has the format {cache.format!r}, and the layer {format!r}."
            fix = "initialize the cache again, or make the layer with the format of the cache."
            raise fail(function, problem, fix=fix)
        cache = cache.append(key, value)
        write(cache)
        # Token i of this call attends to the tokens of the cache up to itself.
        last_tokens = cache.length - key.shape[1] + jnp.arange(key.shape[1], dtype=jnp.int32)
        tokens = jnp.arange(cache.capacity, dtype=jnp.int32)
        causal = (tokens[None] <= last_tokens[:, None])[None, None]
        mask = causal if mask is None else jnp.logical_and(jnp.asarray(mask).astype(bool), causal)
        keys, values = cache.keys.astype(key.dtype), cache.values.astype(value.dtype)
        return attention(query, keys, values, mask=mask, **kwargs)

    return attend


def add_low_rank(base: Any, inputs: Any, a: Any, b: Any, alpha: float) -> Any:
    """Returns the result of a layer plus `alpha / rank x a b`."""
    product = (inputs @ a) @ b
    return base + (product * jnp.asarray(alpha / a.shape[-1], product.dtype)).astype(base.dtype)


class AdapterMatrices(NamedTuple):
    """The adapters of a weight, as matrices.

    Attributes:
      rank: rank of the adapters.
      alpha: a product with the weight adds `alpha / rank * x a b`.
      a: shape of the first, `[..., inputs, rank]`.
      b: shape of the second, `[..., rank, features]`.
      dtype: dtype of both.
    """

    rank: int
    alpha: float
    a: tuple[int, ...]
    b: tuple[int, ...]
    dtype: DTypeLike


def initial_adapters(
    function: str, plan: Plan, maps: Maps, adapters: Mapping[str, AdapterMatrices]
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns the initial values of adapters by the path of their weight: an `a` and a `b` for
    each, such that a product with the weight adds what the maps add.

    Raises:
      ValueError: if a map is not a product of two narrow matrices at a weight with adapters, or if
        a weight has no such product or one that does not fit.
    """
    if not adapters:
        fix = "pass a model from apply_lora, or with layers LoRADense or LoRALinear."
        raise fail(function, "the module has no weights with adapters.", fix=fix)
    products = _products(function, plan, maps)
    if missing := sorted(set(adapters) - set(products)):
        problem = f"weights with adapters have no compensation: {some(map(repr, missing))}."
        fix = "quantize them with jqx.algorithms.loftq or eora, or leave adapters out there."
        raise fail(function, problem, fix=fix)
    if unused := sorted(set(products) - set(adapters)):
        problem = f"compensated weights have no adapters: {some(map(repr, unused))}."
        fix = "add adapters there, by LoRADense, LoRALinear or apply_lora, or change the policy."
        raise fail(function, problem, fix=fix)
    return {path: _scaled(function, path, products[path], adapters[path]) for path in adapters}


def check_same_parameters(
    function: str, params: Mapping[str, Any], quantized: Mapping[str, Any], parts: Collection[str]
) -> None:
    """Checks that quantized parameters are those of a module, and that each quantized one is inside
    a part that takes codes.
    """
    for path in {**params, **quantized}:
        shape, quantized_shape = (
            jnp.shape(x[path]) if path in x else None for x in (params, quantized)
        )
        if shape != quantized_shape:
            problem = "`quantized` does not have the parameters of the module."
            facts = f"{path!r} of shape {quantized_shape}, and {shape} in the module"
            fix = "quantize the module with Flax's layers in place of those with adapters."
            raise fail(function, problem, given=facts, fix=fix)
    outside = [
        path
        for path, x in quantized.items()
        if is_whole(x) and not any(f"{path}/".startswith(part and f"{part}/") for part in parts)
    ]
    if outside:
        paths = some(map(repr, outside))
        problem = f"quantized weights are not in a layer that takes codes: {paths}."
        fix = "use layers of jqx.linen or jqx.nnx, or leave them out of the policy of ptq."
        raise fail(function, problem, fix=fix)


def _products(function: str, plan: Plan, maps: Maps) -> dict[str, LowRank]:
    """Returns the products of narrow matrices by the path of the weight."""
    weights = {site.output_key: site.path for site in plan.sites}
    products = {}
    for key, values in as_maps(function, maps).items():
        value = values[0] if len(values) == 1 else None
        if not isinstance(value, LowRank) or key not in weights:
            maps_there = ", ".join(type(x).__name__ for x in values)
            problem = f"an adapter holds one LowRank of a weight, not {maps_there} at {key!r}."
            fix = "quantize with loftq or eora alone, or after algorithms without maps."
            raise fail(function, problem, fix=fix)
        products[weights[key]] = value
    return products


def _scaled(
    function: str, path: str, product: LowRank, layer: AdapterMatrices
) -> tuple[jax.Array, jax.Array]:
    """Returns both matrices of a product, each with half of the inverse of `alpha / rank`."""
    a, b = jnp.asarray(product.a), jnp.asarray(product.b)
    rank, full_rank = a.shape[-1], min(a.shape[-2], b.shape[-1])
    padded_shapes = (*a.shape[:-1], layer.rank), (*b.shape[:-2], layer.rank, b.shape[-1])
    problem = fix = ""
    if rank != layer.rank and not rank == full_rank < layer.rank:
        problem = f"have another rank, {layer.rank}, than its product of rank {rank}"
        fix = f"make the layer with rank={rank}, or the algorithm with rank={layer.rank}."
    elif padded_shapes != (layer.a, layer.b):
        problem = f"of shapes {layer.a} and {layer.b} do not fit its compensation {padded_shapes}"
        fix = "quantize this module with Dense or Linear in place of layers with adapters."
    elif not layer.alpha:
        problem = "add nothing: alpha == 0"
        fix = "make the layer with alpha=1."
    if problem:
        raise fail(function, f"the adapters of {path!r} {problem}.", fix=fix)
    unpadded = [(0, 0)] * (a.ndim - 1)
    a = jnp.pad(a, [*unpadded, (0, layer.rank - rank)])
    b = jnp.pad(b, [*unpadded[:-1], (0, layer.rank - rank), (0, 0)])
    root = (layer.rank / abs(layer.alpha)) ** 0.5
    sign = 1 if layer.alpha > 0 else -1
    return (a * root).astype(layer.dtype), (b * (sign * root)).astype(layer.dtype)


# Public methods and properties of a module.


OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        *("call", "getitem", "neg", "pos", "abs", "invert"),
        *(
            prefix + name
            for prefix in ("", "r")
            for name in ("add", "sub", "mul", "matmul", "truediv", "pow", "and", "or", "rshift")
        ),
    )
)
"""Special methods that may compute something."""


def forwards(kind: type, skipped: Collection[type]) -> dict[str, Any]:
    """Returns methods and properties for a class that wraps another. Each public method goes
    through `self._q_evaluate(name, ...)`; each public property is read by `self._q_read(name)`.

    They are those of the class and of all its bases, mixins included, except the skipped ones.
    Fields of a dataclass, static methods and class methods are left unchanged.
    """
    members: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base not in skipped:
            members |= vars(base)
    fields = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else ()
    public = {
        name: unwrapped(member)
        for name, member in members.items()
        if (name[0] != "_" or name in OPERATORS) and name not in fields
    }
    methods = {name: _method(name, member) for name, member in public.items() if _is_method(member)}
    return methods | {
        name: _property(name, member) for name, member in public.items() if _is_property(member)
    }


def read(kind: type, module: Any, name: str) -> Any:
    """Returns a property of a module as an instance of `kind`; a cached property is not stored."""
    member = unwrapped(inspect.getattr_static(kind, name))
    if isinstance(member, functools.cached_property):
        return member.func(module)
    return member.__get__(module, type(module))


def unwrapped(member: Any) -> Any:
    """Returns a descriptor without the wrapper that linen adds."""
    inside = getattr(member, "__dict__", {})
    return inside.get("wrapped", member)


def _method(name: str, method: Any) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._q_evaluate(name, *args, **kwargs)

    run.__name__, run.__doc__ = name, method.__doc__
    return run


def _property(name: str, member: Any) -> property:
    def get(self: Any) -> Any:
        return self._q_read(name)

    setters = (getattr(member, "__set__", None), getattr(member, "__delete__", None))
    return property(get, *setters, member.__doc__)


def _is_method(x: Any) -> bool:
    """Returns whether `x` is a function, or is under `nnx.jit`, `functools.partialmethod` etc."""
    kinds = (type, staticmethod, classmethod)
    return hasattr(x, "__get__") and not isinstance(x, kinds) and not _is_data(x)


def _is_property(x: Any) -> bool:
    slots = (types.MemberDescriptorType, types.GetSetDescriptorType)
    return _is_data(x) and not isinstance(x, slots)


def _is_data(x: Any) -> bool:
    """Returns whether `x` is a data descriptor."""
    is_set = hasattr(x, "__get__") and hasattr(x, "__set__")
    return (is_set or isinstance(x, functools.cached_property)) and not isinstance(x, type)
