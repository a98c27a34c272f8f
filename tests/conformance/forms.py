"""The ways in which every stored case is evaluated: each must give the same bits."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FORMS = (
    pytest.param("eager", marks=pytest.mark.slow),
    "jit",
    pytest.param("jit_constants", marks=pytest.mark.slow),
    pytest.param("vmap", marks=pytest.mark.slow),
)
X64 = os.environ.get("JAX_ENABLE_X64") == "1"


def evaluate(form: str, f: Callable[..., Any], operands: Sequence[np.ndarray | None]) -> list[Any]:
    """Evaluates `f(*operands)` in one form; `vmap` maps two copies and gives two results."""
    arrays = [None if a is None else jnp.asarray(a) for a in operands]
    match form:
        case "eager":
            return [f(*arrays)]
        case "jit":
            return [jax.jit(f)(*arrays)]
        case "jit_constants":
            return [jax.jit(lambda: f(*arrays))()]
        case "vmap":
            stacked = [None if a is None else jnp.stack([a, a]) for a in arrays]
            return list(jax.jit(jax.vmap(f))(*stacked))
    raise AssertionError(form)


def selected(cases: list, is_float64: Callable[[dict], bool]) -> list:
    """Keeps the float64 cases where x64 is on, and all others where it is off."""
    kept = [(case, arrays) for case, arrays in cases if is_float64(case) == X64]
    assert kept
    return kept
