"""Files of others are read, tensor by tensor; damaged ones are refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor

from .raw_folders import write_file
from .trees import DTYPES, assert_same, quantized, random_array


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def file_of(header, numbers=b"", pad=b""):
    """The bytes of a file, put together as the format says."""
    text = (json.dumps(header) if isinstance(header, dict) else header).encode() + pad
    return len(text).to_bytes(8, "little") + text + numbers


def entry(dtype="F32", shape=(2,), place=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(place)}


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
        with pytest.raises(ValueError, match="there is no leaf 'x'"):
            archive.read("x")
    assert_same(view.scale, np.asarray(q.scale))  # the map outlives the file's handle


def test_only_the_tensors_that_are_asked_for_are_decoded(path):
    header = {"x": entry("U8", (2,), (0, 2)), "y": entry("U8", (1,), (2, 3))}
    node = {"dict": [[n, {"array": n, "dtype": "float4_e2m1fn"}] for n in ("x", "y")]}
    header["__metadata__"] = {"jqx": json.dumps({"version": 2, "tree": node})}
    path.write_bytes(file_of(header, bytes([1, 2, 99])))
    with jqx.interop.Archive(path) as archive:
        assert archive.read("x").tolist() == [0.5, 1.0]
        with pytest.raises(ValueError, match="'y' holds uint8 that are not float4_e2m1fn"):
            archive.read("y")


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
    "no fields": (file_of({"x": 3}), "'x' without consistent dtype"),
    "negative": (
        file_of({"x": entry(shape=(-2,))}, bytes(8)),
        "'x' without consistent dtype",
    ),
    "a size that does not fit": (
        file_of({"x": entry(shape=(3,))}, bytes(8)),
        "without consistent dtype",
    ),
    "offsets": (
        file_of({"x": entry(place=(8, 0))}, bytes(8)),
        "'x' without consistent dtype",
    ),
    "one offset": (
        file_of({"x": entry(place=(8,))}, bytes(8)),
        "'x' without consistent dtype",
    ),
    "a gap": (file_of({"x": entry(place=(4, 12))}, bytes(12)), "before the tensor 'x'"),
    "an overlap": (
        file_of({"x": entry(), "y": entry(place=(4, 12))}, bytes(12)),
        "before the tensor 'y'",
    ),
    "too long": (file_of({"x": entry()}, bytes(9)), "1 bytes that do not belong to a tensor"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_no_safetensors_file_is_refused(path, name):
    data, given = DAMAGED[name]
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is not a safetensors file") as info:
        jqx.load(path)
    assert given in str(info.value) and "fix: " in str(info.value)


def test_a_file_that_was_cut_short_is_refused(path):
    jqx.save(path, {"w": quantized(jnp.int8), "x": jnp.zeros(100)})
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="is truncated") as info:
        jqx.load(path)
    assert "copy or download it again" in str(info.value)


def test_an_unknown_dtype_is_refused(path):
    path.write_bytes(file_of({"x": entry("F6_E2M3", (4,), (0, 3))}, bytes(3)))
    with pytest.raises(ValueError, match="'x' has a dtype that jqx does not read") as info:
        jqx.load(path)
    assert "F6_E2M3" in str(info.value)


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
    with pytest.raises(ValueError, match="the version is unknown"):
        jqx.load(path)


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
    for said in ({"model_type": "a"}, {"quantization": 4}):
        path.write_text(json.dumps(said))
        with pytest.raises(ValueError, match="has no config that says how"):
            jqx.load(tmp_path / "m")
        with pytest.raises(ValueError, match="has no config that says how"):
            jqx.load(tmp_path / "m", config=said)
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


def test_one_file_of_several_is_no_model(tmp_path):
    tree = {f"{i}.weight": jnp.ones((8, 8)) for i in range(4)}
    jqx.interop.write(tmp_path / "m", tree, "safetensors", config={}, limit=300)
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    for path in [*files[1:], *(tmp_path / "m").glob("*.index.json")]:
        path.unlink()
    with pytest.raises(ValueError, match="lacks files of the model"):
        jqx.load(tmp_path / "m")
    with pytest.raises(ValueError, match=r"only one of . files of a model"):
        jqx.load(files[0])
    assert [*jqx.load(files[0], config={})] == ["0.weight"]
