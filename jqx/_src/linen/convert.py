"""Converts the variables of a quantized module: weights to codes, statistics to scales."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import linen as nn
from flax.core import DenyList, unfreeze

from ..checks import check_instance
from ..errors import fail
from ..modules.quantized_function import (
    Mode,
    Scales,
    Search,
    by_path,
    check_learnable,
    check_scales,
    flatten,
    overlay,
    split,
    unscaled,
    without,
)
from ..tensor.shardings import pack_for
from ..tensor.targets import check_target
from ..transforms.plan import Plan
from .quantized import LEARNED, QPARAMS, SCALES, STATS, Quantized, searching

Variables = Mapping[str, Any]


def convert(
    module: nn.Module,
    variables: Variables,
    *args: Any,
    scales: Scales | None = None,
    target: str | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns variables for integer execution: quantized weights and the scales of activations.

    Runs the module once, so jit it if that takes long. Writes of that run, for example to a cache,
    are dropped. Under `jax.eval_shape` the result is an abstract target, into which a checkpoint
    can be restored.

    Args:
      module: a module in `Mode.CONVERT`, from `quantize` or made of the layers of `jqx.linen`.
      variables: its float variables; with the collection `quant_stats` of a calibration if
        activations have static scales.
      *args: positional arguments of the call, as for `module.apply`; only their shapes and dtypes
        matter, unless `scales` is dynamic.
      scales: `"dynamic"` fixes scales that are not calibrated from the values of this call; `None`
        leaves the choice to the module.
      target: `"cpu"`, `"gpu"` or `"tpu"` lays the weights out as `jqx.pack_for` does, for fast
        products with few rows; `None` keeps the default layout.
      **kwargs: keyword arguments of the call, such as `method=` and `rngs=`.

    Returns:
      The variables, with every planned weight moved from `params` to `qparams` at the same path, as
      a QTensor. Statistics in `quant_stats` are replaced by scales in `quant_scales`.

    Raises:
      ValueError: if no part of the module is in `Mode.CONVERT`, or its weights are quantized
        already; if a static activation or output has neither statistics nor a scale; if `target` is
        unknown.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> x, policy = jnp.ones((1, 4)), jqx.presets.w8a16()
      >>> variables = nn.Dense(2).init(jax.random.key(0), x)
      >>> module = jqx.linen.quantize(nn.Dense(2), policy, mode=jqx.linen.Mode.CONVERT)
      >>> jax.tree.map(lambda x: x.dtype.name, jqx.linen.convert(module, variables, x)["params"])
      {'bias': 'float32'}
    """
    if target is not None:
        check_target("linen.convert", target, None)
    new = _search(Search.CODES, module, variables, scales, args, kwargs)
    codes = pack_for(new[QPARAMS], target) if target else new[QPARAMS]
    collections = {name: unfreeze(tree) for name, tree in variables.items()}
    params, _ = split(collections.get("params", {}))
    params = without(params, codes)
    stats = unscaled(collections.get(STATS, {}), new.get(SCALES, {}))
    collections |= {"params": params, QPARAMS: codes, SCALES: new.get(SCALES, {}), STATS: stats}
    replaced = ("params", QPARAMS, SCALES, STATS)
    return {name: tree for name, tree in collections.items() if tree or name not in replaced}


def fix_scales(
    module: nn.Module,
    variables: Variables,
    *args: Any,
    scales: Scales | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns variables in which scales replace the statistics of activations.

    In `Mode.SIMULATE` every call computes scales from statistics. This function computes them once,
    which saves time if a calibrator searches (`mse`, `percentile`).

    Args:
      module: a module in `Mode.SIMULATE`.
      variables: its variables, with the statistics of a calibration.
      *args: positional arguments of the call, as for `module.apply`; only their shapes and dtypes
        matter, unless `scales` is dynamic.
      scales: as for `convert`. Values after layers of `jqx.linen` are the results of the quantized
        layers.
      **kwargs: keyword arguments of the call, such as `method=` and `rngs=`.

    Returns:
      The variables with scales in the collection `quant_scales`, and without `quant_stats`.

    Raises:
      ValueError: if nothing in it has static activations in `Mode.SIMULATE`, or one of them has
        neither statistics nor a scale.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> module, x = jqx.linen.Dense(2, policy=jqx.presets.w8a8()), jnp.full((1, 4), 127.0)
      >>> variables = module.init(jax.random.key(0), x)
      >>> fixed = jqx.linen.fix_scales(module, variables, x, scales="dynamic")
      >>> float(fixed["quant_scales"]["kernel:dot_general:lhs"].scale[0, 0])
      1.0
    """
    new = _search(Search.SCALES, module, variables, scales, args, kwargs)
    others = {name: tree for name, tree in variables.items() if name != STATS}
    stats = unscaled(variables.get(STATS, {}), new[SCALES])
    return {**others, SCALES: new[SCALES], **({STATS: stats} if stats else {})}


def learn_scales(
    module: nn.Module,
    variables: Variables,
    *args: Any,
    scales: Scales | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns variables in which the scales of weights and of static activations are parameters.

    Their initial values are those that the calibrators compute from the statistics of a
    calibration.

    A scale learns only where its estimator has a gradient for it: use `jqx.gradients.lsq` in the
    specs of weights and of activations. The default, `ste`, gives a scale a gradient only from
    values that are clipped: exactly 0 at the start with an `absmax` calibrator, which clips none.
    For weights a `UserWarning` says so, and for all scales of an estimator that never moves one.
    Make the optimizer from the result, since its state holds the scales too. Leave the scales out
    of weight decay, and give them a small rate, such as 1e-4 with Adam. Nothing keeps a scale
    positive: the sign of a negative one mirrors the codes, and a scale of 0 no longer learns.

    Args:
      module: a module in `Mode.SIMULATE`.
      variables: its variables, with the statistics of a calibration.
      *args: positional arguments of the call, as for `module.apply`; only their shapes and dtypes
        matter, unless `scales` is dynamic.
      scales: as for `convert`.
      **kwargs: keyword arguments of the call, such as `method=` and `rngs=`.

    Returns:
      The variables with scales in `params`, each next to its weight, with names such as
      `kernel:weight` and `kernel:dot_general:lhs`; without `quant_stats` and `quant_scales`.

    Raises:
      ValueError: if nothing in it is quantized in `Mode.SIMULATE`; if a static activation or output
        has neither statistics nor a scale; if a spec has a zero point or a scale in a special
        format (mxfp8, nvfp4), which has no gradient.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> lsq = {"gradient": jqx.gradients.lsq}
      >>> module = jqx.linen.Dense(2, policy=jqx.presets.w8a8(weight=lsq, activation=lsq))
      >>> variables = module.init(jax.random.key(0), jnp.ones((1, 4)))
      >>> learned = jqx.linen.learn_scales(module, variables, jnp.ones((1, 4)), scales="dynamic")
      >>> sorted(learned["params"])
      ['bias', 'kernel', 'kernel:dot_general:lhs', 'kernel:weight']
    """
    learned = _search(Search.LEARNED, module, variables, scales, args, kwargs)[LEARNED]
    check_learnable(flatten(learned))
    others = {name: tree for name, tree in variables.items() if name not in (STATS, SCALES)}
    return {**others, "params": overlay(unfreeze(others.get("params", {})), learned)}


def make_plan(
    module: Quantized,
    variables: Variables,
    *args: Any,
    method: str | Callable[..., Any] = "__call__",
    rngs: Any = None,
    **kwargs: Any,
) -> Plan:
    """Returns the plan of a call of a quantized module: every contraction and its rule.

    Args:
      module: a quantized layer, or the result of `quantize`.
      variables: its variables; arrays or `jax.ShapeDtypeStruct`.
      *args: positional arguments of the call, as for `module.apply`.
      method: the method to call: its name, or a function of the module.
      rngs: as for `module.apply`.
      **kwargs: keyword arguments of the method.

    Raises:
      TypeError: if `module` is not quantized.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> module, x = jqx.linen.Dense(2, policy=jqx.presets.w8a8()), jnp.ones((1, 4))
      >>> variables = module.init(jax.random.key(0), x)
      >>> [site.path for site in jqx.linen.make_plan(module, variables, x).sites]
      ['kernel']
    """
    fix = "pass a layer of jqx.linen, or jqx.linen.quantize(module, policy)."
    check_instance("linen.make_plan", "module", module, Quantized, fix=fix)

    def plan(module: Any, *args: Any, **kwargs: Any) -> Plan:
        return module._q_plan(method, *args, **kwargs)

    options: dict[str, Any] = {"method": plan, "mutable": _everything("plan"), "rngs": rngs}
    return nn.Module.apply(module, variables, *args, **options, **kwargs)[0]


def _search(
    search: Search,
    module: nn.Module,
    variables: Variables,
    scales: Scales | None,
    args: Any,
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Runs a module; returns the collections that its quantized parts write."""
    function = f"linen.{search.function}"
    if scales is not None:
        check_scales(function, scales)
    with searching(search, dynamic=scales == "dynamic"):
        options = {**kwargs, "mutable": _everything(search.value)}
        _, new = module.apply(variables, *args, **options)
    collection = {Search.CODES: QPARAMS, Search.SCALES: SCALES, Search.LEARNED: LEARNED}[search]
    is_found = bool(new.get(collection))
    if search is Search.CODES and is_found:
        is_found = by_path(new[QPARAMS]).keys() != by_path(variables.get(QPARAMS, {})).keys()
    if not is_found:
        mode = Mode.CONVERT if search is Search.CODES else Mode.SIMULATE
        problem = f"no part of the module is in {mode}, or all is quantized already."
        facts = f"{type(module).__name__} with collections {', '.join(variables)}"
        fix = f"pass module.clone(mode={mode}), and variables that are not yet converted."
        raise fail(function, problem, given=facts, fix=fix)
    return unfreeze(dict(new))


def _everything(call: str) -> DenyList:
    """Returns a filter of everything that a call may write; the writes are dropped. The filter
    holds the name of the call, so that Flax does not mix it up with a call of the user in its cache
    of traced calls.
    """
    return DenyList(("params", f"jqx:{call}"))
