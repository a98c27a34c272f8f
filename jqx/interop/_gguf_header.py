"""The header of a GGUF file: metadata, and which tensors there are and where. No tensor is read.

Numbers are little-endian. The file starts with `GGUF`, the version, and the numbers of tensors and
of metadata entries. Each entry is key, type and value; each tensor is name, sizes (the fastest axis
first), type and offset. The aligned bytes of the tensors follow.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, 2023; version 2
differs in nothing else than that no file is big-endian).
"""

import math
from typing import Any, NamedTuple

import numpy as np

from .._checks import shown
from .._errors import fail
from ._gguf_blocks import FORMATS, name_of

_FUNCTION = "interop.read_gguf"

_NUMBERS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
"""Metadata types that are numbers."""

_BOOL, _STRING, _ARRAY = 7, 8, 9

_PYTHON_DTYPES = ("uint32", "float32")
"""Dtypes that Python numbers are written as; numbers of other dtypes are read as NumPy's."""

_LEAST = {**{kind: np.dtype(d).itemsize for kind, d in _NUMBERS.items()}, _STRING: 8, _ARRAY: 12}
"""Minimum size in bytes of a value."""

_MOST_AXES = 4
"""Maximum number of axes of a ggml tensor."""

_MOST_BYTES = 2**63 - 1
"""Maximum size of a NumPy array, with each empty axis counted as one."""


class Entry(NamedTuple):
    """A tensor of a file: number of its type, shape, start and end of its bytes.

    For types that cannot be read the end is unknown.
    """

    kind: int
    shape: tuple[int, ...]
    start: int
    stop: int | None


def read_header(path: str, data: np.ndarray) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Returns the metadata of a file, and its tensors by name in the order of the file.

    Raises:
      ValueError: if the header does not follow the format.
    """
    cursor = _Cursor(path, data)
    _check_begin(cursor, data[:4].tobytes())
    tensors = cursor.number("<u8", "the number of its tensors")
    pairs = cursor.number("<u8", "the number of its entries of metadata")
    metadata: dict[str, Any] = {}
    for i in range(pairs):
        key = cursor.string(f"key {i} of {pairs}")
        check(path, key not in metadata, f"the key {shown(key)} twice", "each key once")
        metadata[key] = cursor.value(cursor.number("<u4", "the type of a value"), shown(key))
    stored = metadata.get("general.alignment", 32)
    is_integer = isinstance(stored, (int, np.integer)) and not isinstance(stored, bool)
    alignment = int(stored) if is_integer else 0
    check(
        path,
        alignment > 0 and alignment & (alignment - 1) == 0,
        f"general.alignment == {shown(stored)}",
        "a power of two",
    )
    entries: dict[str, Entry] = {}
    for i in range(tensors):
        name = cursor.string(f"the name of tensor {i} of {tensors}")
        check(path, name not in entries, f"the tensor {shown(name)} twice", "each name once")
        entries[name] = _entry(cursor, name, alignment)
    first = -(-cursor.place // alignment) * alignment
    return metadata, _placed(path, entries, first, len(data))


def check(
    path: str,
    holds: object,
    given: str,
    expected: str,
    fix: str = "copy or download it again; the program that wrote it may be at fault.",
) -> None:
    """Checks a condition of the format."""
    if not holds:
        raise fail(
            _FUNCTION,
            f"{path!r} is not a GGUF file that can be read.",
            given=given,
            expected=expected,
            fix=fix,
        )


class _Cursor:
    """A position in the header, which advances as it is read."""

    def __init__(self, path: str, data: np.ndarray) -> None:
        self.path, self.place = path, 0
        self._data = data

    def take(self, size: int, what: str) -> np.ndarray:
        """Returns the next bytes."""
        rest = len(self._data) - self.place
        if size > rest:
            check(
                self.path,
                False,
                f"{len(self._data)} bytes, which end in {what} ({size} bytes, {rest} are left)",
                "all contents that its header names",
            )
        self.place += size
        return self._data[self.place - size : self.place]

    def number(self, dtype: str, what: str) -> Any:
        """Returns a number as a Python number."""
        return self.scalar(dtype, what).item()

    def scalar(self, dtype: str, what: str) -> Any:
        """Returns a number as a NumPy number."""
        return self.take(np.dtype(dtype).itemsize, what).view(dtype)[0]

    def string(self, what: str) -> str:
        """Returns a string, whose length precedes it."""
        raw = self.take(self.number("<u8", what), what).tobytes()
        try:
            return raw.decode()
        except UnicodeDecodeError:
            check(self.path, False, f"{what}, which is not UTF-8", "strings in UTF-8")
            raise

    def value(self, kind: int, key: str) -> Any:
        """Returns a metadata value; any nonzero byte is true."""
        what = f"the value of {key}"
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(key)
        self._check_kind(kind, what)
        if kind == _BOOL:
            return self.number("<u1", what) != 0
        x = self.scalar(_NUMBERS[kind], what)
        as_python = x.dtype.name in _PYTHON_DTYPES or (x.dtype.name == "int32" and x < 0)
        return x.item() if as_python else x.dtype.newbyteorder("=").type(x)

    def _array(self, key: str) -> Any:
        what = f"the value of {key}"
        kind = self.number("<u4", what)
        count = self.number("<u8", what)
        self._check_kind(kind, what)
        if kind in _NUMBERS:
            raw = self.take(count * _LEAST[kind], what)
            if kind == _BOOL:
                return raw != 0
            array = raw.view(_NUMBERS[kind])
            return array.astype(array.dtype.newbyteorder("="))
        self.take(count * _LEAST[kind], what)
        self.place -= count * _LEAST[kind]
        return [self.value(kind, key) for _ in range(count)]

    def _check_kind(self, kind: int, what: str) -> None:
        if kind not in _LEAST:
            check(self.path, False, f"{what} is of type {kind}", "types from 0 to 12")


def _check_begin(cursor: _Cursor, magic: bytes) -> None:
    """Checks that a file is a GGUF file with a supported version and byte order."""
    check(
        cursor.path,
        magic == b"GGUF",
        f"a file that begins with {magic!r}",
        "a file that begins with b'GGUF'",
        "pass a file of this format; jqx.load reads safetensors.",
    )
    cursor.place = len(magic)
    raw = cursor.take(4, "the version").tobytes()
    version, turned = (int.from_bytes(raw, order) for order in ("little", "big"))
    check(
        cursor.path,
        version < 2**16 or turned >= 2**16,
        f"a big-endian file, of version {turned}",
        "a little-endian file",
        "convert it with gguf_convert_endian.py of llama.cpp.",
    )
    check(
        cursor.path,
        version in (2, 3),
        f"version {version}",
        "version 2 or 3",
        "write it again with a current version of llama.cpp.",
    )


def _entry(cursor: _Cursor, name: str, alignment: int) -> Entry:
    """Returns a tensor, whose offset is relative to the end of the header."""
    what = f"the tensor {shown(name)}"
    axes = cursor.number("<u4", what)
    check(cursor.path, axes <= _MOST_AXES, f"{what} of {axes} axes", f"{_MOST_AXES} at most")
    sizes = cursor.take(8 * axes, what).view("<u8").tolist()
    kind = cursor.number("<u4", what)
    start = cursor.number("<u8", what)
    given = f"{what} at {start}"
    check(cursor.path, start % alignment == 0, given, f"a multiple of {alignment}, its alignment")
    shape = tuple(reversed(sizes))
    room = 8 * math.prod(max(n, 1) for n in shape)
    check(
        cursor.path, room <= _MOST_BYTES, f"{what} of shape {shape}", "a possible shape of an array"
    )
    if kind not in FORMATS:
        return Entry(kind, shape, start, None)
    form = FORMATS[kind]
    row = shape[-1] if shape else 1
    check(
        cursor.path,
        row % form.size == 0,
        f"{what} of type {name_of(kind)} with rows of {row}",
        f"rows of a multiple of {form.size}",
    )
    return Entry(kind, shape, start, start + math.prod(shape) // form.size * form.fields.itemsize)


def _place(item: tuple[str, Entry]) -> tuple[int, int]:
    _, entry = item
    return entry.start, entry.start if entry.stop is None else entry.stop


def _placed(path: str, entries: dict[str, Entry], first: int, length: int) -> dict[str, Entry]:
    """Returns tensors with their offsets in the file, after checking that they fit in it."""
    placed, stop, before = {}, 0, ""
    for name, entry in sorted(entries.items(), key=_place):
        _, end = _place((name, entry))
        given = f"a file of {length} bytes, and the tensor {shown(name)} up to {first + end}"
        check(path, first + end <= length or end == 0, given, "room for each tensor")
        what = f"the tensors {shown(before)} and {shown(name)} in the same bytes"
        check(path, entry.start >= stop, what, "a place for each tensor")
        placed[name] = entry._replace(start=first + entry.start, stop=first + end)
        stop, before = end, name
    return {name: placed[name] for name in entries}
