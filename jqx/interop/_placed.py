"""Puts leaves of NumPy arrays on devices, the scale of a QTensor like its codes."""

from collections.abc import Callable
from typing import Any

import jax
from jax import dtypes
from jax.sharding import Sharding

from .._errors import fail
from ..tensor._shared import put

Shardings = Sharding | Callable[[str, Any], Sharding | None] | None
"""A sharding for all leaves, or a function of the path and the abstract leaf."""


def sharding_of(shardings: Shardings, path: str, spec: Any) -> Sharding | None:
    """Returns the sharding of a leaf; `None` for the default device."""
    found = shardings
    if callable(shardings) and not isinstance(shardings, Sharding):
        found = shardings(path, spec)
    if found is not None and not isinstance(found, Sharding):
        raise fail(
            "interop.tree",
            f"`sharding` does not return a sharding for {path!r}.",
            given=f"an object of type {type(found).__name__}",
            expected="a jax.sharding.Sharding, or None",
            fix="return for example NamedSharding(mesh, PartitionSpec('model')).",
            error=TypeError,
        )
    assert found is None or isinstance(found, Sharding)
    return found


def placed(path: str, leaf: Any, sharding: Sharding) -> Any:
    """Puts an array or QTensor of NumPy arrays on devices; each device gets only its part."""
    for x in jax.tree.leaves(leaf):
        kept = dtypes.canonicalize_dtype(x.dtype)
        if kept != x.dtype:
            raise fail(
                "interop.tree",
                f"{path!r} would lose bits on a device.",
                given=f"{x.dtype.name}, which JAX would cut to {kept.name}",
                expected="dtypes that JAX supports",
                fix="return None for this path, which leaves it in NumPy, or set jax_enable_x64.",
            )
    try:
        return put("interop.tree", leaf, sharding, path)
    except (ValueError, IndexError) as error:
        text, *_ = str(error).strip().splitlines() or [""]
        raise fail(
            "interop.tree",
            f"{path!r} does not fit its sharding.",
            given=f"shape {tuple(leaf.shape)}, {sharding}: {text}",
            expected="at most as many axes as the array has, with parts that divide its sizes",
            fix="return another sharding for this path.",
        ) from error
