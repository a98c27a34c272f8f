import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.statistics.searches import members, rows_of

from ..arrays import on_device
from ..oracles.calibrators import BLOCKED, SHAPE, blocks


@pytest.mark.parametrize("granularity, sizes", BLOCKED, ids=str)
def test_a_row_holds_the_elements_that_share_a_scale(granularity, sizes):
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    groups = granularity.groups(SHAPE)
    rows, count = rows_of(on_device(x), groups, jnp.nan), members(groups)
    assert rows.shape == (*groups.scale_shape, groups.per_scale)
    assert (count.shape, count.dtype) == (groups.scale_shape, jnp.uint32)
    for place, block in blocks(x, sizes):
        row = np.asarray(rows[place])
        assert count[place] == block.size
        np.testing.assert_array_equal(np.sort(row)[: block.size], np.sort(block.ravel()))
        assert np.isnan(row).sum() == groups.per_scale - block.size


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 2)])
def test_arrays_without_axes_or_elements_have_rows(shape):
    groups = jqx.per_tensor().groups(shape)
    rows = rows_of(jnp.ones(shape), groups, 0)
    assert rows.shape == (*groups.scale_shape, int(np.prod(shape)))
    assert np.asarray(members(groups)).sum() == np.prod(shape)
