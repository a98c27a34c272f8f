"""`jax_debug_nans` and `jax_debug_infs` stop nothing where the data are clean."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jqx
from jqx import calibrators

from ..models.transforms import normal

FLAGS = {"nans": jax.debug_nans, "infs": jax.debug_infs}
CALIBRATORS = [
    *(calibrators.absmax, calibrators.minmax, calibrators.rms(3.0)),
    *(calibrators.delayed, calibrators.fixed(-3, 3)),
    *(
        pytest.param(calibrator, marks=pytest.mark.slow)
        for calibrator in (*(calibrators.percentile, calibrators.mse, calibrators.hqq),)
    ),
]


def f(w, x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x @ w[0], w)[0]


@pytest.mark.many
@pytest.mark.parametrize("calibrator", CALIBRATORS, ids=str)
def test_clean_data_pass(calibrator):
    w, x = normal(0, 2, 8, 8), normal(1, 5, 8)
    symmetric = calibrator not in (calibrators.minmax, calibrators.percentile)
    spec = jqx.QSpec(jnp.int8, symmetric=symmetric, calibrator=calibrator)
    weight = jqx.QSpec(jnp.int4, jqx.per_group(3, tail=True))
    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(weight=weight, activation=spec, output=spec)]))(
        w, x
    )
    with contextlib.ExitStack() as stack:
        for flag in FLAGS.values():
            stack.enter_context(flag(True))
        stats = jqx.calibrate(f, plan)(w, x)[1]
        affines = jqx.affines(plan, jqx.merge_stats(plan, stats, stats))
        jqx.simulate(f, plan, affines)(w, x)
        jqx.convert(f, plan, affines)(jqx.quantize_params(w, plan), x)
