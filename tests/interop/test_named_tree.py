"""Names of tensors to paths of a tree, and back; files compared with a float model."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jqx
from jqx import QTensor
from jqx.interop import Name, named, read, tree, verify, write

from ..arrays import normal
from ..oracles.refusals import assert_error
from .files import write_file
from .trees import integers

LAYERS = 3


RULES = [
    ("embed.weight", "embed"),
    Name("layers.{i}.up.weight", "layers/up", transpose=True),
    Name("layers.{i}.{kind:norm.*}.weight", "layers/{kind}"),
    Name("layers.{i}.q.weight", "layers/q", transpose=True, split={1: (2, 4)}),
    ("head.weight", "out/w"),
    Name("rotary.{x}", None, optional=True),
]


def arrays():
    rng = np.random.default_rng(0)

    def new(*shape):
        return rng.normal(size=shape).astype(np.float32)

    tensors = {"embed.weight": new(5, 4), "head.weight": new(5, 4), "rotary.table": new(3)}
    for i in range(LAYERS):
        tensors[f"layers.{i}.up.weight"] = new(6, 4)
        tensors[f"layers.{i}.q.weight"] = new(8, 4)
        tensors[f"layers.{i}.norm_in.weight"] = new(4)
        tensors[f"layers.{i}.norm_out.weight"] = new(4)
    return tensors


@pytest.fixture
def archive(tmp_path):
    write_file(tmp_path / "a", arrays())
    with read(tmp_path / "a") as opened:
        yield opened


PACKED = {
    "int4": jqx.QSpec("int4", jqx.per_block({0: 1, 1: 32})),
    "int8": jqx.QSpec("int8", jqx.per_axis(0)),
}


@pytest.mark.parametrize("form", PACKED)
def test_codes_that_are_packed_are_split_and_joined(tmp_path, form):
    real = np.asarray(np.random.default_rng(0).normal(size=(96, 128)), np.float32)
    q = QTensor.quantize(jnp.asarray(real), PACKED[form])
    q = q if form == "int8" else q.pack()
    jqx.save(tmp_path / "m", {"q.0": q, "q.1": q})
    rules = [
        Name("q.{i}", "turned", transpose=True, split={1: (3, 32)}),
        Name("q.{i}", "both", transpose=True, split={0: (2, 64), 1: (3, 32)}),
        Name("q.{i}", "axes", transpose=(1, 0), split={0: (4, 32)}),
        Name("q.{i}", "rows", split={0: (3, 32)}),
    ]
    wanted = np.asarray(q.dequantize())
    shapes = {"turned": (128, 3, 32), "both": (2, 64, 3, 32), "axes": (4, 32, 96)}
    with read(tmp_path / "m") as archive:
        for rule in rules:
            ((name, leaf),) = tree(archive, [rule]).items()
            assert jax.tree.structure(leaf) == jax.tree.structure(
                tree(archive, [rule], abstract=True)[name]
            )
            each = (wanted if name == "rows" else wanted.T).reshape(shapes.get(name, (3, 32, 128)))
            np.testing.assert_array_equal(leaf.dequantize(), [each, each])
            assert leaf.values.nbytes == 2 * q.values.nbytes
            back = named({name: leaf}, [rule])["q.1"]
            np.testing.assert_array_equal(back.dequantize(), wanted)


def test_groups_that_a_split_cuts_become_the_largest_that_fit(tmp_path):
    spec = jqx.QSpec("int4", jqx.per_block({0: 24, 1: 32}))
    q = QTensor.quantize(normal(0, 96, 64), spec)
    jqx.save(tmp_path / "m", {"q": q.pack()})
    with read(tmp_path / "m") as archive:
        rule = Name("q", "a", transpose=True, split={1: (6, 16)})
        leaf = tree(archive, [rule])["a"]
    assert leaf.scale.shape == (2, 6, 2)
    np.testing.assert_array_equal(leaf.dequantize(), q.dequantize().T.reshape(64, 6, 16))


def test_layers_are_stacked_transposed_and_split(archive):
    tensors, params = arrays(), tree(archive, RULES)
    assert params["layers"]["up"].shape == (LAYERS, 4, 6)
    for i in range(LAYERS):
        np.testing.assert_array_equal(params["layers"]["up"][i], tensors[f"layers.{i}.up.weight"].T)
        q = tensors[f"layers.{i}.q.weight"].T.reshape(4, 2, 4)
        np.testing.assert_array_equal(params["layers"]["q"][i], q)
    assert {*params["layers"]} == {"up", "q", "norm_in", "norm_out"}
    np.testing.assert_array_equal(params["out"]["w"], tensors["head.weight"])


def test_back_to_names(archive):
    tensors = arrays()
    back = named(tree(archive, RULES), RULES)
    assert {*back} == {*tensors} - {"rotary.table"}
    for name, x in back.items():
        np.testing.assert_array_equal(x, tensors[name], err_msg=name)


def test_like_a_tree_of_the_user(archive):
    shapes = tree(archive, RULES, abstract=True)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shapes))
    params = tree(archive, RULES, like=shapes)
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    more = {**shapes, "bias": jax.ShapeDtypeStruct((2,), jnp.float32)}
    wrong = {**shapes, "embed": jax.ShapeDtypeStruct((4, 5), jnp.float32)}
    fewer = {key: x for key, x in shapes.items() if key != "embed"}
    for like, words in [
        (more, "leaves of `like` have no tensor"),
        (wrong, r"'embed' has the shape .5, 4., in `like`"),
        (fewer, "'embed' has no place in `like`"),
    ]:
        with pytest.raises(ValueError, match=words):
            tree(archive, RULES, like=like)


@pytest.mark.parametrize("kind", ["plain", "packed", "order"])
def test_quantized_layers_are_stacked_without_moving_codes(tmp_path, kind):
    layers = [integers(4, zeros=True, order=kind == "order", shape=(8, 64)) for _ in range(2)]
    layers = [q.pack() for q in layers] if kind == "packed" else layers
    jqx.save(tmp_path / "a", {f"{i}": {"w": q} for i, q in enumerate(layers)})
    rules = [Name("{i}/w", "w", transpose=True)]
    with read(tmp_path / "a") as archive:
        spec = tree(archive, rules, abstract=True)["w"]
        w = tree(archive, rules)["w"]
    assert isinstance(w, QTensor) and w.shape == (2, 64, 8)
    assert jax.tree.structure(w) == jax.tree.structure(spec)
    for i, q in enumerate(layers):
        np.testing.assert_array_equal(w[i].dequantize(), q.dequantize().T)
        if kind == "packed":
            np.testing.assert_array_equal(w.values[i], q.values)
        back = named({"w": w}, rules)[f"{i}/w"]
        np.testing.assert_array_equal(back.dequantize(), q.dequantize())


def test_leaves_are_put_where_a_sharding_says(tmp_path):
    q = integers(4, shape=(8, 64)).pack()
    jqx.save(tmp_path / "a", {"w": q, "b": jnp.ones(4)})
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))

    def where(path, leaf):
        assert leaf.shape in ((8, 64), (4,))
        return NamedSharding(mesh, PartitionSpec("model")) if path == "w" else None

    with read(tmp_path / "a") as archive:
        params = tree(archive, {"w": "w", "b": "b"}, sharding=where)
        with pytest.raises(TypeError, match="returns a str for 'w', not a sharding"):
            tree(archive, {"w": "w", "b": "b"}, sharding=lambda path, leaf: "here")
    assert params["w"].scale.sharding.spec == PartitionSpec("model", None)
    np.testing.assert_array_equal(params["w"].dequantize(), q.dequantize())


WRONG = {
    "a tensor without a rule": (RULES[1:], "'embed.weight' has no rule"),
    "a rule without a tensor": ([*RULES, ("no", "no")], "matches nothing that no earlier"),
    "one path for two": (
        [("{x}.weight", "all"), *RULES],
        "in float and quantized|cannot be stacked",
    ),
    "a part that is no number": ([("{x}.weight", "all"), *RULES[1:]], "cannot be stacked"),
    "a rule that does not fit": (
        [Name("embed.weight", "embed", transpose=(0, 2)), *RULES[1:]],
        "does not fit its rule",
    ),
    "layers that differ": ([("layers.{i}.{k}.weight", "l"), *RULES], "cannot be stacked"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rules_that_do_not_fit_are_refused(archive, case):
    rules, words = WRONG[case]
    with pytest.raises(ValueError, match=words) as caught:
        tree(archive, rules)
    assert "fix:" in str(caught.value)


def test_a_missing_layer_is_reported(tmp_path):
    write_file(tmp_path / "a", {f"l.{i}.w": np.ones(2, np.float32) for i in (0, 2)})
    with read(tmp_path / "a") as archive:
        with pytest.raises(ValueError, match=r"has no tensor at \(1,\)"):
            tree(archive, {"l.{i}.w": "w"})


def test_leaves_that_no_rule_takes_are_refused():
    assert_error(lambda: named({"b": jnp.ones(2)}, {"a": "a"}), "'b' has no rule")
    with pytest.raises(ValueError, match=r"matches nothing that no earlier"):
        named({"a": jnp.ones(2)}, {"a": "a", "b": "b"})


def test_templates_that_are_none_are_refused():
    for error, words, arguments in [
        (ValueError, "'a' lacks the part {b}", ("a", "{b}")),
        (ValueError, "template .* is invalid", ("{a:(}", "b")),
        (TypeError, "source", (1, "b")),
    ]:
        with pytest.raises(error, match=words):
            Name(*arguments)
    for names in ("ab", [("a",)], [1]):
        with pytest.raises(TypeError, match="`names` are not rules"):
            named({"a": jnp.ones(2)}, names)


def test_what_does_not_fit_is_refused(tmp_path):
    jqx.save(tmp_path / "m", {"a": np.array([2**40, 1]), "b": np.ones((4, 6), np.float32)})
    cut = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(None, "x"))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    names = {"a": "a", "b": "b"}

    def refused(words, error=ValueError, names=names, **more):
        with jqx.interop.read(tmp_path / "m") as archive:
            assert_error(lambda: tree(archive, names, **more), words, error=error)

    refused("'a' would lose bits", sharding=one)
    refused("does not fit its sharding", sharding=lambda path, _: cut if path == "b" else None)
    refused("the leaf 'up' is not an array", TypeError, like={"up": 3})
    for split in ({-1: (2, 3)}, {1: 6}, {1: [2, 3]}, {1: (2, 0)}, [1]):
        assert_error(lambda s=split: Name("b", "b", split=s), "`split`", error=TypeError)
    for split in ({2: (2, 3)}, {1: (2, 2)}):
        refused("does not fit its rule", names=[Name("a", "a"), Name("b", "b", split=split)])
    assert_error(lambda: tree({"a": 1}, names), "`archive`", error=TypeError)
    assert_error(lambda: named({"a": 3.0}, {"a": "a"}), "not an array", error=TypeError)
    rules = [Name("l.{i}.a", "a")]
    assert_error(lambda: named({"a": jnp.ones(())}, rules), "lacks axes")


KERNEL = "layers_{i}/{name}/kernel"


ATTENTION = Name("layers.{i}.self_attn.{name}.weight", KERNEL, transpose=True)


MLP = Name("layers.{i}.mlp.{name}.weight", KERNEL, transpose=True)


def optional(rule):
    return dataclasses.replace(rule, optional=True)


@pytest.mark.parametrize("second", [MLP, optional(MLP)], ids=["required", "optional"])
def test_rules_that_give_a_path_two_names_are_refused(second):
    params = {"layers_0": {"q_proj": {"kernel": np.ones((4, 2))}}}
    params["layers_0"]["down_proj"] = params["layers_0"]["q_proj"]
    assert_error(
        lambda: named(params, [ATTENTION, second]),
        "a rule never applies",
        "'layers_0/down_proj/kernel' goes to Name('layers.{i}.self_attn",
        "{name:[qkvo]_proj}",
    )
    narrow = dataclasses.replace(ATTENTION, source="layers.{i}.self_attn.{name:[qkvo]_proj}.weight")
    tensors = named(params, [narrow, second])
    assert {*tensors} == {"layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"}
    assert_error(lambda: named(params, [second, narrow]), "a rule never applies")


def test_a_general_last_rule_may_be_left_with_nothing():
    rules = [("a.weight", "a"), ("b.weight", "b"), Name("{x:.*}", "{x}", optional=True)]
    assert {*named({"a": np.ones(2), "b": np.ones(2)}, rules)} == {"a.weight", "b.weight"}
    assert {*named({"a": np.ones(2), "b": np.ones(2), "c": np.ones(2)}, rules)} >= {"c"}


def test_a_rule_whose_tensors_an_earlier_one_takes_is_an_error(archive):
    assert_error(
        lambda: tree(archive, [("layers.{x:.*}", None), *RULES]),
        "a rule never applies",
        "goes to Name('layers.{x:.*}' -> None)",
        "put the narrower rule first",
    )
    rules = [RULES[0], RULES[4], ("layers.{x:.*}", None), RULES[5]]
    assert {*tree(archive, [*rules, optional(RULES[1])])} == {"embed", "out"}


def test_a_part_that_cannot_be_stacked_names_the_ways_out(archive):
    rules = [("layers.0.{block}.weight", "w"), ("{x:.*}", None)]
    assert_error(lambda: tree(archive, rules), "put {block} into the path", "for each {block}")


RULES_OF_MODEL = [
    Name("layers.{i}.up.weight", "up", transpose=True),
    Name("head.weight", "head", transpose=True),
    Name("norm.weight", "norm"),
]


def apply(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, params["up"])
    return (x * params["norm"][None]) @ params["head"]


@pytest.fixture(scope="module")
def floats():
    keys = jax.random.split(jax.random.key(0), 4)
    names = {f"layers.{i}.up.weight": jax.random.normal(keys[i], (32, 32)) for i in range(3)}
    return {
        **names,
        "head.weight": jax.random.normal(keys[3], (16, 32)),
        "norm.weight": jnp.ones(32),
    }


def quantized(floats, scheme="int4"):
    spec = jqx.QSpec(scheme, jqx.per_block({0: 1, 1: 32}))
    return {
        name: QTensor.quantize(x, spec) if name.startswith("layers") else x
        for name, x in floats.items()
    }


def test_what_is_written_well_is_right(tmp_path, floats):
    write(tmp_path / "m", quantized(floats), "compressed-tensors", config={})
    jqx.save(tmp_path / "f", floats)
    report = verify(tmp_path / "m", tmp_path / "f")
    assert report.ok and report.check() is report and report.sites is None
    assert {row.path for row in report.tensors} == {*floats}
    for row in report.tensors:
        assert 15 < row.sqnr < 25 if row.path.startswith("layers") else row.sqnr == math.inf
    with jqx.interop.read(tmp_path / "m") as archive:
        assert verify(archive, floats) == report
    assert json.loads(json.dumps(report.to_dict()))["problems"] == []
    assert "0 of them wrong" in str(report)


def test_sites_of_a_function_are_compared(tmp_path, floats):
    write(tmp_path / "m", quantized(floats), "compressed-tensors", config={})
    jqx.save(tmp_path / "f", floats)
    with jqx.interop.read(tmp_path / "f") as archive:
        params = jqx.interop.tree(archive, RULES_OF_MODEL)
    batch = (jax.random.normal(jax.random.key(5), (8, 32)),)
    report = verify(tmp_path / "m", params, names=RULES_OF_MODEL, function=apply, batch=batch)
    assert report.ok and [site.name for site in report.sites.sites] == ["up[0]", "up[1]", "up[2]"]
    assert all(15 < site.local_sqnr < 30 for site in report.sites.sites)
    assert "own SQNR dB" in str(report)
    strict = verify(
        tmp_path / "m", params, names=RULES_OF_MODEL, function=apply, batch=batch, least=15
    )
    assert len(strict.problems) == 1 and strict.problems[0].startswith("the site '(result)': ")


def test_a_file_of_a_quantized_function(tmp_path, floats):
    params = {"up": jnp.stack([floats[f"layers.{i}.up.weight"] for i in range(3)])}
    params |= {"norm": floats["norm.weight"], "head": floats["head.weight"].T}
    batch = (jax.random.normal(jax.random.key(5), (8, 32)),)
    whole = jqx.ptq(apply, jqx.presets.w8a8_dynamic(), progress=False)(params, [batch])
    jqx.save(tmp_path / "q", whole)
    report = verify(tmp_path / "q", params, function=apply, batch=batch)
    assert report.ok and len(report.sites.sites) == 4
    other = {**params, "head": params["head"][::-1]}
    assert any("'head'" in line for line in verify(tmp_path / "q", other).problems)


@pytest.mark.parametrize("by", [jqx.algorithms.rotate(), jqx.algorithms.smooth_quant()], ids=str)
def test_a_file_of_rewritten_weights_is_refused(tmp_path, by):
    params = {
        "norm": jnp.linspace(0.5, 9, 32),
        "up": jax.random.normal(jax.random.key(0), (32, 32)),
    }
    f = lambda p, x: (x * p["norm"][None]) @ p["up"]  # noqa: E731
    batch = (jax.random.normal(jax.random.key(5), (8, 32)),)
    jqx.save(tmp_path / "q", jqx.ptq(f, jqx.presets.w8a8(), by, progress=False)(params, [batch]))
    for options in ({}, {"function": f, "batch": batch}):
        call = functools.partial(verify, tmp_path / "q", params, **options)
        assert_error(call, "the weights of the file are not those of the float model")


def with_scales(q, scale):
    return dataclasses.replace(q, scale=scale)


WRONG_WEIGHTS = {
    "missing": (lambda q: None, "missing in the file"),
    "shape": (lambda q: q[:16], r"shape \(16, 32\)"),
    "layout": (lambda q: q.T, "less than 3 dB"),
    "sign": (lambda q: with_scales(q, -q.scale), "less than 3 dB"),
    "infinite": (lambda q: with_scales(q, q.scale.at[0].set(jnp.inf)), "not finite"),
    "zeros": (lambda q: with_scales(q, q.scale.at[3].set(0)), "1 rows are zeros"),
    "twice": (lambda q: with_scales(q, q.scale * 2), "less than 3 dB"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_what_is_wrong_is_found(floats, case):
    name, tree = "layers.1.up.weight", quantized(floats, "int8")
    change, words = WRONG_WEIGHTS[case]
    changed = change(tree.pop(name))
    if changed is not None:
        tree[name] = changed
    report = verify(tree, floats)
    assert not report.ok and len([row for row in report.tensors if row.problems]) == 1
    with pytest.raises(ValueError, match=f"'{name}': .*{words}"):
        report.check()


@pytest.mark.parametrize(
    ("value", "words"), [(0, "is 0"), (-1, "negative"), (np.nan, "not finite")]
)
def test_scales_of_caches_are_looked_at(floats, value, words):
    tree = quantized(floats)
    for name in ("layers.0.k_scale", "layers.0.up.input_scale", "layers.0.up.weight_scale_inv"):
        assert verify({**tree, name: jnp.ones(2)}, floats).ok
        (problem,) = verify({**tree, name: jnp.array([1, value])}, floats).problems
        assert name in problem and words in problem


def test_floats_are_those_of_the_model_in_the_dtype_of_the_file(floats):
    tree = quantized(floats)
    half = {**tree, "head.weight": tree["head.weight"].astype(jnp.bfloat16)}
    assert verify(half, floats).ok
    other = {**tree, "norm.weight": tree["norm.weight"] * 1.05}
    assert verify(other, floats).problems == ("'norm.weight': less than 45 dB",)
    more = {**tree, "more.weight": jnp.ones(3)}
    assert verify(more, floats).problems == ("'more.weight': not in the float model",)
    assert verify(more, floats, ignore=[r"more\..*"]).ok


def test_floats_that_are_lost_in_their_dtype_are_found():
    w = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    lost = {
        "int8, and float32 in the model": (w * 0.2, np.zeros((32, 64), np.int8)),
        "bool, and float32 in the model": (w, w > 0),
        "numbers that are not finite": (w * 1e5, jnp.asarray(w * 1e5).astype(jnp.float16)),
        "less than 20 dB": (w * 1e-4, (w * 1e-4).astype(jnp.float8_e4m3fn)),
    }
    for words, (real, weight) in lost.items():
        (problem, *_) = verify({"w": jnp.asarray(weight)}, {"w": real}).problems
        assert words in problem
    overflown = (w * 1e4).astype(jnp.float8_e4m3fn)
    assert "not finite" in verify({"w": overflown}, {"w": w * 1e4}).problems[0]


def test_swapped_rows_and_layers_are_found(floats):
    name = "layers.0.up.weight"
    tree = quantized(floats, "int8")
    rows = np.arange(32)
    rows[[3, 4]] = 4, 3
    report = verify({**tree, name: tree[name].take(rows, axis=0)}, floats)
    assert report.problems == (f"{name!r}: 2 rows are worse than zeros",)
    rng = np.random.default_rng(0)
    a, b = (1 + 0.02 * rng.normal(size=(2, 576))).astype(np.float32)
    assert len(verify({"a": a, "b": b}, {"a": b, "b": a}).problems) == 2
    zero = {"up.k_scale": jnp.zeros(1)}
    assert verify(zero, zero).problems == ("'up.k_scale': a scale is 0",)


def test_arguments_that_do_not_fit(tmp_path, floats):
    assert_error(lambda: verify(floats, floats, function=apply), "a function needs a batch")
    assert_error(lambda: verify(floats, floats, ignore=["nothing"]), "matches no")
    assert_error(lambda: verify(floats, floats, ignore=["["]), "not a regular expression")
    twice = {"a.b": jnp.ones(3), "a": {"b": jnp.ones(3)}}
    assert_error(lambda: verify(twice, floats), "two tensors have the same name")
    assert_error(lambda: verify(floats, floats, ignore="x"), "not hold patterns", error=TypeError)
    assert_error(lambda: verify({}, floats), "nothing to compare", error=TypeError)
    assert_error(lambda: verify({"w": "text"}, floats), "nothing to compare", error=TypeError)
    assert_error(lambda: verify(floats, floats, names=RULES_OF_MODEL), "`file`", error=TypeError)
    assert_error(lambda: verify(tmp_path / "no", floats), "cannot", error=FileNotFoundError)
