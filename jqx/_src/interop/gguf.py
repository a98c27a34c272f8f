"""GGUF files: metadata and tensors, mapped into memory and dequantized one by one."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ..checks import called, shown
from ..errors import fail, nesting
from ..files import Path, as_path
from ..numerics.blocks import Block
from ..numerics.lookup import E8M0
from ..statistics.granularity import Groups
from .codec import CodedLeaf, abstract, in_runs, weight
from .gguf_blocks import (
    FORMATS,
    Format,
    GgufBlocks,
    Parts,
    blocks_of,
    dequantized,
    in_bits,
    name_of,
)
from .safetensors import Bytes, Entry, Source


def unread_type(function: str, tensor: str, kind: str) -> Exception:
    """Returns the error for a tensor whose type is not in `FORMATS`."""
    problem = f"jqx does not read the type {kind} of the tensor {tensor!r}."
    expected = f"one of {', '.join(form.name for form in FORMATS.values())}"
    fix = "convert it with llama-quantize --allow-requantize; read_gguf reads the others."
    return fail(function, problem, expected=expected, fix=fix)


class GgufTensor:
    """A tensor of a GGUF file. Its bytes are read when they are used.

    Attributes:
      name: its name in the file.
      shape: sizes of its axes, the size of a row last (files list them in reverse).
      format: name of its type, such as `"Q4_1"`.
    """

    def __init__(self, name: str, entry: TensorInfo, data: np.ndarray) -> None:
        self.name: str = name
        self.shape: tuple[int, ...] = entry.shape
        self.format: str = name_of(entry.kind)
        self._kind, self._raw = entry.kind, data[entry.start : entry.stop]

    def __repr__(self) -> str:
        return f"GgufTensor({self.name!r}, {self.format}{list(self.shape)})"

    def dequantize(self) -> np.ndarray:
        """Returns the numbers in float32, as a new array; the codes are not kept.

        Each number is `scale * code + minimum`, rounded once. NaN and infinity are those of the
        file. A scale of 255 in MXFP4 is NaN, as in the standard (ggml uses 2**128).

        Raises:
          ValueError: if jqx does not read the type.
        """
        return dequantized(self.blocks()).reshape(self.shape)

    def blocks(self) -> GgufBlocks:
        """Returns the contents of the file: codes, and the scale and minimum of each block.

        Arrays are parts of the mapped file, read when they are used. Codes of fewer than 8 bits are
        copied, one per byte. Codes of Q4_0 are -8 to 7, of Q4_1 0 to 15, of Q8_0 -128 to 127, of
        MXFP4 twice the numbers of float4_e2m1, and of F32, F16 and BF16 the numbers.

        Raises:
          ValueError: if jqx does not read the type.
        """
        if self._kind not in FORMATS:
            raise unread_type("interop.read_gguf", self.name, self.format)
        form = FORMATS[self._kind]
        *rows, row = self.shape or (1,)
        return blocks_of(form, self._raw.view(form.fields).reshape(*rows, row // form.size))


class Gguf:
    """A GGUF file.

    Attributes:
      metadata: the metadata of the file, by key: Python strings, booleans and numbers (numbers of
        dtypes that `write` does not use for Python numbers are NumPy's), NumPy arrays, and lists of
        strings or of arrays.
      tensors: the tensors by name, in the order of the file.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def __init__(self, metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> None:
        self.metadata, self.tensors = metadata, tensors

    def __repr__(self) -> str:
        return f"Gguf({len(self.tensors)} tensors, {len(self.metadata)} entries of metadata)"


@called("interop.read_gguf", 'pass for example jqx.interop.read_gguf("model.gguf").')
def read_gguf(path: Path) -> Gguf:
    """Opens a GGUF file (version 2 or 3, little-endian), the format of llama.cpp.

    Its metadata is read, and its tensors are mapped into memory: their bytes are read when they are
    used and never copied as a whole. F16, F32, F64, BF16, integers, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
    Q2_K to Q6_K and MXFP4 are supported. A file may have tensors of other types, which are an error
    when they are used. `jqx.load` and `jqx.interop.read` return the tensors of a file as QTensors.

    The file stays mapped as long as one of its tensors exists. If it is written to, its numbers
    change; if it is truncated, using what was beyond its end kills the process (SIGBUS). Map only
    files that nothing else writes.

    A model that llama-gguf-split has split into files is read as a whole: pass the first file.

    Names, shapes and the order of rows are those of the file. In files of Llama models, rows of the
    weights of queries and keys are permuted, so that rotary embeddings rotate adjacent pairs.

    Args:
      path: path of the file.

    Returns:
      A `Gguf`, with `metadata` and `tensors`; `tensors[name].dequantize()` is a NumPy array in
      float32, `tensors[name].blocks()` its codes, scales and minimums.

    Raises:
      OSError: if the file cannot be opened or is not a regular file.
      ValueError: if it is not a GGUF file, has another version or byte order, is truncated, or has
        invalid contents; when a tensor is used: if jqx does not read its type.

    Example:
      >>> import jqx, struct, tempfile
      >>> info = struct.pack("<Q1sIQIQ", 1, b"w", 1, 2, 0, 0)  # name, 1 axis of 2, F32, at 0
      >>> head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info
      >>> path = tempfile.mkdtemp() + "/model.gguf"
      >>> _ = open(path, "wb").write(head.ljust(64, b"-") + struct.pack("<2f", 1.5, -2.0))
      >>> file = jqx.interop.read_gguf(path)
      >>> file.tensors["w"], file.tensors["w"].dequantize()
      (GgufTensor('w', F32[2]), array([ 1.5, -2. ], dtype=float32))
    """
    with nesting("interop.read_gguf"), contextlib.ExitStack() as files:
        text = as_path("interop.read_gguf", path)
        metadata, tensors, _ = read_parts(text, files, "interop.read_gguf")
        return Gguf(metadata, {name: GgufTensor(name, e, x) for name, (_, x, e) in tensors.items()})


# The files of a model in GGUF: one, or several that llama-gguf-split wrote.
#
# Each file has its own header and tensors. The first has the metadata of the model; `split.no`,
# `split.count` and `split.tensors.count` say how the files belong together. llama.cpp takes the
# first and finds the others by their names.


_NAME = re.compile(r"(?P<model>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_FIX = (
    "pass the first file, with all others next to it; or merge them with llama-gguf-split --merge."
)


def read_parts(
    path: str, opened: contextlib.ExitStack, function: str
) -> tuple[dict[str, Any], dict[str, tuple[Bytes, np.ndarray, TensorInfo]], list[str]]:
    """Returns the metadata of a model; its tensors by name, each with its file and all bytes of it;
    and the paths of its files.

    Args:
      path: path of the only file, or of the first.
      opened: closes the files.
      function: the public function, for errors.

    Raises:
      OSError: if a file cannot be opened.
      ValueError: if a file is not a GGUF file that can be read, or not one of the model.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, tuple[Bytes, np.ndarray, TensorInfo]] = {}
    paths = [path]
    for no, part in enumerate(paths):  # the first part names the others
        file = opened.enter_context(Bytes(part, function))
        data = file.view("", 0, file.size)
        part_metadata, entries = read_header(part, data)
        if no == 0:
            metadata = part_metadata
            paths += _others(path, metadata)
        elif (part_metadata.get("split.no"), part_metadata.get("split.count")) != (no, len(paths)):
            raise _misplaced(part, part_metadata, f"file {no + 1} of {len(paths)}")
        twice = next((name for name in entries if name in tensors), None)
        if twice is not None:
            raise malformed(part, f"the tensor {shown(twice)}, as in another file")
        tensors |= {name: (file, data, entry) for name, entry in entries.items()}
    count = metadata.get("split.tensors.count", len(tensors))
    if len(paths) > 1:
        if count != len(tensors):
            detail = f"{len(tensors)} tensors in {len(paths)} files, not {shown(count)}"
            raise malformed(path, detail, "split.tensors.count tensors", _FIX)
        metadata["split.count"] = np.uint16(0)  # as in files that llama-gguf-split has merged
    return metadata, tensors, paths


def _others(path: str, metadata: Mapping[str, Any]) -> list[str]:
    """Returns the paths of the other files of a model."""
    count = metadata.get("split.count", 0)
    if not isinstance(count, (int, np.integer)) or count < 2:
        return []
    folder, name = os.path.split(path)
    match = _NAME.fullmatch(name)
    is_first = match is not None and (int(match["no"]), int(match["count"])) == (1, count)
    if match is None or not is_first or metadata.get("split.no") != 0:
        expected = f"the first, with a name such as model-00001-of-{count:05d}.gguf"
        raise _misplaced(path, metadata, expected)
    names = (f"{match['model']}-{i:05d}-of-{count:05d}.gguf" for i in range(2, count + 1))
    return [os.path.join(folder, name_of_part) for name_of_part in names]


def _misplaced(path: str, metadata: Mapping[str, Any], expected: str) -> Exception:
    fields = [f"split.{key} == {shown(metadata.get(f'split.{key}'))}" for key in ("no", "count")]
    return malformed(path, f"a part of a model, {' and '.join(fields)}", expected, _FIX)


# The header of a GGUF file: metadata, and which tensors there are and where. No tensor is read.
#
# Numbers are little-endian. The file starts with `GGUF`, the version, and the numbers of tensors
# and of metadata entries. Each entry is key, type and value; each tensor is name, sizes (the
# fastest axis first), type and offset. The aligned bytes of the tensors follow.
#
# Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, 2023; version 2
# differs in nothing else than that no file is big-endian).


NUMBERS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
"""Metadata types that are numbers."""

_BOOL, _STRING, _ARRAY = 7, 8, 9

_PYTHON_DTYPES = ("uint32", "float32")
"""Dtypes that Python numbers are written as; numbers of other dtypes are read as NumPy's."""

_LEAST = {**{kind: np.dtype(d).itemsize for kind, d in NUMBERS.items()}, _STRING: 8, _ARRAY: 12}
"""Minimum size in bytes of a value."""

MOST_AXES = 4
"""Maximum number of axes of a ggml tensor."""

_MOST_BYTES = 2**63 - 1
"""Maximum size of a NumPy array, with each empty axis counted as one."""


class TensorInfo(NamedTuple):
    """A tensor of a file: number of its type, shape, start and end of its bytes. Types that cannot
    be read have no known end.
    """

    kind: int
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: str, data: np.ndarray) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Returns the metadata of a file, and its tensors by name in the order of the file.

    Raises:
      ValueError: if the header does not follow the format.
    """
    cursor = _Cursor(path, data)
    magic = cursor.take(min(len(MAGIC), len(data)), "the first bytes").tobytes()
    if magic != MAGIC:
        fix = "pass a file that begins with b'GGUF'; jqx.load reads safetensors."
        raise malformed(path, f"a file that begins with {magic!r}", fix=fix)
    raw = cursor.take(4, "the version").tobytes()
    version, turned = (int.from_bytes(raw, order) for order in ("little", "big"))
    if version >= 2**16 > turned:
        fix = "convert it with gguf_convert_endian.py of llama.cpp."
        raise malformed(path, f"a big-endian file, of version {turned}", fix=fix)
    if version not in (2, 3):
        fix = "write it again with a current version of llama.cpp."
        raise malformed(path, f"version {version}", "version 2 or 3", fix)
    tensors = cursor.number("<u8", "the number of its tensors")
    pairs = cursor.number("<u8", "the number of its entries of metadata")
    metadata: dict[str, Any] = {}
    for i in range(pairs):
        key = cursor.string(f"key {i} of {pairs}")
        if key in metadata:
            raise malformed(path, f"the key {shown(key)} twice")
        metadata[key] = cursor.value(cursor.number("<u4", "the type of a value"), shown(key))
    stored = metadata.get("general.alignment", 32)
    is_integer = isinstance(stored, (int, np.integer)) and not isinstance(stored, bool)
    alignment = int(stored) if is_integer else 0
    if alignment < 1 or alignment & (alignment - 1):
        raise malformed(path, f"general.alignment == {shown(stored)}", "a power of two")
    entries: dict[str, TensorInfo] = {}
    for i in range(tensors):
        name = cursor.string(f"the name of tensor {i} of {tensors}")
        if name in entries:
            raise malformed(path, f"the tensor {shown(name)} twice")
        entries[name] = _entry(cursor, name, alignment)
    return metadata, _in_file(path, entries, -(-cursor.start // alignment) * alignment, len(data))


def malformed(
    path: str,
    detail: str,
    expected: str = "",
    fix: str = "copy or download it again; the program that wrote it may be at fault.",
) -> Exception:
    """Returns the error for a file that does not follow the format."""
    problem = f"{path!r} is not a GGUF file that can be read."
    return fail("interop.read_gguf", problem, given=detail, expected=expected, fix=fix)


class _Cursor:
    """A position in the header, which advances as it is read."""

    def __init__(self, path: str, data: np.ndarray) -> None:
        self.path, self.start = path, 0
        self._data = data

    def take(self, size: int, subject: str) -> np.ndarray:
        """Returns the next bytes."""
        bytes_left = len(self._data) - self.start
        if size > bytes_left:
            left = f"{bytes_left} of {size} bytes"
            raise malformed(self.path, f"{len(self._data)} bytes, which end in {subject} ({left})")
        self.start += size
        return self._data[self.start - size : self.start]

    def number(self, dtype: str, subject: str) -> Any:
        """Returns a number as a Python number."""
        return self.scalar(dtype, subject).item()

    def scalar(self, dtype: str, subject: str) -> Any:
        """Returns a number as a NumPy number."""
        return self.take(np.dtype(dtype).itemsize, subject).view(dtype)[0]

    def string(self, subject: str) -> str:
        """Returns a string, whose length precedes it."""
        raw = self.take(self.number("<u8", subject), subject).tobytes()
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise malformed(self.path, f"{subject}, which is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        """Returns a metadata value; any nonzero byte is true."""
        subject = f"the value of {key}"
        if kind == _STRING:
            return self.string(subject)
        if kind == _ARRAY:
            return self._array(key)
        self._check_kind(kind, subject)
        if kind == _BOOL:
            return self.number("<u1", subject) != 0
        x = self.scalar(NUMBERS[kind], subject)
        as_python = x.dtype.name in _PYTHON_DTYPES or (x.dtype.name == "int32" and x < 0)
        return x.item() if as_python else x.dtype.newbyteorder("=").type(x)

    def _array(self, key: str) -> Any:
        subject = f"the value of {key}"
        kind = self.number("<u4", subject)
        count = self.number("<u8", subject)
        self._check_kind(kind, subject)
        if kind not in NUMBERS:
            self.take(count * _LEAST[kind], subject)  # refuses a count beyond the file
            self.start -= count * _LEAST[kind]
            return [self.value(kind, key) for _ in range(count)]
        raw = self.take(count * _LEAST[kind], subject)
        if kind == _BOOL:
            return raw != 0
        array = raw.view(NUMBERS[kind])
        return array.astype(array.dtype.newbyteorder("="))

    def _check_kind(self, kind: int, subject: str) -> None:
        if kind not in _LEAST:
            raise malformed(self.path, f"{subject} is of type {kind}", "types from 0 to 12")


def _entry(cursor: _Cursor, name: str, alignment: int) -> TensorInfo:
    """Returns a tensor, whose offset is relative to the end of the header."""
    subject = f"the tensor {shown(name)}"
    axes = cursor.number("<u4", subject)
    if axes > MOST_AXES:
        raise malformed(cursor.path, f"{subject} of {axes} axes", f"{MOST_AXES} at most")
    sizes = cursor.take(8 * axes, subject).view("<u8").tolist()
    kind = cursor.number("<u4", subject)
    start = cursor.number("<u8", subject)
    if start % alignment:
        raise malformed(cursor.path, f"{subject} at {start}", f"a multiple of {alignment}")
    shape = tuple(reversed(sizes))
    room = 8 * math.prod(max(n, 1) for n in shape)
    if room > _MOST_BYTES:
        raise malformed(cursor.path, f"{subject} of the impossible shape {shape}")
    if kind not in FORMATS:
        return TensorInfo(kind, shape, start, start)
    form = FORMATS[kind]
    row = shape[-1] if shape else 1
    if row % form.size:
        detail = f"{subject} of type {name_of(kind)} with rows of {row}"
        raise malformed(cursor.path, detail, f"rows of a multiple of {form.size}")
    size = math.prod(shape) // form.size * form.fields.itemsize
    return TensorInfo(kind, shape, start, start + size)


def _in_file(
    path: str, entries: dict[str, TensorInfo], data_start: int, length: int
) -> dict[str, TensorInfo]:
    """Returns tensors with their offsets in the file, after checking that they fit in it."""
    placed, stop, previous = {}, 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        end = entry.stop
        if data_start + end > length and end:
            detail = f"{length} bytes, and the tensor {shown(name)} up to {data_start + end}"
            raise malformed(path, detail)
        if entry.start < stop:
            detail = f"the tensors {shown(previous)} and {shown(name)} in the same bytes"
            raise malformed(path, detail)
        placed[name] = entry._replace(start=data_start + entry.start, stop=data_start + end)
        stop, previous = end, name
    return {name: placed[name] for name in entries}


# An open model in GGUF, whose tensors are read one by one or mapped into memory.


MAGIC = b"GGUF"

_U8 = np.dtype(np.uint8)


class GgufSource:
    """An open model in GGUF. Quantized tensors are bytes, `(..., bytes of a row)`.

    Attributes:
      files: paths of all files of the model.
      metadata: as in `jqx.interop.Gguf`.
      entries: type, shape and offset of each tensor.
      kinds: number of the type of each tensor.
      config: none.
      describes_tree, asked: see `Source`.

    Raises:
      OSError: if the file cannot be opened or is not a regular file.
      ValueError: if it is not a GGUF file that can be read.
    """

    describes_tree, asked = False, False

    def __init__(self, path: Path) -> None:
        self.path = as_path("load", path)
        self.config: Mapping[str, Any] | None = None
        self.entries: dict[str, Entry] = {}
        self.kinds: dict[str, int] = {}
        self._open = contextlib.ExitStack()
        self._bytes: dict[str, Bytes] = {}
        try:
            self.metadata, tensors, self.files = read_parts(self.path, self._open, "load")
        except BaseException:
            self.__exit__()
            raise
        for name, (file, _, (kind, shape, start, stop)) in tensors.items():
            self._bytes[name], self.kinds[name] = file, kind
            form = FORMATS.get(kind)
            if form is not None and form.form is not None:
                shape = (*shape[:-1], shape[-1] // form.size * form.fields.itemsize)
            self.entries[name] = Entry(name_of(kind), shape, start, stop)

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a tensor; for quantized tensors, that of bytes."""
        form = FORMATS.get(self.kinds[name])
        if form is None:
            raise unread_type("interop.read", name, self.entries[name].dtype)
        return form.fields if form.form is None else _U8

    def read(self, name: str, dtype: np.dtype, *, mapped: bool = False) -> np.ndarray:
        """Returns a copy of a tensor, or the tensor mapped into memory."""
        entry, file = self.entries[name], self._bytes[name]
        raw = (file.view if mapped else file.read)(name, entry.start, entry.stop - entry.start)
        return raw.view(self.dtype(name)).reshape(entry.shape)


# GGUF files as checkpoints: the QTensor for a tensor of each type.
#
# A QTensor has the scales and minimums of the file. Those of K-quants are themselves QTensors of
# integers, whose scales are the factors of the blocks of 256. Minimums are subtracted, so the
# factor of the `offset` is negative. Real arrays are float32, which holds every product with a
# scale exactly.


def gguf_leaves(source: Source, dtype: np.dtype | None) -> Iterator[CodedLeaf]:
    """Yields the QTensors of a file."""
    assert isinstance(source, GgufSource)
    real = np.dtype(np.float32) if dtype is None else dtype
    for name, kind in source.kinds.items():
        source.dtype(name)  # raises if the type cannot be read
        form = FORMATS[kind]
        if form.form is not None:
            yield _leaf(name, form, source.entries[name].shape, real)


def _leaf(name: str, form: Format, stored: tuple[int, ...], real: np.dtype) -> CodedLeaf:
    blocks = stored[-1] // form.fields.itemsize
    shape, rows = (*stored[:-1], blocks * form.size), math.prod(stored[:-1])
    groups = Groups(shape, (*(1,) * (len(shape) - 1), form.group))
    float16 = np.dtype(np.float16)
    parts_of_leaf: dict[str, Any] = {}
    if form.inner is not None:
        outer = Groups(groups.scale_shape, (*groups.sizes[:-1], form.size // form.group))
        scale: Any = weight(outer, form.inner, float16, np.dtype(np.float32))
        if form.minimum:
            parts_of_leaf["offset"] = scale
    else:
        scale = E8M0 if isinstance(form.form, Block) else float16
        if form.minimum:
            parts_of_leaf["offset"] = abstract(groups.scale_shape, float16)
    template = weight(groups, form.form, scale, real, **parts_of_leaf)

    def decode(raw: np.ndarray) -> list[np.ndarray]:
        fields = np.ascontiguousarray(raw).reshape(-1).view(form.fields).reshape(rows, blocks)
        arrays = [np.empty((rows, x.shape[-1]), x.dtype) for x in jax.tree.leaves(template)]
        for run in in_runs(rows, blocks * form.size):
            for x, part in zip(arrays, _taken_apart(form, fields[run]), strict=True):
                x[run] = part.view(x.dtype)
        return arrays

    return CodedLeaf(name, ((name, _U8),), template, decode)


def _taken_apart(form: Format, fields: np.ndarray) -> list[np.ndarray]:
    """Returns the arrays of a QTensor for some rows."""
    assert form.form is not None
    parts: Parts = form.read(fields)
    arrays = [in_bits(_rows(parts.codes), form.form)]
    if form.inner is None:
        assert parts.scale is not None
        return [*arrays, parts.scale, *(() if parts.minimum is None else (parts.minimum,))]
    assert parts.scales is not None and parts.scale is not None
    arrays += [in_bits(_rows(parts.scales), form.inner), parts.scale]
    if parts.minimum is not None and parts.minimums is not None:
        arrays += [in_bits(_rows(parts.minimums), form.inner), -parts.minimum]
    return arrays


def _rows(x: np.ndarray) -> np.ndarray:
    rows, *outer = x.shape
    return x.reshape(rows, math.prod(outer))
