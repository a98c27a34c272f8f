"""Scales that are to be learned: which of them get a gradient."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx._src.modules.quantized_function import warn_of_scales_without_gradient

PARTS = r"jqx\.learn_scales: .+(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+lsq.+"
X, W = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 8), (8, 4)))


def planned(gradient, calibrator):
    spec = {"gradient": gradient, "calibrator": calibrator}
    policy = jqx.presets.w8a8(weight=spec, activation=spec)
    return jqx.make_plan(lambda w, x: x @ w, policy)(W, X)


@pytest.mark.parametrize(
    ("gradient", "calibrator", "fact"),
    [
        ("ste", "absmax", "start with a gradient of 0(.|\n)*gradient ste at :weight\n"),
        (
            "ste_unclipped",
            "mse",
            "no gradient(.|\n)*ste_unclipped at :weight, :dot_general:lhs\n",
        ),
        ("ste", "mse", None),
        ("lsq", "absmax", None),
    ],
)
def test_it_warns_of_scales_that_stay(gradient, calibrator, fact):
    plan = planned(getattr(jqx.gradients, gradient), getattr(jqx.calibrators, calibrator))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_scales_without_gradient(plan)
    assert len(caught) == (fact is not None)
    for warning in caught:
        assert re.fullmatch(PARTS, str(warning.message))
        assert re.search(fact, str(warning.message))
        assert warning.filename == __file__


def test_learn_scales_warns_at_the_line_of_the_user():
    model = jqx.nnx.Linear(4, 2, policy=jqx.presets.w8a8(), rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match="start with a gradient of 0") as caught:
        jqx.nnx.learn_scales(model, jnp.ones((1, 4)), scales="dynamic")
    assert [warning.filename for warning in caught] == [__file__]
