"""What formats of checkpoints have in common: a QTensor that is made from tensors of a file
(`CodedLeaf`), the tensors that a QTensor becomes (`Encoded`), codes in streams of bits, and the
quantization config, read field by field (`Config`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ... import QTensor
from ...extend import Groups
from ...numerics import Integer, format_of
from ..checks import shown
from ..errors import fail
from ..files import open_regular
from ..numerics.packing import packed_length, planes_of
from ..tensor.layout import Layout, Packing
from .safetensors import Source
from .tree import Read


@dataclasses.dataclass(frozen=True)
class CodedLeaf:
    """A QTensor of a checkpoint.

    Attributes:
      path: name of the QTensor: that of the weight before it was quantized.
      tensors: name and dtype of each tensor of the file that it is made from.
      like: the abstract QTensor, of `jax.ShapeDtypeStruct`.
      decode: makes the leaves of the QTensor (in the order of `jax.tree.leaves`) from the tensors,
        NumPy arrays in that order. The results have the sizes and dtypes of `like`; they are then
        reshaped to its shapes.
      consumed: names of the tensors that were already read to find all this.
    """

    path: str
    tensors: tuple[tuple[str, np.dtype], ...]
    like: QTensor
    decode: Callable[..., Sequence[np.ndarray]]
    consumed: tuple[str, ...] = ()

    def make(self, read: Read) -> QTensor:
        """Returns the QTensor of arrays from `read`; it is abstract if these are."""
        parts = [read(name, dtype) for name, dtype in self.tensors]
        if any(isinstance(part, jax.ShapeDtypeStruct) for part in parts):
            return self.like
        specs, structure = jax.tree.flatten(self.like)
        arrays = self.decode(*parts)
        for leaf, spec in zip(arrays, specs, strict=True):
            assert leaf.dtype == spec.dtype, f"{self.path}: {leaf.dtype} is not {spec.dtype}"
        return structure.unflatten(
            leaf.reshape(spec.shape) for leaf, spec in zip(arrays, specs, strict=True)
        )


def weight(
    groups: Groups,
    qtype: Any,
    scale: Any,
    dtype: np.dtype,
    *,
    zero_point: bool = False,
    **parts: Any,
) -> QTensor:
    """Returns the QTensor of a weight, of `jax.ShapeDtypeStruct`.

    Codes of 8 bits keep their layout. Others are packed along the last axis.

    Args:
      groups: shape of the weight, and which elements share a scale.
      qtype: format of the codes.
      scale: dtype of the scales, or an abstract QTensor.
      dtype: dtype of the real array.
      zero_point: whether there are zero points, as many as scales.
      **parts: other fields of the QTensor.
    """
    form, stored = format_of(qtype), groups.shape
    layout, kind = None, form.storage
    if form.bits < 8:
        layout, kind = Layout(Packing(-1, stored[-1])), jnp.uint8
        stored = (*stored[:-1], packed_length(stored[-1], form.bits))
    scales = scale if isinstance(scale, QTensor) else abstract(groups.scale_shape, scale)
    return QTensor(
        abstract(stored, kind),
        scales,
        abstract(groups.scale_shape, form.storage) if zero_point else None,
        qtype=qtype,
        dtype=dtype,
        blocks=groups.blocks,
        layout=layout,
        **parts,
    )


def abstract(shape: Sequence[int], dtype: Any) -> Any:
    """Returns a placeholder of an array whose numbers are not read."""
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def refuse(source: Source, name: str, problem: str, *, given: str = "") -> NoReturn:
    """Raises an error: a tensor of a checkpoint contradicts its config or the other tensors."""
    fix = "download the checkpoint again, or correct its config: one of them is damaged or differs."
    problem = f"the tensor {name!r} of {source.path!r} {problem}"
    raise fail("interop.read", problem, given=given, fix=fix)


def shape_and_dtype(
    source: Source,
    name: str,
    shape: Sequence[int] | None,
    dtypes: Sequence[Any],
    reason: str = "",
    *,
    axes: Sequence[int] = (),
) -> tuple[tuple[int, ...], np.dtype]:
    """Returns shape and dtype of a tensor, after checking them.

    Args:
      source: the checkpoint.
      name: name of the tensor.
      shape: the expected shape; `None` for any.
      dtypes: the allowed dtypes.
      reason: the reason for the expected shape.
      axes: the allowed numbers of axes, none of which may be empty; `()` for any.
    """
    if name not in source.entries:
        problem = f"the tensor {name!r} is missing in {source.path!r}."
        fix = "download the checkpoint again; if this is a part of it, read the whole folder."
        raise fail("interop.read", problem, fix=fix)
    stored, dtype = source.entries[name].shape, source.dtype(name)
    allowed = {jnp.dtype(option) for option in dtypes}
    fits = shape is None or tuple(shape) == stored
    if axes:
        fits = len(stored) in axes and 0 not in stored
        reason = f"with {' or '.join(map(str, axes))} axes, none of them empty"
    if dtype not in allowed or not fits:
        names = " or ".join(sorted(option.name for option in allowed))
        kind = f"{names}{'' if shape is None else list(shape)}{reason and f', {reason}'}"
        refuse(source, name, f"is {dtype.name}{list(stored)}; its layer needs {kind}.")
    return stored, dtype


def modules_with(source: Source, end: str) -> list[str]:
    """Returns the modules that have a tensor whose name ends so, in the order of the file."""
    return [name.removesuffix(end) for name in source.entries if name.endswith(end)]


FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32)
"""Dtypes of scales that are floats."""


def real_dtype(source: Source, asked: np.dtype | None, scale: np.dtype | None) -> np.dtype:
    """Returns the dtype of a real array: the requested dtype; else that of its scale, if this is a
    float dtype of 16 or 32 bits; else that of the model in its config; else float32.
    """
    if asked is not None:
        return asked
    if scale in [jnp.dtype(kind) for kind in FLOATS]:
        assert scale is not None
        return scale
    config = source.config or {}
    name = config.get("dtype", config.get("torch_dtype"))
    by_name = {kind.__name__: jnp.dtype(kind) for kind in FLOATS}
    return by_name.get(name if isinstance(name, str) else "", jnp.dtype(jnp.float32))


def group_size(source: Source, config: Config, scales: str, columns: int) -> int:
    """Returns the size of the groups of GPTQ and AWQ. If the config does not say it, readers take
    128 or, old ones, the whole row; the number of scales tells which.
    """
    entry = source.entries.get(scales)
    default = -1 if entry is not None and entry.shape[:1] == (1,) else 128
    stored = config.data.get("group_size", default)
    return columns if stored == -1 else min(config.integer("group_size", 128), columns)


def order_of(source: Source, name: str, groups: np.ndarray, size: int) -> np.ndarray | None:
    """Returns the order of elements that are sorted by groups; `None` if they are sorted already.

    Args:
      source: the checkpoint that `groups` come from.
      name: name of their tensor.
      groups: the group of each element of an axis, as in `g_idx` of GPTQ.
      size: size of a group; the last group may be smaller.

    Raises:
      ValueError: if a group has another size.
    """
    order = np.argsort(groups, kind="stable").astype(np.int32)
    regular = np.arange(len(groups), dtype=np.int64) // size
    if not np.array_equal(groups[order], regular):
        problem = f"puts {groups.min()} to {groups.max()} elements in a group, not always {size}."
        refuse(source, name, problem)
    return None if np.array_equal(order, np.arange(len(groups))) else order


def order_field(order: np.ndarray | None, ndim: int) -> dict[str, Any]:
    """Returns the field `order` of an abstract QTensor; nothing for `None`."""
    return {} if order is None else {"order": abstract((*(1,) * (ndim - 1), len(order)), "int32")}


# A QTensor in a checkpoint format of another library: its tensors and their numbers.


Tensors = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors by name."""


class Encoded(NamedTuple):
    """A QTensor in a format, before its numbers are computed.

    Attributes:
      tensors: dtype and shape of the tensors to write, by name.
      make: computes them, in this order, from the QTensor, whose leaves are NumPy arrays.
      layer: the config of the QTensor: a hashable value that the format defines; `None` for an
        array.
    """

    tensors: Tensors
    make: Callable[[Any], Sequence[np.ndarray]]
    layer: Any


def refuse_leaf(path: str, leaf: Any, format: str, *, expected: str = "", fix: str) -> NoReturn:
    """Raises an error: a format cannot hold a tensor."""
    problem = f"{format} cannot hold the tensor {path!r}."
    raise fail("interop.write", problem, given=repr(leaf), expected=expected, fix=fix)


def check_names_in_float(
    layers: Iterable[str], floats: Sequence[str], format: str, *, inside: bool = False
) -> None:
    """Checks that loaders that skip the layers in float do not skip quantized ones. transformers
    skips modules in a module of the list, and those whose names end in one.

    Args:
      layers: names of quantized weights.
      floats: names of modules with weights in float.
      format: name of the format.
      inside: whether some loaders also skip names that have a name of the list anywhere.
    """
    for path in layers:
        module = path.removesuffix(".weight")
        names = [
            name
            for name in floats
            if module.endswith(name)
            or f"{module}.".startswith(f"{name}.")
            or (inside and name in module)
        ]
        if names:
            expected = f"no layer in float such as {names[0]!r}: loaders skip names with this part"
            fix = f"quantize {names[0]!r} too, or write GPTQ or compressed-tensors."
            refuse_leaf(path, "a quantized layer", format, expected=expected, fix=fix)


def module_of(path: str, leaf: Any, format: str) -> str:
    """Returns the module of a weight, after checking that it has the name of a weight."""
    if not path.endswith(".weight"):
        fix = "name it <module>.weight with jqx.interop.named(params, names), or leave it in float."
        refuse_leaf(path, leaf, format, fix=fix)
    if 0 in leaf.shape:
        refuse_leaf(path, leaf, format, expected="weights", fix="leave it in float.")
    return path.removesuffix(".weight")


def as_numpy(path: str, leaf: Any, format: str) -> Any:
    """Returns a leaf of NumPy arrays, after checking that other libraries read finite numbers: a
    QTensor, or a separate scale of an activation or a cache. Other arrays may hold anything.

    Raises:
      ValueError: if a scale, a minimum or a code is NaN or infinite, if scales make all codes 0, or
        if a separate scale is not above 0.
    """
    leaf = jax.tree.map(np.asarray, leaf)
    wrong = None
    if isinstance(leaf, QTensor):
        wrong = _wrong_numbers(leaf)
    elif _SEPARATE.fullmatch(path) and jnp.issubdtype(leaf.dtype, jnp.floating):
        scales = leaf.astype(np.float64)
        is_valid = (np.isfinite(scales) & (scales > 0)).all()
        wrong = None if is_valid else "a scale that is not above 0"
    if wrong is not None:
        shape = leaf if isinstance(leaf, QTensor) else f"{leaf.dtype.name}{list(leaf.shape)}"
        fix = "check the weight or the statistics that it comes from; jqx.save keeps it as it is."
        refuse_leaf(path, f"{shape}: {wrong}", format, fix=fix)
    return leaf


_SEPARATE = re.compile(r"(.*[./])?(input|output|[qkv])(_global)?_scale")
"""Names of the scales of activations and caches."""


def _wrong_numbers(q: QTensor) -> str | None:
    """Returns what is wrong with the numbers of a QTensor; `None` if nothing is."""
    scale, offset, codes = scale_of(q).astype(np.float64), q.real_offset(), np.asarray(q.values)
    if not np.isfinite(scale).all():
        return "scales that are NaN or infinite"
    if offset is not None and not np.isfinite(np.asarray(offset).astype(np.float64)).all():
        return "minimums that are NaN or infinite"
    if jnp.issubdtype(codes.dtype, jnp.floating) and not np.isfinite(codes).all():
        return "codes that are NaN or infinite"
    if not scale.any() and offset is None and codes_of(q).any():
        return "only scales of 0, and codes of other numbers"
    return None


def codes_of(q: QTensor) -> np.ndarray:
    """Returns the codes of a QTensor of NumPy arrays, in the order of its shape: integers as int8
    or uint8, floats as the bits of their format in uint8.
    """
    form, values = format_of(q.qtype), np.asarray(q.unpack().values)
    if form.code_range is None:
        return np.asarray(form.to_bits(jnp.asarray(values)))
    return values.astype(np.int8 if form.code_range[0] < 0 else np.uint8)


def scale_of(q: QTensor) -> np.ndarray:
    """Returns the scale of a QTensor of NumPy arrays as an array, dequantized if necessary."""
    scale = q.scale
    return np.asarray(scale.dequantize() if isinstance(scale, QTensor) else scale)


def for_rows(x: np.ndarray, q: QTensor) -> np.ndarray:
    """Returns scales or zero points with an entry for each row of each group."""
    shape = (*q.shape[:-1], q.groups.scale_shape[-1])
    x = np.broadcast_to(x, q.groups.scale_shape)
    for axis, n in enumerate(shape):
        if x.shape[axis] != n:
            x = np.take(x, np.arange(n) // q.groups.sizes[axis], axis)
    return x


def integers_of(path: str, q: QTensor, format: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes, zero points and the group of each column of a matrix of integers with at most
    8 bits, for formats whose codes are unsigned. Columns are in the order of the real array.

    Raises:
      ValueError: if the tensor has a float offset.
    """
    check_no_offset(path, q, format)
    form, columns = format_of(q.qtype), q.shape[-1]
    assert isinstance(form, Integer)
    shift = 2 ** (form.bits - 1) if form.signed else 0
    codes = (codes_of(q).astype(np.int16) + shift).astype(np.uint8)
    zero_points = np.zeros((1,) * q.ndim) if q.zero_point is None else np.asarray(q.zero_point)
    zeros = (for_rows(zero_points.astype(np.int16), q) + shift).astype(np.uint8)
    index = np.arange(columns, dtype=np.int32) // q.groups.sizes[-1]
    if q.order is not None:
        order, groups = np.asarray(q.order).reshape(-1), index.copy()
        index[order] = groups
        codes[..., order] = codes.copy()
    return codes, zeros, index


def check_no_offset(path: str, leaf: QTensor, format: str) -> None:
    """Checks that a tensor has no float minimum, which few formats support."""
    if leaf.offset is not None:
        fix = "write it as MLX or GGUF, or quantize it without a float minimum."
        refuse_leaf(path, leaf, format, fix=fix)


def exact_halves(path: str, q: QTensor, format: str) -> np.ndarray:
    """Returns the scales of a matrix in float16, an entry for each row of each group.

    Raises:
      ValueError: if float16 cannot hold a scale exactly.
    """
    scale = for_rows(scale_of(q), q)
    with np.errstate(over="ignore"):
        halves = scale.astype(np.float16)
    if not np.array_equal(halves.astype(np.float32), scale.astype(np.float32), equal_nan=True):
        fix = "quantize it with scales of float16: calibrator=jqx.calibrators.Rounded()."
        refuse_leaf(path, q, format, expected="scales that float16 holds exactly", fix=fix)
    return halves


def minimums_of(
    path: str, q: QTensor, scale: np.ndarray, dtype: np.dtype, format: str
) -> np.ndarray:
    """Returns the exact minimums that are added to the scaled unsigned codes.

    Args:
      path: path of the QTensor.
      q: integers, of NumPy arrays.
      scale: float64, an entry for each row of each group.
      dtype: dtype of the minimums.
      format: name of the format.

    Raises:
      ValueError: if the dtype cannot hold a minimum exactly.
    """
    form = format_of(q.qtype)
    assert isinstance(form, Integer)
    shift = 2 ** (form.bits - 1) if form.signed else 0
    offset, plain = q.real_offset(), q.zero_point is None and shift == 0
    if plain and offset is not None and offset.dtype == dtype:
        return for_rows(np.asarray(offset), q)
    zero = 0 if q.zero_point is None else for_rows(np.asarray(q.zero_point).astype(np.float64), q)
    minimums = np.zeros_like(scale) if plain else -(zero + shift) * scale
    if offset is not None:
        minimums = minimums + for_rows(np.asarray(offset).astype(np.float64), q)
    with np.errstate(over="ignore"):
        rounded = minimums.astype(dtype)
    if not np.array_equal(rounded.astype(np.float64), minimums, equal_nan=True):
        expected = f"minimums (-zero point * scale) that {dtype.name} holds exactly"
        fix = "quantize it without zero points, or write compressed-tensors."
        refuse_leaf(path, q, format, expected=expected, fix=fix)
    return rounded


# Codes in streams of bits, as in files of other libraries, and packed as in jqx, in NumPy.
#
# A stream is little-endian and dense: code i with b bits takes the bits from i * b on, lowest bit
# first, for any word size in which the bytes are read. A code may cross the boundary of two words.
# Formats differ in the axis along which they pack, and in what they add to a code before packing.


def stream_length(count: int, bits: int, word: int = 4) -> int:
    """Returns the bytes of a stream of `count` codes, in whole words of `word` bytes."""
    return -(-count * bits // (8 * word)) * word


def from_stream(raw: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the codes of streams, one per byte.

    Args:
      raw: uint8, `(..., bytes)`; bytes after the codes are ignored.
      bits: 1 to 8.
      count: number of codes in each stream.

    Returns:
      uint8 `(..., count)`, below `2**bits`.
    """
    if bits == 8:
        return raw[..., :count]
    if bits in (1, 2, 4):
        word = np.dtype("u1" if bits == 1 else "<u2")
        index = _whole(raw, -(-count * bits // 8 // word.itemsize) * word.itemsize)
        return np.take(_codes_of(bits), index.view(word)).view(np.uint8)[..., :count]
    groups = -(-count // 8)  # 8 codes are a whole number of bytes
    wide = _whole(raw, groups * bits).reshape(*raw.shape[:-1], groups, bits)
    if bits == 3:
        low, middle, high = (wide[..., i].astype(np.uint16) for i in range(3))
        index = np.empty((*wide.shape[:-1], 2), np.uint16)
        index[..., 0] = low | (middle & np.uint16(15)) << np.uint16(8)
        index[..., 1] = middle >> np.uint16(4) | high << np.uint16(4)
        codes = np.take(_codes_of(3), index).view(np.uint8)
        return codes.reshape(*raw.shape[:-1], groups * 8)[..., :count]
    codes = np.empty((*wide.shape[:-1], 8), np.uint8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        code = wide[..., byte] >> np.uint8(shift)
        if shift + bits > 8:
            code = code | wide[..., byte + 1] << np.uint8(8 - shift)
        codes[..., i] = code & np.uint8(2**bits - 1)
    return codes.reshape(*raw.shape[:-1], groups * 8)[..., :count]


def _whole(raw: np.ndarray, length: int) -> np.ndarray:
    """Returns the first `length` bytes of streams, padded with zeros."""
    lacking = max(0, length - raw.shape[-1])
    if lacking:
        raw = np.concatenate([raw, np.zeros((*raw.shape[:-1], lacking), np.uint8)], axis=-1)
    return np.ascontiguousarray(raw[..., :length])


@functools.cache
def _codes_of(bits: int) -> np.ndarray:
    """Returns a table of several codes, one per byte, indexed by the value of their bits: 8 codes
    with 1 or 2 bits, 4 codes with 3 or 4 bits.
    """
    count = 8 if bits <= 2 else 4
    entries = np.arange(2 ** (count * bits))
    codes = np.zeros(len(entries), f"<u{count}")
    for i in range(count):
        code = (entries >> (i * bits) & (2**bits - 1)).astype(codes.dtype)
        codes |= code << codes.dtype.type(8 * i)
    return codes


def to_stream(codes: np.ndarray, bits: int, word: int = 4) -> np.ndarray:
    """Inverts `from_stream`: uint8 codes `(..., count)` to bytes `(..., stream_length)`."""
    count = codes.shape[-1]
    groups = -(-count // 8)
    padded = np.zeros((*codes.shape[:-1], groups * 8), np.uint8)
    padded[..., :count] = codes & np.uint8(2**bits - 1)
    padded = padded.reshape(*codes.shape[:-1], groups, 8)
    raw = np.zeros((*codes.shape[:-1], groups, bits), np.uint8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        raw[..., byte] |= padded[..., i] << np.uint8(shift)
        if shift + bits > 8:
            raw[..., byte + 1] |= padded[..., i] >> np.uint8(8 - shift)
    raw = raw.reshape(*codes.shape[:-1], groups * bits)
    length = stream_length(count, bits, word)
    words = np.zeros((*codes.shape[:-1], length), np.uint8)
    stored = min(length, raw.shape[-1])
    words[..., :stored] = raw[..., :stored]
    return words


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs uint8 codes below `2**bits` along the last axis as `QTensor.pack` does."""
    count, start = codes.shape[-1], 0
    packed = np.empty((*codes.shape[:-1], packed_length(count, bits)), np.uint8)
    for width, lowest in planes_of(bits):
        per_byte = 8 // width
        run = -(-count // per_byte)
        plane = packed[..., start : start + run]
        start += run
        plane[..., count:] = 0  # fewer codes than runs
        for i in range(per_byte):
            part = codes[..., i * run : (i + 1) * run]
            if width < bits:
                part = part & np.uint8(2**width - 1 << lowest)
            shift = i * width - lowest
            part = part << np.uint8(shift) if shift > 0 else part >> np.uint8(-shift)
            if i == 0:
                plane[..., : part.shape[-1]] = part
            else:
                plane[..., : part.shape[-1]] |= part
    return packed


def repacked(
    raw: np.ndarray,
    bits: int,
    count: int,
    *,
    flip: int = 0,
    order: np.ndarray | None = None,
    convert: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Returns streams packed as `QTensor.pack` does. Only some rows are copied at a time; codes of
    8 bits are changed in place if possible.

    Args:
      raw: words of any size, `(rows, words)`, in any order in memory.
      bits: 1 to 8.
      count: number of codes in a row.
      flip: value that is xor-ed with each code: `2**(bits - 1)` makes signed codes from codes
        stored with `2**(bits - 1)` added.
      order: index of the code of a row at each place; `None` keeps the order.
      convert: makes the streams of some rows from the data of the file, if these are not streams.

    Returns:
      uint8 `(rows, packed_length(count, bits))`; for 8 bits, the codes.
    """
    width = raw.shape[1] * raw.itemsize
    plain = bits == 8 and order is None and convert is None and raw.flags.c_contiguous
    if plain and width == count:
        out = codes = raw.view(np.uint8)
        if not flip:
            return codes
        out = codes if codes.flags.writeable else np.empty_like(codes)
    else:
        out = np.empty((raw.shape[0], count if bits == 8 else packed_length(count, bits)), np.uint8)
    nibbles = bits == 4 and count % 4 == 0 and order is None
    for rows in in_runs(raw.shape[0], width):
        stream = np.ascontiguousarray(raw[rows]).view(np.uint8)
        stream = stream if convert is None else convert(stream)
        if nibbles:
            _repack_nibbles(stream[:, : count // 2], out[rows], flip)
            continue
        codes = from_stream(stream, bits, count)
        codes = codes if order is None else codes[:, order]
        if bits == 8:
            np.bitwise_xor(codes, np.uint8(flip), out=out[rows])
        else:
            out[rows] = pack(codes ^ np.uint8(flip) if flip else codes, bits)
    return out


def _repack_nibbles(raw: np.ndarray, out: np.ndarray, flip: int) -> None:
    """Packs nibbles again: a byte gets one nibble from each half of a row."""
    middle = raw.shape[-1] // 2
    low, high = _spread(raw[:, :middle]), _spread(raw[:, middle:])
    high <<= np.uint16(4)
    high |= low
    if flip:
        high ^= np.uint16(flip * 0x1111)
    out[:] = high.astype("<u2", copy=False).view(np.uint8)


def _spread(x: np.ndarray) -> np.ndarray:
    """Returns the nibbles of bytes, one per byte, the low one in the lower byte of a uint16."""
    wide = x.astype(np.uint16)
    shifted = wide << np.uint16(4)
    shifted |= wide
    shifted &= np.uint16(0x0F0F)
    return shifted


# Rows of bytes in runs, so that temporary data stays in the cache and needs little memory.


_AT_ONCE = 2**17
"""Bytes in a run."""


def in_runs(rows: int, width: int) -> Iterator[slice]:
    """Yields runs of rows of `width` bytes each, which together cover all rows."""
    step = max(1, _AT_ONCE // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


# Reads the quantization config of a checkpoint field by field.

_MOST_BYTES = 64_000_000
"""Maximum size of a JSON file: indices of models with many experts need several MB."""

_MOST_OF_PATTERN, _MOST_OF_NAME = 20_000, 500
"""Maximum length in characters of a pattern, and of the name that it is matched with."""

_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
"""A repeated group: matching could take exponential time."""


class Config:
    """A JSON object of a config file. Its fields are checked when they are read.

    Attributes:
      data: the object.
      where: name of the config in messages.
    """

    def __init__(self, data: Any, where: str) -> None:
        self.where = where
        if not isinstance(data, Mapping):
            self._refuse(f"a {type(data).__name__}", "a JSON object")
        self.data: Mapping[str, Any] = data

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Returns an integer of at least `least`."""
        value = self.data.get(key)
        value = default if value is None else value
        if type(value) is not int or value < least:
            self.refuse(key, f"an integer of {least} or more")
        return value

    def one_of(self, key: str, choices: Sequence[Any], default: Any = None) -> Any:
        """Returns a value that is one of `choices`, of their type."""
        value = self.data.get(key)
        value = default if value is None else value
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            self.refuse(key, f"one of {', '.join(map(repr, choices))}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Returns a boolean."""
        return self.one_of(key, (True, False), default)

    def names(self, key: str) -> tuple[str, ...]:
        """Returns a list of strings; an empty one if the field is missing."""
        value = self.data.get(key)
        value = [] if value is None else value
        if not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            self.refuse(key, "a list of strings")
        return tuple(value)

    def common(self, keys: Sequence[str], default: str) -> str:
        """Returns the lower-case value of fields that mean the same, after checking that they are
        equal; the default if there are none.
        """
        fields = [key for key in keys if self.data.get(key) is not None]
        value = str(self.data[fields[0]]).lower() if fields else default
        for key in fields:
            if str(self.data[key]).lower() != value:
                self.refuse(key, f"{value!r}, as {fields[0]}")
        return value

    def part(self, key: str) -> Config:
        """Returns an inner object."""
        return Config(self.data.get(key), f"{self.where}.{key}")

    def two_sizes(self, key: str, value: Any, expected: str) -> tuple[int, int]:
        """Returns a list of two positive integers, the value of a field."""
        if isinstance(value, list) and len(value) == 2:
            rows, columns = value
            if type(rows) is type(columns) is int and min(rows, columns) > 0:
                return rows, columns
        self.refuse(key, expected)

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raises an error: the value of a field is not allowed."""
        self._refuse(f"{key} == {shown(self.data.get(key))}", expected)

    def _refuse(self, detail: str, expected: str) -> NoReturn:
        problem = f"{self.where} has a value that jqx does not support."
        fix = "correct the config, or convert the checkpoint with the library that wrote it."
        raise fail("interop.read", problem, given=detail, expected=expected, fix=fix)


def read_json(path: str) -> Any:
    """Returns the contents of a JSON file.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if the file is too long or is not JSON.
    """
    with open_regular("interop.read", path) as file:
        size = os.fstat(file.fileno()).st_size  # `read` allocates its argument at once
        text = file.read(min(size, _MOST_BYTES) + 1)
    try:
        if not len(text) <= _MOST_BYTES:
            problem = f"{path!r} has over {_MOST_BYTES:,} bytes, too many for a config or an index."
            raise fail("interop.read", problem, fix="check the file.")
        return json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        problem = f"{path!r} is not JSON that can be read: {error or type(error).__name__}."
        raise fail("interop.read", problem, fix="copy or download it again.") from None


def read_config(folder: str) -> Mapping[str, Any] | None:
    """Returns `config.json` of a folder, with the quantization config of old GPTQ and AWQ folders,
    which is a file of its own; `None` if there is none of them.
    """
    paths = [os.path.join(folder, name) for name in ("config.json", *_OLD_NAMES)]
    configs = {path: read_json(path) for path in paths if os.path.lexists(path)}
    for path, data in configs.items():
        Config(data, repr(path))
    config = configs.pop(paths[0], None)
    if not configs or quantization_of(config) is not None:
        return config
    path, data = next(iter(configs.items()))
    method = "gptq" if path == paths[1] else "awq"
    return {**(config or {}), "quantization_config": {"quant_method": method, **data}}


_OLD_NAMES = ("quantize_config.json", "quant_config.json")
"""Names of files with the quantization config: of AutoGPTQ and GPTQModel, and of AWQ."""

KEYS = ("quantization_config", "compression_config")
"""Keys of the quantization config in the config of a model."""

_OF_GPTQ = {"desc_act", "sym", "damp_percent", "true_sequential", "static_groups"}
"""Keys that only the configs of GPTQ have."""


def wrapped(config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Returns the config of a model. A quantization config by itself becomes a part of one.

    Args:
      config: the config that the user has passed.
      names: names of the tensors of the checkpoint.
    """
    bits = {"bits", "group_size"} <= {*config}
    if quantization_of(config) is not None or isinstance(config.get("quantization"), Mapping):
        return config
    if _method(config) is not None:
        return {KEYS[0]: config}
    if "w_bit" in config or (bits and _OF_GPTQ & {*config}):
        return {KEYS[0]: {"quant_method": "awq" if "w_bit" in config else "gptq", **config}}
    if bits and not any(name.endswith(".qweight") for name in names):
        return {"quantization": config}
    return config


def method_of(config: Mapping[str, Any] | None) -> Any:
    """Returns the quantization method in the config of a model; `None` if there is none."""
    quantization = quantization_of(config)
    return None if quantization is None else _method(quantization.data)


def _method(data: Mapping[str, Any]) -> Any:
    """Returns the method in a quantization config."""
    if data.get("load_in_4bit") is True or data.get("load_in_8bit") is True:
        return "bitsandbytes"
    method = data.get("quant_method", data.get("method"))  # `method` is GPTQModel's own name
    return "compressed-tensors" if method is None and "config_groups" in data else method


def quantization_of(config: Mapping[str, Any] | None) -> Config | None:
    """Returns the quantization config in the config of a model, or of a part such as `text_config`;
    `None` if there is none.

    Raises:
      ValueError: if parts have different ones.
    """
    (where, fields), *others = [*_found(config or {}, ""), ("", None)]
    for part, data in others[:-1]:
        if "." in where and data != fields:
            Config({KEYS[0]: data}, part).refuse(KEYS[0], f"the same in all parts, as in {where}")
    return None if fields is None else Config(fields, where)


def _found(config: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yields the quantization configs in a config and its parts, that of the whole first."""
    yield from ((where + key, config[key]) for key in KEYS if config.get(key) is not None)
    for key in _parts(config) if where.count(".") < _MOST_PARTS else ():
        yield from _found(config[key], f"{where}{key}.")


_MOST_PARTS = 4
"""How deep parts of models are in parts."""


def _parts(config: Mapping[str, Any]) -> list[str]:
    """Returns the keys of the configs of parts of a model."""
    nested = (key for key, item in config.items() if isinstance(item, Mapping) and key not in KEYS)
    return [key for key in nested if key.endswith("_config")]


def without_quantization(config: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Returns the config of a model without quantization configs, those of parts included."""
    left = {key: item for key, item in config.items() if key not in (*KEYS, "quantization")}
    parts = _parts(config) if depth < _MOST_PARTS else ()
    return left | {key: without_quantization(config[key], depth + 1) for key in parts}


def matches(pattern: str, name: str, where: str) -> bool:
    """Returns whether a target of a config matches a module. A target is a name, or `re:` and a
    regular expression that matches from the start of the name.

    Raises:
      ValueError: if the expression is invalid, or may take a very long time.
    """
    if not pattern.startswith("re:"):
        return pattern == name
    compiled = _compiled(pattern[3:])
    if compiled is None:
        Config({"target": pattern}, where).refuse(
            "target",
            f"a regular expression of at most {_MOST_OF_PATTERN} characters without "
            "repeated groups",
        )
    if len(name) > _MOST_OF_NAME:
        Config({"target": name}, where).refuse(
            "target", f"names of at most {_MOST_OF_NAME} characters"
        )
    return compiled.match(name) is not None


@functools.cache
def _compiled(text: str) -> re.Pattern[str] | None:
    """Returns an expression; `None` if it is invalid, or may take a very long time."""
    fits = len(text) <= _MOST_OF_PATTERN and not _REPEATED_GROUP.search(text)
    try:
        return re.compile(text) if fits else None
    except (re.error, RecursionError, OverflowError):
        return None
