"""Pallas, imported when the first kernel is traced, and what every call of a kernel has."""

import functools
import importlib
from typing import Any


@functools.cache
def pl() -> Any:
    """Returns the module of what is common to all platforms."""
    return importlib.import_module("jax.experimental.pallas")


@functools.cache
def tpu() -> Any:
    """Returns the module for TPUs."""
    return importlib.import_module("jax.experimental.pallas.tpu")


@functools.cache
def triton() -> Any:
    """Returns the module for GPUs, of kernels that Triton compiles."""
    return importlib.import_module("jax.experimental.pallas.triton")
