"""The safetensors format: the length of a header, the header in JSON, the numbers of all tensors.

Tensors are read one by one, each mapped into memory on its own, and written one by one at places
that the header has fixed before. Wider numbers come first, so that each tensor is aligned.

Dtypes that the format has no name for are stored a byte an element: int4 and int2 as I8, uint4 and
uint2 as U8, with the same numbers; float4 and the other 8-bit floats as U8, with their bits.

Format: https://huggingface.co/docs/safetensors (Hugging Face, 2022).
"""

import json
import math
import os
import pathlib
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._checks import require_that
from .._errors import message

Path = str | os.PathLike[str]

_NAMES = {
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
"""The names that files have for dtypes."""

_DTYPES = {stored: jnp.dtype(name) for name, stored in _NAMES.items()}

_BYTES = (
    *("int2", "int4", "uint2", "uint4", "float4_e2m1fn"),
    *("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz"),
)
"""Dtypes without such a name, which are stored a byte an element."""

_HEADER_LIMIT = 100_000_000
"""Bytes of a header, at most: the limit of other readers."""


class Entry(NamedTuple):
    """A tensor of a file: name of its dtype in the file, shape, where its bytes begin and end."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def stored_dtype(dtype: Any) -> np.dtype | None:
    """Returns the dtype in which files hold arrays of a dtype; `None` where they hold none."""
    name = getattr(dtype, "name", "")
    if name in _NAMES:
        return jnp.dtype(name)
    if name not in _BYTES:
        return None
    return np.dtype(np.int8 if name.startswith("int") else np.uint8)


def _to_stored(x: np.ndarray) -> np.ndarray:
    if x.dtype.name in _NAMES:
        return x
    return x.view(np.uint8) if x.dtype.name.startswith("float") else x.astype(stored_dtype(x.dtype))


def _from_stored(name: str, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if x.dtype == dtype:
        return x
    if dtype.name.startswith("float"):
        fits, read = dtype.name != "float4_e2m1fn" or not (x >> 4).any(), x.view(dtype)
    else:
        read = x.astype(dtype)
        fits = np.array_equal(read.astype(x.dtype), x)
    require_that(
        fits,
        error=ValueError,
        function="load",
        problem=f"the tensor {name!r} holds numbers beyond its dtype.",
        given=f"{x.dtype.name} numbers for {dtype.name}",
        expected=f"numbers of {dtype.name}",
        mend="write the file again.",
    )
    return read


class Reader:
    """An open file: its tensors by name, and its metadata. A context manager.

    Attributes:
      entries: each tensor's dtype, shape and place.
      metadata: what the file says of itself.

    Raises:
      OSError: the file cannot be opened.
      ValueError: it is no safetensors file, or has been cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = os.fspath(path)
        self._file = open(path, "rb")
        try:
            self._first, header = self._header()
            self.metadata, self.entries = self._parse(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a tensor as the file has it."""
        stored = self.entries[name].dtype
        require_that(
            stored in _DTYPES,
            error=ValueError,
            function="load",
            problem=f"the tensor {name!r} has a dtype that jqx does not read.",
            given=stored,
            expected=f"one of {', '.join(_DTYPES)}",
            mend="convert it with the library that wrote it.",
        )
        return _DTYPES[stored]

    def check_dtype(self, name: str, dtype: np.dtype) -> None:
        """Checks that a tensor is stored as arrays of a dtype are."""
        require_that(
            self.dtype(name) == stored_dtype(dtype),
            error=ValueError,
            function="load",
            problem=f"the tensor {name!r} is not of the dtype that its tree says.",
            given=f"{self.entries[name].dtype} for {dtype.name}",
            expected=f"{_NAMES.get(getattr(stored_dtype(dtype), 'name', ''))}",
            mend="write the file again, with jqx.save.",
        )

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """Returns a tensor, mapped into memory: read when it is used, dropped when it is freed.

        Args:
          name: one of `entries`.
          dtype: the dtype of the array, where that is another than the file names.
        """
        entry, stored = self.entries[name], self.dtype(name)
        if entry.start == entry.stop:
            return np.zeros(entry.shape, dtype or stored)
        place, size = self._first + entry.start, entry.stop - entry.start
        raw = np.memmap(self._file, np.uint8, "r", place, (size,))
        x = np.asarray(raw).view(stored).reshape(entry.shape)
        return x if dtype is None else _from_stored(name, x, dtype)

    def _header(self) -> tuple[int, Any]:
        """Returns where the numbers begin, and the header."""
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        self._check(size >= 8, f"a file of {size} bytes")
        self._check(length <= _HEADER_LIMIT, f"a header of {length} bytes")
        self._check(8 + length <= size, f"a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(self._file.read(length))
        except (ValueError, RecursionError):
            header = None
        self._check(isinstance(header, dict), "a header that is no JSON object")
        return 8 + length, header

    def _parse(self, header: dict[str, Any]) -> tuple[dict[str, str], dict[str, Entry]]:
        metadata = header.pop("__metadata__", {})
        self._check(
            isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()),
            "metadata that is no object of strings",
        )
        entries = {name: self._entry(name, fields) for name, fields in header.items()}
        stop = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            self._check(entry.start == stop, f"a gap, or an overlap, before the tensor {name!r}")
            stop = entry.stop
        size = os.fstat(self._file.fileno()).st_size - self._first
        require_that(
            size >= stop,
            error=ValueError,
            function="load",
            problem=f"{self.path!r} is truncated.",
            given=f"{size} bytes of numbers",
            expected=f"{stop} bytes",
            mend="copy or download it again.",
        )
        self._check(size == stop, f"{size - stop} bytes that belong to no tensor")
        return metadata, entries

    def _entry(self, name: str, fields: Any) -> Entry:
        what = f"the tensor {name!r} without dtype, shape and data_offsets that fit each other"
        self._check(isinstance(fields, dict), what)
        dtype, shape, place = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        self._check(isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(place), what)
        self._check(len(place) == 2 and place[0] <= place[1], what)
        if dtype in _DTYPES:
            size = math.prod(shape) * _DTYPES[dtype].itemsize
            self._check(place[1] - place[0] == size, what)
        return Entry(dtype, tuple(shape), *place)

    def _check(self, holds: bool, given: str) -> None:
        require_that(
            holds,
            error=ValueError,
            function="load",
            problem=f"{self.path!r} is not a safetensors file.",
            given=given,
            expected="8 bytes of length, a header in JSON, and the numbers of its tensors",
            mend="pass a file of this format; jqx.save writes one.",
        )


def _are_sizes(x: Any) -> bool:
    return isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)


class Writer:
    """A file that is written tensor by tensor, in any order. A context manager.

    All goes to another file beside it, which takes its place once every tensor is there; where an
    error comes first, nothing has changed.

    Args:
      path: where the file is to be.
      tensors: dtype and shape of each tensor, by name.
      metadata: what the file says of itself.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[np.dtype, Sequence[int]]],
        metadata: Mapping[str, str],
    ) -> None:
        self._path = pathlib.Path(os.path.realpath(path))
        self._part = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}.part")
        self._tensors = dict(tensors)
        self._entries = _placed(tensors)
        fields = {
            name: {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.stop]}
            for name, e in self._entries.items()
        }
        header = {"__metadata__": dict(metadata), **fields} if metadata else fields
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        require_that(
            len(text) <= _HEADER_LIMIT,
            error=ValueError,
            function="save",
            problem="there are too many tensors for one file.",
            given=f"a header of {len(text)} bytes",
            expected=f"{_HEADER_LIMIT} bytes at most",
            mend="save parts of the tree in files of their own.",
        )
        self._head = len(text).to_bytes(8, "little") + text

    def __enter__(self) -> "Writer":
        self._file = open(self._part, "xb")
        self._file.write(self._head)
        self._missing = dict.fromkeys(self._entries)
        return self

    def write(self, name: str, x: np.ndarray) -> None:
        """Writes a tensor, of the dtype and shape that were announced."""
        dtype, shape = self._tensors[name]
        if x.dtype != dtype or x.shape != tuple(shape):
            raise ValueError(
                message(
                    "save",
                    f"the tensor {name!r} is not what was announced.",
                    given=f"{x.dtype.name}{list(x.shape)}",
                    expected=f"{dtype.name}{list(shape)}",
                    mend="make both from one function, such as with jax.eval_shape.",
                )
            )
        self._file.seek(len(self._head) + self._entries[name].start)
        self._file.write(np.ascontiguousarray(_to_stored(x)).reshape(-1).view(np.uint8).data)
        self._missing.pop(name, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, where: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._check_complete()
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._part, self._path)
        finally:
            self._file.close()
            self._part.unlink(missing_ok=True)

    def _check_complete(self) -> None:
        require_that(
            not self._missing,
            error=ValueError,
            function="save",
            problem="not all tensors were written.",
            given=f"nothing for {next(iter(self._missing), None)!r}",
            expected=f"{len(self._entries)} tensors",
            mend="write each of them.",
        )


def _placed(tensors: Mapping[str, tuple[np.dtype, Sequence[int]]]) -> dict[str, Entry]:
    """Returns where each tensor goes: wider numbers first."""
    stored = {name: stored_dtype(dtype) for name, (dtype, _) in tensors.items()}
    entries, start = {}, 0
    for name in sorted(tensors, key=lambda name: -_width(stored[name])):
        dtype, shape = stored[name], tuple(tensors[name][1])
        assert dtype is not None, "the tree was checked before"
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = Entry(_NAMES[dtype.name], shape, start, stop)
        start = stop
    return entries


def _width(dtype: np.dtype | None) -> int:
    return 0 if dtype is None else dtype.itemsize
