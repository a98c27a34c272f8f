"""Tiles of a product on a TPU: what is filled up."""

import jax.numpy as jnp
import pytest

from jqx._src.kernels.products_tpu import tiles_of


@pytest.mark.parametrize("k", [4096, 14336])
def test_tiles_of_rows_are_as_full_as_each_other(k):
    for m in (1, 8, 31, 512, 1696, 1697, 2048, 4096, 5000, 8192, 100_000):
        tiles = tiles_of(m, k, 4096, 128, [jnp.float32], 2)
        count = -(-m // tiles.m)
        assert tiles.m == m or tiles.m % 16 == 0
        assert tiles.m * count - m < 16 * count
