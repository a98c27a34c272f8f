"""A function of a quantized module: one trace of it, entries by key, scales that are learned, and
rules on steps of `nn.scan` and `nnx.scan`.
"""

import itertools
import re
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import strategies as st

import jqx
import jqx.linen
import jqx.nnx
from jqx._src.modules.quantized_function import (
    Mode,
    QuantizedFunction,
    Search,
    flatten,
    nest,
    overlay,
    split,
    warn_of_scales_without_gradient,
    without,
)

POLICIES = {"static": jqx.presets.w8a8(), "dynamic": jqx.presets.w8a8_dynamic()}
ONES = jnp.ones((2, 4))


def counted(policy, **options):
    """A function of two products, and how often it was traced."""
    traces = []

    def function(identities, x, name):
        traces.append(name)
        return x @ identities["a"] @ identities["b"]

    defaults = {"policy": policy, "args": (ONES, "static"), "kwargs": {}, "stats": {}, "scales": {}}
    options = {**defaults, **options}
    return QuantizedFunction(function, caller="test", converts="convert(f)", **options), traces


def identities():
    return {"a": jnp.eye(4), "b": jnp.eye(4)}


@pytest.mark.parametrize("name", POLICIES)
def test_a_conversion_and_its_result_are_one_trace(name):
    call, traces = counted(POLICIES[name], dynamic=True)
    scales = call.find_scales(identities(), Search.SCALES)
    call = call.with_scales(scales)
    codes = call.quantize(identities())
    call(codes, Mode.CONVERT)
    call(identities(), Mode.SIMULATE)
    assert len(traces) == 1


def test_a_calibration_is_one_trace():
    call, traces = counted(POLICIES["static"])
    _, stats = call.observe(identities())
    again, more = counted(POLICIES["static"], stats=stats)
    again.observe(identities())
    assert (len(traces), len(more)) == (1, 1)


def test_arguments_of_other_types_are_traced_again():
    call, traces = counted(POLICIES["dynamic"])
    call.plan(identities())
    call.plan({"a": jnp.ones((4, 6)), "b": jnp.ones((6, 4))})
    assert len(traces) == 2


NAMES = st.sampled_from(["a", "b", "kernel", "layers_0"])
KEYS = st.builds(
    lambda path, rest: "/".join(path) + rest,
    st.lists(NAMES, max_size=3),
    st.sampled_from([":weight", ":dot_general:lhs", ":dot_general#1:lhs"]),
)
ENTRIES = st.dictionaries(KEYS, st.integers(), max_size=6)
TREES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


def leaves(tree, before=()):
    """Leaves by path; empty dicts have none."""
    if not isinstance(tree, dict):
        return {before: tree}
    return {k: v for name, x in tree.items() for k, v in leaves(x, (*before, name)).items()}


@hypothesis.given(ENTRIES)
def test_flatten_inverts_nest(entries):
    assert flatten(nest(entries)) == entries


def test_an_entry_is_next_to_its_weight():
    nested = nest({"block/query/kernel:dot_general:lhs": 1, ":dot_general:lhs": 2})
    assert nested == {"block": {"query": {"kernel:dot_general:lhs": 1}}, ":dot_general:lhs": 2}


@hypothesis.given(TREES, ENTRIES)
def test_split_parts_what_overlay_joins(params, entries):
    hypothesis.assume(not any(isinstance(x, int) for x in params.values()))
    try:
        joined = overlay(params, nest(entries))
    except TypeError:
        hypothesis.reject()
    kept, found = split(joined)
    assert flatten(found).keys() <= entries.keys()
    assert leaves(kept).items() <= leaves(joined).items()
    assert leaves(kept).keys() | leaves(found).keys() == leaves(joined).keys()
    assert not leaves(kept).keys() & leaves(found).keys()


@hypothesis.given(TREES, TREES)
def test_overlay_has_the_leaves_of_what_is_above(below, above):
    joined = leaves(overlay(below, above))
    assert leaves(above).items() <= joined.items()
    assert joined.keys() <= leaves(below).keys() | leaves(above).keys()


@hypothesis.given(TREES, TREES)
def test_without_drops_the_leaves_of_the_other(tree, gone):
    kept, dropped = leaves(without(tree, gone)), leaves(gone)
    assert kept.items() <= leaves(tree).items()
    assert not kept.keys() & dropped.keys()


PARTS = r"jqx\.learn_scales: .+(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+lsq.+"
ROW_SHAPE, MATRIX_SHAPE = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 8), (8, 4)))


def planned(gradient, calibrator):
    spec = {"gradient": gradient, "calibrator": calibrator}
    policy = jqx.presets.w8a8(weight=spec, activation=spec)
    return jqx.make_plan(lambda w, x: x @ w, policy)(MATRIX_SHAPE, ROW_SHAPE)


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


LAYERS, WIDTH = 4, 8
POLICY = jqx.Policy(
    [
        jqx.Rule("blocks[0]", weight="int8", activation="int8"),
        jqx.Rule("blocks[-1]"),
        jqx.Rule(weight="int4", activation="int8"),
    ]
)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, WIDTH)), jnp.float32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + jnp.tanh(nn.Dense(WIDTH, name="up")(x)), None


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        kind = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = kind(name="blocks")(x, None)
        return nn.Dense(2, name="head")(x)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.up(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer, in_axes=0))
        self.blocks = make(rngs)
        self.head = nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def steps(block, x):
            return block(x)

        return self.head(steps(self.blocks, x))


def of_linen():
    """Returns what calibrates and simulates, what converts and runs, and the stacked weight."""
    module = Linen()
    variables = module.init(jax.random.key(0), X)
    quantized = jqx.linen.quantize(module, POLICY, mode=jqx.linen.Mode.CALIBRATE)
    _, seen = quantized.apply(variables, X, mutable=["quant_stats"])
    variables = {**variables, **seen}
    simulated = quantized.clone(mode=jqx.linen.Mode.SIMULATE, backward=jnp.float32)
    integers = quantized.clone(mode=jqx.linen.Mode.CONVERT)
    plan = jqx.linen.make_plan(simulated, variables, X)
    codes = jqx.linen.convert(integers, variables, X, target="cpu")
    weight = codes["qparams"]["blocks"]["up"]["kernel"]
    run = jax.jit(lambda v, q, x: (simulated.apply(v, x), integers.apply(q, x)))
    return plan, weight, variables["params"]["blocks"]["up"]["kernel"], run(variables, codes, X)


def of_nnx():
    model = jqx.nnx.quantize(Nnx(nnx.Rngs(0)), POLICY, mode=jqx.nnx.Mode.CALIBRATE)
    model(X)
    model.set_attributes(mode=jqx.nnx.Mode.SIMULATE, backward=jnp.float32)
    plan = jqx.nnx.make_plan(model, X)
    real = model.blocks.up.kernel[...]
    simulated = nnx.jit(lambda model, x: model(x))(model, X)
    jqx.nnx.convert(model, X, target="cpu")
    weight = model.blocks.up.kernel.get_value()
    return plan, weight, real, (simulated, nnx.jit(lambda model, x: model(x))(model, X))


@pytest.mark.slow
@pytest.mark.many
@pytest.mark.parametrize("way", [of_linen, of_nnx])
def test_rules_on_steps_split_the_scans_of_modules(way):
    plan, weight, real, (simulated, converted) = way()
    assert [site.path for site in plan.sites] == [
        "blocks/up/kernel[0:1]",
        "blocks/up/kernel[1:3]",
        "head/kernel",
    ]
    assert isinstance(weight, jqx.Segments) and weight.bounds == (0, 1, 3, 4)
    kinds = [getattr(part, "qtype", None) for part in weight.parts]
    assert kinds == [jnp.int8, jnp.int4, None]
    np.testing.assert_array_equal(weight.parts[2], real[3:])
    whole = [
        jqx.QTensor.quantize(real[a:b], jqx.QSpec(kind, jqx.per_axis(0, 2))).dequantize()
        for kind, (a, b) in zip(("int8", "int4"), itertools.pairwise((0, 1, 3)), strict=True)
    ]
    np.testing.assert_array_equal(weight.dequantize()[:3], jnp.concatenate(whole))
    np.testing.assert_array_equal(simulated, converted)
