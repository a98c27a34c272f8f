"""Folders that are written: read back they are what they were, and they are whole or not there."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor
from jqx.interop import write
from jqx.numerics import Integer, mxfp4, mxfp8_e4m3, nvfp4

from .raw_folders import CHECKPOINTS

RNG = np.random.default_rng(0)


def integers(bits, *, zeros=False, order=False, block=32, shape=(12, 96), signed=True):
    """A random QTensor of integers in blocks along its last axis."""
    form = Integer(bits, signed=signed)
    entries = (*shape[:-1], shape[-1] // block)

    def codes(shape):
        return jnp.asarray(RNG.integers(form.low, form.high + 1, shape)).astype(form.storage)

    places = RNG.permutation(shape[-1]).astype(np.int32)
    return QTensor(
        codes(shape),
        jnp.asarray(RNG.normal(size=entries), jnp.float16),
        codes(entries) if zeros else None,
        order=jnp.asarray(places.reshape((1,) * (len(shape) - 1) + (-1,))) if order else None,
        qtype=form,
        dtype=jnp.float16,
    )


def floats(spec, shape=(64, 96)):
    return QTensor.quantize(jnp.asarray(RNG.normal(size=shape), jnp.float32), spec)


MANY = {
    **{f"int{bits}": integers(bits) for bits in range(2, 9)},
    **{f"zeros{bits}": integers(bits, zeros=True) for bits in range(2, 9)},
    "order": integers(4, zeros=True, order=True),
    "order3": integers(3, order=True, block=48),
    "rows": integers(4, block=96),
    "experts": integers(4, shape=(2, 12, 96), zeros=True),
    "packed": integers(4).pack(),
    "packed rows": integers(4).pack(0),
    "turned": integers(4, shape=(96, 12), block=12).T.T,
    "swapped": integers(4).pack_for("cpu"),
    "f8": floats(jqx.QSpec(jnp.float8_e4m3fn, jqx.per_axis(0))),
    "f8 tensor": floats(jqx.QSpec(jnp.float8_e4m3fn)),
    "f8 blocks": floats(jqx.QSpec(jnp.float8_e4m3fn, jqx.per_block({0: 16, 1: 32}))),
    "f8 ragged": floats(jqx.QSpec(jnp.float8_e4m3fn, jqx.per_block({0: 48, 1: 64}, tail=True))),
    "mx4": floats(jqx.QSpec(mxfp4, jqx.per_block({0: 1, 1: 32}))),
    "mx8": floats(jqx.QSpec(mxfp8_e4m3, jqx.per_block({0: 1, 1: 32}))),
    "nv4": floats(jqx.QSpec(nvfp4, jqx.per_block({0: 1, 1: 16}))),
}


def tree_of(leaves):
    return {name: {"weight": leaf} for name, leaf in leaves.items()}


def same(found, expected, name):
    """Codes, scales and zero points are equal; the one factor of nvfp4 nearly. Within their groups,
    permuted columns may stand in another order.
    """
    assert (found.order is None) == (expected.order is None)
    if expected.order is None:
        codes = [q.unpack().values for q in (found, expected)]
        np.testing.assert_array_equal(*codes, err_msg=name)
    unit = 2e-7 if name == "nv4" else 0
    np.testing.assert_allclose(found.real_scale(), expected.real_scale(), rtol=unit, err_msg=name)
    x, y = (q.astype(jnp.float32).dequantize() for q in (found, expected))
    np.testing.assert_allclose(x, y, rtol=unit, err_msg=name)


def test_what_is_written_as_compressed_tensors_is_read_back(tmp_path):
    tree = {**tree_of(MANY), "norm.weight": jnp.ones(4), "head.weight": jnp.ones((4, 4))}
    write(tmp_path / "m", tree, "compressed-tensors", config={"model_type": "mine"})
    with jqx.interop.read(tmp_path / "m") as archive:
        assert archive.config["model_type"] == "mine"
        assert archive.config["quantization_config"]["ignore"] == ["head"]
        assert archive.config["quantization_config"]["format"] == "mixed-precision"
        for name, leaf in MANY.items():
            same(archive.read(f"{name}.weight"), leaf, name)
        assert archive.read("norm.weight").shape == (4,)


def test_a_head_that_is_tied_to_the_table_is_left_in_float(tmp_path):
    """transformers has a Linear without tensors there, which `targets` would mean."""
    weight = integers(4)
    for name, ignored in (("up.weight", ["lm_head"]), ("lm_head.weight", [])):
        write(tmp_path / name, {name: weight}, "compressed-tensors", config={})
        with jqx.interop.read(tmp_path / name) as archive:
            assert archive.config["quantization_config"]["ignore"] == ignored


def test_unsigned_codes_are_those_of_a_zero_point(tmp_path):
    for zeros in (False, True):
        q = integers(4, zeros=zeros, signed=False)
        write(tmp_path / "m", tree_of({"a": q}), "compressed-tensors", config={}, overwrite=True)
        found = jqx.load(str(tmp_path / "m"))["a.weight"]
        np.testing.assert_array_equal(found.dequantize(), q.dequantize())


@pytest.mark.parametrize("zeros", [False, True])
def test_bytes_with_activations(tmp_path, zeros):
    q = integers(8, zeros=zeros, block=96)
    config = {"quantization_config": {"quant_method": "old"}}
    options = {"config": config, "activation": "int8:token:dynamic"}
    write(tmp_path / "m", tree_of({"a": q}), "compressed-tensors", **options)
    with jqx.interop.read(tmp_path / "m") as archive:
        same(archive.read("a.weight"), q, "a")
        said = archive.config["quantization_config"]
    assert said["format"] == "int-quantized"
    inputs = said["config_groups"]["group_0"]["input_activations"]
    assert inputs["dynamic"] is True and inputs["strategy"] == "token"


def test_an_archive_is_written_a_tensor_at_a_time_in_several_files(tmp_path):
    source = CHECKPOINTS / "compressed-tensors-0.20.0"
    with jqx.interop.read(source) as archive:
        write(tmp_path / "m", archive, "compressed-tensors", limit=20_000)
        files = {path.name for path in (tmp_path / "m").iterdir()}
        assert "model.safetensors.index.json" in files and len(files) > 5
        with jqx.interop.read(tmp_path / "m") as again:
            assert {*again.paths} == {*archive.paths}
            for path in archive.paths:
                a, b = archive.view(path), again.view(path)
                if path == "w8_tensor.weight":  # written with a scale for each row
                    np.testing.assert_array_equal(a.dequantize(), b.dequantize())
                    continue
                assert jax.tree.structure(a) == jax.tree.structure(b), path
                for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                    np.testing.assert_array_equal(x, y, err_msg=path)
    index = tmp_path / "m" / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    name, file = next(iter(known["weight_map"].items()))
    for wrong, words in [
        ({**known["weight_map"], name: f"../{file}"}, "has no weight_map"),
        ({**known["weight_map"], "no": file}, "lacks the tensor 'no'"),
        ({**known["weight_map"], name: "absent.safetensors"}, "does not hold|cannot be opened"),
    ]:
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises((ValueError, OSError), match=words):
            jqx.load(str(tmp_path / "m"))


def test_the_tokenizer_and_the_config_are_copied(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text('{"hidden_size": 4}')
    (old / "tokenizer.json").write_text("{}")
    (old / "other.bin").write_text("")
    tree = tree_of({"a": integers(4)})
    write(tmp_path / "m", tree, "compressed-tensors", config=old, tokenizer=old)
    files = {path.name for path in (tmp_path / "m").iterdir()}
    assert files == {"config.json", "tokenizer.json", "model.safetensors"}
    assert json.loads((tmp_path / "m" / "config.json").read_text())["hidden_size"] == 4


OFFSET = QTensor(
    jnp.zeros((2, 4), jnp.int8), jnp.ones((2, 1)), offset=jnp.ones((2, 1)), qtype=jnp.int8
)
TAIL = QTensor.quantize(jnp.ones((2, 100)), jqx.QSpec("int4", jqx.per_block({0: 1, 1: 32}, True)))
WRONG = {
    "a float minimum": (ValueError, "without a float minimum", {"a.weight": OFFSET}),
    "a tail": (ValueError, "groups of equal size .* the last group has 4", {"a.weight": TAIL}),
    "a name": (ValueError, "name it <module>.weight", {"kernel": integers(4)}),
    "nf4": (ValueError, "float8_e4m3fn", {"a.weight": floats(jqx.QSpec(jqx.numerics.nf4))}),
    "nothing quantized": (ValueError, "is quantized, for", {"a.weight": jnp.ones(2)}),
    "twice": (
        ValueError,
        "exists twice",
        {"a.weight": integers(4), "a.weight_scale": jnp.ones(2)},
    ),
    "no tensor": (TypeError, "there is no tensor at 'a.b'", {"a": {"b": 1}}),
    "a key": (TypeError, "the key 0 at 'a' is not a string", {"a": {0: jnp.ones(2)}}),
    "no dict": (TypeError, "not a dict of tensors", jnp.ones(2)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_held_is_an_error_that_names_the_tensor(tmp_path, case):
    error, words, tree = WRONG[case]
    with pytest.raises(error, match=words) as caught:
        write(tmp_path / "m", tree, "compressed-tensors", config={})
    assert "fix:" in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_arguments_that_do_not_fit(tmp_path):
    tree = tree_of({"a": integers(4)})
    for error, words, options in [
        (ValueError, "there is no format", {"format": "gguf9"}),
        (TypeError, "there is no config of the model", {"config": None}),
        (ValueError, "static activations need an input_scale", {"activation": "int8:tensor"}),
        (ValueError, "does not support the activations", {"activation": "float8_e5m2:dynamic"}),
        (FileNotFoundError, "there is no tokenizer", {"tokenizer": tmp_path}),
    ]:
        given = {"format": "compressed-tensors", "config": {}, **options}
        with pytest.raises(error, match=words):
            write(tmp_path / "m", tree, **given)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write(tmp_path / "no" / "m", tree, "compressed-tensors", config={})


def test_a_folder_is_replaced_where_that_is_asked_for(tmp_path):
    folder, tree = tmp_path / "m", tree_of({"a": integers(4)})
    write(folder, tree, "compressed-tensors", config={})
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        write(folder, tree, "compressed-tensors", config={})
    write(folder, tree, "compressed-tensors", config={}, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_error_leaves_the_old_folder(tmp_path, monkeypatch):
    folder, tree = tmp_path / "m", tree_of({"a": integers(4)})
    write(folder, tree, "compressed-tensors", config={"old": True})

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write(folder, tree, "compressed-tensors", config={}, overwrite=True)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert json.loads((folder / "config.json").read_text())["old"] is True


def test_a_config_is_the_file_that_is_named(tmp_path):
    (tmp_path / "mine.json").write_text('{"model_type": "mine"}')
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    tree = {"a.weight": jnp.ones((2, 2))}
    for path, wanted in [(tmp_path / "mine.json", "mine"), (tmp_path, "other")]:
        write(tmp_path / "m", tree, "safetensors", config=path, overwrite=True)
        assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == wanted
    for given, error in [
        (tmp_path / "no.json", FileNotFoundError),
        ({"a": np.float32(3)}, TypeError),
    ]:
        with pytest.raises(error, match="fix:"):
            write(tmp_path / "n", tree, "safetensors", config=given)


def test_arrays_that_files_of_others_lack_are_refused(tmp_path):
    for name, x in {
        "a": jnp.ones(4, jnp.int4),
        "b": jnp.ones(4).astype(jnp.float8_e3m4),
        "__metadata__": jnp.ones(4),
    }.items():
        with pytest.raises(ValueError, match=f"{name!r} does not fit safetensors files"):
            write(tmp_path / "m", {name: x}, "safetensors", config={})
    with pytest.raises(TypeError, match="no tensor at 'a'"):
        write(tmp_path / "m", {"a": np.ma.masked_array([1.0])}, "safetensors", config={})
    for limit in (0, -1):
        with pytest.raises(ValueError, match="is not a size of a file"):
            write(tmp_path / "m", {"a": jnp.ones(2)}, "safetensors", config={}, limit=limit)
    empty = QTensor.quantize(jnp.ones((0, 64)), jqx.QSpec("int8", jqx.per_axis(0)))
    with pytest.raises(ValueError, match=r"cannot hold the tensor 'a\.weight'"):
        write(tmp_path / "m", {"a.weight": empty}, "compressed-tensors", config={})
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_made_is_an_error_of_the_target(tmp_path):
    with pytest.raises(OSError, match="cannot be written"):
        write(tmp_path / ("n" * 300), {"a": jnp.ones(2)}, "safetensors", config={})


@pytest.mark.slow
def test_killed_at_any_moment_the_old_folder_or_the_new_one_is_whole(tmp_path):
    program = """
        import sys, jax.numpy as jnp, jqx
        spec = jqx.QSpec("int4", jqx.per_block({0: 1, 1: 32}))
        trees = [
            {f"m{i}.weight": jqx.QTensor.quantize(jnp.full((64, 64), n + 1.0), spec)
             for i in range(8)} for n in range(2)
        ]
        print("ready", flush=True)
        while True:
            for n, tree in enumerate(trees):
                jqx.interop.write(sys.argv[1], tree, "compressed-tensors", config={"n": n},
                                  overwrite=True, limit=5000)
    """
    folder, is_written = tmp_path / "m", False
    for _ in range(12):
        command = [sys.executable, "-c", textwrap.dedent(program), str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout.readline()
        time.sleep(0.05 + RNG.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if not folder.exists():  # the first ones may be killed before they wrote anything
            assert not is_written
            continue
        is_written = True
        loaded = jqx.load(str(folder))
        number = json.loads((folder / "config.json").read_text())["n"]
        assert {float(x.dequantize()[0, 0]) for x in loaded.values()} == {number + 1.0}
    assert is_written


@pytest.mark.slow
def test_the_package_reads_what_is_written(tmp_path):
    pytest.importorskip("compressed_tensors")
    program = pathlib.Path(__file__).parent / "checkpoints" / "read_compressed_tensors.py"
    leaves = {name: q for name, q in MANY.items() if not name.startswith("order")}
    leaves.pop("f8 ragged")
    write(tmp_path / "m", tree_of(leaves), "compressed-tensors", config={})
    out = tmp_path / "out.npz"
    subprocess.run([sys.executable, str(program), str(tmp_path / "m"), str(out)], check=True)
    found = np.load(out)
    loaded = jqx.load(str(tmp_path / "m"))
    for name in leaves:
        expected = loaded[f"{name}.weight"].dequantize().astype(jnp.float32)
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
