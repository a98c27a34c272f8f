"""Leaves of NumPy arrays, put on devices; the scale of a QTensor in step with its codes."""

from collections.abc import Callable
from typing import Any

import jax
from jax import dtypes
from jax.sharding import Sharding

from .._checks import require_that
from .._errors import message
from ..tensor._shared import put

Shardings = Sharding | Callable[[str, Any], Sharding | None] | None
"""One for all leaves, or a function of the path and the abstract leaf."""


def sharding_of(shardings: Shardings, path: str, spec: Any) -> Sharding | None:
    """Returns where a leaf is put; `None` for the default device."""
    found = shardings
    if callable(shardings) and not isinstance(shardings, Sharding):
        found = shardings(path, spec)
    require_that(
        found is None or isinstance(found, Sharding),
        error=TypeError,
        function="interop.tree",
        problem=f"`sharding` says no place for {path!r}.",
        given=f"an object of type {type(found).__name__}",
        expected="a jax.sharding.Sharding, or None",
        mend="return for example NamedSharding(mesh, PartitionSpec('model')).",
    )
    assert found is None or isinstance(found, Sharding)
    return found


def placed(path: str, leaf: Any, sharding: Sharding) -> Any:
    """Returns an array or QTensor of NumPy arrays on devices: each gets its part alone."""
    for x in jax.tree.leaves(leaf):
        kept = dtypes.canonicalize_dtype(x.dtype)
        require_that(
            kept == x.dtype,
            error=ValueError,
            function="interop.tree",
            problem=f"{path!r} would lose numbers on a device.",
            given=f"{x.dtype.name}, which JAX would cut to {kept.name}",
            expected="dtypes that JAX has",
            mend="return None for this path, which leaves it in NumPy, or set jax_enable_x64.",
        )
    try:
        return put("interop.tree", leaf, sharding, path)
    except (ValueError, IndexError) as error:
        text, *_ = str(error).strip().splitlines() or [""]
        raise ValueError(
            message(
                "interop.tree",
                f"{path!r} cannot be put where `sharding` says.",
                given=f"shape {tuple(leaf.shape)}, {sharding}: {text}",
                expected="as many axes as the array has at most, whose parts divide its sizes",
                mend="return another sharding for this path.",
            )
        ) from error
