"""Files that tests write: folders of safetensors, tensor by tensor, and GGUF files, put together as
the format says, right or wrong.
"""

import json
import pathlib
import struct

import jax.numpy as jnp
import numpy as np

from jqx._src.interop.save import written

CHECKPOINTS = pathlib.Path(__file__).parent / "checkpoints"


def write_file(path, tensors, metadata=None):
    """Writes NumPy arrays by name."""
    kinds = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    with written(str(path), kinds, metadata or {}) as out:
        for name, x in tensors.items():
            out.write(name, np.ascontiguousarray(x).reshape(x.shape))


def write_folder(folder, tensors, config=None):
    """Writes a folder of one file and its config."""
    folder.mkdir(exist_ok=True)
    write_file(folder / "model.safetensors", tensors)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}


NUMBERS = "<B <b <H <h <I <i <f <?".split()


NUMBERS = {**dict(enumerate(NUMBERS)), 10: "<Q", 11: "<q", 12: "<d"}


def text(x):
    raw = x.encode() if isinstance(x, str) else x
    return struct.pack("<Q", len(raw)) + raw


def value(kind, x):
    """A value of metadata; of an array, (type of its elements, list)."""
    if kind == 8:
        return text(x)
    if kind == 9:
        element, items = x
        return struct.pack("<IQ", element, len(items)) + b"".join(value(element, i) for i in items)
    return struct.pack(NUMBERS[kind], x)


def info(name, shape, kind, offset):
    """What the header says of a tensor; axes the other way round."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def file_of(tensors=(), metadata=(), data=b"", *, version=3, counts=None, alignment=32):
    """The bytes of a file, of (name, shape, type, offset) and of (key, type, value)."""
    counts = counts or (len(tensors), len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    head += b"".join(
        text(key) + struct.pack("<I", kind) + value(kind, x) for key, kind, x in metadata
    )
    head += b"".join(info(*tensor) for tensor in tensors)
    return head + bytes(-len(head) % alignment) + data


def stored(arrays, alignment=32):
    """The tensors of `file_of`, and their bytes: of (name, shape, type name, bytes) each."""
    tensors, data = [], b""
    for name, shape, kind, raw in arrays:
        data += bytes(-len(data) % alignment)
        tensors.append((name, shape, TYPES[kind], len(data)))
        data += raw
    return tensors, data


def halves(x):
    return np.asarray(x, "<f2").tobytes()


def nibbles(codes):
    """32 codes of 4 bits: the first 16 in the low halves of 16 bytes."""
    return bytes(low | high << 4 for low, high in zip(codes[:16], codes[16:], strict=True))


def q4_0(scale, codes):
    return halves(scale) + nibbles([code + 8 for code in codes])


def q4_1(scale, minimum, codes):
    return halves([scale, minimum]) + nibbles(codes)


def q8_0(scale, codes):
    return halves(scale) + bytes(code & 255 for code in codes)


def bf16(x):
    return np.asarray(x, jnp.bfloat16).tobytes()
