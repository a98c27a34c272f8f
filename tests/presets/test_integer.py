import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import RoundMode, calibrators, presets

from ..contractions.oracles import gamma
from ..numerics.oracles import as_float64
from ..tensor.tensors import reals

PRESETS = {
    presets.w8a8: jqx.QSpec(jnp.int8, jqx.per_tensor()),
    presets.w8a8_dynamic: jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True),
    presets.w8a16: None,
}
WEIGHT = jqx.QSpec(jnp.int8, jqx.per_channel())
every_preset = pytest.mark.parametrize("preset", list(PRESETS), ids=lambda preset: preset.__name__)


@every_preset
def test_a_preset_is_one_rule_for_all_weights_and_their_activations(preset):
    assert preset() == jqx.Policy([jqx.Rule(weight=WEIGHT, activation=PRESETS[preset])])


@every_preset
def test_a_preset_leaves_products_of_two_activations_in_float(preset):
    assert preset().first("scores", "dot_general", has_weight=False) is None
    assert preset().first("w", "dot_general", has_weight=True) == (0, preset().rules[0])


@every_preset
def test_a_preset_may_cover_some_paths_alone(preset):
    policy = preset("blocks/.*")
    assert policy == preset(path="blocks/.*")
    assert policy.first("blocks/0/w", "dot_general", has_weight=True)
    assert policy.first("head/w", "dot_general", has_weight=True) is None


@every_preset
def test_fields_of_the_weights_are_replaced_and_the_others_kept(preset):
    fields = {
        "qtype": jnp.uint4,
        "symmetric": False,
        "calibrator": calibrators.minmax,
        "round_mode": RoundMode.NEAREST_TOWARD_INFINITY,
    }
    (rule,) = preset(weight=fields).rules
    assert rule.weight == jqx.QSpec(granularity=jqx.per_channel(), **fields)
    assert rule.activation == PRESETS[preset]


@pytest.mark.parametrize("preset", [presets.w8a8, presets.w8a8_dynamic])
def test_fields_of_the_activations_are_replaced_and_the_others_kept(preset):
    (rule,) = preset(activation={"qtype": jnp.uint8, "symmetric": False}).rules
    kept = PRESETS[preset]
    expected = jqx.QSpec(jnp.uint8, kept.granularity, False, dynamic=kept.dynamic)
    assert (rule.weight, rule.activation) == (WEIGHT, expected)


@every_preset
def test_a_field_that_a_spec_has_not_is_refused(preset):
    with pytest.raises(TypeError, match="bits"):
        preset(weight={"bits": 4})


@pytest.mark.parametrize("preset", [presets.w8a8, presets.w8a8_dynamic])
def test_a_field_that_a_spec_of_activations_has_not_is_refused(preset):
    with pytest.raises(TypeError, match="bits"):
        preset(activation={"bits": 4})


def test_there_are_no_activations_to_refine_where_they_stay_in_float():
    with pytest.raises(TypeError, match="activation"):
        presets.w8a16(activation={"qtype": jnp.int4})


@every_preset
def test_a_refinement_is_checked_as_any_spec_and_rule_is(preset):
    with pytest.raises(ValueError, match="unsigned"):
        preset(weight={"qtype": jnp.uint8})
    with pytest.raises(ValueError, match="regular expression"):
        preset("(")


@every_preset
def test_refinements_of_one_call_do_not_reach_the_next(preset):
    before = preset()
    preset(weight={"qtype": jnp.int4})
    assert preset() == before
    assert hash(preset()) == hash(before)


@every_preset
def test_the_specs_of_a_preset_quantize_a_matrix_product(preset):
    """At the site of `x @ w`: the weight per column, the activation as a whole or by row."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 16), (16, 4)))
    (rule,) = preset().rules
    weight = jqx.QTensor.quantize(w, rule.weight.resolve(rank=2, kept=(1,)))
    assert weight.scale.shape == (1, 4)
    operand = x
    # Each operand is off by half a step at most: xq wq - x w = x (wq - w) + (xq - x) wq.
    off = np.abs(as_float64(x)).sum(1, keepdims=True) * as_float64(weight.scale) / 2
    if rule.activation is not None:
        operand = jqx.QTensor.quantize(x, rule.activation.resolve(rank=2, kept=(0,)))
        assert operand.scale.shape == ((3, 1) if rule.activation.dynamic else (1, 1))
        off = off + as_float64(operand.scale) / 2 * np.abs(reals(weight)).sum(0, keepdims=True)
    # And float32 rounds two quotients, 16 products or sums, and two products with the scales.
    rounding = gamma(20) * (np.abs(as_float64(x)) @ np.abs(as_float64(w)) + off)
    expected = as_float64(x) @ as_float64(w)
    assert np.all(np.abs(as_float64(operand @ weight) - expected) <= off + rounding)


@every_preset
def test_a_block_format_brings_its_blocks_along(preset):
    """`per_channel` of the preset has none."""
    with pytest.raises(ValueError, match=r"mxfp4 has blocks of 32") as error:
        preset(weight={"qtype": jqx.numerics.mxfp4})
    assert "per_group(32)" in str(error.value)
    (rule,) = preset(weight={"qtype": jqx.numerics.mxfp4, "granularity": jqx.per_group(32)}).rules
    assert rule.weight == jqx.QSpec(jqx.numerics.mxfp4)


@every_preset
@pytest.mark.parametrize("qtype", [jqx.numerics.int3, jnp.float8_e4m3fn, jqx.numerics.nf4])
def test_a_format_without_blocks_keeps_the_granularity(preset, qtype):
    (rule,) = preset(weight={"qtype": qtype}).rules
    assert rule.weight == jqx.QSpec(qtype, jqx.per_channel())
