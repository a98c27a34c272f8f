"""Files that nobody means well by: damaged, deep or huge; and what no file is to hold."""

import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics

from ..oracles.refusals import assert_error
from .test_archive import entry, file_of
from .trees import assert_same, quantized


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


# Numbers.


def test_arrays_of_any_byte_order_are_saved_as_numbers(path):
    x = np.array([1.0, 2.5, -3.0])
    tree = {
        f"{order}{kind}{size}": x.astype(f"{order}{kind}{size}")
        for order in "<>="
        for kind, sizes in (("f", (2, 4, 8)), ("i", (1, 2, 4, 8)), ("u", (2, 4, 8)), ("c", (8,)))
        for size in sizes
    }
    jqx.save(path, tree)
    read = jqx.load(path)
    for name, array in tree.items():
        np.testing.assert_array_equal(read[name], array)
        assert np.asarray(read[name]).dtype.isnative
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    jqx.interop.save_leaves(path, [like], [x.astype(">f4")])
    np.testing.assert_array_equal(jqx.load(path)[0], x)


def test_any_byte_but_0_is_true(path):
    numbers = bytes([7, 0, 255, 1])
    path.write_bytes(file_of({"m": entry("BOOL", (2, 2), (0, 4))}, numbers))
    with jqx.interop.Archive(path) as archive:
        for found in (jqx.load(path)["m"], archive.view("m")):
            assert_same(found, np.array([[True, False], [True, True]]))
            assert int(found.sum()) == 3
    jqx.save(path, np.frombuffer(numbers, bool))
    assert path.read_bytes()[-4:] == bytes([1, 0, 1, 1])


def test_bits_beyond_a_small_float_are_not_saved(path):
    x = np.array([0x12, 0xF3], np.uint8).view(jnp.float4_e2m1fn)
    jqx.save(path, x)
    assert path.read_bytes()[-2:] == bytes([0x02, 0x03])
    assert jqx.load(path).astype(np.float32).tolist() == [1.0, 1.5]


THREE = numerics.Codebook((-1.0, 0.25, 3.0), "three")
BEYOND = {
    "int3": (numerics.int3, [4, 100, -5]),
    "uint5": (numerics.uint5, [32, 255]),
    "ternary": (numerics.ternary, [2, -2]),
    "int8_narrow": (numerics.Integer(8, narrow=True), [-128]),
    "int4_narrow": (numerics.Integer(4, narrow=True), [-8, 8]),
    "int16_narrow": (numerics.Integer(16, narrow=True), [-(2**15)]),
    "nf4": (numerics.nf4, [16, 255]),
    "binary": (numerics.binary, [2]),
    "three": (THREE, [3]),
    "float6": (numerics.float6_e3m2fn, [64]),
    "mxfp6": (numerics.mxfp6_e2m3, [64]),
    "mxint8": (numerics.mxint8, [-128]),
    "blocks of nf4": (numerics.Block(numerics.nf4, 4, "mine"), [16]),
}


def with_codes(q, codes):
    """A QTensor whose first codes are others, without asking whether they are any."""
    values = np.array(q.values)
    flat = values.reshape(-1)
    flat[: len(codes)] = codes
    leaves = [values, *jax.tree.leaves(q)[1:]]
    return jax.tree.unflatten(jax.tree.structure(q), leaves)


def damaged(path, q, codes):
    """Saves a QTensor and replaces its first codes in the file."""
    jqx.save(path, {"w": q})
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start = 8 + size + json.loads(data[8 : 8 + size])["w.values"]["data_offsets"][0]
    raw = np.asarray(codes).astype(q.values.dtype).tobytes()
    data[start : start + len(raw)] = raw
    path.write_bytes(data)


def test_codes_that_are_none_of_their_format_are_refused(path):
    for name, (qtype, codes) in BEYOND.items():
        q = quantized(qtype)
        for code in codes:
            words = ("'w.values'", f"not codes of {numerics.format_of(qtype).name}", str(code))
            if np.iinfo(q.values.dtype).min <= code <= np.iinfo(q.values.dtype).max:
                wrong = with_codes(q, [code])
                assert_error(lambda q=wrong: jqx.save(path, {"w": q}), *words)
                damaged(path, q, [code])
                assert_error(lambda: jqx.load(path), *words)
                with jqx.interop.Archive(path) as archive:
                    assert_error(lambda a=archive: a.view("w"), *words)
        low, high = numerics.format_of(qtype).code_range
        damaged(path, q, [low, high])
        assert jqx.load(path)["w"].values.reshape(-1)[:2].tolist() == [low, high], name


@pytest.mark.parametrize("lay", ["pack", "int8"])
def test_codes_that_are_laid_out_otherwise_are_looked_at_too(path, lay):
    for qtype, bits in ((numerics.ternary, 0b10), (THREE, 0b11)) if lay == "pack" else ():
        q = quantized(qtype).pack()
        damaged(path, q, [bits])
        assert_error(lambda: jqx.load(path), "'w.values'", numerics.format_of(qtype).name)
    for qtype in (jnp.int4, jnp.uint4, numerics.int5) if lay == "int8" else ():
        q = quantized(qtype).pack_for("cpu")
        assert q.values.dtype == jnp.int8
        damaged(path, q, [100])
        assert_error(lambda: jqx.load(path), "'w.values'", numerics.format_of(qtype).name)
    for q in (quantized(jnp.uint8).pack_for("cpu"), quantized(numerics.nf4).pack()):
        damaged(path, q, [-128 if q.values.dtype == jnp.int8 else 255])
        jqx.load(path)  # each byte is a code


def test_zero_points_beyond_their_format_are_refused(path):
    scale = jnp.ones((1, 2))
    q = jqx.QTensor(
        jnp.zeros((3, 2), jnp.uint8), scale, jnp.array([[0, 8]], jnp.uint8), qtype=numerics.uint3
    )
    assert_error(lambda: jqx.save(path, {"w": q}), "'w.zero_point'", "not codes of uint3")
    assert not path.exists()


def test_codes_of_a_format_of_the_user_have_its_bits(path):
    class Mine(numerics.Codebook):
        pass

    mine = Mine((-1.0, 0.5, 1.0), "mine")
    q = with_codes(quantized(mine), [3])
    assert_error(lambda: jqx.save(path, {"w": q}, values={"mine": mine}), "codes of mine")


# Headers.


@pytest.mark.parametrize(
    "shape",
    [
        [0, 2**62, 2**62],
        [0, 2**70],
        [2**63],
        [1] * 70,
        [0] * 65,
        [2**32, 2**32],
        [9] * 500_000,
        [-1, 2],
        [1.0, 2],
        ["2"],
        [True, 2],
        [None],
        [[2]],
        "2",
        {"0": 2},
        None,
        2,
    ],
    ids=lambda shape: repr(shape)[:20],
)
def test_shapes_that_no_array_has_are_refused_at_once(path, shape):
    size = 0 if isinstance(shape, list) and shape[:1] == [0] else 8
    fields = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    path.write_bytes(file_of({"x": fields}, bytes(size)))
    start = time.process_time()
    assert_error(lambda: jqx.load(path), "the tensor 'x' without consistent dtype, shape")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "place", [[0, 8.0], ["0", 8], [0, None], [-8, 0], [0, 2**80], [0], [0, 8, 8], "08", None, 8]
)
def test_places_that_are_none_are_refused(path, place):
    fields = {"dtype": "F32", "shape": [2], "data_offsets": place}
    path.write_bytes(file_of({"x": fields}, bytes(8)))
    assert_error(lambda: jqx.load(path), "is not a safetensors file")


@pytest.mark.parametrize("dtype", [None, 3, ["F32"], {"F32": 1}])
def test_dtypes_that_are_none_are_refused(path, dtype):
    path.write_bytes(file_of({"x": {**entry(), "dtype": dtype}}, bytes(8)))
    assert_error(lambda: jqx.load(path), "without consistent dtype")


@pytest.mark.parametrize("fields", [None, 3, "x", [], {}])
def test_tensors_without_fields_are_refused(path, fields):
    path.write_bytes(file_of({"x": fields}))
    assert_error(lambda: jqx.load(path), "without consistent dtype")


def test_a_key_that_stands_twice_is_refused(path):
    one = json.dumps(entry())
    path.write_bytes(file_of(f'{{"x":{one},"x":{one}}}', bytes(8)))
    assert_error(lambda: jqx.load(path), "a header with the key 'x' twice")
    fields = '{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}'
    path.write_bytes(file_of(f'{{"x":{fields}}}', bytes(8)))
    assert_error(lambda: jqx.load(path), "'shape' twice")


def test_axes_as_many_as_arrays_have_are_read(path):
    path.write_bytes(
        file_of({"x": entry(shape=[2] + [1] * 63), "y": entry("F32", (0, 3), (8, 8))}, bytes(8))
    )
    assert jqx.load(path)["x"].ndim == 64


# The tree.


def described(path, tree, tensors=None):
    """A file of one tensor `x` whose tree is described so."""
    text = tree if isinstance(tree, str) else json.dumps({"version": 2, "tree": tree})
    path.write_bytes(
        file_of({"__metadata__": {"jqx": text}, **(tensors or {"x": entry()})}, bytes(8))
    )
    return lambda: jqx.load(path)


def deep(node, depth, wrap):
    for _ in range(depth):
        node = wrap(node)
    return node


X = {"array": "x", "dtype": "float32"}
WRAPS = {
    "dict": lambda node: {"dict": [["a", node]]},
    "list": lambda node: {"list": [node]},
    "tuple": lambda node: {"tuple": [node]},
}


@pytest.mark.parametrize("kind", WRAPS)
def test_deep_trees_are_refused_in_four_parts_or_read(path, kind):
    assert np.shape(jax.tree.leaves(described(path, deep(X, 40, WRAPS[kind]))())[0]) == (2,)
    before, after = json.dumps(WRAPS[kind]("@")).split('"@"')
    for depth in (250, 400, 1000, 100_000):
        inner = before * depth + json.dumps(X) + after * depth
        load = described(path, f'{{"version":2,"tree":{inner}}}')
        try:
            load()
        except ValueError:
            assert_error(load, "nested more deeply")


def test_deep_trees_are_saved_or_refused_in_four_parts(path):
    for wrap in (lambda t: {"a": t}, lambda t: [t], lambda t: (t,)):
        jqx.save(path, deep(jnp.ones(2), 40, wrap))
        jqx.load(path)
        tree = deep(jnp.ones(2), 5000, wrap)
        assert_error(lambda tree=tree: jqx.save(path, tree), "nested more deeply")
    assert os.listdir(path.parent) == [path.name]


def test_what_a_tree_cannot_be_is_refused(path):
    q = {"qtensor": "x", "fields": {}, "values": X, "scale": X, "zero_point": None}
    fields = {"version": 2, "qtype": "int8", "dtype": "float32", "blocks": [], "layout": None}
    others = [None, 3, 1.5, True, "x", [], [[[[]]]], {}, {"list": 3}, {"number": "inf"}, {"a": {}}]
    others += [deep([], 900, lambda x: [x]), deep({}, 300, lambda x: {"dict": x})]
    trees = [
        *({**X, "dtype": other} for other in [*others, {"list": [{"a": 1}]}, "void8", "f4", "<f4"]),
        *({**X, "array": other} for other in others if other != "x"),
        *({**q, part: other} for other in others for part in q),
        *({**q, "fields": {**fields, name: o}} for o in others for name in fields),
        *({kind: other} for kind in WRAPS for other in others if other != []),
        *({"dict": [other]} for other in others),
        *({"dict": [[other, X]]} for other in others if other not in ("x", 3)),
        {"dict": [["a", X], ["a", None]]},
        *({"list": [other, X]} for other in others if other is not None),
    ]
    for tree in trees:
        with pytest.raises((TypeError, ValueError)) as info:
            described(path, tree)()
        assert "fix: " in str(info.value), (tree, info.value)
        assert type(info.value) in (TypeError, ValueError)


def test_a_deep_plan_is_refused_in_four_parts():
    data = {"version": 2, "sites": deep([], 5000, lambda x: [x])}
    data |= {name: [] for name in ("skipped", "weights", "params", "signature")}
    assert_error(lambda: jqx.Plan.from_dict(data), "nested more deeply")


# What is in the tree.


def test_arrays_without_values_are_refused(path):
    like = jax.ShapeDtypeStruct((2,), jnp.float32)
    masked = np.ma.array([1.0, 2.0], mask=[True, False])
    q = jax.tree.map(lambda _: "x", quantized(jnp.int8))
    for tree, words in (
        (like, "no values"),
        ([masked], "MaskedArray"),
        ({"q": q}, "is not an array"),
    ):
        assert_error(lambda t=tree: jqx.save(path, t), words, error=TypeError)
    for metadata in ({"a": 1}, {"jqx": "x"}, [("a", "b")], {1: "a"}):
        assert_error(
            lambda m=metadata: jqx.interop.save_leaves(path, [like], [jnp.ones(2)], metadata=m),
            "`metadata`",
            error=TypeError,
        )
    assert not path.exists()
