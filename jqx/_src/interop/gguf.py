"""GGUF files: metadata and tensors, mapped into memory and dequantized one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...extend import Groups
from ...numerics import Block, Integer, mxfp4
from ..checks import called, shown
from ..errors import fail, nesting
from ..files import Path, as_path
from ..numerics.lookup import E8M0
from .codec import CodedLeaf, abstract, in_runs, pack, weight
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


class GgufSource(Source):
    """An open model in GGUF. Quantized tensors are bytes, `(..., bytes of a row)`.

    Attributes:
      files: paths of all files of the model.
      kinds: number of the type of each tensor.
    """

    def _open(self) -> None:
        self.kinds: dict[str, int] = {}
        self._bytes: dict[str, Bytes] = {}
        self.metadata, tensors, self.files = read_parts(self.path, self._opened, "load")
        for name, (file, _, (kind, shape, start, stop)) in tensors.items():
            self._bytes[name], self.kinds[name] = file, kind
            form = FORMATS.get(kind)
            if form is not None and form.form is not None:
                shape = (*shape[:-1], shape[-1] // form.size * form.fields.itemsize)
            self.entries[name] = Entry(name_of(kind), shape, start, stop)

    def dtype(self, name: str) -> np.dtype:
        form = FORMATS.get(self.kinds[name])
        if form is None:
            raise unread_type("interop.read", name, self.entries[name].dtype)
        return form.fields if form.form is None else _U8

    def read(self, name: str, dtype: np.dtype, *, mapped: bool = False) -> np.ndarray:
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


# The formats of tensors in GGUF files: how the bytes of a block hold codes, scales and minimums.
#
# A block is 32 or 256 weights of a row, or one weight if numbers are stored directly. Types have
# the same numbers as in ggml. The types in `FORMATS` can be read; to read another one, add its
# line.
#
# In blocks of 256 (K-quants) each group of 16 or 32 weights has a scale, and in some types a
# minimum; both are integers of 4 to 8 bits. One float16 of a block multiplies all its scales, and
# another all its minimums.
#
# Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml-common.h (2026).


class GgufBlocks(NamedTuple):
    """The contents of the blocks of a tensor. A weight is `scale * code + minimum`.

    Attributes:
      codes: numbers of the weights, `(..., scales of a row, weights of a scale)`.
      scale: scales, `(..., scales of a row)`; `None` if numbers are stored directly. If a scale is
        an integer and a factor, it is their product in float32.
      minimum: as `scale`; `None` if the format has none.
    """

    codes: np.ndarray
    scale: np.ndarray | None = None
    minimum: np.ndarray | None = None


class Parts(NamedTuple):
    """The fields of blocks, separated; the first axes are those of the blocks.

    Attributes:
      codes: uint8 `(..., size)`, with half of their range added if they are signed; int8 for 8
        bits; or numbers.
      scale: scale of each block, or the factor of its scales if these are integers.
      minimum: as `scale`, for the minimums, with the sign in the file.
      scales: integers `(..., size // group)` that `scale` multiplies, stored like codes.
      minimums: as `scales`, for `minimum`; they are subtracted.
    """

    codes: np.ndarray
    scale: np.ndarray | None = None
    minimum: np.ndarray | None = None
    scales: np.ndarray | None = None
    minimums: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Format:
    """A type of tensors.

    Attributes:
      name: name in ggml.
      size: weights in a block.
      fields: layout of the bytes of a block.
      read: separates the fields.
      form: format of the codes; `None` if numbers are stored directly.
      group: weights per scale.
      inner: format of the scales and minimums, if these are integers.
      minimum: whether weights have a minimum.
    """

    name: str
    size: int
    fields: np.dtype
    read: Callable[[np.ndarray], Parts]
    form: Integer | Block | None = None
    group: int = 1
    inner: Integer | None = None
    minimum: bool = False


def in_bits(codes: np.ndarray, form: Integer | Block) -> np.ndarray:
    """Returns codes of `Parts` in whole rows, packed as `QTensor.pack` does."""
    if form.bits == 8:
        return codes
    signed = isinstance(form, Integer) and form.signed
    return pack(codes ^ np.uint8(2 ** (form.bits - 1)) if signed else codes, form.bits)


def blocks_of(form: Format, raw: np.ndarray) -> GgufBlocks:
    """Returns the contents of blocks, from `(..., blocks of a row)` fields of a format."""
    parts = form.read(raw)
    if form.form is None:
        return GgufBlocks(parts.codes[..., None])
    assert parts.scale is not None
    codes, scale, minimum = parts.codes, parts.scale, parts.minimum
    if isinstance(form.form, Block):
        codes, scale = _DOUBLED[codes], _half_power(scale)
    elif form.form.signed and form.form.bits < 8:
        codes = _signed(codes, form.form)
    if parts.scales is not None:
        assert form.inner is not None
        scale = _product(_signed(parts.scales, form.inner), scale)
        minimum = None if minimum is None else -_product(parts.minimums, minimum)
        *outer, blocks = raw.shape
        codes = codes.reshape(*outer, blocks * form.size // form.group, form.group)
    return GgufBlocks(codes, scale, minimum)


def dequantized(blocks: GgufBlocks) -> np.ndarray:
    """Returns the weights in float32, each rounded once."""
    codes, scale, minimum = blocks
    if scale is None:
        return codes.astype(np.float32)
    with np.errstate(invalid="ignore"):  # scales may be infinite, or NaN
        weights = np.multiply(codes, scale.astype(np.float32)[..., None], dtype=np.float32)
        if minimum is not None:
            weights += minimum.astype(np.float32)[..., None]
    return weights


def _signed(codes: np.ndarray, form: Integer) -> np.ndarray:
    if not form.signed or form.bits == 8:
        return codes
    return codes.view(np.int8) - np.int8(2 ** (form.bits - 1))


def _product(codes: Any, factor: np.ndarray) -> np.ndarray:
    """Returns the integers of blocks times the factor of each block, exact in float32."""
    with np.errstate(invalid="ignore"):
        product = np.multiply(codes, factor.astype(np.float32)[..., None], dtype=np.float32)
    *outer, blocks, group_size = product.shape
    return product.reshape(*outer, blocks * group_size)


_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the numbers of float4_e2m1."""


def _half_power(exponents: np.ndarray) -> np.ndarray:
    """Returns half of the numbers of float8_e8m0, in float32; 255 is NaN."""
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
    return np.where(exponents == 255, np.float32(np.nan), powers)


# Functions that read blocks.


def _numbers(raw: np.ndarray) -> Parts:
    return Parts(raw)


def _bytes(raw: np.ndarray) -> Parts:
    return Parts(raw["codes"], raw["scale"])


def _runs(packed: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Returns the codes of bytes: each `run` of bytes holds `run` codes in its lowest bits, then as
    many in the next bits, and so on.
    """
    *outer, length = packed.shape
    packed = packed.reshape(*outer, length // run, run)
    # NumPy moves a run at once if it is one element, and byte by byte otherwise.
    element = np.dtype((np.void, run))
    contiguous = np.ascontiguousarray(packed.view(element)).view(np.uint8)
    parts = np.empty((*packed.shape[:-1], 8 // bits, run), np.uint8)
    for i in range(8 // bits):
        part = contiguous >> np.uint8(i * bits) & np.uint8(2**bits - 1)
        parts.view(element)[..., i, :] = part.view(element)
    return parts.reshape(*outer, length * 8 // bits)


def _nibbles(raw: np.ndarray) -> Parts:
    minimum = raw["minimum"] if "minimum" in (raw.dtype.names or ()) else None
    return Parts(_runs(raw["codes"], 4, 16), raw["scale"], minimum)


def _fives(raw: np.ndarray) -> Parts:
    low, scale, minimum, *_ = _nibbles(raw)
    high = np.unpackbits(raw["high"], axis=-1, bitorder="little")
    return Parts(low | high << np.uint8(4), scale, minimum)


def _k2(raw: np.ndarray) -> Parts:
    pairs = raw["scales"]
    codes = _runs(raw["codes"], 2, 32)
    return Parts(codes, raw["scale"], raw["minimum"], pairs & np.uint8(15), pairs >> np.uint8(4))


def _k3(raw: np.ndarray) -> Parts:
    codes = _runs(raw["codes"], 2, 32) | _runs(raw["high"], 1, 32) << np.uint8(2)
    low, high = _runs(raw["scales"][..., :8], 4, 8), _runs(raw["scales"][..., 8:], 2, 4)
    return Parts(codes, raw["scale"], None, low | high << np.uint8(4))


def _sixes(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns 8 scales and 8 minimums of 6 bits from 12 bytes; the last four of each are split."""
    a, b, c = (raw[..., i : i + 4] for i in (0, 4, 8))
    six, two = np.uint8(63), np.uint8(48)
    scales = np.concatenate([a & six, c & np.uint8(15) | a >> np.uint8(2) & two], axis=-1)
    minimums = np.concatenate([b & six, c >> np.uint8(4) | b >> np.uint8(2) & two], axis=-1)
    return scales, minimums


def _k4(raw: np.ndarray) -> Parts:
    return Parts(_runs(raw["codes"], 4, 32), raw["scale"], raw["minimum"], *_sixes(raw["scales"]))


def _k5(raw: np.ndarray) -> Parts:
    parts = _k4(raw)
    return parts._replace(codes=parts.codes | _runs(raw["high"], 1, 32) << np.uint8(4))


def _k6(raw: np.ndarray) -> Parts:
    codes = _runs(raw["codes"], 4, 64) | _runs(raw["high"], 2, 32) << np.uint8(4)
    return Parts(codes, raw["scale"], None, raw["scales"])


def _fields(*fields: Any) -> np.dtype:
    return np.dtype(list(fields))


def _codes(size: int) -> tuple[str, str, int]:
    return "codes", "u1", size


_SCALE, _MINIMUM = ("scale", "<f2"), ("minimum", "<f2")
_HIGH, _SCALES = ("high", "u1", 32), ("scales", "u1", 12)


def _plain(name: str, dtype: Any) -> Format:
    return Format(name, 1, np.dtype(dtype), _numbers)


def _ints(bits: int, signed: bool) -> Integer:
    return Integer(bits, signed=signed)


_Q4_0 = _fields(_SCALE, _codes(16))
_Q4_1 = _fields(_SCALE, _MINIMUM, _codes(16))
_Q5_0 = _fields(_SCALE, ("high", "u1", 4), _codes(16))
_Q5_1 = _fields(_SCALE, _MINIMUM, ("high", "u1", 4), _codes(16))
_Q8_0 = _fields(_SCALE, ("codes", "i1", 32))
_Q2_K = _fields(("scales", "u1", 16), _codes(64), _SCALE, _MINIMUM)
_Q3_K = _fields(_HIGH, _codes(64), _SCALES, _SCALE)
_Q4_K = _fields(_SCALE, _MINIMUM, _SCALES, _codes(128))
_Q5_K = _fields(_SCALE, _MINIMUM, _SCALES, _HIGH, _codes(128))
_Q6_K = _fields(_codes(128), ("high", "u1", 64), ("scales", "i1", 16), _SCALE)
_MXFP4 = _fields(("scale", "u1"), _codes(16))
_U6 = _ints(6, False)

FORMATS = {
    0: _plain("F32", "<f4"),
    1: _plain("F16", "<f2"),
    2: Format("Q4_0", 32, _Q4_0, _nibbles, _ints(4, True), 32),
    3: Format("Q4_1", 32, _Q4_1, _nibbles, _ints(4, False), 32, minimum=True),
    6: Format("Q5_0", 32, _Q5_0, _fives, _ints(5, True), 32),
    7: Format("Q5_1", 32, _Q5_1, _fives, _ints(5, False), 32, minimum=True),
    8: Format("Q8_0", 32, _Q8_0, _bytes, _ints(8, True), 32),
    10: Format("Q2_K", 256, _Q2_K, _k2, _ints(2, False), 16, _ints(4, False), True),
    11: Format("Q3_K", 256, _Q3_K, _k3, _ints(3, True), 16, _ints(6, True)),
    12: Format("Q4_K", 256, _Q4_K, _k4, _ints(4, False), 32, _U6, True),
    13: Format("Q5_K", 256, _Q5_K, _k5, _ints(5, False), 32, _U6, True),
    14: Format("Q6_K", 256, _Q6_K, _k6, _ints(6, True), 16, _ints(8, True)),
    24: _plain("I8", "i1"),
    25: _plain("I16", "<i2"),
    26: _plain("I32", "<i4"),
    27: _plain("I64", "<i8"),
    28: _plain("F64", "<f8"),
    30: _plain("BF16", jnp.bfloat16),
    39: Format("MXFP4", 32, _MXFP4, _nibbles, mxfp4, 32),
}
"""The types that can be read, by number."""

NUMBER_OF = {form.name: number for number, form in FORMATS.items()}

_OTHERS = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}


def name_of(number: int) -> str:
    """Returns the name of a type, also if it cannot be read."""
    form = FORMATS.get(number)
    return form.name if form else _OTHERS.get(number, f"type {number}")
