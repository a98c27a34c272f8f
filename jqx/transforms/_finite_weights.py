"""The check that weights are finite, before they are quantized."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._errors import fail

_MOST = 2**22
"""Maximum number of elements that are looked at at once on the host."""


def check_finite_weight(function: str, x: Any, path: str) -> None:
    """Raises if a weight holds a NaN or an infinity. Traced and abstract ones are not checked."""
    if isinstance(x, jax.ShapeDtypeStruct) or not _compat.is_concrete(x):
        return
    if not jnp.issubdtype(x.dtype, jnp.inexact) or _is_finite(x):
        return
    nans, bad = (int(np.asarray(jnp.sum(f(x)))) for f in (jnp.isnan, lambda x: ~jnp.isfinite(x)))
    counts = ((nans, "NaN"), (bad - nans, "infinite"))
    raise fail(
        function,
        f"the weight {path!r} is not finite.",
        given=f"{' and '.join(f'{n} {kind}' for n, kind in counts if n)} of {x.size} elements",
        expected="finite numbers: one other value would spoil a scale, and all that share it",
        fix="replace these values, or add a rule that leaves this weight in float.",
    )


def _is_finite(x: Any) -> bool:
    if isinstance(x, jax.Array) and _is_elsewhere(x):
        return bool(jnp.isfinite(x).all())
    flat = np.asarray(x).reshape(-1)
    parts = range(0, flat.size, _MOST)
    return all(np.isfinite(flat[start : start + _MOST]).all() for start in parts)


def _is_elsewhere(x: jax.Array) -> bool:
    """Whether an array is not in the memory of this process, so that reading it would copy it."""
    return len(x.devices()) > 1 or next(iter(x.devices())).platform != "cpu"
