"""Pallas, which is imported when the first kernel is traced, and the call of a kernel."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import _compat, _compat_kernels
from .._errors import fail, message


@functools.cache
def pl() -> Any:
    """Returns the module that is common to all platforms."""
    return importlib.import_module("jax.experimental.pallas")


@functools.cache
def tpu() -> Any:
    """Returns the module for TPUs."""
    return importlib.import_module("jax.experimental.pallas.tpu")


@functools.cache
def triton() -> Any:
    """Returns the module for GPUs, whose kernels Triton compiles.

    Raises:
      ImportError: this release of JAX does not have it.
    """
    try:
        return importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        raise fail(
            "pack_for",
            "kernels for GPUs are compiled by Triton, which this release of JAX does not support.",
            given=f"jax {jax.__version__}",
            expected="a release with jax.experimental.pallas.triton, such as 0.12",
            fix="install such a release, or restore the default layout: q.unpack().",
            error=ImportError,
        ) from error


def call(
    kernel: Callable[..., None],
    name: str,
    result: Any,
    arrays: Sequence[jax.Array],
    *,
    multiplies: DTypeLike,
    interpret: bool,
    chips: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Calls a kernel on arrays.

    Args:
      kernel: a function of references to blocks of the arrays and of the results.
      name: its name in a compiled program.
      result: shape and dtype of its result, or a list of them.
      arrays: the arrays that it reads.
      multiplies: the dtype that matrix units multiply, which `jqx.lowering` shows.
      interpret: whether to run it step by step on any platform, as tests do.
      chips: the kinds of TPUs that it supports, if it does not support all of them.
      **options: options of `pallas_call`.

    Raises:
      ValueError: on lowering, if the program is exported, is partitioned over devices by the
        compiler, or is for a TPU of another kind.
    """
    arrays = _compat.vary_alike(*arrays)
    axes = _compat.varies_along(arrays[0])
    if axes:
        result = jax.tree.map(lambda shape: _compat.shape_that_varies(shape, axes), result)
    if not interpret:
        texts = {"exported": _EXPORTED, "partitioned": _PARTITIONED, "other": _OTHER}
        first = _compat_kernels.for_kernel(arrays[0], chips=chips, **texts)
        arrays = (first, *arrays[1:])
    run = pl().pallas_call(kernel, result, name=name, interpret=interpret, **options)
    with jax.named_scope(f"multiplies_{_name_in_hlo(jnp.dtype(multiplies))}"):
        return run(*arrays)


def _name_in_hlo(dtype: jnp.dtype) -> str:
    kinds = {"float8_": "f8", "bfloat": "bf", "float": "f", "uint": "u", "int": "s"}
    start = next(kind for kind in kinds if dtype.name.startswith(kind))
    return kinds[start] + dtype.name[len(start) :]


_EXPORTED = message(
    "jax.export",
    "a kernel of jqx cannot be exported: its program is valid only for one release of JAX.",
    given="a weight that pack_for, or target=, has laid out for a kernel",
    expected="weights in the default layout",
    fix="pass target=False to jqx.ptq, or leave out target= and pack_for; q.unpack() restores the "
    "default layout.",
)

_PARTITIONED = message(
    "jax.jit",
    "a compiler cannot partition a kernel of jqx over devices: each would read whole arrays.",
    given="a weight or cache that is laid out for a kernel, in a program for several devices",
    expected="one device, or the kernel in a jax.shard_map over all axes of the mesh",
    fix="call it in jax.shard_map, or pass target=False to jqx.ptq, or leave out target= and "
    "pack_for; q.unpack() restores the default layout.",
)

_OTHER = message(
    "pack_for",
    "a weight is laid out for another TPU: this one does not convert its codes.",
    given="{chip}, and codes that are stored as float4, the layout for target='tpu7x'",
    expected="TPU7x, or codes that are stored as uint4",
    fix="lay the weights out for this machine: jqx.pack_for(params, 'tpu').",
)
