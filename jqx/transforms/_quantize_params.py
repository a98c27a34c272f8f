"""`quantize_params`: the weights of a plan become QTensors; and floats again."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from .. import _compat
from .._calls import called
from .._checks import require_that
from ..calibrators import Affine
from ..tensor import QSpec, QTensor
from ..tensor._shared import check_target
from ._arguments import check_plan
from ._paths import Params, flatten
from ._plan import Plan
from ._signature import parameter_line
from ._trace import is_parameter, is_quantized


@called("quantize_params", "pass for example jqx.quantize_params(params, plan).")
def quantize_params(
    params: Any,
    plan: Plan,
    affines: Mapping[str, Affine] | None = None,
    *,
    donate: bool = False,
    target: str | None = None,
) -> Any:
    """Returns `params` with every planned weight as a QTensor, rounded to nearest.

    Args:
      params: the argument of `f` that holds its weights; a tuple of arguments where the plan was
        made with several. Leaves may be `jax.ShapeDtypeStruct`, which gives abstract QTensors.
      plan: from `make_plan`.
      affines: scales to use instead of the calibrators', by key `<path>:weight`. Entries for
        activations are not read here.
      donate: whether each float weight that is a JAX array is deleted as soon as its codes are
        ready: then no more is held than all float weights, one of them again and its codes. An
        array that is a leaf more than once goes with its last, and stays where one is not planned.
      target: `"cpu"`, `"gpu"` or `"tpu"`, such as `jax.default_backend()`, lays the codes out as
        `jqx.pack_for` does: a product of few rows reads them several times as fast. `None` leaves
        them plain, as files keep them.

    Returns:
      The same tree; leaves that the plan does not quantize are the very same objects.

    Raises:
      TypeError: `plan` is no `Plan`.
      ValueError: a weight of the plan is missing, has another shape or dtype, or is quantized
        already; `donate=True` under `jax.jit`; `target` is unknown.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda p, x: x @ p["w"] + p["b"]
      >>> params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(params, jnp.ones((1, 4)))
      >>> jqx.quantize_params(params, plan)["w"]
      QTensor(int8[4, 3] per_axis(1), scale float32[1, 3], dtype=float32, 24 bytes)
    """
    check_plan("quantize_params", plan, params, order="quantize_params(params, plan)")
    if target is not None:
        check_target("quantize_params", target, None)
    plan.check_affines("quantize_params", affines)
    given = affines or {}
    rooted = _rooted(params, plan)
    tree = jax.tree.structure(rooted, is_leaf=is_quantized)
    named = named_leaves("quantize_params", rooted, plan)
    for name, leaf in named:
        require_that(
            plan.weight_at(name) is None or not is_quantized(leaf),
            error=ValueError,
            function="quantize_params",
            problem=f"the weight {name!r} is quantized already.",
            given=repr(leaf) if is_quantized(leaf) else "",
            expected="a float array",
            mend="pass the float parameters.",
        )
    lines = [
        parameter_line(name, leaf)
        for name, leaf in named
        if name is not None and is_parameter(leaf)
    ]
    plan.check_parameters("quantize_params", lines)
    weights = [plan.weight_at(name) for name, _ in named]
    last_use = {id(leaf): place for place, (_, leaf) in enumerate(named)}
    stays = {id(leaf) for weight, (_, leaf) in zip(weights, named, strict=True) if weight is None}
    leaves = []
    for place, (weight, (_, leaf)) in enumerate(zip(weights, named, strict=True)):
        if weight is None:
            leaves.append(leaf)
            continue
        quantized = quantize_weight(leaf, weight.spec, given.get(weight.key))
        leaves.append(quantized if target is None else quantized.pack_for(target))
        if donate and last_use[id(leaf)] == place and id(leaf) not in stays:
            _delete(leaf, leaves[-1])
    converted = jax.tree.unflatten(tree, leaves)
    if isinstance(plan.params, int):
        return converted
    return tuple(converted[position] for position in plan.params)


@called("dequantize_params", "pass one tree: jqx.dequantize_params(params).")
def dequantize_params(params: Any) -> Any:
    """Returns `params` with every QTensor as the float array that it stands for.

    Args:
      params: any pytree; leaves that are no QTensors are the very same objects.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> q = jqx.QTensor.quantize(jnp.array([1.0, -127.0]), jqx.QSpec(jnp.int8))
      >>> jqx.dequantize_params({"w": q})
      {'w': Array([   1., -127.], dtype=float32)}
    """
    return jax.tree.map(
        lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf, params, is_leaf=is_quantized
    )


def named_leaves(function: str, params: Any, plan: Plan) -> list[tuple[str | None, Any]]:
    """Returns the leaves of parameters, QTensors whole, each with the name that the plan has, or
    `None` where it is no weight.
    """
    flat = flatten(params)
    names = plan.parameters.name(function, [keys for keys, _ in flat])
    return [(name, leaf) for name, (_, leaf) in zip(names, flat, strict=True)]


def quantize_weight(x: Any, spec: QSpec, affine: Affine | None = None) -> QTensor:
    """Quantizes one weight with the scale given, or with its calibrator's. One program is compiled
    for all weights that are alike.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(partial(quantize_weight, spec=spec, affine=affine), x)
    quantize = _compiled if _compat.is_concrete(x) else QTensor.quantize
    return quantize(x, spec, affine)


_compiled = jax.jit(QTensor.quantize, static_argnames="spec")


def _delete(x: Any, quantized: QTensor) -> None:
    """Frees a float weight once its codes are there."""
    require_that(
        _compat.is_concrete(x),
        error=ValueError,
        function="quantize_params",
        problem="`donate` has no meaning under jax.jit.",
        given="donate=True and traced parameters",
        expected="donate=False",
        mend="call quantize_params outside of jit, or donate the argument: jax.jit(..., "
        "donate_argnums=...).",
    )
    if isinstance(x, jax.Array):
        jax.block_until_ready(quantized)
        x.delete()


def _rooted(params: Any, plan: Plan) -> Any:
    """Returns the parameters under the paths that the plan knows them by."""
    check_arguments("quantize_params", plan.params, params)
    return params if isinstance(plan.params, int) else dict(zip(plan.params, params, strict=True))


def check_arguments(function: str, places: Params, params: Any) -> None:
    """Checks that there is a tuple of arguments where weights stand in several."""
    require_that(
        isinstance(places, int)
        or (isinstance(params, (tuple, list)) and len(params) == len(places)),
        error=ValueError,
        function=function,
        problem="the weights stand in several arguments.",
        given=f"an object of type {type(params).__name__}",
        expected="a tuple of as many arguments as params= names",
        mend="pass the arguments named in params=, as a tuple in that order.",
    )
