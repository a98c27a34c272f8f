"""Every preset: its rule and its arguments, every kind of contraction under it, and what is
simulated with it beside what is converted: code by code, and end to end.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import RoundMode, calibrators, numerics, presets
from jqx._src.tensor.grid import fake_quantize_as

from .arrays import on_device
from .models.transforms import close, mlp, mlp_params, normal, product, relative
from .oracles.contractions import equations_of

INT8 = jqx.QSpec(jnp.int8, jqx.per_channel())
INT4 = jqx.QSpec(jnp.int4, jqx.per_channel())
PER_TOKEN = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)
E4M3 = jnp.float8_e4m3fn
IN_32 = jqx.per_group(32, tail=True)
MXFP8 = jqx.QSpec(numerics.mxfp8_e4m3, IN_32, calibrator=calibrators.ceil)
SIGNED = calibrators.Mse(2, 0.8, signed=True)

PRESETS = {
    presets.w8a8: (INT8, jqx.QSpec(jnp.int8, jqx.per_tensor())),
    presets.w8a8_dynamic: (INT8, PER_TOKEN),
    presets.w8a16: (INT8, None),
    presets.w4a16: (jqx.QSpec(jnp.int4, IN_32, calibrator=SIGNED), None),
    presets.w4a8: (INT4, PER_TOKEN),
    presets.w4a4: (INT4, jqx.QSpec(jnp.int4, jqx.per_token(), dynamic=True)),
    presets.fp8: (jqx.QSpec(E4M3, jqx.per_channel()), jqx.QSpec(E4M3, jqx.per_tensor())),
    presets.mxfp8: (MXFP8, dataclasses.replace(MXFP8, dynamic=True)),
    presets.nf4: (jqx.QSpec(numerics.nf4, jqx.per_group(64, tail=True)), None),
}
BLOCKS = {presets.w4a16: 32, presets.nf4: 64}
"""Those with an argument `block`, and its default."""

STATIC = [preset for preset, (_, spec) in PRESETS.items() if spec and not spec.dynamic]
ACTIVE = [preset for preset, (_, spec) in PRESETS.items() if spec]
"""Those that quantize activations."""


def for_each(chosen):
    """Parametrizes a test by presets."""
    return pytest.mark.parametrize("preset", chosen, ids=lambda preset: preset.__name__)


every_preset = for_each(list(PRESETS))


def test_the_error_of_a_misspelt_preset_has_the_names_that_are_near():
    with pytest.raises(AttributeError, match="'w4a_16': did you mean w4a16 or w8a16 or w4a8"):
        presets.w4a_16  # noqa: B018
    assert "w4a_16" not in dir(presets) and "w4a16" in dir(presets)


def test_every_preset_is_in_the_table():
    public = [f for name, f in vars(presets).items() if not name.startswith("_")]
    assert set(public) == set(PRESETS)


@every_preset
def test_a_preset_is_one_rule_for_all_weights_and_their_activations(preset):
    """Whatever other calls refine."""
    weight, activation = PRESETS[preset]
    preset(weight={"qtype": jnp.int4})
    policy = jqx.Policy([jqx.Rule(weight=weight, activation=activation, tables=None)])
    assert preset() == policy and hash(preset()) == hash(policy)


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


FORMAT = {"qtype": jnp.uint8, "symmetric": False}
DYNAMIC = {"granularity": jqx.per_token(), "dynamic": True}


@pytest.mark.parametrize(
    ("preset", "fields"),
    [*((preset, FORMAT) for preset in ACTIVE), *((preset, DYNAMIC) for preset in STATIC)],
)
def test_fields_of_the_activations_are_replaced_and_the_others_kept(preset, fields):
    (rule,) = preset(activation=fields).rules
    weight, activation = PRESETS[preset]
    assert (rule.weight, rule.activation) == (weight, dataclasses.replace(activation, **fields))


@every_preset
def test_a_field_that_a_spec_has_not_is_refused(preset):
    """Any field of activations that stay in float."""
    with pytest.raises(TypeError, match="bits"):
        preset(weight={"bits": 4})
    with pytest.raises(TypeError, match="bits" if preset in ACTIVE else "activation"):
        preset(activation={"bits": 4})


@every_preset
def test_a_refinement_is_checked_as_any_spec_and_rule_is(preset):
    with pytest.raises(ValueError, match="unsigned"):
        preset(weight={"qtype": jnp.uint8})
    with pytest.raises(ValueError, match="regular expression"):
        preset("(")


@every_preset
def test_a_format_without_blocks_keeps_the_granularity(preset):
    for qtype in (jqx.numerics.int3, jnp.float8_e4m3fn, jqx.numerics.nf4):
        (rule,) = preset(weight={"qtype": qtype}).rules
        assert rule.weight == dataclasses.replace(PRESETS[preset][0], qtype=qtype)


@for_each([preset for preset in PRESETS if str(PRESETS[preset][0].granularity) == "per_channel"])
def test_a_block_format_brings_its_blocks_along(preset):
    """`per_channel` of the preset has none."""
    with pytest.raises(ValueError, match=r"mxfp4 has blocks of 32") as error:
        preset(weight={"qtype": jqx.numerics.mxfp4})
    assert "per_group(32)" in str(error.value)
    (rule,) = preset(weight={"qtype": jqx.numerics.mxfp4, "granularity": jqx.per_group(32)}).rules
    assert rule.weight == jqx.QSpec(jqx.numerics.mxfp4)


@for_each(BLOCKS)
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
    positions = [text.index(part) for part in parts]
    assert positions == sorted(positions) and text.count("Args:") == text.count("Example:") == 1
    assert max(map(len, text.splitlines())) <= 100


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
    "dense": (product, (100, 6), (5, 100), (100, 32, 64)),
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


FEATURES, HEADS, HIDDEN = 64, 4, 160


def centred(x):
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def transformer(params, x):
    """A block of attention and a perceptron."""
    h = centred(x)
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, params[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / (FEATURES / HEADS) ** 0.5
    mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("bthk,hkd->btd", mixed, params["o"])
    return x + jax.nn.gelu(centred(x) @ params["up"]) @ params["down"]


def transformer_params():
    split = (FEATURES, HEADS, FEATURES // HEADS)
    shapes = dict.fromkeys("qkv", split) | {"o": (*split[1:], FEATURES)}
    shapes |= {"up": (FEATURES, HIDDEN), "down": (HIDDEN, FEATURES)}
    return {name: normal(i, *shape) / 8 for i, (name, shape) in enumerate(shapes.items())}


MODELS = {
    "mlp": (mlp, mlp_params, (32, 16)),
    "transformer": (transformer, transformer_params, (2, 24, FEATURES)),
}


def calibrated(f, preset, params, x):
    plan = jqx.make_plan(f, preset())(params, x)
    find_affines = jax.jit(
        lambda params, x: jqx.affines(plan, jqx.calibrate(f, plan)(params, x)[1])
    )
    return plan, find_affines(params, x)


def operands(plan, affines, params):
    """(spec, scale given, values) of each quantized operand: weights, and normal activations."""
    for weight in plan.weights:
        yield weight.spec, None, params[weight.path]
    for i, site in enumerate(plan.sites):
        for operand, shape in zip(site.operands, site.shapes, strict=False):
            if operand.role == "activation" and operand.spec is not None:
                x = 2 * np.random.default_rng(i).standard_normal(shape, np.float32)
                yield operand.spec, affines.get(operand.key), on_device(x)


@pytest.mark.many
@every_preset
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_equal_inputs_have_equal_codes_simulated_and_converted(preset, dtype):
    """Twice as large as what was calibrated, so that static codes saturate as well."""
    params = transformer_params()
    x = normal(9, 2, 24, FEATURES)
    plan, affines = calibrated(transformer, preset, params, x)
    specs, scales, arrays = zip(*operands(plan, affines, params), strict=True)

    @jax.jit
    def run(scales, arrays):
        results = []
        for spec, affine, x in zip(specs, scales, arrays, strict=True):
            x = x.astype(dtype)
            q = jqx.QTensor.quantize(x, spec, affine)
            simulated = fake_quantize_as(x, spec, affine)
            again = jqx.QTensor.quantize(simulated, spec, jqx.calibrators.Affine(q.scale))
            results.append((simulated, q.dequantize(), q.values, again.values))
        return results

    results = run(scales, arrays)
    for spec, (simulated, real, codes, again) in zip(specs, results, strict=True):
        assert simulated.dtype == dtype
        np.testing.assert_array_equal(simulated, real, str(spec))
        np.testing.assert_array_equal(again, codes, str(spec))
    assert len(results) == len(plan.weights) + (
        0 if PRESETS[preset][1] is None else len(plan.sites)
    )


def cases():
    """A transformer is slow to compile: of dynamic presets, with the slow tests."""
    for preset in PRESETS:
        for name in MODELS:
            slow = name == "transformer" and preset not in STATIC
            marks = pytest.mark.slow if slow else ()
            yield pytest.param(preset, name, marks=marks, id=f"{preset.__name__}-{name}")


@pytest.mark.many
@pytest.mark.parametrize(("preset", "name"), list(cases()))
def test_simulated_and_converted_agree_end_to_end(preset, name):
    f, make, shape = MODELS[name]
    params = make()
    plan, affines = calibrated(f, preset, params, normal(9, *shape))
    assert {skip.op for skip in plan.skipped} <= {"dot_general"}  # attention
    simulated = jax.jit(jqx.simulate(f, plan, affines))
    converted = jax.jit(jqx.convert(f, plan, affines))
    q = jqx.quantize_params(params, plan)
    for seed in (9, 10, 11):
        x = normal(seed, *shape)
        expected = simulated(params, x)
        assert relative(converted(q, x), expected) <= 1e-3
        assert relative(expected, f(params, x)) > 1e-3  # or nothing is quantized


def stacked(params, x):
    layer = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
    return jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]


def stacked_params():
    """Weights large enough to be contracted in tiles or digits."""
    return {"layers": normal(0, 3, 144, 144) / 12, "head": normal(1, 144, 144)}


def is_wide(atom):
    return jnp.issubdtype(atom.aval.dtype, jnp.floating) and atom.aval.dtype.itemsize > 1


@every_preset
def test_weights_reach_their_contractions_as_codes(preset):
    """No float array holds a stack of layers, and what a scan steps over are the codes."""
    params, x = stacked_params(), normal(2, 4, 144)
    plan = jqx.make_plan(stacked, preset())(params, x)
    q = jqx.quantize_params(params, plan)
    equations = equations_of(jax.jit(jqx.convert(stacked, plan, "dynamic")), q, x)
    stacks = [v for eqn in equations for v in eqn.outvars if v.aval.shape == (3, 144, 144)]
    assert not any(map(is_wide, stacks))
    scans = [eqn for eqn in equations if eqn.primitive.name == "scan"]
    (layers,) = [eqn for eqn in scans if (3, 144, 144) in [v.aval.shape for v in eqn.invars]]
    codes = [v.aval.dtype for v in layers.invars if v.aval.shape == (3, 144, 144)]
    assert codes == [q["layers"].values.dtype]
