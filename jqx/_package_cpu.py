"""The package jqx-cpu, kernels in C++ (the folder `cpu`): whether it is there, and what it has."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.custom_batching import custom_vmap

from ._checks import require_that

NAME = "jqx_cpu"
FAST = ("AVX-512 VNNI", "AVX-512 BF16", "AMX")
"""Instructions with which its kernels are used. Those of AVX-512 were measured to be faster than
what XLA makes. Those of AMX were compared with plain loops on emulated tiles, and were not timed:
they are used since XLA multiplies int8 by AMX too, which kernels of AVX-512 VNNI would lose to.
"""

BFLOATS = ("AVX-512 BF16", "AMX")
"""Those that multiply bfloat16 as such."""


@functools.cache
def is_installed() -> bool:
    """Whether there is such a package, and it is used on this processor: for its instructions, or
    since an environment variable names some.
    """
    if importlib.util.find_spec(NAME) is None:
        return False
    package = importlib.import_module(NAME)
    return package.kernels() in FAST or bool(package.CHOSEN)


def has_bfloats() -> bool:
    """Whether its kernels multiply bfloat16 as such."""
    return is_installed() and importlib.import_module(NAME).kernels() in BFLOATS


def is_faster_beside_bfloats(is_plain: bool) -> bool:
    """Whether they multiply many rows of bfloat16 faster than XLA.

    Weights that are `is_plain`, with one scale a column and no zero points, XLA multiplies as
    bfloat16 too, by AMX where the processor has it; these kernels were not timed beside that. All
    others it multiplies in float32.
    """
    if not has_bfloats():
        return False
    return not is_plain or importlib.import_module(NAME).kernels() != "AMX"


@functools.cache
def check_version() -> None:
    """Raises an ImportError where the package is of another version."""
    jqx, package = importlib.import_module("jqx"), importlib.import_module(NAME)
    require_that(
        package.__version__ == jqx.__version__,
        error=ImportError,
        function="pack_for",
        problem="the packages jqx and jqx-cpu are of two versions.",
        given=f"jqx {jqx.__version__} and jqx-cpu {package.__version__}",
        expected="one version",
        mend="build both from one repository, pip install ./cpu, or uninstall jqx-cpu.",
    )


def handlers() -> tuple[str, ...]:
    """Returns the names by which XLA calls the kernels."""
    return tuple(f"{NAME}_{name}" for name in importlib.import_module(NAME).HANDLERS)


def call(name: str, result: jax.ShapeDtypeStruct, *given: jax.Array, **options: Any) -> jax.Array:
    """Calls a kernel; a tuple of numbers among the options is an array of float32."""
    check_version()
    options |= {k: np.asarray(v, np.float32) for k, v in options.items() if isinstance(v, tuple)}
    return jax.ffi.ffi_call(f"{NAME}_{name}", result)(*given, **options)


def _of_rows(name: str, *each: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a kernel that finds some numbers for each row of float32 [M, K]."""

    @custom_vmap
    def find(x: jax.Array) -> jax.Array:
        return call(name, jax.ShapeDtypeStruct((x.shape[0], *each), x.dtype), x)

    @find.def_vmap
    def _(size: int, _: Any, x: jax.Array) -> tuple[jax.Array, bool]:
        return find(x.reshape(-1, x.shape[-1])).reshape(size, -1, *each), True

    return find


magnitudes = _of_rows("magnitudes")
"""Returns the largest magnitude of each row: as bits, NaN above all."""

ranges = _of_rows("ranges", 3)
"""Returns the least and the largest number of each row, and how many are NaN, float32 [M, 3]."""


def has_groups(length: int, size: int, bits: int) -> bool:
    """Whether there is a kernel for codes of so many bits, in groups of a size along an axis."""
    if bits not in (8, 4, 2) or length * bits % 8:
        return False
    in_lane = 32 // bits
    few = size in (2 * in_lane, 4 * in_lane, 8 * in_lane) or size % (16 * in_lane) == 0
    return size == length or (length % size == 0 and few)
