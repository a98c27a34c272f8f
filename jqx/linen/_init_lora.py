"""Initializes the variables of a module with adapters from the quantized float module."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta, unfreeze

from .._calls import called
from .._checks import check_instance
from ..modules._shared import (
    Adapter,
    by_path,
    check_same_parameters,
    initial_adapters,
    nest,
    without,
)
from ..ptq import Quantized
from ..transforms._shared import is_array, is_whole
from ._lora import LORA, LoRADense
from ._state import QPARAMS, SCALES, State

_NAME = "linen.init_lora"


@called("linen.init_lora", "pass jqx.linen.init_lora(module, quantized, x).")
def init_lora(module: nn.Module, quantized: Quantized, *args: Any, **kwargs: Any) -> dict[str, Any]:
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
    check_instance(_NAME, "module", module, nn.Module, fix="pass the module to be trained.")
    fix = "pass the result of jqx.linen.ptq for the float module and its variables."
    check_instance(_NAME, "quantized", quantized, Quantized, fix=fix)
    shapes, layers, parts = _looked_at(module, args, kwargs)
    collections = {name: unfreeze(meta.unbox(tree)) for name, tree in quantized.params.items()}
    params = collections.pop("params")
    found = initial_adapters(_NAME, quantized.plan, quantized.maps, layers)
    values = by_path(params)
    check_same_parameters(_NAME, by_path(shapes.get("params", {})), values, parts)
    codes = {path: x for path, x in values.items() if is_whole(x)}
    adapters: dict[str, Any] = {}
    for path, (a, b) in found.items():
        before = path and f"{path}/"
        adapters |= {f"{before}a": a, f"{before}b": b}
    own = {"params": without(params, nest(codes)), QPARAMS: nest(codes), LORA: nest(adapters)}
    own[SCALES] = nest(quantized.affines)
    return {**collections, **{name: tree for name, tree in own.items() if tree}}


def _looked_at(
    module: nn.Module, args: Any, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Adapter], set[str]]:
    """Returns the shapes of the variables of a module, its layers with adapters, and the paths of
    all quantized parts.
    """
    fields: dict[str, tuple[int, float]] = {}
    parts: set[str] = set()

    def look(following: Any, args: Any, kwargs: Any, context: Any) -> Any:
        part = context.module
        if isinstance(part, State):
            parts.add("/".join(part.path))
        if isinstance(part, LoRADense):
            fields["/".join(part.path)] = part.rank, part.alpha
        return following(*args, **kwargs)

    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    arrays = {i: x for i, x in enumerate(leaves) if is_array(x)}

    def init(key: jax.Array, arrays: Mapping[int, Any]) -> Any:
        args, kwargs = tree.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        with nn.intercept_methods(look):
            return module.init(key, *args, **kwargs)

    shapes = unfreeze(meta.unbox(jax.eval_shape(init, jax.random.key(0), arrays)))
    layers = {}
    for path, (rank, alpha) in fields.items():
        own = shapes[LORA]
        for name in path.split("/") if path else ():
            own = own[name]
        layers[path] = Adapter(rank, alpha, own["a"].shape, own["b"].shape, own["a"].dtype)
    return shapes, layers, parts
