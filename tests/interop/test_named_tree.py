"""Names of tensors to paths of a tree, and back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jqx
from jqx import QTensor
from jqx.interop import Name, named, read, tree

from ..arrays import normal
from ..oracles.refusals import assert_error
from .raw_folders import write_file
from .test_write import integers

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

    found = {"embed.weight": new(5, 4), "head.weight": new(5, 4), "rotary.table": new(3)}
    for i in range(LAYERS):
        found[f"layers.{i}.up.weight"] = new(6, 4)
        found[f"layers.{i}.q.weight"] = new(8, 4)
        found[f"layers.{i}.norm_in.weight"] = new(4)
        found[f"layers.{i}.norm_out.weight"] = new(4)
    return found


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
    given, found = arrays(), tree(archive, RULES)
    assert found["layers"]["up"].shape == (LAYERS, 4, 6)
    for i in range(LAYERS):
        np.testing.assert_array_equal(found["layers"]["up"][i], given[f"layers.{i}.up.weight"].T)
        q = given[f"layers.{i}.q.weight"].T.reshape(4, 2, 4)
        np.testing.assert_array_equal(found["layers"]["q"][i], q)
    assert {*found["layers"]} == {"up", "q", "norm_in", "norm_out"}
    np.testing.assert_array_equal(found["out"]["w"], given["head.weight"])


def test_back_to_names(archive):
    given = arrays()
    back = named(tree(archive, RULES), RULES)
    assert {*back} == {*given} - {"rotary.table"}
    for name, x in back.items():
        np.testing.assert_array_equal(x, given[name], err_msg=name)


def test_like_a_tree_of_the_user(archive):
    shapes = tree(archive, RULES, abstract=True)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shapes))
    found = tree(archive, RULES, like=shapes)
    assert jax.tree.structure(found) == jax.tree.structure(shapes)
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
        found = tree(archive, {"w": "w", "b": "b"}, sharding=where)
        with pytest.raises(TypeError, match="returns a str for 'w', not a sharding"):
            tree(archive, {"w": "w", "b": "b"}, sharding=lambda path, leaf: "here")
    assert found["w"].scale.sharding.spec == PartitionSpec("model", None)
    np.testing.assert_array_equal(found["w"].dequantize(), q.dequantize())


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
    with pytest.raises(ValueError, match="'b' has no rule"):
        named({"b": jnp.ones(2)}, {"a": "a"})
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
    found = named(params, [narrow, second])
    assert {*found} == {"layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"}
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
