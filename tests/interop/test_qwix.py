"""Rules of Qwix become policies with the same sites, formats, scales and codes."""

import bisect
import dataclasses
import functools
import importlib.util
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict

import jqx
import jqx.linen
import jqx.nnx
from jqx.calibrators import absmax, ceil, fixed, minmax, rms
from jqx.interop import from_qarray, from_qwix, to_qarray
from jqx.numerics import ngraph, qwix
from jqx.recipes import Products, Recipe, Rounded

from ..oracles.refusals import assert_error

PAIR = ("dot_general", "einsum")
W8A8 = {"weight_qtype": "int8", "act_qtype": "int8"}
W8A8B8 = W8A8 | {"bwd_qtype": "int8"}


def int8(granularity, **options):
    return jqx.QSpec("int8", granularity, **{"numerics": qwix} | options)


CHANNEL = int8(jqx.per_channel())
TOKEN = int8(jqx.per_channel(), dynamic=True)
WHOLE = int8(jqx.per_tensor())


@pytest.mark.parametrize(
    ("fields", "weight", "activation"),
    [
        ({}, None, None),
        ({"weight_qtype": "int8"}, CHANNEL, None),
        ({"weight_qtype": jnp.int8}, CHANNEL, None),
        (W8A8, CHANNEL, TOKEN),
        (W8A8 | {"act_static_scale": False, "act_batch_axes": (1,)}, CHANNEL, TOKEN),
        (W8A8 | {"act_static_scale": True, "act_batch_axes": [0]}, CHANNEL, WHOLE),
        (W8A8 | {"disable_channelwise_axes": True}, WHOLE, int8(jqx.per_tensor(), dynamic=True)),
        ({"weight_qtype": "nf4"}, jqx.QSpec("nf4", jqx.per_channel()), None),
        (
            {"weight_qtype": jnp.float8_e4m3fn},
            jqx.QSpec("float8_e4m3fn", jqx.per_channel()),
            None,
        ),
        (
            {"weight_qtype": "int8", "weight_calibration_method": "minmax"},
            int8(jqx.per_channel(), symmetric=False, calibrator=minmax),
            None,
        ),
        (
            W8A8 | {"weight_calibration_method": "rms,7", "act_calibration_method": "RMS,2.5"},
            int8(jqx.per_channel(), calibrator=rms(7)),
            int8(jqx.per_channel(), calibrator=rms(2.5), dynamic=True),
        ),
        (
            W8A8 | {"weight_calibration_method": "fixed,3", "act_calibration_method": "fixed,-1,3"},
            int8(jqx.per_tensor(), calibrator=fixed(-3, 3)),
            int8(jqx.per_tensor(), calibrator=fixed(-1, 3), symmetric=False, dynamic=True),
        ),
        (W8A8 | {"tile_size": 1.0, "act_calibration_method": "absmax,1"}, CHANNEL, TOKEN),
        (
            W8A8
            | {"weight_calibration_method": "minmax,0.5", "act_calibration_method": "absmax,.8"},
            int8(
                jqx.per_channel(),
                symmetric=False,
                calibrator=dataclasses.replace(minmax, factor=0.5),
            ),
            int8(
                jqx.per_channel(), calibrator=dataclasses.replace(absmax, factor=0.8), dynamic=True
            ),
        ),
    ],
)
def test_a_field_has_an_equal(fields, weight, activation):
    first, *others = from_qwix([fields]).rules
    assert (first.path, first.weight, first.activation) == (".*", weight, activation)
    expected = [] if activation is None else [(".*", "dot_general", None, activation, True)]
    found = [(x.path, x.op, x.weight, x.activation, x.optional) for x in others]
    assert [x for x in found if x[1] != "ragged_dot"] == expected


def test_tiles_are_along_the_last_summed_axis():
    rules = from_qwix([{"weight_qtype": "int8", "act_qtype": "int4", "tile_size": 4}]).rules
    assert [rule.op for rule in rules] == ["dot_general", "conv_general_dilated", "dot_general"]
    assert (rules[1].weight, rules[1].optional) == (CHANNEL, True)

    def f(p, x):
        return jnp.einsum("bhd,hdf->bf", x, p["out"]) @ p["w"]

    params, x = {"out": jnp.ones((2, 8, 12)), "w": jnp.ones((12, 3))}, jnp.ones((5, 2, 8))
    plan = jqx.make_plan(f, jqx.Policy(rules))(params, x)
    scales = {path: q.scale.shape for path, q in jqx.quantize_params(params, plan).items()}
    assert scales == {"out": (1, 2, 12), "w": (3, 3)}
    granularities = [site.operands[0].spec.granularity for site in plan.sites]
    assert granularities == [jqx.per_block({0: 1, 2: 4}), jqx.per_block({0: 1, 1: 4})]
    (rule, *_) = from_qwix([{"weight_qtype": "int8", "tile_size": 1 / 4}]).rules
    spec = rule.weight.resolve(3, (0,))
    assert spec.granularity.scale_shape((3, 2, 8)) == (3, 1, 4)
    words = "interop.from_qwix", "(3, 2, 7)", "divides axis 2"
    assert_error(lambda: spec.granularity.scale_shape((3, 2, 7)), *words)
    (block,) = from_qwix([{"weight_qtype": "mxfp8", "tile_size": 32}]).rules
    assert (block.weight.qtype, block.weight.calibrator) == (jqx.numerics.mxfp8_e4m3, ceil)


def test_a_module_is_a_prefix_of_its_weights():
    first, *_ = from_qwix([{"module_path": "a|b/[0-9]", "weight_qtype": "int8"}]).rules
    paths = ["a/kernel", "b/1/kernel", "b/1/c/kernel", "a", "kernel", "ab/kernel"]
    found = [path for path in paths if first.matches(path, "dot_general", has_weight=True)]
    assert found == ["a/kernel", "b/1/kernel"]
    (root,) = from_qwix([{"module_path": "(a/?)*", "weight_qtype": "int8"}]).rules
    assert root.matches("kernel", "dot_general", has_weight=True)
    assert root.matches("a/a/kernel", "dot_general", has_weight=True)


@pytest.mark.parametrize(
    ("names", "op", "others"),
    [
        (PAIR, "dot_general", [".*"]),
        (["dot_general"], "dot_general", ["[^,]*"]),
        ("einsum", "dot_general", [".*,.*"]),
        (["conv_general_dilated"], "conv_general_dilated", []),
        (["ragged_dot"], "ragged_dot", []),
        ([], "dot_general|conv_general_dilated", [".*"]),
    ],
)
def test_operations_are_those_of_jax(names, op, others):
    first, *rest = from_qwix([W8A8 | {"op_names": names}], merge_einsum=True).rules
    assert (first.op, [rule.path for rule in rest]) == (op, others)
    (only,) = from_qwix([{"op_names": names}], merge_einsum=True).rules
    assert only.is_float and only.op == (op if names else None)


def test_experts_share_scales_and_only_training_quantizes_them():
    def f(p, x):
        return jax.lax.ragged_dot(x, p, jnp.array([3, 5]))

    policy = from_qwix([W8A8 | {"op_names": ["ragged_dot"], "tile_size": 4}])
    (site,) = jqx.make_plan(f, policy)(jnp.ones((2, 16, 8)), jnp.ones((8, 16))).sites
    assert site.operands[1].spec.granularity == jqx.per_axis(2)
    assert site.operands[0].spec.granularity == jqx.per_axis(0)
    rules = [{"weight_qtype": "int8"}, {"module_path": "a", "disable_channelwise_axes": False}]
    assert [x.op for x in from_qwix(rules).rules[:2]][1] == "ragged_dot"
    assert all(x.op != "ragged_dot" for x in from_qwix(rules[:1]).rules)


def test_the_backward_pass():
    row = CHANNEL
    run = int8(jqx.per_group(16))
    assert from_qwix([W8A8B8]).rules[0].products == Products(
        (row, row), (row, row), (row, row), "rounded"
    )
    noise = Rounded(int8(jqx.per_channel(), numerics=ngraph), "stochastic")
    noisy_run = Rounded(int8(jqx.per_group(16), numerics=ngraph), "stochastic")
    fields = {"bwd_weight_grad_tile_size": 16, "bwd_stochastic_rounding": "uniform"}
    rules = [{"module_path": "head"}, W8A8 | {"module_path": "a"}, W8A8B8 | fields]
    head, forward, last = from_qwix(rules).rules
    assert head.is_float and head.products is None
    floats = ("float32", "float32")
    assert forward.products == Products((row, row), floats, floats)
    assert last.products == Products((row, row), (noise, row), (run, noisy_run), "rounded")
    (rule,) = from_qwix([W8A8B8 | {"bwd_weight_grad_tile_size": 1 / 4}]).rules
    specs = [x.spec.resolve(3, (0, 1)) for x in rule.products.wgrad.operands]
    assert [x.granularity.scale_shape((2, 5, 8)) for x in specs] == [(2, 5, 4)] * 2
    whole = from_qwix([W8A8B8 | {"disable_channelwise_axes": True}])
    assert whole.rules[0].products.wgrad.lhs.spec == WHOLE
    e4m3 = jqx.QSpec("float8_e4m3fn", jqx.per_tensor(), calibrator=fixed(-2, 2))
    e5m2 = jqx.QSpec("float8_e5m2", jqx.per_channel())
    fields = {"weight_calibration_method": "fixed,-2,2", "act_calibration_method": "fixed,-2,2"}
    formats = {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"}
    (rule,) = from_qwix([fields | formats | {"bwd_qtype": "float8_e5m2"}]).rules
    assert rule.products == Products((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2), "rounded")


def test_a_policy_trains():
    fields = {"module_path": "body", "bwd_weight_grad_tile_size": 1 / 2}
    policy = from_qwix([{"module_path": "head"}, W8A8B8 | fields])
    recipe = Recipe("qwix", {rule.path: rule.products for rule in policy.rules})
    params = {"body": {"w": jnp.eye(8)}, "head": {"w": jnp.eye(8)}}

    def f(p, x):
        return (x @ p["body"]["w"] @ p["head"]["w"]).sum()

    gradients = jax.grad(jqx.train(f, policy, recipe))(params, {}, jnp.ones((4, 8)))
    np.testing.assert_allclose(gradients["body"]["w"], 4 * jnp.ones((8, 8)), rtol=0.02)


def test_a_static_scale_is_calibrated():
    policy = from_qwix([W8A8 | {"act_static_scale": True, "act_calibration_method": "minmax"}])
    batches = [jnp.ones((2, 3, 8)), -jnp.ones((2, 3, 8))]
    quantized = jqx.ptq(lambda w, x: x @ w, policy, jqx.algorithms.nearest())(jnp.eye(8), batches)
    (affine,) = quantized.affines.values()
    assert affine.scale.shape == (1, 1, 1) and affine.zero_point is not None
    np.testing.assert_allclose(affine.scale, 2 / 255, rtol=1e-6)


def test_the_names_of_maxtext():
    def rule(name):
        (rule,) = from_qwix(name, merge_einsum=True).rules
        assert rule.matches("decoder/layers/mlp/wi_0/kernel", "dot_general", has_weight=True)
        assert not rule.matches("decoder/logits_dense/kernel", "dot_general", has_weight=True)
        return rule

    assert rule("int8").products == from_qwix([W8A8B8]).rules[0].products
    assert rule("int4").weight.qtype == jnp.int4
    assert rule("fp8_full").products.dgrad.lhs.spec.qtype == jnp.float8_e5m2
    assert rule("fp8_full").op == "dot_general|ragged_dot"
    assert rule("fp8").products.dgrad.lhs.spec.qtype == jnp.float8_e4m3fn
    assert rule("fp8_gpu").products == jqx.recipes.fp8_delayed().rules[0][1]


def test_what_holds_rules(tmp_path):
    @dataclasses.dataclass
    class Dataclass:
        module_path: str = ".*"
        weight_qtype: object = None
        later: int = 0

    expected = from_qwix([{"weight_qtype": "int8"}])
    for rules in (
        [Dataclass(weight_qtype=jnp.int8)],
        (SimpleNamespace(module_path=".*", weight_qtype=np.dtype("int8")),),
        {"rules": [{"weight_qtype": "int8"}]},
        {"qwix": {"use_abstract_model": True, "rules": [{"weight_qtype": "int8"}]}},
        json.dumps([{"weight_qtype": "int8"}]),
    ):
        assert from_qwix(rules) == expected
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"rules": [{"weight_qtype": "int8"}]}))
    assert from_qwix(path) == from_qwix(str(path)) == expected
    assert from_qwix([]) == jqx.Policy([])


def test_what_has_no_equal_is_refused():
    @dataclasses.dataclass
    class Later:
        module_path: str = ".*"
        later: int = 1

    for fields, *words in (
        ({"weight_qtype": "nvfp4"}, "weight_qtype == 'nvfp4'", "no format"),
        ({"weight_qtype": "uint8"}, "weight_qtype == 'uint8'"),
        ({"weight_qtype": jnp.bfloat16}, "weight_qtype == "),
        ({"weight_qtype": object()}, "weight_qtype == "),
        ({"weight_qtype": "mxfp4"}, "blocks of 32"),
        ({"act_qtype": "int8"}, "act_qtype == 'int8'", "no effect"),
        ({"weight_qtype": "int8", "act_static_scale": True}, "act_static_scale == True"),
        ({"weight_qtype": "int8", "act_calibration_method": "minmax"}, "without act_qtype"),
        ({"tile_size": 8}, "without weight_qtype"),
        ({"bwd_qtype": "int8"}, "without weight_qtype"),
        (W8A8 | {"bwd_weight_grad_tile_size": 8}, "without bwd_qtype"),
        (
            W8A8B8 | {"disable_channelwise_axes": True, "bwd_weight_grad_tile_size": 8},
            "disable_channelwise_axes == True",
        ),
        (W8A8 | {"act_static_scale": True, "act_batch_axes": (0, 1)}, "act_batch_axes == (0, 1)"),
        (W8A8 | {"act_static_scale": True, "tile_size": 8}, "act_static_scale == True"),
        (W8A8 | {"disable_channelwise_axes": True, "tile_size": 8}, "disable_channelwise_axes"),
        (W8A8 | {"tile_size": 2.5}, "tile_size == 2.5", "neither a size nor a share"),
        (W8A8 | {"tile_size": True}, "tile_size == True"),
        (W8A8 | {"weight_calibration_method": "absmax,0"}, "absmax,0", "above 0"),
        (W8A8 | {"weight_calibration_method": "minmax,1,2"}, "minmax,1,2"),
        (W8A8 | {"weight_calibration_method": "rms"}, "== 'rms'"),
        (W8A8 | {"weight_calibration_method": "fixed,1,2"}, "== 'fixed,1,2'"),
        (W8A8 | {"act_calibration_method": "fixed,a"}, "act_calibration_method", "no number"),
        (W8A8 | {"act_calibration_method": "mse"}, "== 'mse'"),
        (W8A8 | {"op_names": ("dot_general",)}, "op_names", "merge_einsum=True"),
        (W8A8 | {"op_names": ("dot_general", "gmm")}, "'gmm'"),
        (W8A8 | {"additional_qt_config": {"sparsity_rule": 1}}, "additional_qt_config"),
        (W8A8 | {"scale_dtype": "bfloat16"}, "'scale_dtype'", "scale_dtype == 'bfloat16'"),
        (W8A8B8 | {"tile_size": 8}, "tile_size == 8", "in training"),
        (W8A8B8 | {"act_static_scale": True}, "act_static_scale == True", "in training"),
        (W8A8B8 | {"act_qtype": None}, "act_qtype == None", "in training"),
        (W8A8B8 | {"bwd_weight_grad_tile_size": -1}, "bwd_weight_grad_tile_size == -1"),
        (W8A8B8 | {"bwd_stochastic_rounding": "low_bit_uniform"}, "low_bit_uniform"),
        (
            W8A8B8 | {"bwd_stochastic_rounding": "uniform", "channelwise_noise_axes": (0, 1)},
            "channelwise_noise_axes == (0, 1)",
        ),
        (
            W8A8B8 | {"bwd_stochastic_rounding": "uniform", "bwd_qtype": "float8_e5m2"},
            "bwd_stochastic_rounding",
            "on floats",
        ),
        ({"module_path": "("}, "module_path", "not a regular expression"),
    ):
        assert_error(lambda: from_qwix([{}, fields]), "interop.from_qwix", "rule 1", *words)  # noqa: B023
    assert_error(lambda: from_qwix([Later(later=2)]), "rule 0", "later == 2")
    assert from_qwix([Later()]).rules[0].is_float
    assert_error(lambda: from_qwix([{"module_path": 1}]), "module_path", error=TypeError)
    wrong = [W8A8 | {"weight_calibration_method": 1}]
    assert_error(lambda: from_qwix(wrong), "weight_calibration_method", error=TypeError)
    for rules in ([1], [None], [object()]):
        assert_error(lambda: from_qwix(rules), "rule 0 is neither", error=TypeError)  # noqa: B023
    for rules in (1, {}, None, Later()):
        assert_error(lambda: from_qwix(rules), "`rules` is not", error=TypeError)  # noqa: B023
    assert_error(lambda: from_qwix({"rules": [], "scale_dtype": 1}), "'scale_dtype'")
    for text in ("int8w", "int4w", "nanoo_fp8", "fp8_nanoo", "- module_path: a"):
        assert_error(lambda: from_qwix(text), "MaxText", "yaml.safe_load")  # noqa: B023


def test_an_array_of_qwix_is_a_qtensor():
    codes, scale = jnp.arange(-4, 4).astype(jnp.int8).reshape(4, 2), jnp.ones((2, 2), jnp.bfloat16)
    x = SimpleNamespace(qvalue=codes, scale=scale, zero_point=None, qtype="int8")
    q = from_qarray(x)
    assert q.values is codes and q.scale is scale and q.dtype == jnp.bfloat16
    np.testing.assert_array_equal(q.dequantize(), codes.astype(jnp.bfloat16))
    zero_point = jnp.ones((2, 2), jnp.int8)
    x = SimpleNamespace(qvalue=codes, scale=scale, zero_point=zero_point, qtype=jnp.int8)
    np.testing.assert_array_equal(from_qarray(x).dequantize(), (codes - 1).astype(jnp.bfloat16))


def test_arrays_without_an_equal_are_refused():
    assert_error(lambda: from_qarray(jnp.ones(2)), "no qwix.QArray", error=TypeError)
    codes = {"qvalue": jnp.ones(2), "scale": jnp.ones(1), "zero_point": None}
    for qtype in ("mxfp8", "nvfp4", "int9", object()):
        x = SimpleNamespace(**codes, qtype=qtype)
        assert_error(lambda: from_qarray(x), "interop.from_qarray")  # noqa: B023
    q = jqx.QTensor.quantize(jnp.ones((4, 6)), "int8")
    tail = jqx.QSpec("int8", jqx.per_block({1: 4}, tail=True))
    block = jqx.QSpec("mxfp8_e4m3", jqx.per_block({1: 32}, tail=True))
    for other, words in (
        (dataclasses.replace(q, offset=jnp.ones((1, 1))), "an offset"),
        (dataclasses.replace(q, order=jnp.arange(6)[None]), "an order"),
        (jqx.QTensor.quantize(jnp.ones((4, 6)), tail), "a last block that is smaller"),
        (jqx.QTensor.quantize(jnp.ones((4, 6)), block), "no format mxfp8_e4m3"),
        (jqx.QTensor.quantize(jnp.ones((4, 6)), "int16"), "no format int16"),
    ):
        assert_error(lambda: to_qarray(other), words)  # noqa: B023
    assert_error(lambda: to_qarray(jnp.ones(2)), "`q` is not", error=TypeError)
    if importlib.util.find_spec("qwix") is None:
        assert_error(lambda: to_qarray(q), "not installed", "pip install qwix", error=ImportError)


# Against Qwix itself.


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(4, name="attention")(x)
        x = nn.Einsum((64, 128), "btd,df->btf", name="up")(x)
        return nn.Dense(64, name="down")(nn.gelu(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.attention(x)
        for block in self.blocks:
            x = nnx.gelu(block(x))
        return x


RULES = {
    "W8A8": [W8A8],
    "mixed": [
        {"module_path": "down|blocks/1"},
        {"module_path": "attention(/.*)?", **W8A8},
        {"weight_qtype": "int4", "tile_size": 16},
    ],
    "tiles": [{"weight_qtype": "int4", "act_qtype": "int8", "tile_size": 8}],
    "shares": [{"weight_qtype": "int8", "act_qtype": "int8", "tile_size": 1 / 4}],
    "narrowed": [
        {"module_path": "down|blocks/1", **W8A8, "weight_calibration_method": "minmax,0.7"},
        {**W8A8, "weight_calibration_method": "absmax,0.8"},
    ],
    "minmax": [{"weight_qtype": "int4", "weight_calibration_method": "minmax", "tile_size": 16}],
    "rms": [{"weight_qtype": "int8", "weight_calibration_method": "rms,3"}],
    "fixed": [{"weight_qtype": "int8", "weight_calibration_method": "fixed,-0.2,0.3"}],
    "float8": [{"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"}],
    "nf4": [{"weight_qtype": "nf4", "tile_size": 16}],
    "int3": [{"weight_qtype": "int3"}],
}


def assert_same_codes(params, arrays):
    """Asserts that the QTensors are those of Qwix, which are all in `arrays`."""
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, jqx.QTensor))
    found = {
        jax.tree_util.keystr(keys, simple=True, separator="/").removeprefix("params/"): leaf
        for keys, leaf in flat
        if isinstance(leaf, jqx.QTensor)
    }
    assert {*found} == {*arrays}
    for path, expected in arrays.items():
        q = found[path].unpack()
        assert q.scale.shape == expected.scale.shape, path
        codes, want = (np.asarray(x, np.float32) for x in (q.values, expected.qvalue))
        np.testing.assert_array_equal(codes, want.reshape(codes.shape), path)


def _child(node, key):
    child = node[key] if isinstance(key, int) else getattr(node, key)
    return child.array if hasattr(child, "how") else child


def recording(package, rules):
    """Returns a provider of Qwix, and the paths of modules at which it finds a rule, sorted."""
    flax_util = importlib.import_module("qwix._src.utils.flax_util")
    found = []

    class Recording(package.QtProvider):
        def _create_dot_general_qt_config(self, rule, op_id, lhs, rhs):
            config = super()._create_dot_general_qt_config(rule, op_id, lhs, rhs)
            if config.lhs_qtype is not None or config.rhs_qtype is not None:
                bisect.insort(found, "/".join(map(str, flax_util.get_current_module_path())))
            return config

    return Recording(rules), found


def modules_of(plan):
    """Returns the path of the module of each site, sorted: of its weight, or in its name scope."""
    weights = [site.path.rpartition("/")[0] for site in plan.sites if "," not in site.path]
    scopes = [site.path.split("/", 1)[1] for site in plan.sites if "," in site.path]
    return sorted([*weights, *(scope.rpartition("/")[0] for scope in scopes)])


@pytest.fixture
def package():
    with jax.numpy_dtype_promotion("standard"):
        yield pytest.importorskip("qwix")


@pytest.mark.bench
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", RULES)
def test_linen_modules_have_the_sites_and_codes_of_qwix(package, name):
    x = jax.random.normal(jax.random.key(1), (2, 16, 64))
    model = Linen()
    variables = model.init(jax.random.key(0), x)
    rules = [package.QuantizationRule(**fields) for fields in RULES[name]]
    theirs = package.quantize_model(model, package.PtqProvider(rules))
    abstract = jax.eval_shape(theirs.init, jax.random.key(0), x)["params"]
    params = package.quantize_params(variables["params"], abstract)
    arrays = {path: x for path, x in flatten_dict(params, sep="/").items() if hasattr(x, "how")}
    ours = jqx.linen.ptq(model, from_qwix(rules), jqx.algorithms.nearest())(variables, [x])
    assert_same_codes(ours.params, {path: x.array for path, x in arrays.items()})
    provider, modules = recording(package, rules)
    jax.eval_shape(package.quantize_model(model, provider).apply, variables, x)
    assert modules == modules_of(ours.plan)
    y, want = ours.function(ours.params, x), theirs.apply({"params": params}, x)
    # A code of an activation may be the next one: Qwix under `jit` differs by 0.5 % from itself.
    assert float(jnp.linalg.norm(y - want) / jnp.linalg.norm(want)) < 0.02


@pytest.mark.bench
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", RULES)
def test_nnx_modules_have_the_sites_and_codes_of_qwix(package, name):
    x = jax.random.normal(jax.random.key(1), (2, 16, 64))
    rules = [package.QuantizationRule(**fields) for fields in RULES[name]]
    theirs = package.quantize_model(Nnx(nnx.Rngs(0)), package.PtqProvider(rules), x)
    state = nnx.to_flat_state(nnx.state(theirs))
    paths = {keys[: keys.index("array")] for keys, _ in state if "array" in keys}
    arrays = {"/".join(map(str, keys)): functools.reduce(_child, keys, theirs) for keys in paths}
    ours = jqx.nnx.ptq(Nnx(nnx.Rngs(0)), from_qwix(rules), jqx.algorithms.nearest())([x])
    assert_same_codes(ours.params, arrays)


@pytest.mark.bench
@pytest.mark.parametrize("qtype", ["int3", "int4", "int7", "int8", "nf4", "float8_e4m3fn"])
def test_arrays_of_qwix_come_back_identical(package, qtype):
    x = jax.random.normal(jax.random.key(0), (64, 32)).astype(jnp.bfloat16)
    for dtype in (jnp.float32, jnp.bfloat16):
        for options in ({"channelwise_axes": [1]}, {"tiled_axes": {0: 16, 1: 1}}):
            for method in ("absmax", *(["minmax"] if qtype in ("int4", "int8") else [])):
                given = x.astype(dtype)
                array = package.quantize(given, qtype, calibration_method=method, **options)
                q = from_qarray(array)
                back = to_qarray(q)
                assert back.qtype == array.qtype
                if qtype not in ("int3", "nf4"):
                    assert back.qvalue is array.qvalue and back.scale is array.scale
                jax.tree.map(np.testing.assert_array_equal, back, array)
                near = 0 if dtype == jnp.float32 else 2**-7
                real, want = (
                    a.astype(jnp.float32) for a in (q.dequantize(), package.dequantize(array))
                )
                np.testing.assert_allclose(real, want, rtol=near)
