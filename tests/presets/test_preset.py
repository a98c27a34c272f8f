"""What holds for every preset."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import RoundMode, calibrators, presets

from ..models.transforms import close, normal
from .table import ACTIVE, BLOCKS, PRESETS, STATIC, each, every_preset


def test_the_error_of_a_misspelt_preset_has_the_names_that_are_near():
    with pytest.raises(AttributeError, match="'w4a_16': did you mean w4a16 or w8a16 or w4a8"):
        presets.w4a_16  # noqa: B018
    assert "w4a_16" not in dir(presets) and "w4a16" in dir(presets)


def test_every_preset_is_in_the_table():
    public = [f for name, f in vars(presets).items() if not name.startswith("_")]
    assert set(public) == set(PRESETS)


@every_preset
def test_a_preset_is_one_rule_for_all_weights_and_their_activations(preset):
    weight, activation = PRESETS[preset]
    assert preset() == jqx.Policy([jqx.Rule(weight=weight, activation=activation, tables=None)])


@every_preset
@pytest.mark.parametrize(
    ("tables", "spec"),
    [
        ("int8", jqx.QSpec(jnp.int8, jqx.per_channel())),
        (jnp.uint4, None),
        (jqx.numerics.nf4, jqx.QSpec(jqx.numerics.nf4, jqx.per_channel())),
        (jqx.numerics.mxfp4, jqx.QSpec(jqx.numerics.mxfp4, jqx.per_group(32, tail=True))),
        (jqx.QSpec(jnp.int4, jqx.per_group(8)), jqx.QSpec(jnp.int4, jqx.per_group(8))),
    ],
    ids=["int8", "unsigned", "nf4", "blocks", "spec"],
)
def test_tables_have_a_format_of_their_own_or_stay_in_float(preset, tables, spec):
    """One scale a row, or a block; what `QSpec` refuses is refused."""
    if spec is None:
        with pytest.raises(ValueError, match="unsigned"):
            preset(tables=tables)
        return
    (rule,) = preset(tables=tables).rules
    assert rule.weight_for("gather") == spec and rule.weight_for("dot_general") == rule.weight
    assert preset().rules[0].weight_for("gather") is None


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
    weight, activation = PRESETS[preset]
    (rule,) = preset(weight=fields).rules
    assert rule.weight == jqx.QSpec(granularity=weight.granularity, **fields)
    assert rule.activation == activation


@each(ACTIVE)
def test_fields_of_the_activations_are_replaced_and_the_others_kept(preset):
    (rule,) = preset(activation={"qtype": jnp.uint8, "symmetric": False}).rules
    weight, kept = PRESETS[preset]
    expected = dataclasses.replace(kept, qtype=jnp.uint8, symmetric=False)
    assert (rule.weight, rule.activation) == (weight, expected)


@each(STATIC)
def test_static_scales_can_be_made_dynamic(preset):
    (rule,) = preset(activation={"granularity": jqx.per_token(), "dynamic": True}).rules
    weight, kept = PRESETS[preset]
    expected = jqx.QSpec(kept.qtype, jqx.per_token(), dynamic=True)
    assert (rule.weight, rule.activation) == (weight, expected)


@every_preset
def test_a_field_that_a_spec_has_not_is_refused(preset):
    with pytest.raises(TypeError, match="bits"):
        preset(weight={"bits": 4})


@each(ACTIVE)
def test_a_field_that_a_spec_of_activations_has_not_is_refused(preset):
    with pytest.raises(TypeError, match="bits"):
        preset(activation={"bits": 4})


@each([preset for preset in PRESETS if preset not in ACTIVE])
def test_there_are_no_activations_to_refine_where_they_stay_in_float(preset):
    with pytest.raises(TypeError, match="activation"):
        preset(activation={"qtype": jnp.int4})


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
def test_a_format_without_blocks_keeps_the_granularity(preset):
    for qtype in (jqx.numerics.int3, jnp.float8_e4m3fn, jqx.numerics.nf4):
        (rule,) = preset(weight={"qtype": qtype}).rules
        assert rule.weight == dataclasses.replace(PRESETS[preset][0], qtype=qtype)


@each([preset for preset in PRESETS if str(PRESETS[preset][0].granularity) == "per_channel"])
def test_a_block_format_brings_its_blocks_along(preset):
    """`per_channel` of the preset has none."""
    with pytest.raises(ValueError, match=r"mxfp4 has blocks of 32") as error:
        preset(weight={"qtype": jqx.numerics.mxfp4})
    assert "per_group(32)" in str(error.value)
    (rule,) = preset(weight={"qtype": jqx.numerics.mxfp4, "granularity": jqx.per_group(32)}).rules
    assert rule.weight == jqx.QSpec(jqx.numerics.mxfp4)


@each(BLOCKS)
def test_blocks_are_of_the_size_that_is_asked_for(preset):
    weight = PRESETS[preset][0]
    assert preset(block=BLOCKS[preset]) == preset()
    (rule,) = preset(block=16, weight={"qtype": jqx.numerics.nvfp4}).rules
    granularity = jqx.per_group(16, tail=True)
    nvfp4 = dataclasses.replace(weight, qtype=jqx.numerics.nvfp4, granularity=granularity)
    assert rule.weight == nvfp4
    (rule,) = preset(weight={"granularity": jqx.per_channel()}).rules
    assert rule.weight == dataclasses.replace(weight, granularity=jqx.per_channel())
    with pytest.raises(ValueError, match=f"presets.{preset.__name__}: .*both set the granularity"):
        preset(block=16, weight={"granularity": jqx.per_channel()})
    with pytest.raises(ValueError, match="`size` is out of range"):
        preset(block=0)
    with pytest.raises(TypeError, match="size"):
        preset(block=32.0)


@every_preset
def test_every_argument_is_described_before_the_example(preset):
    text = inspect.getdoc(preset)
    parts = [f"\n  {name}: " for name in inspect.signature(preset).parameters]
    parts = ["Returns a policy", "\nArgs:", *parts, "\nRaises:", "\nExample:\n  >>> "]
    places = [text.index(part) for part in parts]
    assert places == sorted(places) and text.count("Args:") == text.count("Example:") == 1
    assert max(map(len, text.splitlines())) <= 100


def dense(w, x):
    return x @ w


def heads(w, x):
    return jnp.einsum("bhk,hkd->bd", x, w)


def conv(axes, groups=1):
    def f(w, x):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=axes, feature_group_count=groups
        )

    return f


def lookup(w, x):
    return w[jnp.array([[3, 0], [2, 3]])] + x


def stack(w, x):
    return jax.lax.scan(lambda c, w: (c, x @ w), None, w)[1]


NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
SITES = {
    "dense": (dense, (100, 6), (5, 100), (100, 32, 64)),
    "heads": (heads, (4, 12, 6), (5, 4, 12), (48, 24, 48)),
    "conv": (conv(NHWC), (3, 3, 8, 6), (2, 5, 5, 8), (72, 24, 48)),
    "conv, channels first": (conv(NCHW), (6, 8, 3, 3), (2, 8, 5, 5), (72, 27, 63)),
    "depthwise": (conv(NHWC, 6), (3, 3, 1, 6), (2, 5, 5, 6), (9, 9, 9)),
    "lookup": (lookup, (4, 100), (1, 1, 100), (100, 32, 64)),
    "stack": (stack, (2, 100, 6), (5, 100), (100, 32, 64)),
}
"""A function, shapes of its weight and input, and the weights that share a scale: all that one
element of the result sums over, or blocks of up to 32 or 64 of them.
"""


def sites():
    """The slow ones share their code with the others."""
    slow = ("heads", "conv, channels first", "depthwise")
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in SITES]


@pytest.mark.many
@every_preset
@pytest.mark.parametrize("name", sites())
def test_a_preset_quantizes_every_kind_of_contraction(name, preset):
    """As the function of what quantized operands stand for."""
    f, shape, x_shape, (whole, by_32, by_64) = SITES[name]
    w, x = normal(0, *shape), normal(1, *x_shape)
    tables = {"tables": PRESETS[preset][0]} if name == "lookup" else {}
    plan = jqx.make_plan(f, preset(**tables))(w, x)
    (site,) = plan.sites
    assert plan.skipped == ()
    affines = jqx.affines(plan, jqx.calibrate(f, plan)(w, x)[1])
    q = jqx.quantize_params(w, plan)
    granularity = PRESETS[preset][0].granularity
    shared = {jqx.per_channel(): whole, jqx.per_group(32, True): by_32}.get(granularity, by_64)
    assert q.groups.per_scale == shared
    on_grid, operand = x, site.operands[0]
    if operand.role == "activation" and operand.spec is not None:
        affine = affines.get(operand.key)
        affine = jax.tree.map(lambda leaf: leaf[0], affine) if site.loops else affine
        on_grid = jqx.QTensor.quantize(x, operand.spec, affine).dequantize()
        assert not np.array_equal(on_grid, x)

    @jax.jit
    def results(w, q, x, on_grid):
        simulated, converted = jqx.simulate(f, plan, affines), jqx.convert(f, plan, affines)
        return simulated(w, x), converted(q, x), f(q.dequantize(), on_grid)

    simulated, converted, expected = results(w, q, x, on_grid)
    assert close(simulated, expected, 100)
    assert close(converted, expected, 100)
