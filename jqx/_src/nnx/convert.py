"""Converts the variables of a quantized model: weights to codes, statistics to scales."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..checks import check_instance
from ..errors import fail
from ..modules.quantized_function import (
    Mode,
    Scales,
    Search,
    check_learnable,
    check_scales,
    flatten,
    nest,
    overlay,
    unscaled,
)
from ..tensor.shardings import pack_for
from ..tensor.targets import check_target
from ..transforms.plan import Plan
from .quantized import Quantized
from .state import QParam, SearchResult, replace_nodes, split_nodes, write_values


def convert(
    model: nnx.Module,
    *args: Any,
    method: str = "__call__",
    scales: Scales | None = None,
    target: str | None = None,
    **kwargs: Any,
) -> None:
    """Converts a model to integer execution in place: its weights and the scales of activations.

    Every planned weight becomes a `QParam` at its path, without the metadata of its variable.
    Statistics and learned scales become fixed scales. The mode of every part becomes
    `Mode.CONVERT`, except that parts in `Mode.FLOAT` stay unchanged. A copy of the model is run
    once, so nothing else changes. Under `nnx.jit` (in graph mode, Flax's default) this is one
    program. Under `nnx.eval_shape` the model becomes an abstract one, into which a checkpoint can
    be restored.

    Args:
      model: from `quantize`, or with layers of `jqx.nnx`. It must be calibrated if
        activations have static scales.
      *args: positional arguments of the call; only their shapes and dtypes matter, unless `scales`
        is dynamic.
      method: name of the method to call.
      scales: `"dynamic"` fixes scales that are not calibrated from the values of this call; `None`
        leaves the choice to the model.
      target: `"cpu"`, `"gpu"` or `"tpu"` lays the weights out as `jqx.pack_for` does, for fast
        products with few rows; `None` keeps the default layout.
      **kwargs: keyword arguments of the call.

    Raises:
      TypeError: if `model` is not a module.
      ValueError: if no weight was quantized (no part is quantized or not in `Mode.FLOAT`, or all
        weights that the call uses are codes already); if a static activation or output has neither
        statistics nor a scale; if `target` is unknown.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> model = jqx.nnx.Linear(4, 2, policy=jqx.presets.w4a16(block=4), rngs=nnx.Rngs(0))
      >>> jqx.nnx.convert(model, jnp.ones((1, 4)))
      >>> model.mode
      <Mode.CONVERT: 'convert'>
      >>> model.kernel.get_value().qtype
      dtype(int4)
    """
    if target is not None:
        check_target("nnx.convert", target, None)
    parts = _search(Search.CODES, model, scales, method, args, kwargs)
    codes: dict[int, QParam] = {}
    for part, results in parts:
        of_part = results.get("codes", {})
        codes |= write_values(part, pack_for(of_part, target) if target else of_part)
    for part, results in parts:
        _add_scales(part, results.get("scales", {}))
        part.learned_scales, part.mode = None, Mode.CONVERT
    replace_nodes(model, codes)


def fix_scales(
    model: nnx.Module,
    *args: Any,
    method: str = "__call__",
    scales: Scales | None = None,
    **kwargs: Any,
) -> None:
    """Replaces the statistics of activations by scales, in place.

    In `Mode.SIMULATE` every call computes scales from statistics. This function computes them once,
    which saves time if a calibrator searches (`mse`, `percentile`). The mode of every part becomes
    `Mode.SIMULATE`, except that parts in `Mode.FLOAT` stay unchanged.

    Args:
      model: as for `convert`.
      *args: positional arguments of the call; only their shapes and dtypes matter, unless `scales`
        is dynamic.
      method: name of the method to call.
      scales: as for `convert`.
      **kwargs: keyword arguments of the call.

    Raises:
      TypeError: if `model` is not a module.
      ValueError: if the model has no static activations, or one of them has neither statistics nor
        a scale.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> options = {"policy": jqx.presets.w8a8(), "mode": jqx.nnx.Mode.CALIBRATE}
      >>> model = jqx.nnx.Linear(4, 2, **options, rngs=nnx.Rngs(0))
      >>> out = model(jnp.full((1, 4), 127.0))
      >>> jqx.nnx.fix_scales(model, jnp.ones((1, 4)))
      >>> float(model.quant_scales["kernel:dot_general:lhs"].scale[0, 0])
      1.0
    """
    for part, results in _search(Search.SCALES, model, scales, method, args, kwargs):
        _add_scales(part, results.get("scales", {}))
        part.mode = Mode.SIMULATE


def learn_scales(
    model: nnx.Module,
    *args: Any,
    method: str = "__call__",
    scales: Scales | None = None,
    **kwargs: Any,
) -> None:
    """Makes the scales of weights and of static activations parameters, in place.

    They become an `nnx.Param`, the attribute `learned_scales` of the quantized part: nested dicts
    of arrays with names such as `kernel:weight` and `kernel:dot_general:lhs`. Their initial values
    are those that the calibrators compute from the statistics of a calibration. The mode of every
    part becomes `Mode.SIMULATE`, except that parts in `Mode.FLOAT` stay unchanged.

    A scale learns only where its estimator has a gradient for it: use `jqx.gradients.lsq` in the
    specs of weights and of activations. The default, `ste`, gives a scale a gradient only from
    values that are clipped: exactly 0 at the start with an `absmax` calibrator, which clips none.
    For weights a `UserWarning` says so, and for all scales of an estimator that never moves one.
    Make the optimizer after this call: its state holds the scales too. Leave the scales
    out of weight decay, and give them a small rate, such as 1e-4 with Adam. Nothing keeps a scale
    positive: the sign of a negative one mirrors the codes, and a scale of 0 learns no more.

    Args:
      model: as for `convert`.
      *args: positional arguments of the call; only their shapes and dtypes matter, unless `scales`
        is dynamic.
      method: name of the method to call.
      scales: as for `convert`.
      **kwargs: keyword arguments of the call.

    Raises:
      TypeError: if `model` is not a module.
      ValueError: if nothing in it is quantized; if a static activation or output has neither
        statistics nor a scale; if a spec has a zero point or a scale in a special format (mxfp8,
        nvfp4), which has no gradient.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> lsq = {"gradient": jqx.gradients.lsq}
      >>> policy = jqx.presets.w8a8(weight=lsq, activation=lsq)
      >>> model = jqx.nnx.Linear(4, 2, policy=policy, rngs=nnx.Rngs(0))
      >>> jqx.nnx.learn_scales(model, jnp.ones((1, 4)), scales="dynamic")
      >>> sorted(model.learned_scales)
      ['kernel:dot_general:lhs', 'kernel:weight']
    """
    parts = _search(Search.LEARNED, model, scales, method, args, kwargs)
    learned = [
        (part, flatten(results["learned"])) for part, results in parts if results.get("learned")
    ]
    for _, affines in learned:
        check_learnable(affines)
    for part, _ in parts:
        part.quant_scales.set_value({})
        part.quant_stats.set_value({})
        part.learned_scales, part.mode = None, Mode.SIMULATE
    for part, affines in learned:
        entries = {key: affine.scale for key, affine in affines.items()}
        # A State, since nnx.Optimizer makes one of a dict, and then masks of optax do not fit.
        part.learned_scales = nnx.Param(nnx.State(nest(entries)))


def make_plan(model: Quantized, *args: Any, method: str = "__call__", **kwargs: Any) -> Plan:
    """Returns the plan of a call of a quantized model: every contraction and its rule.

    Args:
      model: a quantized layer, or the result of `quantize`.
      *args: positional arguments of the call; arrays or `jax.ShapeDtypeStruct`.
      method: name of the method to call.
      **kwargs: keyword arguments of the call.

    Raises:
      TypeError: if `model` is not quantized.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> model = jqx.nnx.Linear(4, 2, policy=jqx.presets.w8a8(), rngs=nnx.Rngs(0))
      >>> [site.path for site in jqx.nnx.make_plan(model, jnp.ones((1, 4))).sites]
      ['kernel']
    """
    fix = "pass a layer of jqx.nnx, or jqx.nnx.quantize(model, policy)."
    check_instance("nnx.make_plan", "model", model, Quantized, fix=fix)
    return model._q_plan(method, *args, **kwargs)


def _search(
    search: Search,
    model: nnx.Module,
    scales: Scales | None,
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[tuple[Quantized, dict[str, Any]]]:
    """Runs a copy of a model; returns its quantized parts and what the run found for each."""
    function = f"nnx.{search.function}"
    check_instance(function, "model", model, nnx.Module, fix="pass an nnx module.")
    if scales is not None:
        check_scales(function, scales)
    # Nodes among the arguments, which the call may write, are copied too.
    graph, leaves, insert = split_nodes(model, args, kwargs)
    model_copy, nodes = nnx.clone(graph)
    args, kwargs = insert(leaves, nodes)
    parts, twins = _parts(model), _parts(model_copy)
    for twin in twins:
        twin.mode = Mode.CONVERT if search is Search.CODES else Mode.SIMULATE
        twin.quant_dynamic = twin.quant_dynamic or scales == "dynamic"
        twin.quant_found = SearchResult({}, search=search)
    getattr(model_copy, method)(*args, **kwargs)
    results = [{} if x.quant_found is None else x.quant_found.get_value() for x in twins]
    if not any(values.get(search.value) for values in results):
        problem = "no part of the model has anything left to quantize."
        facts = f"{type(model).__name__} with {len(parts)} quantized parts"
        fix = "pass jqx.nnx.quantize(model, policy), not yet converted, and not in Mode.FLOAT."
        raise fail(function, problem, given=facts, fix=fix)
    return list(zip(parts, results, strict=True))


def _parts(model: nnx.Module) -> list[Quantized]:
    modules = [module for _, module in nnx.iter_modules(model) if isinstance(module, Quantized)]
    return [module for module in modules if module.mode is not Mode.FLOAT]


def _add_scales(part: Quantized, scales: Mapping[str, Any]) -> None:
    """Adds scales to those of a part. Statistics without new scales stay, for other methods."""
    merged = overlay(part.quant_scales.get_value(), scales)
    part.quant_scales.set_value(merged)
    part.quant_stats.set_value(unscaled(part.quant_stats.get_value(), merged))
