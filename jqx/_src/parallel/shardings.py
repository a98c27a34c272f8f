"""Shardings of the parameters of a model, for the QTensors that a plan makes of them."""

from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ..checks import called
from ..errors import fail
from ..tensor.shardings import shardings_of
from ..transforms.partitioned import LeafSharding, as_sharding_of_leaf, is_sharding, mesh_sizes
from ..transforms.paths import as_arguments, by_argument, parameter_of, path_of
from ..transforms.plan import Plan
from ..transforms.quantize_params import quantize_params


@called("parallel.shardings", "pass for example jqx.parallel.shardings(specs, plan, mesh=mesh).")
def shardings(tree: Any, plan: Any, *, mesh: Mesh | None = None, target: str | None = None) -> Any:
    """Returns the shardings of quantized parameters, from the shardings of a model's floats.

    In place of each quantized weight stands a QTensor of shardings. A scale or zero point is
    partitioned like its values. Along an axis whose elements share it, it is whole on every device.
    If rows and weights are on the same devices (FSDP), compilers gather weights with scales in
    blocks as floats, unless `convert` gathers codes and scales: pass it `gather_axes` and the
    `shardings` of the floats. `jax.jit(in_shardings=)`, `jax.device_put` and, for PartitionSpecs,
    `jax.shard_map(in_specs=)` accept the result.

    Args:
      tree: the parameters that the plan was made for, with a `jax.sharding.NamedSharding` or a
        `jax.sharding.PartitionSpec` in place of each array; `None` if it is not specified. For
        Flax's logical axes, `flax.linen.logical_to_mesh_sharding` and
        `flax.nnx.get_named_sharding` make it. A tuple if several arguments hold weights.
      plan: from `make_plan`; or the quantized parameters themselves, abstract ones too, in any
        layout.
      mesh: turns PartitionSpecs into NamedShardings. With `None` PartitionSpecs are kept, and the
        number of parts is that of the surrounding mesh, see `jax.set_mesh`.
      target: the platform whose weight layout is used, as in `quantize_params`; only with a plan.

    Returns:
      The tree with QTensors, and Segments, of shardings.

    Raises:
      TypeError: a leaf is not a sharding.
      ValueError: elements that share a scale, or the codes of a byte, would be on two devices; an
        axis cannot be divided evenly; the mesh is unknown; the tree does not fit the plan; or
        `target` is given with quantized parameters.

    Gradient: none.

    Example:
      >>> import jax, jqx, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> f = lambda p, x: x @ p["w"] + p["b"]
      >>> params = {"w": jnp.ones((4, 8)), "b": jnp.zeros(8)}
      >>> plan = jqx.make_plan(f, jqx.presets.w8a16())(params, jnp.ones((1, 4)))
      >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> found = jqx.parallel.shardings({"w": P("model"), "b": P()}, plan, mesh=mesh)
      >>> found["w"].values.spec, found["w"].scale.spec
      (P('model',), P(None, None))
    """
    name = "parallel.shardings"
    if isinstance(plan, Plan):
        params = quantize_params(_floats_of(name, plan, tree), plan, target=target)
    elif target is None:
        params = plan
    else:
        problem = f"`target` is not used, since quantized parameters keep their layout: {target!r}."
        raise fail(name, problem, fix="leave out target=, or pass the plan.")
    return _of_params(name, tree, params, mesh)


def _of_leaf(function: str, sharding: LeafSharding, leaf: Any, path: str) -> Any:
    """Returns a leaf with a sharding in place of each of its arrays; `None` stays.

    Raises:
      ValueError: if a PartitionSpec is given and the mesh is not known; or see `shardings_of`.
    """
    if sharding is None:
        return None
    sizes = mesh_sizes(function, sharding, path) if isinstance(sharding, PartitionSpec) else None
    return shardings_of(function, leaf, sharding, sizes, path)


def _floats_of(function: str, plan: Plan, tree: Any) -> Any:
    """Returns the parameters that a plan was made for, as shapes and dtypes, in the form of a tree
    of shardings. Leaves that are not its parameters stay as they are.
    """
    tree_of_params = by_argument(plan.params, tree)
    lines = map(parameter_of, plan.parameters.lines or ())
    float_shardings = {
        path: jax.ShapeDtypeStruct(shape, dtype)
        for path, dtype, shape in lines
        if not dtype.startswith("key<")  # random keys are no weights
    }
    named = plan.parameters.named(function, tree_of_params, is_sharding)
    leaves = [float_shardings.get(name or "", leaf) for name, leaf in named]
    floats = jax.tree.unflatten(jax.tree.structure(tree_of_params, is_leaf=is_sharding), leaves)
    return as_arguments(plan.params, floats)


def _of_params(function: str, tree: Any, params: Any, mesh: Mesh | None) -> Any:
    """Returns parameters with a sharding in place of each array. Leaves that are not arrays, and
    those without a sharding, are taken from `tree`.
    """

    def at(keys: Any, sharding: Any, leaf: Any) -> Any:
        path = path_of(keys)
        resolved = as_sharding_of_leaf(function, sharding, mesh, path)
        return _of_leaf(function, resolved, leaf, path) if hasattr(leaf, "shape") else resolved

    return jax.tree_util.tree_map_with_path(at, tree, params, is_leaf=is_sharding)
