"""What `apply_lora` of linen and of nnx share."""

import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ..checks import check_instance
from ..compat import is_concrete
from ..policy import Policy, Rule
from ..tensor.spec import QSpec
from ..transforms.adapters import Adapter, Use
from ..transforms.paths import is_whole


def base_policy(paths: Iterable[str], base: str | QSpec) -> Policy:
    """Returns a policy that quantizes the weights at some paths."""
    return Policy([Rule("|".join(map(re.escape, paths)), weight=base)])


def check_base(function: str, base: Any) -> None:
    """Checks how the weights of the base are quantized."""
    fix = "pass for example 'nf4:group=64', or None for floats."
    check_instance(function, "base", base, (str, QSpec, type(None)), fix=fix)
    if base is not None:
        base_policy(["w"], base)


def of_matrices(rank: int, alpha: float, axes: int) -> Adapter:
    """Returns the adapter of a layer whose kernel has this number of axes: a stack of matrices."""
    *stack, summed, kept = range(axes)
    return Adapter(rank, alpha, Use(tuple(stack), (summed,), (kept,)))


def initial_factors(adapter: Adapter, key: jax.Array, weight: jax.Array) -> list[jax.Array]:
    """Returns the factors of an adapter whose product is 0, with the dtype and the sharding of its
    weight. The first one is uniform, by He.
    """
    shape_a, shape_b = adapter.of_axes(weight.shape, adapter.rank)
    stack, last = range(len(adapter.use.stack)), len(shape_a) - 1
    init = jax.nn.initializers.variance_scaling(
        2.0, "fan_in", "uniform", in_axis=range(len(stack), last), out_axis=last, batch_axis=stack
    )
    factors = [init(key, shape_a, weight.dtype), jnp.zeros(shape_b, weight.dtype)]
    sharding = weight.sharding if is_concrete(weight) else None
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return factors
    specs = of_padded(adapter, sharding.spec, weight.ndim)
    return [
        jax.device_put(x, sharding.update(spec=jax.sharding.PartitionSpec(*spec)))
        for x, spec in zip(factors, specs, strict=True)
    ]


def of_padded(adapter: Adapter, names: Iterable[Any], rank: int) -> list[tuple[Any, ...]]:
    """Returns the names of the axes of both factors, from those of the first axes of a weight."""
    names = tuple(names)
    return adapter.of_axes([*names, *[None] * (rank - len(names))], None)


def with_product(weight: Any, adapter: Adapter, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a weight, as floats, plus its adapter."""
    weight = weight.dequantize() if is_whole(weight) else weight
    return weight + adapter.product(a, b).astype(weight.dtype)
