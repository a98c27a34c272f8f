"""Models of others promote dtypes and ranks as JAX does by default."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _default_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
