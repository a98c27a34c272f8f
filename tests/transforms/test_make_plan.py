"""Plans: sites, paths and rules, what they print, and which arguments hold weights."""

import dataclasses
import io
import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqx
from jqx.presets import w8a8, w8a8_dynamic, w8a16

from ..arrays import assert_same
from ..models.transforms import close, eighths, mlp, mlp_params, normal, plan_of
from .sources import POLICY, assert_transformed, rounded

X, PARAMS = normal(3, 7, 16), mlp_params()
INT8 = jqx.QSpec(jnp.int8, jqx.per_channel())


@pytest.mark.parametrize("granularity", [jqx.per_axis(0), jqx.per_group(4), jqx.per_axis(1)])
def test_a_scale_that_one_of_two_sites_cannot_take_is_refused_where_it_is_planned(granularity):
    """The one contracts axis 0, the other axis 1: blocks along both serve both."""

    def tied(p, x):
        return jnp.tanh(x @ p["w"]) @ p["w"].T

    p, x = {"w": normal(0, 16, 8)}, normal(1, 3, 16)
    with pytest.raises(ValueError, match="varies along a contracted axis") as error:
        plan_of(tied, jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8, granularity))]), p, x)
    assert "weight 'w', rule 0" in str(error.value)
    assert "per_block({0: 8, 1: 8})" in str(error.value)
    blocks = jqx.QSpec(jnp.int8, jqx.per_block({0: 8, 1: 8}))
    plan = plan_of(tied, jqx.Policy([jqx.Rule(weight=blocks)]), p, x)
    q = jqx.quantize_params(p, plan)
    assert q["w"].scale.shape == (2, 1)
    assert close(jqx.convert(tied, plan)(q, x), tied(jqx.dequantize_params(q), x))


def test_axes_merged_at_one_site_have_equal_scales_at_all_sites():
    def f(w, x):  # the first site keeps axis 0 alone, the second merges both axes
        return jnp.einsum("bj,ij->bi", x, w).sum() + x[:, :1] @ w.reshape(1, -1)

    w, x = normal(0, 4, 6), normal(1, 2, 6)
    plan = plan_of(f, w8a8_dynamic(), w, x)
    assert plan.weights[0].spec.granularity.scale_shape((4, 6)) == (1, 1)
    assert jqx.convert(f, plan)(jqx.quantize_params(w, plan), x).shape == (2, 24)


def test_an_unmatched_weight_is_listed_and_an_optional_rule_may_match_nothing():
    assert plan_of(mlp, w8a8("w"), PARAMS, X).skipped[0].reason == "no rule matches"
    policy = jqx.Policy([jqx.Rule("nothing", weight=INT8, optional=True), *w8a16().rules])
    assert len(plan_of(mlp, policy, PARAMS, X).sites) == 2


NOTHING = "matches no contraction"


@pytest.mark.parametrize(
    ("rules", "fact"),
    [
        ([jqx.Rule("w", weight=INT8), jqx.Rule("nothing", weight=INT8)], NOTHING),
        ([*w8a16().rules, jqx.Rule("w", weight=INT8)], "earlier rule"),
        ([jqx.Rule(op="gather", weight=INT8)], NOTHING),
        ([jqx.Rule(activation=jqx.QSpec(jnp.int8, jqx.per_token()))], "bound to one batch size"),
        ([jqx.Rule(activation=jqx.QSpec(jnp.int8, jqx.per_axis(1)))], "along a contracted axis"),
    ],
)
def test_a_rule_that_matches_nothing_or_does_not_fit_its_site_is_an_error(rules, fact):
    with pytest.raises(ValueError, match=fact):
        plan_of(mlp, jqx.Policy(rules), PARAMS, X)


MANY = {f"layer_{i}": {"kernel": jax.ShapeDtypeStruct((4, 4), jnp.float32)} for i in range(12)}


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("layer_11/kernle", ("did you mean 'layer_11/kernel'?", "'layer_11/kernel', ", "5 more")),
        ("layer_3", ("such as 'layer_3/kernel': write 'layer_3/.*'",)),
        ("(?i)Layer_3|none", ("such as 'layer_3/kernel': write 'layer_3/.*'",)),
        ("nothing", ("correct its path or op",)),
    ],
)
def test_the_error_of_a_rule_that_matches_nothing_names_near_paths(path, facts):
    def f(params, x):
        for layer in params.values():
            x = x @ layer["kernel"]
        return x @ x.T

    with pytest.raises(ValueError, match="rule 0 of the policy matches no contraction") as refusal:
        jqx.make_plan(f, jqx.Policy({path: "float", ".*": "int8"}))(MANY, jnp.ones((2, 4)))
    assert all(fact in str(refusal.value) for fact in facts), refusal.value
    assert "no weight reaches it" not in str(refusal.value)


def test_rules_that_differ_leave_a_product_of_two_weights_in_float():
    def f(params, x):
        return x @ params["u"] @ (params["u"] @ params["w"])

    params = {"u": normal(0, 4, 4), "w": normal(1, 4, 4)}
    int4 = jqx.QSpec(jnp.int4, jqx.per_channel())
    policy = jqx.Policy([jqx.Rule("w", weight=int4), jqx.Rule("u", weight=INT8)])
    plan = plan_of(f, policy, params, normal(2, 3, 4))
    assert [site.path for site in plan.sites] == ["u"]
    assert "'w' and 'u' are multiplied by each other, but fall under different rules" in str(plan)


def test_a_rule_names_an_operation():
    def f(params, x):
        y = jax.lax.conv_general_dilated(x, params["k"], (1, 1), "SAME")
        return y.reshape(2, -1) @ params["w"]

    params = {"k": normal(0, 3, 2, 3, 3), "w": normal(1, 48, 5)}
    args = (params, normal(2, 2, 2, 4, 4))
    assert [site.path for site in plan_of(f, w8a16(), *args).sites] == ["k", "w"]
    plan = plan_of(f, jqx.Policy([jqx.Rule(op="conv.*"), *w8a16().rules]), *args)
    assert [site.path for site in plan.sites] == ["w"]
    assert plan.skipped[0].op == "conv_general_dilated"


def test_integer_contractions_are_skipped_with_a_reason():
    def f(w, x):
        return w @ w

    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(weight=INT8)]))(jnp.ones((2, 2), jnp.int32), 0)
    assert plan.sites == () and "not floats" in plan.skipped[0].reason


def with_names(names):
    return jqx.make_plan(listed, POLICY, names=names)(LISTED, EIGHTHS)


NO_PATH = "`names` has paths that the parameters do not have"
NO_STRING = "`names` gives a name that is not a string"


@pytest.mark.parametrize(
    ("call", "error", "fact"),
    [
        (lambda: jqx.calibrate(mlp, "plan"), TypeError, "`plan` is not a Plan"),
        (lambda: jqx.simulate(mlp, {".*": "int8"}), TypeError, "make a policy of the dict"),
        (lambda: jqx.simulate(None, w8a8()), TypeError, "`f` is not a function"),
        (lambda: with_names(3), TypeError, "`names` is neither a dict nor a function"),
        (lambda: with_names({"0": 1}), TypeError, NO_STRING),
        (lambda: with_names(lambda keys: None), TypeError, NO_STRING),
        (lambda: with_names({"2": "a"}), ValueError, NO_PATH),
        (lambda: with_names({"0/w": "1"}), ValueError, "two weights have the same path"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_do(call, error, fact):
    with pytest.raises(error, match=fact) as info:
        call()
    assert all(part in str(info.value) for part in ("jqx.", "fix:"))


TABLE = """\
path  op           shapes           weight            activation       rule
---------------------------------------------------------------------------------------
w     dot_general  [7,16] x [16,24]  int8 per_axis(1)  int8 per_tensor  1
v     dot_general  [7,24] x [24,5]   -                 -                rule 0 leaves it in float
1 of 2 contractions quantized, 76.2 % of the multiply-adds"""


def test_a_plan_prints_every_contraction_and_why_it_is_left_alone():
    policy = jqx.Policy([jqx.Rule("v"), *w8a8().rules])
    lines = str(plan_of(mlp, policy, PARAMS, X)).splitlines()
    assert [line.split() for line in lines if "---" not in line] == [
        line.split() for line in TABLE.splitlines() if "---" not in line
    ]


def test_a_plan_is_a_value_and_that_of_any_batch_size():
    first, again, other_batch = (plan_of(mlp, w8a8(), PARAMS, x) for x in (X, X, X[:1]))
    assert first == again == other_batch and len({first, again, other_batch}) == 1
    assert first.fingerprint == other_batch.fingerprint
    assert first != plan_of(mlp, w8a8_dynamic(), PARAMS, X)


def test_the_fingerprint_is_that_of_the_function_not_of_the_policy():
    wider = {**PARAMS, "v": jnp.zeros((6, 24))}
    cases = (w8a8(), PARAMS), (w8a8_dynamic(), PARAMS), (w8a8(), wider)
    static, dynamic, other = (plan_of(mlp, *case, X).fingerprint for case in cases)
    assert static == dynamic != other


def test_a_path_gives_its_contractions():
    policy = jqx.Policy([jqx.Rule("v"), *w8a8().rules])
    plan = plan_of(mlp, policy, PARAMS, X)
    assert plan["w"] == plan.sites and plan["v"] == plan.skipped
    with pytest.raises(KeyError, match="no contraction has the path") as info:
        plan["ww"]
    assert "such as w" in str(info.value)


def test_rich_prints_the_same_cells_as_a_table():
    console = pytest.importorskip("rich.console")
    plan = plan_of(mlp, w8a8("w"), mlp_params(), normal(0, 4, 16))
    file = io.StringIO()
    console.Console(width=200, file=file).print(plan)
    text = file.getvalue()
    assert str(plan).splitlines()[-1] in text
    for line in str(plan).splitlines()[2:-1]:
        assert all(cell in text for cell in re.split(r"  +", line))


ROWS, MATRIX = np.ones((4, 64), np.float32), np.ones((64, 10), np.float32)
TREE = {"w": np.ones((64, 128), np.float32), "v": np.ones((10, 128), np.float32)}
TURN = np.ones((64, 64), np.float32)


def convolution(x, w):
    axes = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=axes)


IMAGE, KERNEL = np.ones((2, 8, 8, 3), np.float32), np.ones((3, 3, 3, 4), np.float32)

LEGITIMATE = {
    "x @ w": (lambda w, x: x @ w, MATRIX, ROWS),
    "w @ x": (lambda w, x: w @ x, MATRIX.T, ROWS.T),
    "a batch in a dict": (lambda w, b: b["x"] @ w, MATRIX, {"x": ROWS, "y": ROWS}),
    "einsum": (lambda w, b: jnp.einsum("bd,dk->bk", b["x"], w), MATRIX, {"x": ROWS}),
    "rows of outputs": (lambda w, b: b["x"] @ w.T, MATRIX.T, {"x": ROWS}),
    "columns of inputs": (lambda p, b: p["w"].T @ b["x"], TREE, {"x": ROWS.T}),
    "a batch in a tuple": (lambda w, b: b[0] @ w, MATRIX, (ROWS, ROWS)),
    "experts": (
        lambda w, b: jnp.einsum("ebd,edk->ebk", b["x"], w),
        np.ones((3, 64, 8), np.float32),
        {"x": np.ones((3, 4, 64), np.float32)},
    ),
    "images in a dict": (lambda w, b: convolution(b["x"], w), KERNEL, {"x": IMAGE}),
    "two inputs": (
        lambda p, b: b["q"] @ p["w"] @ (b["k"] @ p["w"]).T,
        TREE,
        {"q": ROWS, "k": ROWS},
    ),
    "a cache": (lambda p, x, c: x @ p["w"] @ c["k"].T, TREE, ROWS, {"k": TREE["v"]}),
    "data closed over": (lambda w: jnp.mean((ROWS @ w) ** 2), MATRIX),
    "data closed over, a tree": (lambda p: jnp.mean((ROWS @ p["w"]) @ p["v"].T), TREE),
    "a constant rotation": (lambda p, x: (x @ TURN) @ p["w"], TREE, ROWS),
    "a weight rotated": (lambda w, x: x @ (w @ TURN[:10, :10]) + x @ w, MATRIX, ROWS),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_a_weight_is_planned_where_it_stands_as_one(name):
    f, *args = LEGITIMATE[name]
    assert jqx.make_plan(f, w8a16())(*args).weights


def test_positions_in_a_tuple_are_taken_at_their_word():
    plan = jqx.make_plan(lambda w, b: w @ b["x"], w8a16(), params=(0,))(ROWS, {"x": MATRIX})
    assert [weight.path for weight in plan.weights] == ["0"]
    plan = jqx.make_plan(lambda x, p: x @ p["w"], w8a16(), params=1)(ROWS, TREE)
    assert [weight.path for weight in plan.weights] == ["w"]


def test_what_no_rule_quantizes_is_not_looked_at():
    plan = jqx.make_plan(lambda x, p: x @ p["w"], jqx.Policy([jqx.Rule(activation="int8")]))(
        ROWS, TREE
    )
    assert not plan.weights


ABSTRACT = jax.ShapeDtypeStruct((2, 4), jnp.float32)
KERNEL_SHAPE = jax.ShapeDtypeStruct((4, 4), jnp.float32)
LAYERS = {name: {"kernel": KERNEL_SHAPE, "bias": ABSTRACT} for name in ("embed", "head", "up")}


def layers(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    with jax.named_scope("scores"):
        return x @ x.T


def plan_layers(policy):
    return jqx.make_plan(layers, policy)(LAYERS, ABSTRACT)


def test_a_warning_names_the_rule_the_alternative_and_the_nearest_path():
    policy = jqx.Policy({"(embed|haed)/kernel": "float", ".*": "int8"})
    with pytest.warns(UserWarning) as record:
        plan_layers(policy)
    (warning,) = record
    assert warning.filename == __file__
    assert str(warning.message) == (
        "jqx.make_plan: rule 0 of the policy has alternatives without a match.\n"
        "  given:    'haed' in Rule('(embed|haed)/kernel')\n"
        "  fix:      did you mean 'head/kernel'? Or drop them, or pass optional=True for a policy "
        "of several models."
    )


@pytest.mark.parametrize(
    ("rules", "fact"),
    [
        (w8a16(exclude="(embed|heads)/.*").rules, "'heads' in Rule('(embed|heads)/"),
        ([jqx.Rule("(?:embed|no|none)/.*", weight="int8")], "'no', 'none' in Rule"),
        ([jqx.Rule("embed/kernel|head", weight="int8")], "write 'head/.*'."),
        ([jqx.Rule("embed/kernel|.*query.*", weight="int8")], "correct the path."),
    ],
)
def test_it_warns_of_every_rule_that_has_one(rules, fact):
    with pytest.warns(UserWarning, match=re.escape(fact)) as record:
        plan_layers(jqx.Policy(rules))
    assert len(record) == 1


SILENT = {
    "all match": [jqx.Rule("(embed|head)/kernel|up/.*", weight="int8")],
    "a path of a parameter": [jqx.Rule("(embed|up)/(kernel|bias)", weight="int8")],
    "a path without a weight": [jqx.Rule("embed/.*|scores", activation="int8")],
    "taken by an earlier rule": [
        jqx.Rule("up.*", weight="int8"),
        jqx.Rule("(up|head)/.*", weight="int8"),
    ],
    "optional": [jqx.Rule("(embed|none)/.*", weight="int8", optional=True)],
    "repeated": [jqx.Rule("(em|bed|/|kernel)+", weight="int8")],
    "empty": [jqx.Rule("embed/kernel(|_2|_3)", weight="int8")],
    "may be absent": [jqx.Rule("embed/(a|b)?kernel", weight="int8")],
    "flags": [jqx.Rule("(?i)EMBED/kernel|none", weight="int8")],
    "a lookahead": [jqx.Rule("(?=.*(embed|none)).*", weight="int8")],
    "names": [jqx.Rule("(?P<first>embed|none)/kernel", weight="int8")],
    "counts": [jqx.Rule("(embed|none){1}/kernel", weight="int8")],
    "an escape": [jqx.Rule(r"embed\|?/kernel", weight="int8")],
    "a set": [jqx.Rule("[embd|]*/kernel", weight="int8")],
}


@pytest.mark.parametrize("rules", SILENT.values(), ids=SILENT)
def test_it_raises_no_false_alarm(rules):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_layers(jqx.Policy(rules))


def test_steps_of_a_scan_are_paths():
    def scanned(params, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, params["layers"])[0]

    params = {"layers": jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)}
    rules = {"layers[0]|layers[-1]": "int8", "layers.*": "int4"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="selects steps twice"):
            jqx.make_plan(scanned, jqx.Policy(rules))(params, ABSTRACT)
        jqx.make_plan(scanned, jqx.Policy({"(layers)[0]": "int8", ".*": "int4"}))(params, ABSTRACT)
    with pytest.warns(UserWarning, match="'blocks' in Rule"):
        jqx.make_plan(scanned, jqx.Policy({"(layers|blocks)": "int8"}))(params, ABSTRACT)


def test_one_call_of_ptq_warns_once():
    params = jax.tree.map(lambda x: jnp.ones(x.shape), LAYERS)
    policy = w8a16("(embed|none)/.*")
    with pytest.warns(UserWarning) as record:
        jqx.ptq(layers, policy, jqx.algorithms.nearest(), target=False, progress=False)(
            params, [jnp.ones(ABSTRACT.shape)]
        )
    assert len(record) == 1


EIGHTHS = eighths(1, 4, 8)


def listed(p, x):
    return x @ p[0]["w"] @ p[1] + p[0]["b"][None]


LISTED = [{"w": normal(0, 8, 8), "b": normal(2, 6)}, normal(1, 8, 6)]


def by_keys(keys):
    return ".".join(str(getattr(key, "key", f"layer{getattr(key, 'idx', '')}")) for key in keys)


@pytest.mark.parametrize(
    ("names", "paths"),
    [
        (None, ["0/w", "1"]),
        ({"0": "first", "1": "head/kernel"}, ["first/w", "head/kernel"]),
        ({"0": "first", "0/w": "kernel"}, ["kernel", "1"]),
        (by_keys, ["layer0.w", "layer1"]),
    ],
    ids=["keys", "beginnings", "the longest", "a function"],
)
def test_names_take_the_place_of_key_paths_in_all_transforms(names, paths):
    policy = jqx.Policy([jqx.Rule(path, weight=POLICY.rules[0].weight) for path in paths])
    plan = jqx.make_plan(listed, policy, names=names)(LISTED, EIGHTHS)
    assert [weight.path for weight in plan.weights] == paths
    again = jqx.Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.names == plan.names and hash(again) == hash(plan)
    assert ("names" in plan.to_dict()) == (names is not None)
    expected = listed([{**LISTED[0], "w": rounded(LISTED[0]["w"])}, rounded(LISTED[1])], EIGHTHS)
    assert_transformed(listed, again, LISTED, expected, EIGHTHS, wrap=lambda f: f)
    assert [row.path for row in jqx.report(plan, LISTED).weights] == paths
    assert [site.path for site in jqx.compare(listed, plan)(LISTED, EIGHTHS).sites] == paths


def test_names_cover_several_arguments_and_scales():
    f = lambda a, x, b: x @ a @ b  # noqa: E731
    args = normal(0, 8, 8), EIGHTHS, normal(1, 8, 4)
    options = {"params": (0, 2), "names": {"0": "a", "2": "b"}}
    plan = jqx.make_plan(f, w8a8(), **options)(*args)
    assert set(plan.static_specs()) == {"a:dot_general:lhs", "b:dot_general:lhs"}
    affines = jqx.affines(plan, jqx.calibrate(f, plan)(*args)[1])
    a, b = jqx.quantize_params((args[0], args[2]), plan, affines)
    assert isinstance(b, jqx.QTensor)
    assert jqx.convert(f, plan, affines)(a, EIGHTHS, b).shape == (4, 4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    value: jax.Array


def test_the_key_of_a_variables_value_is_no_part_of_a_path_and_that_of_others_is():
    net = nnx.Dict(
        value=nnx.Linear(8, 4, rngs=nnx.Rngs(0)), box=nnx.Param({"value": normal(0, 4, 4)})
    )
    graph, state = nnx.split(net)

    def f(state, x):
        model = nnx.merge(graph, state)
        return model.value(x) @ model.box.get_value()["value"]

    plan = jqx.make_plan(f, POLICY)(state, EIGHTHS)
    assert [weight.path for weight in plan.weights] == ["value/kernel", "box/value"]
    q = jqx.quantize_params(state, plan)
    assert isinstance(q["value"]["kernel"][...], jqx.QTensor)
    assert jnp.isfinite(jqx.convert(f, plan)(q, EIGHTHS)).all()
    boxed = jqx.make_plan(lambda p, x: x @ p.value, POLICY)(Box(normal(0, 8, 2)), EIGHTHS)
    assert [weight.path for weight in boxed.weights] == ["value"]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Axes:
    """An array with named axes, whose number is checked: a node whose children have no keys."""

    array: jax.Array
    names: tuple[str, ...]

    def __post_init__(self):
        if hasattr(self.array, "shape"):
            assert len(self.array.shape) == len(self.names)

    def tree_flatten(self):
        return (self.array,), self.names

    @classmethod
    def tree_unflatten(cls, names, children):
        return cls(*children, names)


@jax.tree_util.register_pytree_node_class
class Pair(tuple):
    def tree_flatten(self):
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children)


def test_an_only_child_without_a_key_has_the_path_of_its_node():
    """Weights are in classes such as `haliax.NamedArray`, stacked, in a scan with remat."""
    params = {
        "layers": {"w": Axes(normal(0, 3, 8, 8), ("layer", "in", "out"))},
        "heads": Pair([Axes(normal(1, 8, 4), ("in", "out")), normal(2, 4, 4)]),
    }

    def f(params, x):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ w.array), None

        stack = params["layers"]["w"]
        x, _ = jax.lax.scan(lambda x, w: layer(x, Axes(w, stack.names[1:])), x, stack.array)
        return x @ params["heads"][0].array @ params["heads"][1]

    plan = jqx.make_plan(f, POLICY)(params, EIGHTHS)
    assert [weight.path for weight in plan.weights] == ["layers/w", "heads/0", "heads/1"]
    q = jqx.quantize_params(params, plan)
    assert isinstance(q["layers"]["w"], Axes)
    assert isinstance(q["layers"]["w"].array, jqx.QTensor)
    y = jqx.convert(f, plan)(q, EIGHTHS)
    np.testing.assert_allclose(y, f(jqx.dequantize_params(q), EIGHTHS), rtol=0, atol=1e-4)


def test_what_is_named_none_holds_no_weights():
    def f(params, x):
        return x @ params["w"] @ params["constants"]["turn"] + params["constants"]["b"]

    params = {"w": normal(0, 8, 8), "constants": {"turn": normal(1, 8, 4), "b": normal(2, 1, 4)}}
    plan = jqx.make_plan(f, POLICY, names={"constants": None})(params, EIGHTHS)
    assert [weight.path for weight in plan.weights] == ["w"] and len(plan.skipped) == 1
    assert plan.names == (("constants/b", None), ("constants/turn", None))
    assert jqx.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    other = {**params, "constants": {"turn": normal(1, 8, 5), "b": normal(2, 1, 5)}}
    q = jqx.quantize_params(other, plan)  # of any shape, as what is no parameter
    assert q["constants"]["turn"] is other["constants"]["turn"]
    assert jqx.convert(f, plan)(q, EIGHTHS).shape == (len(EIGHTHS), 5)
    assert jqx.report(plan, params).kept == 4 * (8 * 4 + 4)


def test_weights_are_mapped_by_their_names():
    plan = jqx.make_plan(listed, POLICY, names={"0": "embed"})(LISTED, EIGHTHS)
    mapped_paths = []
    mapped = plan.map_weights(
        lambda w, x: mapped_paths.append(w.path) or jqx.QTensor.quantize(x, w.spec), LISTED
    )
    assert mapped_paths == [weight.path for weight in plan.weights]
    assert_same(mapped, jqx.quantize_params(LISTED, plan))
