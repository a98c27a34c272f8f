"""What is saved is what is loaded, bit for bit; what cannot be is refused, and nothing is lost."""

import json
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jqx
from jqx import numerics

from ..strategies import law
from .trees import DTYPES, KINDS, assert_same, kind, quantized, random_array, trees


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@law
@given(tree=trees())
def test_what_is_loaded_is_what_was_saved(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("law") / "tree.safetensors"
    jqx.save(path, tree)
    assert_same(jqx.load(path), tree)


@pytest.mark.many
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_qtensor_comes_back(path, name):
    q = kind(name)
    jqx.save(path, {"w": q})
    assert_same(jqx.load(path)["w"], q)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(path, dtype):
    x = random_array(np.random.default_rng(0), dtype, (3, 5))
    jqx.save(path, x)
    read = jqx.load(path)
    assert_same(read, x)
    assert isinstance(read, np.ndarray) == (dtype[-2:] == "64" and dtype != "complex64")


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_64_bits_are_jax_arrays_where_jax_has_them(path, dtype):
    x = random_array(np.random.default_rng(0), dtype, (3, 5))
    jqx.save(path, [x])
    with jax.enable_x64(True):
        (read,) = jqx.load(path)
        assert isinstance(read, jax.Array)
        assert_same(read, x)


def test_complex_leaves_are_saved_as_they_are(path):
    pairs = np.array([[1 + 2j, -0.0 + 0j, complex(np.nan, -np.inf)]] * 2)
    tree = {"s": pairs[0, 0], "t": pairs.T, "none": pairs[:0], "c64": pairs.astype(np.complex64)}
    jqx.save(path, tree)
    with jqx.interop.Archive(path) as archive:
        for name, x in tree.items():
            assert (archive.spec(name).shape, archive.spec(name).dtype) == (x.shape, x.dtype)
            for found in (archive.numpy(name), archive.view(name)):
                assert_same(found, np.asarray(x))
    jqx.save(path.parent / "again", jqx.load(path), resume=True)
    assert (path.parent / "again").read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="does not fit safetensors files of other libraries"):
        jqx.interop.write(path.parent / "m", {"s": pairs}, "safetensors", config={})


def test_a_qtensor_is_three_tensors_and_json(path):
    q = quantized(jnp.uint8)
    jqx.save(path, {"layer": [q]})
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["layer/0.values"]["dtype"] == "U8"
    assert header["layer/0.scale"]["shape"] == [4, 1]
    assert header["layer/0.zero_point"]["dtype"] == "U8"
    described = json.loads(header["__metadata__"]["jqx"])
    assert described["version"] == 1
    node = described["tree"]["dict"][0][1]["list"][0]
    assert node["fields"]["qtype"] == "uint8" and node["fields"]["dtype"] == "float32"
    assert node["values"] == {"array": "layer/0.values", "dtype": "uint8"}


def test_a_format_of_the_user_is_looked_up_by_its_name(path):
    class Mine(numerics.Codebook):
        pass

    mine = Mine((-1.0, 0.5, 1.0), "mine")
    q = quantized(mine)
    with pytest.raises(ValueError, match="type Mine is neither of a class of jqx"):
        jqx.save(path, q)
    jqx.save(path, q, values={"mine": mine})
    with pytest.raises(ValueError, match="the object 'mine' at tree"):
        jqx.load(path)
    assert_same(jqx.load(path, values={"mine": mine}), q)


def test_arrays_on_several_devices_are_gathered(path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(jnp.arange(8), sharding)
    jqx.save(path, x)
    assert_same(jqx.load(path), np.arange(8, dtype=np.int32))


def test_what_was_loaded_does_not_change_with_the_file(path):
    jqx.save(path, jnp.arange(1000))
    read = jqx.load(path)
    with open(path, "r+b") as file:
        file.seek(200)
        file.write(b"\xff" * 800)
    assert_same(read, np.arange(1000, dtype=np.int32))


class Pair(NamedTuple):
    a: jax.Array
    b: jax.Array


REFUSED = {
    "a named tuple": (Pair(np.ones(2), np.ones(2)), TypeError, "type Pair"),
    "a number": ({"step": 3}, TypeError, "at 'step'"),
    "text": ([{"name": "x"}], TypeError, "at '0/name'"),
    "a key": ({"a": {1.5: np.ones(2)}}, TypeError, "a key of type float"),
    "a key that is no integer": ({True: np.ones(2)}, TypeError, "a key of type bool"),
    "long numbers": ({"z": np.ones(2, np.longdouble)}, ValueError, "float128"),
    "strings": ({"z": np.array(["a"])}, ValueError, "<U1"),
    "a random key": ({"k": jax.random.key(0)}, ValueError, "key<fry>"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_stored_is_refused_in_four_parts(path, name):
    tree, error, words = REFUSED[name]
    with pytest.raises(error) as info:
        jqx.save(path, tree)
    text = str(info.value)
    assert words in text and "jqx.save: " in text and "fix: " in text
    assert not path.exists()


def test_a_traced_array_is_refused(path):
    with pytest.raises(TypeError, match="has no values yet"):
        jax.jit(lambda x: jqx.save(path, {"x": x}))(jnp.ones(2))


def test_an_unfinished_write_keeps_the_old_file_and_leaves_no_other(path):
    jqx.save(path, {"x": jnp.ones(3)})
    before = path.read_bytes()
    like = jax.ShapeDtypeStruct((2,), jnp.float32)

    def leaves():
        yield jnp.zeros(2)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        jqx.interop.save_leaves(path, [like, like], leaves())
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


WRONG = {
    "shape": (jnp.zeros(3), "the tensor '1' differs from what was announced"),
    "dtype": (jnp.zeros(2, jnp.int32), "the tensor '1' differs from what was announced"),
    "kind": (quantized(jnp.int8), "the leaf '1' differs from what was announced"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_leaf_that_is_not_what_was_announced_is_refused(path, what):
    like = jax.ShapeDtypeStruct((2,), jnp.float32)
    leaf, problem = WRONG[what]
    with pytest.raises(ValueError, match=problem):
        jqx.interop.save_leaves(path, [like, like], [jnp.zeros(2), leaf])
    with pytest.raises(ValueError, match="shorter"):
        jqx.interop.save_leaves(path, [like, like], [jnp.zeros(2)])
    assert not list(path.parent.iterdir())


def test_a_link_stays_a_link(path, tmp_path):
    link = tmp_path / "link.safetensors"
    path.write_bytes(b"old")
    link.symlink_to(path)
    jqx.save(link, jnp.ones(2))
    assert link.is_symlink() and path.read_bytes() != b"old"
