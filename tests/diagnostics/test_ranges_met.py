"""Primitives of real models in `ranges`: nothing that they name is unknown."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import jqx
from jqx.diagnostics import ranges


def test_a_value_that_is_named_to_be_kept_is_what_it_was():
    f = lambda _, x: checkpoint_name(jnp.minimum(x, 0.0), "kept")  # noqa: E731
    x = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    found = ranges(f, jqx.Policy([]), bounds={1: (-1.0, 0.5)})(0.0, x)
    assert not found.unknown and found.results == ((-1.0, 0.0),)
