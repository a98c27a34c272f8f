"""GGUF files as checkpoints: read to QTensors of the bytes they have, and written."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import QTensor
from jqx.interop import Name, named, read_gguf, tree, write
from jqx.numerics import mxfp4

from .gguf_files import file_of
from .raw_folders import CHECKPOINTS
from .refusals import assert_refused
from .test_write import floats, integers

FILE = CHECKPOINTS / "gguf-0.19.0" / "model.gguf"
BITS = {
    **{"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "MXFP4": 4.25},
    **{"Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625},
}
METADATA = {"general.architecture": "llama"}


def test_every_type_is_read_to_the_floats_of_the_package_at_the_size_of_the_file():
    """Zeros have no sign in integers, and XLA on CPU has no numbers below the normal ones."""
    expected, file = np.load(FILE.parent / "floats.npz"), read_gguf(FILE)
    with jqx.interop.read(FILE) as archive:
        assert archive.format == "gguf" and archive.config is None
        assert archive.metadata["tokenizer.ggml.tokens"] == ["a", "b", "<end>"]
        assert archive.metadata.keys() == file.metadata.keys()
        assert {*archive.paths} == {*expected}
        leaves = {path: archive.read(path) for path in archive.paths}
        for path, leaf in leaves.items():
            spec = archive.spec(path)
            assert jax.tree.structure(spec) == jax.tree.structure(leaf)
            assert [x.shape for x in jax.tree.leaves(spec)] == [
                x.shape for x in jax.tree.leaves(leaf)
            ]
            np.testing.assert_array_equal(
                file.tensors[path].dequantize(), expected[path].astype(np.float32), path
            )
    quantized = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, QTensor)}
    assert {path.removesuffix(".bytes") for path in quantized} == {*BITS}
    made = jax.jit(lambda leaves: {path: q.dequantize() for path, q in leaves.items()})(quantized)
    for path, leaf in quantized.items():
        assert leaf.dtype == jnp.float32
        assert (
            sum(x.nbytes for x in jax.tree.leaves(leaf)) * 8
            == leaf.size * BITS[path[:5].rstrip(".b")]
        )
        want = np.where(np.abs(expected[path]) < 2.0**-126, 0, expected[path])
        np.testing.assert_array_equal(made[path], want, path)
        np.testing.assert_array_equal(leaf.dequantize(), want, path)


def test_the_whole_file_is_loaded():
    loaded = jqx.load(FILE, dtype=jnp.bfloat16)
    assert isinstance(loaded["Q4_K.bytes"].scale, QTensor)
    assert loaded["Q4_0"].dtype == jnp.bfloat16 and loaded["F16"].dtype == jnp.float16
    assert_refused(lambda: jqx.load(FILE, config={}), "`config` has no use")


def test_products_with_every_type_take_no_weight_apart():
    x = np.random.default_rng(0).normal(size=(5, 512)).astype(np.float32)
    with jqx.interop.read(FILE) as archive:
        names = [name for name in ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "MXFP4")]
        leaves = {name: archive.read(name) for name in names}
    found = jax.jit(lambda x, leaves: {n: jqx.matmul(x, q.T) for n, q in leaves.items()})(x, leaves)
    for name, q in leaves.items():
        real = np.asarray(q.dequantize()).astype(np.float64)
        least = 0 if q.offset is None else np.repeat(np.asarray(q.offset, np.float64), 32, -1)
        terms = np.abs(x) @ (np.abs(real - least) + np.abs(least)).T
        # 512 sums, two products, the sum of both parts: each rounds once
        error = np.abs(np.asarray(found[name]) - x.astype(np.float64) @ real.T)
        assert (error <= 516 * 2.0**-24 * terms).all(), name


def test_rows_of_zero_and_files_of_floats(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of([("w", (0, 32), 3, 0), ("k", (0, 256), 12, 0)]))
    assert {name: q.shape for name, q in jqx.load(path).items()} == {"w": (0, 32), "k": (0, 256)}
    path.write_bytes(file_of([("w", (2,), 0, 0), ("i", (2,), 27, 32)], data=bytes(48)))
    assert jqx.load(path)["i"].dtype == np.int64


def test_a_type_that_is_not_read_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of([("w", (2,), 0, 0), ("k", (256,), 23, 32)], data=bytes(300)))
    assert_refused(lambda: jqx.load(path), "'k'", "IQ4_XS", "Q6_K", "llama-quantize")


# Rows of queries and keys.


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K.bytes", "F32"])
def test_rows_of_pairs_become_halves_exactly_and_back(name, tmp_path):
    shape, heads = (24, 512), 3
    rng = np.random.default_rng(0)
    with jqx.interop.read(FILE) as archive:
        leaf = archive.read(name) if name != "F32" else jnp.asarray(rng.normal(size=shape))
    if isinstance(leaf, QTensor):
        leaf = leaf.take(rng.integers(0, 3, 24), axis=0)
    jqx.save(tmp_path / "f", {"blk.0.attn_q.weight": leaf})
    rules = [Name("blk.{i}.attn_q.weight", "q", transpose=True, interleaved=heads)]
    with jqx.interop.read(tmp_path / "f") as archive:
        found = tree(archive, rules)["q"]
        spec = tree(archive, rules, abstract=True)["q"]
    assert jax.tree.structure(spec) == jax.tree.structure(found)

    def real(x):
        return np.asarray(x.dequantize() if isinstance(x, QTensor) else x)

    want = real(leaf).reshape(heads, 4, 2, 512).swapaxes(1, 2).reshape(shape)
    np.testing.assert_array_equal(real(found[0]), want.T)
    back = named({"q": found}, rules)["blk.0.attn_q.weight"]
    assert jax.tree.structure(back) == jax.tree.structure(leaf)
    jax.tree.map(np.testing.assert_array_equal, back, leaf)


def test_heads_that_do_not_fit_are_refused():
    with jqx.interop.read(FILE) as archive:
        rules = [Name("Q4_1", "q", interleaved=2), Name("{rest:.*}", None)]
        assert_refused(lambda: tree(archive, rules), "'Q4_1'", "rows of 2 heads")
    for fields in ({"interleaved": -1}, {"halved": -2}, {"interleaved": 2, "halved": 2}):
        assert_refused(lambda fields=fields: Name("a", "b", **fields), "not a number of heads")


def test_rows_of_halves_become_pairs():
    pairs, halves = (Name("{n}", "q/{n}", **{field: 2}) for field in ("interleaved", "halved"))
    x = jnp.arange(16.0).reshape(8, 2)
    np.testing.assert_array_equal(pairs.view("n", x)[:, 0], [0, 4, 2, 6, 8, 12, 10, 14])
    for a, b in ((pairs, halves), (halves, pairs)):
        np.testing.assert_array_equal(a.view("n", b.view("n", x)), x)
        np.testing.assert_array_equal(a.unview("n", x), b.view("n", x))


# Writing.


def halved(q):
    return dataclasses.replace(q, scale=q.scale.astype(jnp.float16))


def with_minimum(size=32):
    q = integers(4, signed=False, block=size, shape=(8, 128))
    offset = jnp.asarray(np.random.default_rng(1).normal(size=q.scale.shape), jnp.float16)
    return dataclasses.replace(halved(q), offset=offset)


MANY = {
    "q4_0": (halved(integers(4, shape=(8, 128))), "Q4_0"),
    "packed": (halved(integers(4, shape=(8, 128))).pack(), "Q4_0"),
    "wide": (halved(integers(4, block=64, shape=(2, 8, 128))), "Q4_0"),
    "channel": (halved(integers(4, block=128, shape=(8, 128))), "Q4_0"),
    "q4_1": (with_minimum(), "Q4_1"),
    "q4_1 wide": (with_minimum(64), "Q4_1"),
    "unsigned": (halved(integers(4, shape=(8, 128), signed=False)), "Q4_1"),
    "q8_0": (halved(integers(8, shape=(8, 128))), "Q8_0"),
    "mxfp4": (floats(jqx.QSpec(mxfp4, jqx.per_block({0: 1, 1: 32}))), "MXFP4"),
    "f32": (jnp.arange(6.0).reshape(2, 3), "F32"),
    "f16": (jnp.ones((2, 3, 4), jnp.float16), "F16"),
    "bf16": (jnp.ones((), jnp.bfloat16), "BF16"),
    "i32": (jnp.arange(3, dtype=jnp.int32), "I32"),
    "empty": (jnp.ones((2, 0)), "F32"),
}


def test_what_is_written_is_read_back(tmp_path):
    metadata = {
        **METADATA,
        **{"a": 3, "b": -2, "c": 2**40, "d": 0.5, "e": True, "f": "text", "g": ["x", "y"]},
        **{"h": [1, 2], "i": [0.5, 1.0], "j": np.arange(3, dtype=np.int8), "k": np.float64(0.1)},
        **{"l": [True, False], "m": []},
    }
    path = tmp_path / "m.gguf"
    write(path, {name: leaf for name, (leaf, _) in MANY.items()}, "gguf", metadata=metadata)
    file, found = read_gguf(path), jqx.load(path)
    assert {n: t.format for n, t in file.tensors.items()} == {
        n: kind for n, (_, kind) in MANY.items()
    }
    for key, value in metadata.items():
        np.testing.assert_array_equal(file.metadata[key], value)
    for name, (leaf, _) in MANY.items():
        assert leaf.shape == found[name].shape == file.tensors[name].shape
        if isinstance(leaf, QTensor):
            want = leaf.astype(jnp.float32).dequantize()
            np.testing.assert_array_equal(found[name].dequantize(), want, name)
        else:
            assert found[name].dtype == leaf.dtype
            np.testing.assert_array_equal(found[name], leaf)


def test_an_archive_is_written_to_the_same_bytes(tmp_path):
    names = {f"{name}{end}" for name in ("Q4_0", "Q4_1", "Q8_0", "MXFP4") for end in ("", ".bytes")}
    kept = tmp_path / "kept.gguf"
    with jqx.interop.read(FILE) as archive:
        leaves = {n: archive.read(n) for n in names | {"F16", "BF16"}}
    for name, leaf in list(leaves.items()):
        if name in names and not np.isfinite(leaf.real_scale()).all():  # bytes of chance
            assert_refused(
                lambda n=name: write(kept, {n: leaves.pop(n)}, "gguf", metadata=METADATA)
            )
    assert len(leaves) > 6
    write(kept, leaves, "gguf", metadata=METADATA)
    old, new = read_gguf(FILE), read_gguf(kept)
    for name in new.tensors:
        np.testing.assert_array_equal(new.tensors[name]._raw, old.tensors[name]._raw, name)
    with jqx.interop.read(kept) as archive:
        write(tmp_path / "again.gguf", archive, "gguf")
    assert (tmp_path / "again.gguf").read_bytes() == kept.read_bytes()


def a_third(q):
    return dataclasses.replace(q, scale=q.scale.astype(jnp.float32) / 3)


CASES = {
    "a tail": (halved(integers(4, block=48, shape=(8, 96))), "whole groups of 32"),
    "bits": (integers(3, shape=(8, 96)), "int4"),
    "a scale": (a_third(integers(4, shape=(8, 96))), "float16"),
    "zeros": (halved(integers(4, zeros=True, shape=(8, 96))), "minimums"),
    "order": (halved(integers(4, order=True)), "in order"),
    "axes": (jnp.ones((1,) * 5), "4 axes"),
    "kind": (jnp.ones(3, jnp.uint32), "numbers of F32"),
    "n" * 64: (jnp.ones(3), "63 bytes"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_held_is_an_error_that_names_the_tensor(tmp_path, name):
    leaf, words = CASES[name]
    path = tmp_path / "m.gguf"
    assert_refused(lambda: write(path, {name: leaf}, "gguf", metadata=METADATA), f"'{name}'", words)
    assert os.listdir(tmp_path) == []


def test_k_quants_are_not_written(tmp_path):
    with jqx.interop.read(FILE) as archive:
        for name in ("Q2_K.bytes", "Q4_K.bytes", "Q6_K.bytes"):
            leaf = {name: archive.read(name)}
            words = (
                ("float16", "minimums", "NaN")
                if name == "Q4_K.bytes"
                else ("GGUF cannot hold", name)
            )
            try:
                write(tmp_path / "m.gguf", leaf, "gguf", metadata=METADATA)
            except ValueError as error:
                assert any(word in str(error) for word in words) and name in str(error)
            else:
                raise AssertionError(name)


def test_arguments_that_do_not_fit(tmp_path):
    path, leaves = tmp_path / "m.gguf", {"w": jnp.ones(3)}

    def refuse(*words, error=ValueError, **given):
        given = {"metadata": METADATA, **given}
        assert_refused(lambda: write(path, leaves, "gguf", **given), *words, error=error)

    refuse("`metadata`", "Mapping", error=TypeError, metadata=None)
    refuse("general.architecture", metadata={"a": 1})
    refuse("general.alignment", metadata={**METADATA, "general.alignment": 24})
    refuse("'k'", error=TypeError, metadata={**METADATA, "k": {"a": 1}})
    refuse("'k'", error=TypeError, metadata={**METADATA, "k": np.ones((2, 2))})
    refuse("`config` has no use", config={})
    refuse("`tokenizer` has no use", tokenizer="folder")
    refuse("`limit` has no use", limit=3)
    refuse("`activation` has no use", activation="int8:token:dynamic")
    write(path, leaves, "gguf", metadata={**METADATA, "general.alignment": 64})
    refuse("exists already", error=FileExistsError)
    write(path, {"v": jnp.ones(3)}, "gguf", metadata=METADATA, overwrite=True)
    assert jqx.load(path).keys() == {"v"}
    with jqx.interop.read(path) as archive:
        assert_refused(
            lambda: write(tmp_path / "n", archive, "safetensors", metadata={}, config={}),
            "`metadata` has no use",
        )


def test_arrays_alone_are_written_as_safetensors_with_an_index(tmp_path):
    leaves = {f"layers.{i}.weight": jnp.full((4, 4), float(i)) for i in range(4)}
    write(tmp_path / "m", leaves, "safetensors", config={"model_type": "mine"}, limit=128)
    assert "model.safetensors.index.json" in os.listdir(tmp_path / "m")
    jax.tree.map(np.testing.assert_array_equal, jqx.load(tmp_path / "m"), leaves)
    leaves["layers.0.weight"] = integers(4)
    assert_refused(
        lambda: write(tmp_path / "n", leaves, "safetensors", config={}), "'layers.0.weight'"
    )


READ = """
import gguf, numpy as np, sys
floats = {}
for tensor in gguf.GGUFReader(sys.argv[1]).tensors:
    floats[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
np.savez(sys.argv[2], **floats)
"""


@pytest.mark.slow
def test_the_package_reads_what_is_written(tmp_path):
    pytest.importorskip("gguf")
    leaves = {n: leaf for n, (leaf, _) in MANY.items() if n not in ("empty", "i32", "bf16", "f16")}
    write(tmp_path / "m.gguf", leaves, "gguf", metadata=METADATA)
    call = [sys.executable, "-c", READ, tmp_path / "m.gguf", tmp_path / "floats.npz"]
    subprocess.run(call, check=True)
    found = np.load(tmp_path / "floats.npz")
    for name, leaf in leaves.items():
        want = leaf.astype(jnp.float32).dequantize() if isinstance(leaf, QTensor) else leaf
        np.testing.assert_array_equal(found[name], want, name)
