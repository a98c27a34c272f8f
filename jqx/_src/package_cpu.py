"""The package jqx-cpu, kernels in C++ (the folder `cpu`): whether it is installed, and calls."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.custom_batching import custom_vmap

from .errors import fail

NAME = "jqx_cpu"
FAST = ("AVX-512 VNNI", "AVX-512 BF16", "AMX")
"""Instruction sets for which its kernels are used: they were measured to be faster than the code of
XLA, which also multiplies bfloat16 and int8 by AMX where the processor has it.
"""

BFLOATS = ("AVX-512 BF16", "AMX")
"""Instruction sets whose kernels multiply bfloat16 directly."""


@functools.cache
def is_installed() -> bool:
    """Whether the package is installed and used on this processor, because of its instruction set
    or because an environment variable selects one.
    """
    if importlib.util.find_spec(NAME) is None:
        return False
    package = importlib.import_module(NAME)
    return package.kernels() in FAST or bool(package.CHOSEN)


def has_bfloats() -> bool:
    """Whether its kernels multiply bfloat16 directly."""
    return is_installed() and importlib.import_module(NAME).kernels() in BFLOATS


@functools.cache
def check_version() -> None:
    """Raises an ImportError if the package has another version than jqx."""
    jqx, package = importlib.import_module("jqx"), importlib.import_module(NAME)
    if package.__version__ != jqx.__version__:
        raise fail(
            "pack_for",
            "the packages jqx and jqx-cpu have different versions.",
            given=f"jqx {jqx.__version__} and jqx-cpu {package.__version__}",
            expected="the same version",
            fix="build both from one repository, pip install ./cpu, or uninstall jqx-cpu.",
            error=ImportError,
        )


def handlers() -> tuple[str, ...]:
    """Returns the names by which XLA calls the kernels."""
    return tuple(f"{NAME}_{name}" for name in importlib.import_module(NAME).HANDLERS)


def call(name: str, result: Any, *given: jax.Array, **options: Any) -> Any:
    """Calls a kernel, which has a result, or several, of some types; a tuple of numbers among the
    options becomes an array of float32.
    """
    check_version()
    options |= {k: np.asarray(v, np.float32) for k, v in options.items() if isinstance(v, tuple)}
    return jax.ffi.ffi_call(f"{NAME}_{name}", result)(*given, **options)


def _of_rows(name: str, *each: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a kernel that computes some numbers for each row of float32 [M, K]."""

    @custom_vmap
    def find(x: jax.Array) -> jax.Array:
        return call(name, jax.ShapeDtypeStruct((x.shape[0], *each), x.dtype), x)

    @find.def_vmap
    def _(size: int, _: Any, x: jax.Array) -> tuple[jax.Array, bool]:
        return find(x.reshape(-1, x.shape[-1])).reshape(size, -1, *each), True

    return find


magnitudes = _of_rows("magnitudes")
"""Returns the bits of the largest magnitude of each row; NaN is above all numbers."""

ranges = _of_rows("ranges", 3)
"""Returns the least and the largest number and the number of NaN of each row, float32 [M, 3]."""


def has_groups(length: int, size: int, bits: int) -> bool:
    """Whether there is a kernel for codes with this many bits in groups along an axis."""
    if bits not in (8, 4, 2) or length * bits % 8:
        return False
    in_lane = 32 // bits
    few = size in (2 * in_lane, 4 * in_lane, 8 * in_lane) or size % (16 * in_lane) == 0
    return size == length or (length % size == 0 and few)
