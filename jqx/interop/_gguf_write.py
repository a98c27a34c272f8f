"""Writes GGUF files tensor by tensor; a file is written completely or not at all."""

import math
import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._checks import check_instance, shown
from .._errors import fail
from .._files import Path, Replacement, as_path
from ..transforms._shared import with_bar
from ._encoded import as_numpy
from ._gguf_encode import GgufEntry, encode
from ._gguf_source import MAGIC
from ._tree_leaves import Leaf

_TYPES = {
    **{"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6},
    **{"bool": 7, "uint64": 10, "int64": 11, "float64": 12},
}
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
    _check_metadata(metadata)
    assert metadata is not None
    target = as_path("interop.write", path)
    if not overwrite and os.path.lexists(target):
        raise fail(
            "interop.write",
            f"{target!r} exists already.",
            given="overwrite=False",
            expected="no file of that name",
            fix="choose another name, or pass overwrite=True.",
            error=FileExistsError,
        )
    alignment = int(metadata.get(_ALIGNMENT, 32))
    entries = {name: encode(name, leaf.spec) for name, leaf in leaves.items()}
    places, stop = {}, 0
    for name, entry in entries.items():
        places[name] = stop
        stop += -(-entry.size // alignment) * alignment
    head = _header(metadata, entries, places)
    first = -(-len(head) // alignment) * alignment
    with Replacement("interop.write", target) as file:
        file.write(0, head.ljust(first, b"\0"))
        for name in with_bar("write", "tensor", leaves, progress):
            entry, leaf = entries[name], leaves[name].read()
            made = entry.make(as_numpy(name, leaf, "GGUF"))
            raw = np.ascontiguousarray(made).reshape(-1).view(np.uint8)
            assert raw.size == entry.size, f"{name}: {raw.size} bytes are not {entry.size}"
            file.write(first + places[name], raw.data)
            file.write(first + places[name] + raw.size, bytes(-raw.size % alignment))
        file.commit()


def _check_metadata(metadata: Any) -> None:
    fix = "pass metadata={'general.architecture': 'llama', ...}, such as read_gguf(...).metadata."
    check_instance("interop.write", "metadata", metadata, Mapping, fix=fix)
    known = metadata.get(_ARCHITECTURE)
    if not (isinstance(known, str) and known):
        raise fail(
            "interop.write",
            "`metadata` does not say which model a GGUF file has.",
            given=f"{_ARCHITECTURE} == {shown(known)}",
            expected="the name of the architecture in llama.cpp",
            fix=fix,
        )
    alignment = metadata.get(_ALIGNMENT, 32)
    fits = isinstance(alignment, (int, np.integer)) and not isinstance(alignment, bool)
    if not (fits and 8 <= alignment <= 2**16 and alignment & (alignment - 1) == 0):
        raise fail(
            "interop.write",
            f"{_ALIGNMENT!r} is not an alignment.",
            given=shown(alignment),
            expected="a power of two from 8 to 65536",
            fix="leave it out: tensors are aligned to 32 bytes.",
        )


def _header(
    metadata: Mapping[str, Any], entries: Mapping[str, GgufEntry], places: Mapping[str, int]
) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", 3, len(entries), len(metadata))]
    for key, value in metadata.items():
        check_instance("interop.write", "metadata", key, str, fix="use strings as keys.")
        kind, raw = _value(key, value)
        parts += [_text(key), struct.pack("<I", kind), raw]
    for name, entry in entries.items():
        sizes = entry.shape[::-1]
        parts += [_text(name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        parts.append(struct.pack("<IQ", entry.kind, places[name]))
    return b"".join(parts)


def _text(text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise fail(
            "interop.write",
            "a name or a string of `metadata` is not text.",
            given=f"{text!r}: {error}",
            expected="strings that UTF-8 can encode: no lone surrogates",
            fix="correct the string.",
        ) from None
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
        raise fail(
            "interop.write",
            f"the value of {shown(key)} in `metadata` has no type in GGUF files.",
            given=f"an object of type {type(value).__name__}",
            expected="strings, numbers, booleans; lists or one-dimensional arrays of them",
            fix="leave it out, or convert it.",
            error=TypeError,
        )
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
            most = np.finfo(np.float32).max
            wide = any(most < abs(item) < math.inf for item in items)
            return np.array(value, np.float64 if wide else np.float32)
        low, high = min(items), max(items)
        order = (np.uint32, np.int32, np.uint64, np.int64)
        for dtype in (np.int32, *order) if is_list else order:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return np.array(value, dtype)
    return None
