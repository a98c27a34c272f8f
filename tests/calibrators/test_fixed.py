import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.statistics.calibrators import Fixed
from jqx.calibrators import fixed

from ..oracles.calibrators import BLOCKED, SHAPE, affine, draw
from ..oracles.refusals import assert_refused


@pytest.mark.parametrize("low, high", [(-1.5, 4.0), (1.0, 3.0), (-3.0, -1.0), (-2.0, 2.0)])
def test_the_range_is_the_given_one_for_every_scale(low, high):
    specs = [
        jqx.QSpec(qtype, granularity, symmetric, fixed(low, high))
        for granularity, _ in BLOCKED
        for qtype, symmetric in [("int8", True), ("uint4", False)]
    ]

    @jax.jit
    def both(x):
        empties = [spec.calibrator.empty(spec.granularity.scale_shape(SHAPE)) for spec in specs]
        return [
            (spec.calibrator.fit(x, spec), spec.calibrator.affine(empty, spec))
            for spec, empty in zip(specs, empties, strict=True)
        ]

    for spec, pair in zip(specs, both(draw(SHAPE)), strict=True):
        scale, zero = affine(np.float32(low), np.float32(high), spec.qtype, spec.symmetric)
        for found in pair:
            assert found.scale.shape == spec.granularity.scale_shape(SHAPE)
            assert (np.asarray(found.scale) == scale).all()
            assert spec.symmetric or (np.int64(found.zero_point) == zero).all()


def test_the_function_makes_the_value():
    assert fixed(-1, 2) == Fixed(-1.0, 2.0)
    assert str(fixed(-1, 2)) == "fixed(-1.0, 2.0)"


@pytest.mark.parametrize(
    "low, high, error, fact",
    [
        (1.0, 1.0, ValueError, "empty"),
        (2.0, 1.0, ValueError, "low 2.0 is not below high 1.0"),
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
