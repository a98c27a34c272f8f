"""The safetensors format: the length of a header, the header in JSON, the numbers of all tensors.

Numbers are little-endian. Wider dtypes come first, so that each tensor is aligned.

Dtypes without a name in the format are stored one byte per element: int4 and int2 as I8, uint4 and
uint2 as U8, with the same numbers; float4 and other 8-bit floats as U8, with their bits.
complex128 is F64 with a last axis of 2: the real and the imaginary part.

Format: https://huggingface.co/docs/safetensors (Hugging Face, 2022).
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._checks import shown
from .._errors import fail

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""The names of dtypes in files."""

DTYPES = {stored: jnp.dtype(name) for name, stored in NAMES.items()}

_BYTES = (
    *("int2", "int4", "uint2", "uint4", "float4_e2m1fn"),
    *("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz"),
)
"""Dtypes without a name in files, which are stored one byte per element."""

_PAIRS = "complex128"
"""A dtype whose numbers are stored as two."""

METADATA = "__metadata__"
"""A key of the header that is not a tensor."""

KEY = "jqx"
"""The entry of a file's metadata that describes its tree."""

HEADER_LIMIT = 100_000_000
"""Maximum size in bytes of a header: the limit of other readers."""


_MOST_AXES = 64
"""Maximum number of axes of a NumPy array."""

_MOST_BYTES = 2**63 - 1
"""Maximum size of a NumPy array, with each empty axis counted as one."""


class Entry(NamedTuple):
    """A tensor of a file: name of its dtype in the file, shape, start and end of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def stored_dtype(dtype: Any) -> np.dtype | None:
    """Returns the dtype in which files store arrays of a dtype; `None` if they cannot."""
    name = getattr(dtype, "name", "")
    if name in NAMES:
        return jnp.dtype(name)
    if name == _PAIRS:
        return np.dtype(np.float64)
    if name not in _BYTES:
        return None
    return np.dtype(np.int8 if name.startswith("int") else np.uint8)


def stored_shape(dtype: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape in which files store arrays of a dtype."""
    return (*shape, 2) if getattr(dtype, "name", "") == _PAIRS else tuple(shape)


def shape_of(entry: Entry, dtype: np.dtype) -> tuple[int, ...]:
    """Returns the shape of an array of a dtype, from its tensor: inverts `stored_shape`."""
    return entry.shape[:-1] if dtype.name == _PAIRS else entry.shape


def to_stored(x: np.ndarray) -> np.ndarray:
    """Returns an array in the form that files store."""
    name = x.dtype.name
    if name == _PAIRS:
        return np.ascontiguousarray(x, "<c16").reshape(-1).view("<f8")
    if name == "bool":
        return x.view(np.uint8) != 0
    if name in NAMES:
        return x.astype(x.dtype.newbyteorder("<"), copy=False)
    if name.startswith("float"):
        bits = x.view(np.uint8)
        return bits & np.uint8(15) if name == "float4_e2m1fn" else bits
    stored = stored_dtype(x.dtype)
    assert stored is not None, "the tree was checked before"
    return x.astype(stored)


def from_stored(name: str, raw: np.ndarray, stored: np.dtype, dtype: np.dtype) -> np.ndarray:
    """Returns the bytes of a tensor as a flat array of `dtype`.

    Raises:
      ValueError: if some numbers are not numbers of `dtype`.
    """
    if stored == np.bool_:  # any nonzero byte is true
        return raw != 0 if raw.size and raw.max() > 1 else raw.view(stored)
    x = raw.view(stored)
    if dtype.name in (stored.name, _PAIRS):
        return x.view(dtype)
    if dtype.name.startswith("float"):
        fits, read = dtype.name != "float4_e2m1fn" or not (x >> 4).any(), x.view(dtype)
    else:
        read = x.astype(dtype)
        fits = np.array_equal(read.astype(x.dtype), x)
    if not fits:
        raise fail(
            "load",
            f"the tensor {name!r} holds numbers that its dtype does not have.",
            given=f"{x.dtype.name} numbers for {dtype.name}",
            expected=f"numbers of {dtype.name}",
            fix="write the file again.",
        )
    return read


def read_header(path: str, text: bytes) -> tuple[dict[str, str], dict[str, Entry]]:
    """Returns the metadata of a header, and its tensors in the order of their bytes.

    Raises:
      ValueError: if the header does not follow the format.
    """
    header, given = None, "a header that is not a JSON object"
    try:
        header = json.loads(text, object_pairs_hook=_without_doubles)
    except _DoubledKey as error:
        given = str(error)
    except (ValueError, RecursionError):
        pass
    check(path, isinstance(header, dict), given)
    assert isinstance(header, dict)
    metadata = header.pop(METADATA, {})
    check(
        path,
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()),
        "metadata that is not an object of strings",
    )
    entries = {name: _entry(path, name, fields) for name, fields in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: item[1][2:]))
    stop = 0
    for name, entry in entries.items():
        if entry.start != stop:
            check(path, False, f"a gap, or an overlap, before the tensor {shown(name)}")
        stop = entry.stop
    return metadata, entries


class _DoubledKey(ValueError):
    """A key that occurs twice in an object, which the format forbids."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise _DoubledKey(f"a header with the key {shown(twice)} twice")
    return found


def _entry(path: str, name: str, fields: Any) -> Entry:
    fields = fields if isinstance(fields, dict) else {}
    dtype, shape, place = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(place))
        or not (len(place) == 2 and place[0] <= place[1])
        or (dtype in DTYPES and not _fits(shape, DTYPES[dtype].itemsize, place[1] - place[0]))
    ):
        what = "without consistent dtype, shape and data_offsets"
        check(path, False, f"the tensor {shown(name)} {what}")
    return Entry(dtype, tuple(shape), *place)


def _fits(shape: Sequence[int], width: int, size: int) -> bool:
    """Returns whether an array can have this shape, and has this number of bytes."""
    if len(shape) > _MOST_AXES:
        return False
    room = width
    for n in shape:
        room *= max(n, 1)
        if room > _MOST_BYTES:
            return False
    return size == (0 if 0 in shape else room)


def _are_sizes(x: Any) -> bool:
    return isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)


def check(path: str, holds: bool, given: str) -> None:
    """Checks a condition of the format."""
    if not holds:
        raise fail(
            "load",
            f"{path!r} is not a safetensors file.",
            given=given,
            expected="8 bytes of length, a header in JSON, and the numbers of its tensors",
            fix="pass a file of this format; jqx.save writes one.",
        )


def write_header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Returns the start of a file: the length of the header, and the header.

    Raises:
      ValueError: if it is longer than readers accept.
    """
    fields = {
        name: {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.stop]}
        for name, e in entries.items()
    }
    header = {METADATA: dict(metadata), **fields} if metadata else fields
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if not len(text) <= HEADER_LIMIT:
        raise fail(
            "save",
            "there are too many tensors for one file.",
            given=f"a header of {len(text)} bytes",
            expected=f"at most {HEADER_LIMIT} bytes",
            fix="save parts of the tree in separate files.",
        )
    return len(text).to_bytes(8, "little") + text


def placed(tensors: Iterable[tuple[str, np.dtype, Sequence[int]]]) -> dict[str, Entry]:
    """Returns the offset of each tensor, by name; wider dtypes come first."""
    stored = [(name, stored_dtype(kind), stored_shape(kind, n)) for name, kind, n in tensors]
    entries, start = {}, 0
    for name, dtype, shape in sorted(stored, key=lambda item: -_width(item[1])):
        assert dtype is not None, "the tree was checked before"
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = Entry(NAMES[dtype.name], shape, start, stop)
        start = stop
    return entries


def _width(dtype: np.dtype | None) -> int:
    return 0 if dtype is None else dtype.itemsize
