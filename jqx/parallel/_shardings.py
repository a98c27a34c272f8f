"""Shardings of a model's parameters, for the QTensors that a plan makes of them."""

from typing import Any

from jax.sharding import Mesh

from .._calls import called
from .._checks import require_that
from ..transforms import Plan, quantize_params
from ..transforms._shared import floats_of, of_params


@called("parallel.shardings", "pass for example jqx.parallel.shardings(specs, plan, mesh=mesh).")
def shardings(tree: Any, plan: Any, *, mesh: Mesh | None = None, target: str | None = None) -> Any:
    """Returns where quantized parameters lie: the shardings of a model's floats, with a QTensor of
    shardings in the place of each weight that is quantized.

    A scale, and a zero point, is partitioned as its values are, and whole on every device along an
    axis whose elements share it. Where rows and weights are on the same devices (FSDP), compilers
    gather weights with scales in blocks as floats, unless `convert` is told to gather codes and
    scales, by `gather_axes` and the `shardings` of the floats. What this returns is a tree such as
    `jax.jit(in_shardings=)`, `jax.device_put` and, of PartitionSpecs, `jax.shard_map(in_specs=)`
    take.

    Args:
      tree: the parameters that the plan was made for, with a `jax.sharding.NamedSharding` or a
        `jax.sharding.PartitionSpec` in the place of each array; `None` where nothing is said. Of
        Flax's logical axes its own functions make it: `flax.linen.logical_to_mesh_sharding`,
        `flax.nnx.get_named_sharding`. A tuple where the weights stand in several arguments.
      plan: from `make_plan`; or the quantized parameters themselves, abstract ones too, for any
        layout that they have.
      mesh: makes NamedShardings of PartitionSpecs. `None` leaves these; how many parts there are
        is then that of the mesh around, see `jax.set_mesh`.
      target: for which weights are laid out, as in `quantize_params`; only with a plan.

    Returns:
      The tree with QTensors, and Segments, of shardings.

    Raises:
      TypeError: a leaf is no sharding.
      ValueError: elements that share a scale, or the codes of a byte, would be on two devices; an
        axis does not divide; the mesh is not known; the tree does not fit the plan; or `target`
        stands beside quantized parameters.

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
    if isinstance(plan, Plan):
        params = quantize_params(floats_of("parallel.shardings", plan, tree), plan, target=target)
    else:
        require_that(
            target is None,
            error=ValueError,
            function="parallel.shardings",
            problem="`target` has no use: quantized parameters lie as they lie.",
            given=f"target == {target!r}, and no plan",
            expected="target=None",
            mend="leave it out, or pass the plan.",
        )
        params = plan
    return of_params("parallel.shardings", tree, params, mesh)
