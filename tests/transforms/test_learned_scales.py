"""Learned scales of weights that somebody forgets are an error where they can be seen."""

import re

import jax
import jax.numpy as jnp
import pytest

import jqx

from ..arrays import normal

PARTS = r"jqx\.[a-z_]+: .+(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+"
X, PARAMS = normal(0, 2, 8), {"w": normal(1, 8, 4), "v": normal(2, 4, 4)}


def f(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def test_parameters_that_hold_learned_scales_are_refused_without_them():
    """As `jqx.linen.learn_scales` returns them: each beside its weight."""
    scales = {"w:weight": jqx.calibrators.Affine(jnp.ones((1, 4)), None)}
    params = {**PARAMS, **scales}
    plan = jqx.make_plan(f, jqx.presets.w8a16())(params, X)
    for refused in (
        lambda: jqx.quantize_params(params, plan),
        lambda: jqx.quantize_params(params, plan, {"v:weight": scales["w:weight"]}),
        lambda: jqx.quantize_params(params, plan, algorithm=jqx.algorithms.nearest()),
        lambda: jqx.ptq(f, jqx.presets.w8a16())(params, [X]),
    ):
        with pytest.raises(
            ValueError, match=r"hold learned scales(.|\n)*given:    w:weight"
        ) as info:
            refused()
        assert re.fullmatch(PARTS, str(info.value)) and "jqx.linen.convert(" in str(info.value)
    abstract = jax.eval_shape(lambda x: x, params)
    assert isinstance(jqx.quantize_params(abstract, plan, scales)["w"], jqx.QTensor)


def test_a_quantized_function_is_saved_with_the_scales_of_its_weights(tmp_path):
    plan = jqx.make_plan(f, jqx.presets.w8a16())(PARAMS, X)
    scales = {"w:weight": jqx.calibrators.Affine(jnp.full((1, 4), 0.02), None)}
    function, report = jqx.convert(f, plan, scales), jqx.report(plan, PARAMS, scales)

    def saved(given):
        params = jqx.quantize_params(PARAMS, plan, given, target="cpu")
        quantized = jqx.Quantized(function, params, plan, scales, report)
        jqx.save(tmp_path / "x", quantized, progress=False)

    with pytest.raises(ValueError, match=r"weights have other scales.*: w\.\n") as info:
        saved(None)
    assert re.fullmatch(PARTS, str(info.value))
    saved(scales)
