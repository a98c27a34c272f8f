"""The safetensors format: the length of a header, the header in JSON, the numbers of all tensors.

Numbers are little-endian. Wider dtypes come first, so that each tensor is aligned.

Dtypes without a name in the format are stored one byte per element: int4 and int2 as I8, uint4 and
uint2 as U8, with the same numbers; float4 and other 8-bit floats as U8, with their bits.
complex128 is F64 with a last axis of 2: the real and the imaginary part.

Format: https://huggingface.co/docs/safetensors (Hugging Face, 2022).
"""

import contextlib
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import jax.numpy as jnp
import numpy as np

from ..checks import shown
from ..errors import fail
from ..files import Path, as_path, open_regular

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
        problem = f"the tensor {name!r} holds {x.dtype.name} that are not {dtype.name}."
        raise fail("load", problem, fix="write the file again.")
    return read


def read_header(path: str, text: bytes) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Returns the metadata of a header, and its tensors in the order of their bytes.

    Raises:
      ValueError: if the header does not follow the format.
    """
    header, detail = None, "a header that is not a JSON object"
    try:
        header = json.loads(text, object_pairs_hook=_without_doubles)
    except _DoubledKey as error:
        detail = str(error)
    except (ValueError, RecursionError):
        pass
    if not isinstance(header, dict):
        raise malformed(path, detail)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise malformed(path, "metadata that is not an object of strings")
    entries = {name: _entry(path, name, fields) for name, fields in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: item[1][2:]))
    stop = 0
    for name, entry in entries.items():
        if entry.start != stop:
            raise malformed(path, f"a gap, or an overlap, before the tensor {shown(name)}")
        stop = entry.stop
    return metadata, entries


class _DoubledKey(ValueError):
    """A key that occurs twice in an object, which the format forbids."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise _DoubledKey(f"a header with the key {shown(twice)} twice")
    return fields


def _entry(path: str, name: str, fields: Any) -> Entry:
    fields = fields if isinstance(fields, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets))
        or not (len(offsets) == 2 and offsets[0] <= offsets[1])
        or (dtype in DTYPES and not _fits(shape, DTYPES[dtype].itemsize, offsets[1] - offsets[0]))
    ):
        problem = "without consistent dtype, shape and data_offsets"
        raise malformed(path, f"the tensor {shown(name)} {problem}")
    return Entry(dtype, tuple(shape), *offsets)


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


def malformed(path: str, detail: str) -> Exception:
    """Returns the error for a file that does not follow the format."""
    problem = f"{path!r} is not a safetensors file."
    return fail("load", problem, given=detail, fix="pass a safetensors file; jqx.save writes one.")


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
        problem = f"the header of {len(text)} bytes exceeds the limit of {HEADER_LIMIT}."
        raise fail("save", problem, fix="save parts of the tree in separate files.")
    return len(text).to_bytes(8, "little") + text


def placed(tensors: Iterable[tuple[str, np.dtype, Sequence[int]]]) -> dict[str, Entry]:
    """Returns the offset of each tensor, by name; wider dtypes come first."""
    stored = [(name, stored_dtype(kind), stored_shape(kind, n)) for name, kind, n in tensors]
    entries, start = {}, 0
    for name, dtype, shape in sorted(stored, key=lambda item: -item[1].itemsize if item[1] else 0):
        assert dtype is not None, "the tree was checked before"
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = Entry(NAMES[dtype.name], shape, start, stop)
        start = stop
    return entries


# An open file of tensors, whose parts are read or mapped into memory.


_ALIGNED = 64
"""Alignment in bytes of JAX arrays on CPUs."""


class Bytes:
    """An open file. A context manager.

    Attributes:
      path: path of the file.

    Raises:
      OSError: if the file cannot be opened or is not a regular file.
    """

    def __init__(self, path: Path, function: str = "load") -> None:
        self.path = as_path(function, path)
        self._lock = threading.Lock()
        self._file = open_regular(function, self.path)

    def __enter__(self) -> "Bytes":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def head(self, size: int) -> bytes:
        """Returns the first bytes; fewer if the file is shorter."""
        with self._lock:
            self._file.seek(0)
            return self._file.read(size)

    def read(self, name: str, start: int, size: int) -> np.ndarray:
        """Returns a copy of the bytes of the tensor `name`, from a place on."""
        self._check_open(name)
        raw, done = _aligned(size), 0
        with self._lock:
            self._file.seek(start)
            while done < size:
                count = self._file.readinto(raw[done:].data)
                if not count:
                    self._refuse_shorter(name, start + size)
                done += count
        return raw

    def view(self, name: str, start: int, size: int) -> np.ndarray:
        """Returns bytes mapped into memory: read when they are used, dropped when freed."""
        self._check_open(name)
        if self.size < start + size:
            self._refuse_shorter(name, start + size)
        raw = np.memmap(self._file, np.uint8, "r", start, (size,)) if size else np.empty(0, "u1")
        return np.asarray(raw)

    def _check_open(self, name: str) -> None:
        if self._file.closed:
            problem = f"{self.path!r} is closed, and {name!r} cannot be read."
            raise fail("load", problem, fix="read inside the `with` block.")

    def _refuse_shorter(self, name: str, stop: int) -> NoReturn:
        problem = f"{self.path!r} has become shorter while it was open, and ends before {name!r}."
        fix = "copy or download it again, and put a new file in its place only as a whole."
        raise fail("load", problem, fix=fix, error=OSError)


def _aligned(size: int) -> np.ndarray:
    """Allocates bytes with the alignment that a JAX array needs to use them without a copy."""
    raw = np.empty(size + _ALIGNED, np.uint8)
    return raw[-raw.ctypes.data % _ALIGNED :][:size]


# Open files and folders, whose tensors are read one by one or mapped into memory.


class Source:
    """Tensors by name. A context manager; what it opens is closed at the end, or if it fails.

    Attributes:
      path: path of the file or folder.
      metadata: metadata of the file.
      entries: dtype, shape and offset of each tensor.
      config: config of the model; `None` if there is none.
      describes_tree: whether its metadata may describe a tree of jqx.
      asked: whether the caller passed the config, and thus knows what the tensors are.

    Raises:
      OSError: if a file cannot be opened or is not a regular file.
      ValueError: if it is not in its format, or is truncated.
    """

    describes_tree, asked = False, False

    def __init__(self, path: str) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        self.config: Mapping[str, Any] | None = None
        with contextlib.ExitStack() as self._opened:
            self._open()
            self._opened = self._opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _open(self) -> None:
        """Finds the tensors, without reading them."""

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a tensor in its file."""
        raise NotImplementedError

    def read(self, name: str, dtype: np.dtype, *, mapped: bool = False) -> np.ndarray:
        """Returns a copy of a tensor, or the tensor mapped into memory, where it is read when it is
        used and dropped when it is freed.
        """
        raise NotImplementedError


class Reader(Source):
    """An open safetensors file."""

    describes_tree = True

    def dtype(self, name: str) -> np.dtype:
        stored = self.entries[name].dtype
        if stored not in DTYPES:
            problem = f"the tensor {name!r} has a dtype that jqx does not read: {stored}."
            fix = "convert it with the library that wrote it."
            raise fail("load", problem, expected=f"one of {', '.join(DTYPES)}", fix=fix)
        return DTYPES[stored]

    def read(self, name: str, dtype: np.dtype, *, mapped: bool = False) -> np.ndarray:
        # `dtype` is that in the description of the tree; the file may store another one.
        entry = self.entries[name]
        load = self._bytes.view if mapped else self._bytes.read
        raw = load(name, self._first + entry.start, entry.stop - entry.start)
        return from_stored(name, raw, self.dtype(name), dtype).reshape(shape_of(entry, dtype))

    def _open(self) -> None:
        """Reads the header, and checks that the file has the length in the header."""
        self._bytes = self._opened.enter_context(Bytes(self.path))
        size = self._bytes.size
        length = int.from_bytes(self._bytes.head(8), "little")
        if size < 8 or length > HEADER_LIMIT or 8 + length > size:
            raise malformed(self.path, f"a header of {length} bytes in a file of {size} bytes")
        self._first = 8 + length
        text = self._bytes.head(8 + length)[8:]
        self.metadata, self.entries = read_header(self.path, text)
        stop = max((entry.stop for entry in self.entries.values()), default=0)
        if not size - self._first >= stop:
            problem = f"{self.path!r} is truncated: {size - self._first} of {stop} bytes."
            raise fail("load", problem, fix="copy or download it again.")
        unused = size - self._first - stop
        if unused:
            raise malformed(self.path, f"{unused} bytes that do not belong to a tensor")


def check_dtype(source: Source, name: str, dtype: np.dtype) -> None:
    """Checks that a tensor is stored in the way of arrays with a dtype."""
    entry, stored = source.entries[name], source.dtype(name)
    shape = stored_shape(dtype, shape_of(entry, dtype))
    if stored != dtype and (stored != stored_dtype(dtype) or entry.shape != shape):
        problem = f"{name!r} is {entry.dtype}{list(entry.shape)}, in the tree {dtype.name}."
        raise fail("load", problem, fix="write the file again with jqx.save.")
