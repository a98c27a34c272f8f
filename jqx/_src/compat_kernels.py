"""Lowering of programs that contain a kernel, with JAX names that change between versions: see
`compat`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from .compat import vary_alike

_for_kernel = jex_core.Primitive("jqx_for_kernel")
_for_kernel.def_impl(lambda x, **_: x)
_for_kernel.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_for_kernel, lambda cotangent, x, **_: [cotangent])
batching.defvectorized(_for_kernel)


def _is_partitioned(ctx: Any, in_shard_map: bool = True) -> bool:
    """Whether the compiler partitions a program over devices. Unless `in_shard_map`, a `shard_map`
    over several devices counts as well.
    """
    around = ctx.module_context.axis_context
    if hasattr(around, "manual_axes"):  # in a shard_map
        is_whole = around.manual_axes == frozenset(around.mesh.axis_names)
        return not is_whole if in_shard_map else around.mesh.size > 1
    return getattr(around, "num_devices", None) not in (None, 1)


def _lower_for_kernel(
    ctx: Any, x: Any, *, exported: str, partitioned: str, chips: tuple[str, ...], other: str
) -> list[Any]:
    if ctx.module_context.lowering_parameters.for_export:
        raise ValueError(exported)
    if _is_partitioned(ctx):
        raise ValueError(partitioned)
    chip = local_chip()
    if chips and chip and chip not in chips:
        raise ValueError(other.format(chip=chip))
    return [x]


mlir.register_lowering(_for_kernel, _lower_for_kernel)


def local_chip() -> str:
    """Returns the kind of TPU of this process, or an empty string."""
    return jax.devices()[0].device_kind if jax.default_backend() == "tpu" else ""


def for_kernel(
    x: jax.Array, *, exported: str, partitioned: str, chips: tuple[str, ...], other: str
) -> jax.Array:
    """Returns an array for a kernel to read. When it is lowered, a ValueError with these texts is
    raised: `exported` for `jax.export`, `partitioned` for a program that the compiler partitions
    over devices, and `other` on a TPU that is not among `chips`, if any are named.
    """
    texts = {"exported": exported, "partitioned": partitioned, "other": other}
    return _for_kernel.bind(x, chips=chips, **texts)


IN_EXPORTS = jax.make_user_context(False)
"""Whether exported functions call kernels as well."""

_alone = jex_core.Primitive("jqx_alone_or_in_parts")
_alone.multiple_results = True
_alone.def_impl(lambda *arrays, alone, **_: alone(*arrays))


def _lower_alone(
    ctx: Any, *arrays: Any, alone: Any, in_parts: Any, kinds: Any, in_shard_map: bool
) -> Any:
    exported = ctx.module_context.lowering_parameters.for_export
    plain = exported and not (in_shard_map and IN_EXPORTS.value)
    function = in_parts if plain or _is_partitioned(ctx, in_shard_map) else alone
    return mlir.lower_fun(function, multiple_results=True)(ctx, *arrays)


def _batch_alone(
    arrays: Any, axes: Any, *, alone: Any, in_parts: Any, kinds: Any, in_shard_map: bool
) -> Any:
    results = _bind_alone(jax.vmap(alone, axes), jax.vmap(in_parts, axes), arrays, in_shard_map)
    return results, [0] * len(results)


_alone.def_abstract_eval(lambda *_, kinds, **__: list(kinds))
mlir.register_lowering(_alone, _lower_alone)
batching.primitive_batchers[_alone] = _batch_alone


def _bind_alone(alone: Any, in_parts: Any, arrays: Any, in_shard_map: bool) -> list[Any]:
    kinds = tuple(x.aval for x in jax.make_jaxpr(in_parts)(*arrays).jaxpr.outvars)
    return _alone.bind(
        *arrays, alone=alone, in_parts=in_parts, kinds=kinds, in_shard_map=in_shard_map
    )


def alone_or_in_parts(
    alone: Callable[..., Any],
    in_parts: Callable[..., Any],
    *args: Any,
    in_shard_map: bool = True,
) -> Any:
    """Returns the result of `alone` if it is computed on one device, and otherwise of `in_parts`.
    The latter applies if the compiler partitions the program over devices, because it cannot
    partition a kernel, or if the program is exported and `IN_EXPORTS` is false. Both are functions
    of pytrees of arrays, with results of the same shape and dtype: an array, or a list of some.
    There is no derivative. Unless `in_shard_map`, `in_parts` applies in a `shard_map` over several
    devices and in all exports too.
    """
    arrays, structure = jax.tree.flatten(args)
    results = None

    def of_arrays(f: Callable[..., Any]) -> Callable[..., list[jax.Array]]:
        def run(*arrays: Any) -> list[jax.Array]:
            nonlocal results
            leaves, results = jax.tree.flatten(f(*jax.tree.unflatten(structure, arrays)))
            return leaves

        return run

    forms = of_arrays(alone), of_arrays(in_parts)
    leaves = _bind_alone(*forms, vary_alike(*arrays), in_shard_map)
    assert results is not None  # `in_parts` was traced for the types of its results
    return jax.tree.unflatten(results, leaves)
