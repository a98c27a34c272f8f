"""Adapters of low rank for any linen module: `apply_lora`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta, unfreeze

from ..checks import called, check_instance
from ..errors import fail, some
from ..modules.layers import AdapterMatrices, check_same_parameters, initial_adapters
from ..modules.lora import base_policy, check_base, initial_factors, of_padded, with_product
from ..modules.quantized_function import Mode, QuantizedFunction, by_path, nest, overlay, without
from ..policy import Policy
from ..ptq.quantized import Quantized as PtqResult
from ..tensor.spec import QSpec
from ..transforms.adapters import (
    Adapter,
    LoRA,
    adapter_of,
    check_rules,
    find_products,
    match_rules,
    use_of,
    with_adapters,
)
from ..transforms.make_plan import make_plan
from ..transforms.paths import is_whole
from ..transforms.quantize_params import quantize_params
from .layers import LORA, inspect_layers, merge_layers
from .quantized import QPARAMS, SCALES, Method, Whole, call_method, values, wrapped

_NAME = "linen.apply_lora"


Adapters = tuple[tuple[str, Adapter], ...]
"""The adapters of weights, each with the path of its weight in `params`."""


class Adapted(Whole, kw_only=True):
    """Base of modules to whose weights `apply_lora` has added adapters.

    Attributes:
      adapters: one for each weight that has one.
    """

    adapters: Adapters

    @nn.nowrap
    def _q_is_plain(self) -> bool:
        return self.scope is None or self.is_initializing()

    def _q_function(
        self, method: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[QuantizedFunction, dict[str, Any], bool]:
        function, params, is_pair = super()._q_function(method, args, kwargs)
        factors = _factors(type(self).__name__, self.adapters, values(self.variables).get(LORA))
        adapters = dict(self.adapters)
        adapted = with_adapters(_NAME, function.function, adapters)
        function = dataclasses.replace(function, function=adapted, args=(factors, *function.args))
        return function, params, is_pair


def apply_lora(
    module: nn.Module,
    variables: Mapping[str, Any],
    rules: Mapping[str, LoRA],
    *args: Any,
    base: str | QSpec | None = None,
    key: jax.Array | None = None,
    method: Method = "__call__",
    **kwargs: Any,
) -> tuple[Any, dict[str, Any]]:
    """Adds trainable adapters of low rank to the weights of a module.

    The result is the module as an instance of a subclass of its class, and its variables with one
    more collection, `lora`: the factors `a` and `b` of each weight, at its path. The module adds
    `alpha / rank * (x @ a) @ b` to each product with the weight. Shapes are those of the weight:
    `a` has the axes that are summed, and then the rank; `b` the rank, and then the other axes. Both
    begin with the axes of a stack, such as those of layers in a scan. `a` is drawn (He, uniform),
    `b` is 0, so that the module computes the same as before, but for the rounding of `base`. Both
    have the dtype of the weight, its sharding, and its box of axis names.

    Differentiate only with respect to the collection `lora`. With `base` the weights become codes,
    in the collection `qparams`, and calls dequantize them: `Mode.SIMULATE`.
    `module.clone(mode=jqx.linen.Mode.CONVERT)` multiplies by the codes, for serving.

    Args:
      module: any unbound linen module in float.
      variables: its variables; they are not changed.
      rules: adapters by regular expression. It matches the whole path of a weight in `params`, such
        as `layers_0/attn/query/kernel`, or of the module that has it; the first match counts. Only
        weights of products get adapters: lookups, convolutions and grouped products do not.
      *args: positional arguments of a call; only their shapes and dtypes matter.
      base: how weights that get adapters are quantized, such as `"nf4:group=64"`; `None` leaves
        them as floats.
      key: for `a`; by default `jax.random.key(0)`.
      method: what runs: the name of a method, or a function of the module.
      **kwargs: keyword arguments of the call.

    Returns:
      The module, and its variables.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if a rule matches no weight of a product; if the module multiplies by a part of a
        matched weight; or if it is bound, is quantized already, or has a field of a name that
        quantized modules use.

    Source: Hu et al., "LoRA", arXiv:2106.09685; Dettmers et al., "QLoRA", arXiv:2305.14314.

    Example:
      >>> import jax, jqx.linen, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> x = jnp.ones((1, 64))
      >>> variables = nn.Dense(8).init(jax.random.key(0), x)
      >>> rules = {"kernel": jqx.linen.LoRA(rank=2, alpha=4.0)}
      >>> layer, known = jqx.linen.apply_lora(nn.Dense(8), variables, rules, x, base="nf4:group=64")
      >>> sorted(known), jax.tree.map(jnp.shape, known["lora"])
      (['lora', 'params', 'qparams'], {'kernel': {'a': (64, 2), 'b': (2, 8)}})
      >>> layer.apply(known, x).shape
      (1, 8)
    """
    check_instance(_NAME, "module", module, nn.Module, fix="pass a linen module.")
    fix = "pass the result of module.init: jqx.linen.apply_lora(module, variables, rules, x)."
    check_instance(_NAME, "variables", variables, Mapping, fix=fix)
    rules = check_rules(_NAME, rules)
    check_base(_NAME, base)
    others = values(variables)
    params = others.pop("params", {})
    mutable = list(others)

    def f(params: Any, others: Any, *args: Any) -> Any:
        def run(bound: nn.Module, *args: Any) -> Any:
            return call_method(bound, method, *args, **kwargs)

        return module.apply({**others, "params": params}, *args, mutable=mutable, method=run)

    products = find_products(_NAME, f, (params, others, *args))
    adapters = dict[str, Adapter]()
    for path, rule in match_rules(_NAME, rules, *products).items():
        uses = {use_of(_NAME, path, item) for item in products.items[path]}
        adapters[path] = adapter_of(_NAME, path, rule, uses)
    options: dict[str, Any] = {"policy": Policy([]), "mode": Mode.FLOAT}
    codes = dict[str, Any]()
    if base is not None:
        options = {"policy": base_policy(adapters, base), "mode": Mode.SIMULATE}
        plan = make_plan(f, options["policy"])(params, others, *args)
        quantized = by_path(quantize_params(params, plan))
        codes = nest({path: quantized[path] for path in adapters})
    entries = tuple(adapters.items())
    adapted = wrapped(_NAME, module, Adapted, "LoRA", {**options, "adapters": entries})
    boxed, weights = by_path_boxed(variables), by_path(params)
    keys = jax.random.split(jax.random.key(0) if key is None else key, len(adapters))
    factors = {}
    for own, (path, adapter) in zip(keys, adapters.items(), strict=True):
        pair = initial_factors(adapter, own, weights[path])
        for side, x in zip("ab", _like(boxed[path], adapter, pair), strict=True):
            factors[f"{path}/{side}"] = x
    known = {name: unfreeze(tree) for name, tree in variables.items()}
    known["params"] = without(known["params"], codes)
    return adapted, {**known, LORA: nest(factors), **({QPARAMS: codes} if codes else {})}


def by_path_boxed(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters by path; a box of axis names is a leaf."""
    leaves, _ = jax.tree.flatten_with_path(
        unfreeze(variables["params"]), is_leaf=lambda x: isinstance(x, meta.AxisMetadata)
    )
    return {"/".join(str(key.key) for key in path): x for path, x in leaves}


def _like(weight: Any, adapter: Adapter, factors: list[jax.Array]) -> list[Any]:
    """Returns factors in boxes with axis names, if their weight is in one."""
    if not isinstance(weight, nn.Partitioned):
        return list(factors)
    names = of_padded(adapter, weight.names, weight.value.ndim)
    return [weight.replace(value=x, names=axes) for x, axes in zip(factors, names, strict=True)]


def _factors(
    function: str, adapters: Adapters, tree: Mapping[str, Any] | None
) -> dict[str, tuple[Any, Any]]:
    """Returns the two factors of each weight."""
    leaves = by_path(tree or {})
    missing = [path for path, _ in adapters if f"{path}/a" not in leaves]
    if missing:
        problem = f"the collection {LORA!r} has no adapters of {some(map(repr, missing))}."
        fix = "pass the variables that jqx.linen.apply_lora has returned with the module."
        raise fail(function, problem, fix=fix)
    return {path: (leaves[f"{path}/a"], leaves[f"{path}/b"]) for path, _ in adapters}


@called("linen.init_lora", "pass jqx.linen.init_lora(module, quantized, x).")
def init_lora(module: nn.Module, quantized: PtqResult, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns variables of a module with adapters: the codes of a quantized module, and adapters
    that start from the low-rank products that `jqx.algorithms.loftq` or `eora` has found.

    The module then computes the same as `quantized`, in `Mode.SIMULATE` and `Mode.CONVERT`, up to
    rounding in float32: `a` and `b` share the factor that cancels `alpha / rank`. Training
    continues from there.

    Args:
      module: the module from `apply_lora`, with a `base`; or one that has `LoRADense` layers where
        the module that was quantized has `flax.linen.Dense`, and other layers of `jqx.linen` where
        it has other quantized weights; in any mode.
      quantized: the result of `jqx.linen.ptq(float_module, policy, loftq(rank=...))`.
      *args: positional arguments of a call, as for `module.init`; arrays or `jax.ShapeDtypeStruct`.
      **kwargs: keyword arguments of the call, as for `module.init`.

    Returns:
      The collections `qparams` and `lora`; `params` and other collections as in `quantized`; and
      `quant_scales` if activations have static scales. They have no boxes such as `nn.Partitioned`.

    Raises:
      TypeError: if `module` is not a linen module, or `quantized` is not a `jqx.Quantized`.
      ValueError: if a weight with adapters has no such product, or one of another rank; if
        something else is kept at a site; if the parameters of `module` are not those of
        `quantized`; or if a quantized weight is not in a layer of `jqx.linen`.

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
    shapes, layers, parts = inspect_layers(module, args, kwargs)
    collections = values(quantized.params)
    params = collections.pop("params")
    leaves = by_path(params)
    adapters = {f"{path}/kernel".lstrip("/"): layer for path, layer in layers.items()}
    entries = dict(module.adapters) if isinstance(module, Adapted) else {}
    for path, x in entries.items():
        if path in leaves:
            matrices = x.of_matrices(leaves[path].shape)
            adapters[path] = AdapterMatrices(x.rank, x.alpha, *matrices, leaves[path].dtype)
    starts = initial_adapters(name, quantized.plan, quantized.maps, adapters)
    check_same_parameters(name, by_path(shapes.get("params", {})), leaves, parts)
    codes = nest({path: x for path, x in leaves.items() if is_whole(x)})
    factors: dict[str, Any] = {}
    for path, (a, b) in starts.items():
        if path in entries:
            a, b = entries[path].from_matrices(a, b, leaves[path].shape)
        prefix = f"{path}/" if path in entries else path.removesuffix("kernel")
        factors |= {f"{prefix}a": a, f"{prefix}b": b}
    collections |= {"params": without(params, codes), QPARAMS: codes, LORA: nest(factors)}
    collections[SCALES] = nest(quantized.affines)
    return {name: tree for name, tree in collections.items() if tree}


def merge_lora(
    variables: Mapping[str, Any], module: nn.Module | None = None, *, alpha: float = 1.0
) -> dict[str, Any]:
    """Returns variables with every adapter added to its weight, in float, and without adapters.

    Args:
      variables: variables of a module from `apply_lora`, or with `LoRADense` layers; float or
        converted.
      module: the module from `apply_lora`; `None` for one with `LoRADense` layers.
      alpha: the `alpha` of `LoRADense` layers.

    Returns:
      Variables for the float module: float weights in `params`.

    Raises:
      TypeError: if `module` is not from `apply_lora`.
      ValueError: if there are no adapters.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> layer, x = jqx.linen.LoRADense(2, rank=1, policy=jqx.presets.w8a16()), jnp.ones((1, 4))
      >>> merged = jqx.linen.merge_lora(layer.init(jax.random.key(0), x))
      >>> jax.tree.map(jnp.shape, merged)
      {'params': {'bias': (2,), 'kernel': (4, 2)}}
    """
    name = "linen.merge_lora"
    if not variables.get(LORA):
        problem = f"there are no adapters: the collections are {', '.join(variables)}."
        fix = "pass all variables of a module from apply_lora, or with LoRADense layers."
        raise fail(name, problem, fix=fix)
    merged = {name: unfreeze(tree) for name, tree in variables.items() if name != LORA}
    params, codes = merged.get("params", {}), merged.get(QPARAMS, {})
    if module is None:
        merged["params"] = merge_layers(params, codes, unfreeze(variables[LORA]), alpha)
    else:
        fix = "pass the module that jqx.linen.apply_lora returned, or none with LoRADense layers."
        check_instance(name, "module", module, Adapted, fix=fix)
        factors = _factors(name, module.adapters, values(variables)[LORA])
        weights = by_path(overlay(values(variables)["params"], codes))
        sums = {
            path: with_product(weights[path], adapter, *factors[path])
            for path, adapter in module.adapters
        }
        merged["params"] = overlay(params, nest(sums))
    merged[QPARAMS] = without(codes, merged["params"])
    return {name: tree for name, tree in merged.items() if tree}
