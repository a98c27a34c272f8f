import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.calibrators import Fixed, fixed

from ..ops.refusals import assert_refused
from .oracles import BLOCKED, SHAPE, affine


@pytest.mark.parametrize("granularity, sizes", BLOCKED, ids=str)
@pytest.mark.parametrize("low, high", [(-1.5, 4.0), (1.0, 3.0), (-3.0, -1.0), (-2.0, 2.0)])
def test_the_range_is_the_given_one_for_every_scale(granularity, sizes, low, high):
    x = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), jnp.float32)
    for qtype, symmetric in [("int8", True), ("uint4", False)]:
        spec = jqx.QSpec(qtype, granularity, symmetric, fixed(low, high))
        scale, zero = affine(np.float32(low), np.float32(high), qtype, symmetric)
        empty = spec.calibrator.empty(granularity.scale_shape(SHAPE))
        for found in (spec.calibrator.fit(x, spec), spec.calibrator.affine(empty, spec)):
            assert found.scale.shape == granularity.scale_shape(SHAPE)
            assert (np.asarray(found.scale) == scale).all()
            assert symmetric or (np.int64(found.zero_point) == zero).all()


def test_the_function_makes_the_value():
    assert fixed(-1, 2) == Fixed(-1.0, 2.0)
    assert str(fixed(-1, 2)) == "fixed(-1.0, 2.0)"


@pytest.mark.parametrize(
    "low, high, error, fact",
    [
        (1.0, 1.0, ValueError, "empty"),
        (2.0, 1.0, ValueError, "low < high"),
        (-np.inf, 1.0, ValueError, "finite"),
        (0.0, np.nan, ValueError, "finite"),
        ("0", 1.0, TypeError, "low"),
        (0.0, None, TypeError, "high"),
        (False, 1.0, TypeError, "low"),
        (jnp.zeros(()), 1.0, TypeError, "low"),
    ],
)
def test_what_is_no_range_is_refused(low, high, error, fact):
    assert_refused(lambda: fixed(low, high), (), error, "calibrators.fixed", fact)
