"""Files of others are read, tensor by tensor; files that nobody means well by, damaged, deep or
huge, are refused; and so is what no file is to hold.
"""

import dataclasses
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor, numerics

from ..oracles.refusals import assert_error
from .files import write_file
from .trees import DTYPES, assert_same, quantized, random_array


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def file_of(header, numbers=b"", pad=b""):
    """The bytes of a file, put together as the format says."""
    text = (json.dumps(header) if isinstance(header, dict) else header).encode() + pad
    return len(text).to_bytes(8, "little") + text + numbers


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_file_of_another_writer_is_a_dict_of_arrays(path):
    numbers = np.array([1.5, -2.0], "<f4").tobytes() + bytes([0x80, 0x3F]) + bytes([1, 255])
    header = {
        "__metadata__": {"format": "pt"},
        "b.weight": entry(),
        "half": entry("BF16", (1, 1), (8, 10)),
        "codes": entry("I8", (2,), (10, 12)),
        "nothing": entry("F64", (0, 3), (12, 12)),
    }
    path.write_bytes(file_of(header, numbers, b"   "))
    read = jqx.load(path)
    want = {
        "b.weight": np.array([1.5, -2.0], np.float32),
        "half": np.array([[1]], jnp.bfloat16),
        "codes": np.array([1, -1], np.int8),
        "nothing": np.zeros((0, 3)),
    }
    assert_same(read, want)
    with jqx.interop.Archive(path) as archive:
        assert archive.metadata == {"format": "pt"}


def test_what_is_written_has_the_bytes_that_the_format_says(path):
    jqx.save(path, {"a": jnp.array([1, 2, 3], jnp.int8), "b": jnp.array([1.0], jnp.float32)})
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    assert header["b"] == entry("F32", (1,), (0, 4))  # wider numbers first: all are aligned
    assert header["a"] == entry("I8", (3,), (4, 7))
    assert data[8 + size :] == np.float32(1).tobytes() + bytes([1, 2, 3])


def test_the_library_of_the_format_reads_and_writes_the_same(path):
    library = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    tree = {name: random_array(rng, name, (3, 5)) for name in DTYPES}
    jqx.save(path, tree)
    with library.safe_open(path, "np") as file:
        assert set(file.keys()) == set(tree)
        for name in ("float32", "float64", "int8", "uint16", "bool"):
            assert_same(file.get_tensor(name), tree[name])
        assert_same(file.get_tensor("int4"), tree["int4"].astype(np.int8))
        assert_same(file.get_tensor("float4_e2m1fn"), tree["float4_e2m1fn"].view(np.uint8))
    plain = {name: tree[name] for name in ("float32", "float16", "int8", "uint8", "bool")}
    library.save_file(plain, path)
    assert_same(dict(sorted(jqx.load(path).items())), dict(sorted(plain.items())))


def test_shapes_are_known_before_anything_is_read(path):
    q = quantized(jnp.int4)
    jqx.save(path, {"w": q, "x": [jnp.zeros((2, 3))]})
    with jqx.interop.Archive(path) as archive:
        assert archive.paths == ("w", "x/0")
        assert archive.spec("x/0") == jax.ShapeDtypeStruct((2, 3), jnp.float32)
        assert archive.spec("w").shape == q.shape
        assert archive.map(str.upper) == {"w": "W", "x": ["X/0"]}
        view = archive.view("w")
        assert isinstance(view.scale, np.ndarray) and not isinstance(view.scale, jax.Array)
        assert_error(lambda: archive.read("x"), "there is no leaf 'x'")
    assert_same(view.scale, np.asarray(q.scale))  # the map outlives the file's handle


def test_only_the_tensors_that_are_asked_for_are_decoded(path):
    header = {"x": entry("U8", (2,), (0, 2)), "y": entry("U8", (1,), (2, 3))}
    node = {"dict": [[n, {"array": n, "dtype": "float4_e2m1fn"}] for n in ("x", "y")]}
    header["__metadata__"] = {"jqx": json.dumps({"version": 2, "tree": node})}
    path.write_bytes(file_of(header, bytes([1, 2, 99])))
    with jqx.interop.Archive(path) as archive:
        assert archive.read("x").tolist() == [0.5, 1.0]
        assert_error(lambda: archive.read("y"), "'y' holds uint8 that are not float4_e2m1fn")


DAMAGED = {
    "empty": (b"", "a file of 0 bytes"),
    "short": (b"1234", "a file of 4 bytes"),
    "long header": ((10**9).to_bytes(8, "little") + b"{}", "a header of 1000000000 bytes"),
    "header beyond the end": ((100).to_bytes(8, "little") + b"{}", "a header of 100 bytes"),
    "no json": (file_of("{x"), "a header that is not a JSON object"),
    "deep json": (file_of("[" * 100_000), "a header that is not a JSON object"),
    "no utf-8": ((1).to_bytes(8, "little") + b"\xff", "a header that is not a JSON object"),
    "a list": (file_of("[]"), "a header that is not a JSON object"),
    "metadata": (file_of({"__metadata__": {"a": 1}}), "metadata that is not an object of strings"),
    "a gap": (file_of({"x": entry(offsets=(4, 12))}, bytes(12)), "before the tensor 'x'"),
    "an overlap": (
        file_of({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12)),
        "before the tensor 'y'",
    ),
    "too long": (file_of({"x": entry()}, bytes(9)), "1 bytes that do not belong to a tensor"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_no_safetensors_file_is_refused(path, name):
    data, problem = DAMAGED[name]
    path.write_bytes(data)
    assert_error(lambda: jqx.load(path), "is not a safetensors file", problem)


def test_a_file_that_was_cut_short_is_refused(path):
    jqx.save(path, {"w": quantized(jnp.int8), "x": jnp.zeros(100)})
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert_error(lambda: jqx.load(path), "is truncated", "copy or download it again")


def test_an_unknown_dtype_is_refused(path):
    path.write_bytes(file_of({"x": entry("F6_E2M3", (4,), (0, 3))}, bytes(3)))
    assert_error(lambda: jqx.load(path), "'x' has a dtype that jqx does not read", "F6_E2M3")


def rewritten(path, change):
    """Saves a tree and changes its description, or the header."""
    jqx.save(path, {"w": quantized(jnp.uint8), "x": jnp.zeros(4)})
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    described = json.loads(header["__metadata__"]["jqx"])
    change(header, described)
    header["__metadata__"]["jqx"] = json.dumps(described)
    path.write_bytes(file_of(header, data[8 + size :]))


def rename(header, old, new):
    header[new] = header.pop(old)


def leaf(described, i):
    return described["tree"]["dict"][i][1]


CHANGES = {
    "version": (lambda h, d: d.update(version=3), "the version is unknown"),
    "missing": (lambda h, d: rename(h, "w.scale", "w.skale"), "the tensor 'w.scale' is missing"),
    "extra": (lambda h, d: d["tree"]["dict"].pop(), "the tensor 'x' has no place in the tree"),
    "path twice": (
        lambda h, d: d["tree"]["dict"].append(["y", leaf(d, 1)]),
        "the path 'x' has two places",
    ),
    "tensor twice": (
        lambda h, d: leaf(d, 0)["values"].update(array="w.zero_point"),
        "the tensor 'w.zero_point' has two places",
    ),
    "dtype": (
        lambda h, d: leaf(d, 1).update(dtype="int32"),
        "'x' is F32.*, in the tree int32",
    ),
    "no dtype": (lambda h, d: leaf(d, 1).update(dtype="real"), "`dtype` is not a dtype"),
    "node": (lambda h, d: leaf(d, 1).update(what=1), "the tree in the file is invalid"),
    "number": (lambda h, d: d.update(tree=3), "the tree in the file is invalid"),
    "pair": (lambda h, d: d["tree"]["dict"].append([1]), "the tree in the file is invalid"),
    "qtype": (lambda h, d: leaf(d, 0)["fields"].update(qtype="int9"), "is not a dtype"),
    "fields": (lambda h, d: leaf(d, 0)["fields"].pop("blocks"), "not have the field 'blocks'"),
    "other qtype": (lambda h, d: leaf(d, 0)["fields"].update(qtype="int8"), "at:       'w'"),
    "shape": (lambda h, d: h["w.scale"].update(shape=[2, 2]), "does not fit `scale`"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_description_that_does_not_fit_is_refused(path, name):
    change, problem = CHANGES[name]
    rewritten(path, change)
    with pytest.raises((TypeError, ValueError), match=problem) as info:
        jqx.load(path)
    assert "fix" in str(info.value)


def test_a_description_that_is_no_json_is_refused(path):
    path.write_bytes(file_of({"__metadata__": {"jqx": "{"}}))
    assert_error(lambda: jqx.load(path), "the version is unknown")


def test_there_must_be_a_file(path):
    with pytest.raises(FileNotFoundError):
        jqx.load(path)


def test_values_are_objects_by_name(path):
    jqx.save(path, jnp.ones(2))
    with pytest.raises(TypeError, match="`values` is not a dict of objects by name"):
        jqx.load(path, values=[1])


def test_codes_that_no_config_speaks_of_are_refused(tmp_path):
    q = QTensor.quantize(jnp.ones((32, 64)), jqx.QSpec("int4", jqx.per_block({0: 1, 1: 32})))
    half = dataclasses.replace(q, scale=q.scale.astype(jnp.float16))
    jqx.interop.write(tmp_path / "m", {"m.weight": half}, "gptq", config={})
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    for model_config in ({"model_type": "a"}, {"quantization": 4}):
        path.write_text(json.dumps(model_config))
        assert_error(lambda: jqx.load(tmp_path / "m"), "has no config that says how")
        with pytest.raises(ValueError, match="has no config that says how"):
            jqx.load(tmp_path / "m", config=model_config)
    raw = jqx.load(tmp_path / "m", config={})
    assert raw["m.qweight"].dtype == jnp.int32
    path.write_text(json.dumps({"text_config": config}))
    assert isinstance(jqx.load(tmp_path / "m")["m.weight"], QTensor)


LACKING = {
    "compressed-tensors": ("float8_e4m3fn", jqx.per_axis(0), "weight_scale"),
    "fp8": ("float8_e4m3fn", jqx.per_block({0: 32, 1: 32}), "weight_scale_inv"),
    "mlx": ("int4", jqx.per_block({0: 1, 1: 32}), "scales"),
}


@pytest.mark.parametrize("form", LACKING)
def test_a_layer_that_lacks_its_scale_is_refused(tmp_path, form):
    kind, blocks, end = LACKING[form]
    q = QTensor.quantize(jnp.ones((32, 64)), jqx.QSpec(kind, blocks))
    jqx.interop.write(tmp_path / "m", {"a.weight": q, "b.weight": q}, form, config={})
    with jqx.interop.read(tmp_path / "m", config={}) as archive:
        rest = {name: archive.numpy(name) for name in archive.paths if name != f"a.{end}"}
    write_file(tmp_path / "m" / "model.safetensors", rest)
    with pytest.raises(ValueError, match=r"'a\.\w+' .* does not belong to a layer"):
        jqx.load(tmp_path / "m")


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
        for mask in (jqx.load(path)["m"], archive.view("m")):
            assert_same(mask, np.array([[True, False], [True, True]]))
            assert int(mask.sum()) == 3
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


SHAPES = (
    *([0, 2**62, 2**62], [0, 2**70], [2**63], [1] * 70, [0] * 65, [2**32, 2**32], [2**62, 4]),
    *([9] * 500_000, [-1, 2], [-2], [1.0, 2], ["2"], [True, 2], [None], [[2]]),
    *("2", {"0": 2}, None, 2),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: repr(shape)[:20])
def test_shapes_that_no_array_has_are_refused_at_once(path, shape):
    size = 0 if isinstance(shape, list) and shape[:1] == [0] else 8
    fields = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    path.write_bytes(file_of({"x": fields}, bytes(size)))
    start = time.process_time()
    assert_error(lambda: jqx.load(path), "the tensor 'x' without consistent dtype, shape")
    assert time.process_time() - start < 2


ENTRIES = {
    **{
        f"at {offsets}": {"dtype": "F32", "shape": [2], "data_offsets": offsets}
        for offsets in (
            *([0, 8.0], ["0", 8], [0, None], [-8, 0], [0, 2**80], [0], [8], [0, 8, 8], [8, 0]),
            *("08", None, 8),
        )
    },
    **{f"of {dtype}": entry(dtype=dtype) for dtype in (None, 3, ["F32"], {"F32": 1})},
    **{f"is {fields}": fields for fields in (None, 3, "x", [], {})},
    "a size that does not fit": entry(shape=(3,)),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_tensors_without_consistent_fields_are_refused(path, case):
    path.write_bytes(file_of({"x": ENTRIES[case]}, bytes(8)))
    problem = "the tensor 'x' without consistent dtype"
    assert_error(lambda: jqx.load(path), "is not a safetensors file", problem)


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
