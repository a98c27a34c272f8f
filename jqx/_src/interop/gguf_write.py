"""Writes GGUF files tensor by tensor; a file is written completely or not at all."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..checks import check_instance, shown
from ..errors import fail
from ..files import Path, Replacement, as_path
from ..numerics.blocks import mxfp4
from ..numerics.lookup import E8M0, format_of
from ..numerics.qtype import Integer
from ..tensor.qtensor import QTensor
from ..transforms.calibrate import with_bar
from .codec import as_numpy, codes_of, exact_halves, for_rows, minimums_of, refuse_leaf, scale_of
from .gguf import MAGIC, MOST_AXES, NUMBERS
from .gguf_blocks import FORMATS, NUMBER_OF
from .named_tree import Leaf

_TYPES = {np.dtype(dtype).name: kind for kind, dtype in NUMBERS.items()}
"""Metadata types that are numbers, by dtype."""

_STRING, _ARRAY = 8, 9

_ARCHITECTURE, _ALIGNMENT = "general.architecture", "general.alignment"


def write_gguf(
    path: Path,
    leaves: Mapping[str, Leaf],
    metadata: Mapping[str, Any] | None,
    *,
    overwrite: bool,
    progress: bool,
) -> None:
    """Writes a file; see `jqx.interop.write`.

    Raises:
      OSError: if the file exists already or cannot be written.
      TypeError: if metadata has a type that the format does not support.
      ValueError: if the format cannot hold a tensor.
    """
    fix = "pass metadata={'general.architecture': 'llama', ...}, such as read_gguf(...).metadata."
    check_instance("interop.write", "metadata", metadata, Mapping, fix=fix)
    assert metadata is not None
    architecture = metadata.get(_ARCHITECTURE)
    if not (isinstance(architecture, str) and architecture):
        problem = f"`metadata` does not say which model a GGUF file has: {_ARCHITECTURE} is "
        problem += f"{shown(architecture)}."
        raise fail("interop.write", problem, fix=fix)
    stored = metadata.get(_ALIGNMENT, 32)
    is_integer = isinstance(stored, (int, np.integer)) and not isinstance(stored, bool)
    if not (is_integer and 8 <= stored <= 2**16 and stored & (stored - 1) == 0):
        problem = f"{_ALIGNMENT!r} is {shown(stored)}, not a power of two from 8 to 65536."
        raise fail("interop.write", problem, fix="leave it out: tensors are aligned to 32 bytes.")
    alignment = int(stored)
    target = as_path("interop.write", path)
    if not overwrite and os.path.lexists(target):
        problem = f"{target!r} exists already."
        fix = "choose another name, or pass overwrite=True."
        raise fail("interop.write", problem, fix=fix, error=FileExistsError)
    entries = {name: encode(name, leaf.spec) for name, leaf in leaves.items()}
    offsets, stop = {}, 0
    for name, entry in entries.items():
        offsets[name] = stop
        stop += -(-entry.size // alignment) * alignment
    head = _header(metadata, entries, offsets)
    data_start = -(-len(head) // alignment) * alignment
    with Replacement("interop.write", target) as file:
        file.write(0, head.ljust(data_start, b"\0"))
        for name in with_bar("write", "tensor", leaves, progress):
            entry, leaf = entries[name], leaves[name].read()
            array = entry.make(as_numpy(name, leaf, "GGUF"))
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            assert raw.size == entry.size, f"{name}: {raw.size} bytes are not {entry.size}"
            file.write(data_start + offsets[name], raw.data)
            file.write(data_start + offsets[name] + raw.size, bytes(-raw.size % alignment))
        file.commit()


def _header(
    metadata: Mapping[str, Any], entries: Mapping[str, GgufEntry], offsets: Mapping[str, int]
) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", 3, len(entries), len(metadata))]
    for key, value in metadata.items():
        check_instance("interop.write", "metadata", key, str, fix="use strings as keys.")
        kind, raw = _value(key, value)
        parts += [_text(key), struct.pack("<I", kind), raw]
    for name, entry in entries.items():
        sizes = entry.shape[::-1]
        parts += [_text(name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        parts.append(struct.pack("<IQ", entry.kind, offsets[name]))
    return b"".join(parts)


def _text(text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        problem = f"a name or a string of `metadata` is not text: {text!r}, {error}."
        fix = "correct it: UTF-8 cannot encode lone surrogates."
        raise fail("interop.write", problem, fix=fix) from None
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> tuple[int, bytes]:
    """Returns the type and the bytes of a metadata value."""
    if isinstance(value, str):
        return _STRING, _text(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        texts = b"".join(map(_text, value))
        return _ARRAY, struct.pack("<IQ", _STRING, len(value)) + texts
    array = value if isinstance(value, (np.ndarray, np.generic)) else _as_numbers(value)
    fits = array is not None and array.ndim < 2 and array.dtype.name in _TYPES
    if not fits:
        problem = f"{shown(key)} of `metadata` has no type in GGUF files: {type(value).__name__}."
        fix = "convert it to strings, numbers or booleans, or to lists or 1-d arrays of them."
        raise fail("interop.write", problem, fix=fix, error=TypeError)
    assert array is not None
    kind, raw = _TYPES[array.dtype.name], array.astype(array.dtype.newbyteorder("<")).tobytes()
    return (kind, raw) if array.ndim == 0 else (_ARRAY, struct.pack("<IQ", kind, array.size) + raw)


def _as_numbers(value: Any) -> np.ndarray | None:
    """Returns Python numbers in the smallest dtype that files of llama.cpp use for them."""
    is_list = isinstance(value, (list, tuple))
    items = list(value) if is_list else [value]
    if all(isinstance(item, bool) for item in items):
        return np.array(value)
    if all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in items):
        if any(isinstance(item, float) for item in items):
            largest = np.finfo(np.float32).max
            wide = any(largest < abs(item) < math.inf for item in items)
            return np.array(value, np.float64 if wide else np.float32)
        low, high = min(items), max(items)
        order = (np.uint32, np.int32, np.uint64, np.int64)
        for dtype in (np.int32, *order) if is_list else order:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return np.array(value, dtype)
    return None


# Encodes a leaf for a GGUF file: the type of its tensor, and the bytes of its blocks.


_NAME = "GGUF"
_MOST_OF_NAME = 63
_HALF = np.dtype(np.float16)


class GgufEntry(NamedTuple):
    """A tensor to be written.

    Attributes:
      kind: number of its type.
      shape: shape of its weights.
      make: computes its numbers or blocks from the leaf as NumPy arrays.
    """

    kind: int
    shape: tuple[int, ...]
    make: Callable[[Any], np.ndarray]

    @property
    def size(self) -> int:
        """Size in bytes."""
        form = FORMATS[self.kind]
        return math.prod(self.shape) // form.size * form.fields.itemsize


def encode(path: str, leaf: Any) -> GgufEntry:
    """Returns the encoded form of a leaf.

    Raises:
      ValueError: if the format cannot hold it; the message names the tensor.
    """
    if len(path.encode()) > _MOST_OF_NAME or len(leaf.shape) > MOST_AXES:
        expected = f"names of at most {_MOST_OF_NAME} bytes, and at most {MOST_AXES} axes"
        fix = "name it as llama.cpp does, such as blk.0.attn_q.weight; merge or split its axes."
        refuse_leaf(path, leaf, _NAME, expected=expected, fix=fix)
    name, make = _coded(path, leaf) if isinstance(leaf, QTensor) else _encode_floats(path, leaf)
    return GgufEntry(NUMBER_OF[name], tuple(leaf.shape), make)


def _encode_floats(path: str, leaf: Any) -> tuple[str, Callable[[Any], np.ndarray]]:
    kinds = {form.fields: form.name for form in FORMATS.values() if form.form is None}
    dtype = np.dtype(leaf.dtype)
    if dtype not in kinds:
        fix = f"convert it to one of {', '.join(kinds.values())}, for example to float32."
        refuse_leaf(path, leaf, _NAME, fix=fix)
    return kinds[dtype], lambda x: np.ascontiguousarray(x)


def _coded(path: str, leaf: QTensor) -> tuple[str, Callable[[QTensor], np.ndarray]]:
    form, size = format_of(leaf.qtype), leaf.groups.sizes[-1] if leaf.ndim else 0
    fits_blocks = size and size % 32 == 0 and leaf.shape[-1] % size == 0 and leaf.order is None
    plain = leaf.zero_point is None and leaf.offset is None
    if fits_blocks and form == mxfp4 and plain and leaf.scale.dtype == E8M0:
        return "MXFP4", _floats
    if fits_blocks and isinstance(form, Integer) and form.bits == 8 and form.signed and plain:
        return "Q8_0", partial(_integers, path, "Q8_0")
    if fits_blocks and isinstance(form, Integer) and form.bits == 4:
        name = "Q4_0" if form.signed and plain else "Q4_1"
        return name, partial(_integers, path, name)
    expected = "int4, 4 bits with a minimum, int8 or mxfp4; whole groups of 32 or more; in order"
    fix = "quantize it like that, leave it in float, or write compressed-tensors."
    refuse_leaf(path, leaf, _NAME, expected=expected, fix=fix)


def _integers(path: str, name: str, q: QTensor) -> np.ndarray:
    """Returns the blocks of Q4_0, Q4_1 or Q8_0."""
    form, raw = format_of(q.qtype), _blocks(name, q)
    assert isinstance(form, Integer)
    blocks_per_group = q.groups.sizes[-1] // 32
    raw["scale"] = np.repeat(exact_halves(path, q, _NAME), blocks_per_group, -1)
    codes = codes_of(q)
    if form.bits == 4:
        shift = 8 if form.signed else 0
        codes = (codes.astype(np.int16) + shift).astype(np.uint8)
    if name == "Q4_1":
        scale = for_rows(scale_of(q), q).astype(np.float64)
        raw["minimum"] = np.repeat(minimums_of(path, q, scale, _HALF, _NAME), blocks_per_group, -1)
    codes = codes.reshape(*raw.shape, 32)
    raw["codes"] = _paired(codes) if form.bits == 4 else codes
    return raw


def _floats(q: QTensor) -> np.ndarray:
    """Returns the blocks of MXFP4."""
    raw = _blocks("MXFP4", q)
    scale = for_rows(np.asarray(q.scale).view(np.uint8), q)
    raw["scale"] = np.repeat(scale, q.groups.sizes[-1] // 32, -1)
    raw["codes"] = _paired(codes_of(q).reshape(*raw.shape, 32))
    return raw


def _blocks(name: str, q: QTensor) -> np.ndarray:
    return np.empty((*q.shape[:-1], q.shape[-1] // 32), FORMATS[NUMBER_OF[name]].fields)


def _paired(codes: np.ndarray) -> np.ndarray:
    """Returns 32 codes of 4 bits in 16 bytes, with the first half in the low bits."""
    return codes[..., :16] | codes[..., 16:] << np.uint8(4)
