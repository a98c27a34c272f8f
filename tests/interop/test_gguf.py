"""GGUF files are read, tensor by tensor; damaged ones are refused."""

import struct

import jax.numpy as jnp
import numpy as np
import pytest

from jqx.interop import read_gguf

from .gguf_files import TYPES, bf16, file_of, halves, q4_0, q4_1, q8_0, stored, text
from .refusals import assert_refused

CODES = [(7 * i) % 16 for i in range(32)]
EVERY_HALF = np.arange(2**16, dtype="<u2").view("<f2")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def write(path, arrays, metadata=(), alignment=32):
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
    file = write(path, arrays)
    assert list(file.tensors) == [name for name, *_ in arrays]  # in the order of the file
    for name, shape, kind, _ in arrays:
        tensor = file.tensors[name]
        assert (tensor.name, tensor.shape, tensor.format) == (name, shape, kind)
        found = tensor.dequantize()
        assert found.dtype == np.float32 and found.shape == shape and found.flags.writeable
        np.testing.assert_array_equal(found, want[name])
    assert repr(file) == "Gguf(9 tensors, 0 entries of metadata)"
    assert repr(file.tensors["q4_1"]) == "GgufTensor('q4_1', Q4_1[1, 64])"


def test_codes_scales_and_minimums_are_those_that_are_stored(path):
    signed = [code - 8 for code in CODES]
    rows = q4_1(0.5, 3, CODES) + q4_1(0.25, -1, CODES[::-1])
    file = write(
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
        tensor = write(path, [("w", (len(raw), 32), name, raw.tobytes())]).tensors["w"]
        np.testing.assert_array_equal(tensor.dequantize(), want.astype(np.float32))


def test_every_number_of_16_bits_is_read(path):
    bits = EVERY_HALF.tobytes()
    file = write(path, [("h", (256, 256), "F16", bits), ("b", (2**16,), "BF16", bits)])
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
    found = read_gguf(path).metadata
    for key, kind, x in plain:
        want = float(np.float32(x)) if kind == 6 else x
        # Numbers of Python are written as uint32, int32 below 0, and float32: others are NumPy's.
        kinds = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 10: "u8", 11: "i8", 12: "f8"}
        wanted = np.dtype(kinds[kind]).type if kind in kinds else type(want)
        assert found[key] == want and type(found[key]) is wanted, key
        array = found[f"a{kind}"]  # of two equal values
        assert not key or list(array) == [want, want], key
        assert (type(array) is list) == (kind == 8), key
        assert kind == 8 or array.dtype.isnative
    assert found["deep"][0] == ["a", "b"] and found["deep"][1].tolist() == [1, 2]
    assert found["deep"][2] == found["empty"] == []


def test_any_byte_but_0_is_true(path):
    data = file_of((), [("x", 7, True), ("y", 9, (7, [True, False]))])
    at = data.index(text("x")) + 13
    path.write_bytes(data[:at] + b"\x02" + data[at + 1 :])
    assert read_gguf(path).metadata["x"] is True
    assert read_gguf(path).metadata["y"].tolist() == [True, False]


def test_the_alignment_that_the_file_says_is_kept(path):
    for alignment in (1, 8, 64, 4096):
        arrays = [("a", (3,), "F16", halves([1, 2, 3])), ("b", (1,), "F32", struct.pack("<f", 9))]
        file = write(path, arrays, [("general.alignment", 4, alignment)], alignment)
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
        assert_refused(call, "'k'", "IQ4_XS", "one of F32, F16, Q4_0, Q4_1, Q5_0", "Q8_0 or F16")
    assert_refused(file.tensors["new"].dequantize, "'new'", "type 77")


# Damaged files.


def refused(path, data, *words):
    path.write_bytes(data)
    assert_refused(lambda: read_gguf(path), "is not a GGUF file", *words)


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
    assert_refused(lambda: read_gguf(path), "interop.read_gguf", error=FileNotFoundError)
    assert_refused(lambda: read_gguf(path.parent), "a folder", error=IsADirectoryError)
    assert_refused(lambda: read_gguf(3), "`path` is not a path", error=TypeError)
    assert_refused(lambda: read_gguf(), "interop.read_gguf", error=TypeError)


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
        place = n // 32 * 32
        refused(path, file_of([("w", (2,), 0, place)], data=bytes(64)), "'w'")
        refused(path, file_of([("w", (2,), 23, place)], data=bytes(64)), "'w'")


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
    assert_refused(lambda: read_gguf(path), "nested too deeply")


def test_bytes_of_chance_are_read_or_refused(path):
    """One byte of the header is another: the file is read, or refused in four parts."""
    tensors, data = stored([("w", (1, 32), "Q4_1", q4_1(1, 2, CODES))])
    whole = file_of(tensors, [("a", 8, "t"), ("b", 9, (8, ["x"])), ("c", 9, (5, [1]))], data)
    for place in range(len(whole) - len(data)):
        for other in (1, 0xFF):
            path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
            try:
                for tensor in read_gguf(path).tensors.values():
                    tensor.dequantize()
            except ValueError as error:
                assert "fix: " in str(error) and len(str(error)) < 2000
