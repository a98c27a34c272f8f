"""Strict promotion everywhere: a silent upcast or rank change fails a test. Four CPU devices."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Frees what the tests of a file have compiled: tens of thousands of programs in one process
    slow down every further compilation.
    """
    yield
    jax.clear_caches()
