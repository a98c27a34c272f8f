"""GGUF files are read, tensor by tensor; damaged ones are refused."""

import dataclasses
import os
import struct
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

from ..arrays import assert_same
from ..oracles.refusals import assert_error
from .files import CHECKPOINTS, TYPES, bf16, file_of, halves, q4_0, q4_1, q8_0, stored, text
from .trees import blocks_of, halved, integers

CODES = [(7 * i) % 16 for i in range(32)]
EVERY_HALF = np.arange(2**16, dtype="<u2").view("<f2")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def written_file(path, arrays, metadata=(), alignment=32):
    tensors, data = stored(arrays, alignment)
    path.write_bytes(file_of(tensors, metadata, data, alignment=alignment))
    return read_gguf(path)


# What is read.


def test_every_type_is_read_as_the_format_says(path):
    signed = [code - 8 for code in CODES]
    small = [5 * i - 80 for i in range(32)]
    arrays = [
        ("f32", (2, 3), "F32", np.arange(6, dtype="<f4").tobytes()),
        ("f16", (3,), "F16", halves([1.5, -0.0, np.inf])),
        ("bf16", (2, 1), "BF16", bf16([[1.5], [-3.0]])),
        ("q4_0", (2, 1, 32), "Q4_0", q4_0(0.5, signed) + q4_0(-2, signed[::-1])),
        ("q4_1", (1, 64), "Q4_1", q4_1(0.5, 3, CODES) + q4_1(0.25, -1, CODES[::-1])),
        ("q8_0", (32,), "Q8_0", q8_0(0.125, small)),
        ("one", (), "F32", struct.pack("<f", 7)),
        ("none", (4, 0), "F16", b""),
        ("no rows", (0, 32), "Q4_1", b""),
    ]
    want = {
        "f32": np.arange(6).reshape(2, 3),
        "f16": np.array([1.5, -0.0, np.inf]),
        "bf16": np.array([[1.5], [-3.0]]),
        "q4_0": np.array([0.5, -2])[:, None, None] * np.stack([signed, signed[::-1]])[:, None],
        "q4_1": np.concatenate([0.5 * np.array(CODES) + 3, 0.25 * np.array(CODES[::-1]) - 1])[None],
        "q8_0": 0.125 * np.array(small),
        "one": np.array(7.0),
        "none": np.zeros((4, 0)),
        "no rows": np.zeros((0, 32)),
    }
    file = written_file(path, arrays)
    assert list(file.tensors) == [name for name, *_ in arrays]  # in the order of the file
    for name, shape, kind, _ in arrays:
        tensor = file.tensors[name]
        assert (tensor.name, tensor.shape, tensor.format) == (name, shape, kind)
        real = tensor.dequantize()
        assert real.dtype == np.float32 and real.shape == shape and real.flags.writeable
        np.testing.assert_array_equal(real, want[name])
    assert repr(file) == "Gguf(9 tensors, 0 entries of metadata)"
    assert repr(file.tensors["q4_1"]) == "GgufTensor('q4_1', Q4_1[1, 64])"


def test_codes_scales_and_minimums_are_those_that_are_stored(path):
    signed = [code - 8 for code in CODES]
    rows = q4_1(0.5, 3, CODES) + q4_1(0.25, -1, CODES[::-1])
    file = written_file(
        path,
        [
            ("a", (1, 64), "Q4_1", rows),
            ("b", (1, 32), "Q4_0", q4_0(-2, signed)),
            ("c", (32,), "Q8_0", q8_0(0.125, signed)),
            ("d", (2, 2), "BF16", bf16([1, 2, 3, 4])),
        ],
    )
    codes, scale, minimum = file.tensors["a"].blocks()
    np.testing.assert_array_equal(codes, [[CODES, CODES[::-1]]])
    np.testing.assert_array_equal(scale, [[0.5, 0.25]])
    np.testing.assert_array_equal(minimum, [[3, -1]])
    for name, shape, dtype in (("b", (1, 1, 32), np.int8), ("c", (1, 32), np.int8)):
        blocks = file.tensors[name].blocks()
        np.testing.assert_array_equal(blocks.codes.reshape(-1), signed)
        assert blocks.codes.shape == shape and blocks.codes.dtype == dtype
        assert blocks.scale.dtype == np.float16 and blocks.minimum is None
    blocks = file.tensors["d"].blocks()
    assert blocks.codes.shape == (2, 2, 1) and blocks.codes.dtype == jnp.bfloat16
    assert blocks.scale is None and blocks.minimum is None


def every_block(name, minimum):
    """Blocks of every scale, with every code (of 8 bits: with 32 of them); weights in float64."""
    scales = EVERY_HALF
    raw = np.zeros(
        len(scales),
        {
            "Q4_0": [("s", "<f2"), ("c", "u1", 16)],
            "Q4_1": [("s", "<f2"), ("m", "<f2"), ("c", "u1", 16)],
            "Q8_0": [("s", "<f2"), ("c", "i1", 32)],
        }[name],
    )
    raw["s"] = scales
    if name == "Q8_0":
        raw["c"] = np.tile(np.arange(-128, 128, dtype="i1").reshape(8, 32), (2**13, 1))
        codes = raw["c"].astype(float)
    else:
        raw["c"] = np.arange(16) | np.arange(16)[::-1] << 4
        codes = np.r_[:16, 15:-1:-1] - (8.0 if name == "Q4_0" else 0.0)
    with np.errstate(invalid="ignore"):
        want = scales.astype(float)[:, None] * codes
        if name == "Q4_1":
            raw["m"] = minimum
            want = want + minimum.astype(float)[:, None]
    return raw, want


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_every_scale_with_every_code_is_rounded_once(path, name):
    minimums = [0] if name != "Q4_1" else [1, 4097, 30000]
    for turn in minimums:  # another minimum beside each scale; NaN and infinity are among both
        raw, want = every_block(name, np.roll(EVERY_HALF[::-1], turn))
        tensor = written_file(path, [("w", (len(raw), 32), name, raw.tobytes())]).tensors["w"]
        np.testing.assert_array_equal(tensor.dequantize(), want.astype(np.float32))


def test_every_number_of_16_bits_is_read(path):
    bits = EVERY_HALF.tobytes()
    file = written_file(path, [("h", (256, 256), "F16", bits), ("b", (2**16,), "BF16", bits)])
    np.testing.assert_array_equal(
        file.tensors["h"].dequantize(), EVERY_HALF.astype("f4").reshape(256, 256)
    )
    want = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(file.tensors["b"].dequantize(), want)


def test_metadata_of_every_type_are_read(path):
    plain = [
        *[(f"n{kind}", kind, x) for kind, x in enumerate([255, -128, 65535, -(2**15), 2**32 - 1])],
        ("i32", 5, -(2**31)),
        ("f32", 6, 0.1),
        ("true", 7, True),
        ("u64", 10, 2**64 - 1),
        ("i64", 11, -(2**63)),
        ("f64", 12, 0.1),
        ("text", 8, "naïve ▁"),
        ("", 8, ""),
    ]
    arrays = [(f"a{kind}", 9, (kind, [x, x])) for _, kind, x in plain[:-1]]
    nested = [("deep", 9, (9, [(8, ["a", "b"]), (4, [1, 2]), (9, [])])), ("empty", 9, (8, []))]
    path.write_bytes(file_of((), [*plain, *arrays, *nested]))
    metadata = read_gguf(path).metadata
    for key, kind, x in plain:
        want = float(np.float32(x)) if kind == 6 else x
        # Numbers of Python are written as uint32, int32 below 0, and float32: others are NumPy's.
        kinds = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 10: "u8", 11: "i8", 12: "f8"}
        wanted = np.dtype(kinds[kind]).type if kind in kinds else type(want)
        assert metadata[key] == want and type(metadata[key]) is wanted, key
        array = metadata[f"a{kind}"]  # of two equal values
        assert not key or list(array) == [want, want], key
        assert (type(array) is list) == (kind == 8), key
        assert kind == 8 or array.dtype.isnative
    assert metadata["deep"][0] == ["a", "b"] and metadata["deep"][1].tolist() == [1, 2]
    assert metadata["deep"][2] == metadata["empty"] == []


def test_any_byte_but_0_is_true(path):
    data = file_of((), [("x", 7, True), ("y", 9, (7, [True, False]))])
    at = data.index(text("x")) + 13
    path.write_bytes(data[:at] + b"\x02" + data[at + 1 :])
    assert read_gguf(path).metadata["x"] is True
    assert read_gguf(path).metadata["y"].tolist() == [True, False]


def test_the_alignment_that_the_file_says_is_kept(path):
    for alignment in (1, 8, 64, 4096):
        arrays = [("a", (3,), "F16", halves([1, 2, 3])), ("b", (1,), "F32", struct.pack("<f", 9))]
        file = written_file(path, arrays, [("general.alignment", 4, alignment)], alignment)
        assert file.tensors["a"].dequantize().tolist() == [1, 2, 3]
        assert file.tensors["b"].dequantize().tolist() == [9]


def test_a_file_of_nothing_is_read(path):
    path.write_bytes(file_of())
    assert read_gguf(path).tensors == {} and read_gguf(str(path)).metadata == {}


def test_tensors_are_mapped_not_read(path):
    """A file that is much larger than what it takes to open it: holes are not on the disk."""
    size = 2**36
    path.write_bytes(file_of([("w", (size // 4,), 0, 0), ("x", (1,), 0, size)]))
    with open(path, "r+b") as file:
        first = file.seek(0, 2)
        file.truncate(first + size)
        file.seek(0, 2)
        file.write(struct.pack("<f", 5))
    assert read_gguf(path).tensors["x"].dequantize().tolist() == [5]
    assert read_gguf(path).tensors["w"].blocks().codes[-1].tolist() == [0]


# Types that are not read.


def test_a_tensor_of_another_type_is_refused_when_it_is_asked_for(path):
    tensors = [("k", (256,), 23, 0), ("new", (3,), 77, 160), ("w", (1,), 0, 192)]
    path.write_bytes(file_of(tensors, data=bytes(192) + struct.pack("<f", 2)))
    file = read_gguf(path)
    assert [tensor.format for tensor in file.tensors.values()] == ["IQ4_XS", "type 77", "F32"]
    assert file.tensors["w"].dequantize().tolist() == [2]
    for call in (file.tensors["k"].dequantize, file.tensors["k"].blocks):
        assert_error(call, "'k'", "IQ4_XS", "one of F32, F16, Q4_0, Q4_1, Q5_0", "llama-quantize")
    assert_error(file.tensors["new"].dequantize, "'new'", "type 77")


# Damaged files.


def refused(path, data, *words):
    path.write_bytes(data)
    assert_error(lambda: read_gguf(path), "is not a GGUF file", *words)


def test_other_files_are_refused(path):
    refused(path, b"", "begins with b''")
    refused(path, b"GGU", "begins with b'GGU'")
    refused(path, b"\x08" + bytes(20), "jqx.load reads safetensors")
    refused(path, b"GGUF", "the version")
    for version in (0, 1, 4, 65535):
        refused(path, file_of(version=version), f"version {version}", "version 2 or 3")
    refused(path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian", "of version 3")
    refused(path, b"GGUF\xff\xff\xff\xff" + bytes(16), "version 4294967295")


def test_no_file_is_refused(path):
    assert_error(lambda: read_gguf(path), "interop.read_gguf", error=FileNotFoundError)
    assert_error(lambda: read_gguf(path.parent), "a folder", error=IsADirectoryError)
    assert_error(lambda: read_gguf(3), "is neither a string nor a pathlib.Path", error=TypeError)
    assert_error(lambda: read_gguf(), "interop.read_gguf", error=TypeError)


def test_a_file_that_is_cut_short_anywhere_is_refused(path):
    tensors, data = stored(
        [("w", (1, 32), "Q4_1", q4_1(1, 2, CODES)), ("x", (2,), "F32", bytes(8))]
    )
    metadata = [("a", 8, "text"), ("b", 9, (8, ["x", "y"])), ("c", 9, (5, [1, 2])), ("d", 12, 1.0)]
    whole = file_of(tensors, metadata, data)
    path.write_bytes(whole)
    assert read_gguf(path).metadata["d"] == 1
    for length in range(len(whole)):
        refused(path, whole[:length], "given:")


HUGE = (2**31, 2**40, 2**63 - 1, 2**64 - 1)


def test_sizes_beyond_the_file_are_refused_at_once(path):
    for n in HUGE:
        size = struct.pack("<Q", n)
        refused(path, file_of(counts=(n, 0)), "bytes, which end in the tensor ''")
        refused(path, file_of(counts=(0, n)), "bytes, which end in the type of a value")
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
        refused(path, head + size + b"k" * 40, "key 0 of 1")
        refused(path, head + text("k") + struct.pack("<I", 8) + size + bytes(40), "'k'")
        for kind in (0, 5, 7, 8, 9, 12):
            array = struct.pack("<II", 9, kind) + size
            refused(path, head + text("k") + array + bytes(40), "'k'")
        refused(path, file_of([("w", (n,), 0, 0)], data=bytes(64)), "'w'")
        refused(path, file_of([("w", (n, 2**40, 3), 0, 0)], data=bytes(64)), "'w'")
        refused(path, file_of([("w", (0, n, 2**32), 0, 0)], data=bytes(64)), "'w'")
        offset = n // 32 * 32
        refused(path, file_of([("w", (2,), 0, offset)], data=bytes(64)), "'w'")
        refused(path, file_of([("w", (2,), 23, offset)], data=bytes(64)), "'w'")


def test_what_cannot_be_is_refused(path):
    refused(path, file_of((), [("a", 4, 1), ("a", 4, 1)]), "the key 'a' twice")
    tensors = [("w", (1,), 0, 0), ("w", (1,), 0, 32)]
    refused(path, file_of(tensors, data=bytes(64)), "the tensor 'w' twice")
    refused(path, file_of([("w", (1,), 0, 4)], data=bytes(64)), "'w' at 4", "a multiple of 32")
    for other in (0, 48, 2**31 + 1):
        bad = file_of((), [("general.alignment", 4, other)])
        refused(path, bad, f"general.alignment == {other}", "power of two")
    refused(path, file_of((), [("general.alignment", 8, "32")]), "general.alignment == '32'")
    refused(path, file_of((), [("general.alignment", 7, True)]), "general.alignment == True")
    refused(path, file_of([("w", (1, 1, 1, 1, 1), 0, 0)], data=bytes(64)), "5 axes")
    many = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w") + struct.pack("<I", 2**32 - 1)
    refused(path, many + bytes(64), "4294967295 axes")
    for kind in ("Q4_0", "Q4_1", "Q8_0"):
        for shape in ((31,), (2, 16), (33,), ()):
            tensors = [("w", shape, TYPES[kind], 0)]
            refused(path, file_of(tensors, data=bytes(640)), kind, "a multiple of 32")
    tensors = [("w", (16,), 0, 0), ("x", (1,), 0, 32)]
    refused(path, file_of(tensors, data=bytes(64)), "'w' and 'x' in the same bytes")
    refused(path, file_of(tensors[::-1], data=bytes(64)), "'w' and 'x' in the same bytes")
    for kind in (13, 77, 2**32 - 1):
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k")
        refused(path, head + struct.pack("<I", kind) + bytes(64), f"type {kind}")
        refused(path, head + struct.pack("<II", 9, kind) + bytes(64), f"type {kind}")
    refused(path, file_of((), [(b"\xff", 4, 1)]), "not UTF-8")
    refused(path, file_of((), [("k", 8, b"\xff")]), "not UTF-8", "'k'")
    long = "k" * 5000
    refused(path, file_of((), [(long, 4, 1), (long, 4, 1)]), "twice")


def test_deep_arrays_are_refused_in_four_parts(path):
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 9)
    path.write_bytes(head + struct.pack("<IQ", 9, 1) * 100_000 + struct.pack("<IQ", 9, 0))
    assert_error(lambda: read_gguf(path), "nested more deeply")


def test_bytes_of_chance_are_read_or_refused(path):
    """One byte of the header is another: the file is read, or refused in four parts."""
    tensors, data = stored([("w", (1, 32), "Q4_1", q4_1(1, 2, CODES))])
    whole = file_of(tensors, [("a", 8, "t"), ("b", 9, (8, ["x"])), ("c", 9, (5, [1]))], data)
    for index in range(len(whole) - len(data)):
        for other in (1, 0xFF):
            path.write_bytes(whole[:index] + bytes([other]) + whole[index + 1 :])
            try:
                for tensor in read_gguf(path).tensors.values():
                    tensor.dequantize()
            except ValueError as error:
                assert "fix: " in str(error) and len(str(error)) < 2000


# GGUF files as checkpoints: read to QTensors of the bytes they have, and written.


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
    assert_error(lambda: jqx.load(FILE, config={}), "`config` has no use")


def test_products_with_every_type_take_no_weight_apart():
    x = np.random.default_rng(0).normal(size=(5, 512)).astype(np.float32)
    with jqx.interop.read(FILE) as archive:
        names = [name for name in ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "MXFP4")]
        leaves = {name: archive.read(name) for name in names}
    products = jax.jit(lambda x, leaves: {n: jqx.matmul(x, q.T) for n, q in leaves.items()})(
        x, leaves
    )
    for name, q in leaves.items():
        real = np.asarray(q.dequantize()).astype(np.float64)
        least = 0 if q.offset is None else np.repeat(np.asarray(q.offset, np.float64), 32, -1)
        terms = np.abs(x) @ (np.abs(real - least) + np.abs(least)).T
        # 512 sums, two products, the sum of both parts: each rounds once
        error = np.abs(np.asarray(products[name]) - x.astype(np.float64) @ real.T)
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
    assert_error(lambda: jqx.load(path), "'k'", "IQ4_XS", "Q6_K", "llama-quantize")


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
        q = tree(archive, rules)["q"]
        spec = tree(archive, rules, abstract=True)["q"]
    assert jax.tree.structure(spec) == jax.tree.structure(q)

    def real(x):
        return np.asarray(x.dequantize() if isinstance(x, QTensor) else x)

    want = real(leaf).reshape(heads, 4, 2, 512).swapaxes(1, 2).reshape(shape)
    np.testing.assert_array_equal(real(q[0]), want.T)
    back = named({"q": q}, rules)["blk.0.attn_q.weight"]
    assert_same(back, leaf)


def test_heads_that_do_not_fit_are_refused():
    with jqx.interop.read(FILE) as archive:
        rules = [Name("Q4_1", "q", interleaved=2), Name("{rest:.*}", None)]
        assert_error(lambda: tree(archive, rules), "'Q4_1'", "rows of 2 heads")
    for fields in ({"interleaved": -1}, {"halved": -2}, {"interleaved": 2, "halved": 2}):
        assert_error(lambda fields=fields: Name("a", "b", **fields), "not a number of heads")


def test_rows_of_halves_become_pairs():
    pairs, halves = (Name("{n}", "q/{n}", **{field: 2}) for field in ("interleaved", "halved"))
    x = jnp.arange(16.0).reshape(8, 2)
    np.testing.assert_array_equal(pairs.view("n", x)[:, 0], [0, 4, 2, 6, 8, 12, 10, 14])
    for a, b in ((pairs, halves), (halves, pairs)):
        np.testing.assert_array_equal(a.view("n", b.view("n", x)), x)
        np.testing.assert_array_equal(a.unview("n", x), b.view("n", x))


# Writing.


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
    "mxfp4": (blocks_of(mxfp4, 32), "MXFP4"),
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
    file, loaded = read_gguf(path), jqx.load(path)
    assert {n: t.format for n, t in file.tensors.items()} == {
        n: kind for n, (_, kind) in MANY.items()
    }
    for key, value in metadata.items():
        np.testing.assert_array_equal(file.metadata[key], value)
    for name, (leaf, _) in MANY.items():
        assert leaf.shape == loaded[name].shape == file.tensors[name].shape
        if isinstance(leaf, QTensor):
            want = leaf.astype(jnp.float32).dequantize()
            np.testing.assert_array_equal(loaded[name].dequantize(), want, name)
        else:
            assert loaded[name].dtype == leaf.dtype
            np.testing.assert_array_equal(loaded[name], leaf)


def test_an_archive_is_written_to_the_same_bytes(tmp_path):
    names = {f"{name}{end}" for name in ("Q4_0", "Q4_1", "Q8_0", "MXFP4") for end in ("", ".bytes")}
    copy = tmp_path / "kept.gguf"
    with jqx.interop.read(FILE) as archive:
        leaves = {n: archive.read(n) for n in names | {"F16", "BF16"}}
    for name, leaf in list(leaves.items()):
        if name in names and not np.isfinite(leaf.real_scale()).all():  # bytes of chance
            assert_error(lambda n=name: write(copy, {n: leaves.pop(n)}, "gguf", metadata=METADATA))
    assert len(leaves) > 6
    write(copy, leaves, "gguf", metadata=METADATA)
    old, new = read_gguf(FILE), read_gguf(copy)
    for name in new.tensors:
        np.testing.assert_array_equal(new.tensors[name]._raw, old.tensors[name]._raw, name)
    with jqx.interop.read(copy) as archive:
        write(tmp_path / "again.gguf", archive, "gguf")
    assert (tmp_path / "again.gguf").read_bytes() == copy.read_bytes()


def a_third(q):
    return dataclasses.replace(q, scale=q.scale.astype(jnp.float32) / 3)


CASES = {
    "a tail": (halved(integers(4, block=48, shape=(8, 96))), "whole groups of 32"),
    "bits": (integers(3, shape=(8, 96)), "int4"),
    "a scale": (a_third(integers(4, shape=(8, 96))), "float16"),
    "zeros": (halved(integers(4, zeros=True, shape=(8, 96))), "minimums"),
    "order": (halved(integers(4, order=True)), "in order"),
    "axes": (jnp.ones((1,) * 5), "4 axes"),
    "kind": (jnp.ones(3, jnp.uint32), "one of F32, F16"),
    "n" * 64: (jnp.ones(3), "63 bytes"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_held_is_an_error_that_names_the_tensor(tmp_path, name):
    leaf, words = CASES[name]
    path = tmp_path / "m.gguf"
    assert_error(lambda: write(path, {name: leaf}, "gguf", metadata=METADATA), f"'{name}'", words)
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

    def refuse(*words, error=ValueError, **options):
        options = {"metadata": METADATA, **options}
        assert_error(lambda: write(path, leaves, "gguf", **options), *words, error=error)

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
        assert_error(
            lambda: write(tmp_path / "n", archive, "safetensors", metadata={}, config={}),
            "`metadata` has no use",
        )


def test_arrays_alone_are_written_as_safetensors_with_an_index(tmp_path):
    leaves = {f"layers.{i}.weight": jnp.full((4, 4), float(i)) for i in range(4)}
    write(tmp_path / "m", leaves, "safetensors", config={"model_type": "mine"}, limit=128)
    assert "model.safetensors.index.json" in os.listdir(tmp_path / "m")
    jax.tree.map(np.testing.assert_array_equal, jqx.load(tmp_path / "m"), leaves)
    leaves["layers.0.weight"] = integers(4)
    assert_error(
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
    reals = np.load(tmp_path / "floats.npz")
    for name, leaf in leaves.items():
        want = leaf.astype(jnp.float32).dequantize() if isinstance(leaf, QTensor) else leaf
        np.testing.assert_array_equal(reals[name], want, name)
